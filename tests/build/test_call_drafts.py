"""Call drafts: whole or not there, and nothing in them that nobody may read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cachectl.build.call_drafts import (
    leave_draft,
    leave_refusal,
    read_drafts,
    refusal,
    sayable_environment,
)
from cachectl.errors import DocumentError
from cachectl.schemas.boot import Reason

REASON = Reason("policy", "record", None, "fault", "policy", "none")


def test_drafts_are_read_as_they_were_left(tmp_path: Path) -> None:
    """Document and artifact, one folder a draft, in the order of their names."""
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    (artifact / "compiled_module").write_bytes(b"graph")

    leave_draft(tmp_path / "record", {"method": "main_decode", "rank": 1}, artifact)
    leave_draft(tmp_path / "record", {"method": "mtp_decode", "rank": 0, "refused": REASON.to_json()})

    kept, refused = read_drafts(tmp_path / "record")
    assert ("main_decode", 1, None, b"graph") == (
        kept.method,
        kept.rank,
        kept.refused,
        (kept.harvest / "compiled_module").read_bytes(),
    )
    assert REASON == refused.refused


def test_draft_that_is_not_whole_is_not_seen(tmp_path: Path) -> None:
    """What a process was writing when it was killed has no name yet; what could not be written leaves nothing."""
    pending = tmp_path / "drafts" / f".{os.getpid()}-7"
    pending.mkdir(parents=True)
    (pending / "draft.json").write_text("{}")

    with pytest.raises(OSError, match="no such folder"):
        leave_draft(tmp_path, {"method": "main_decode", "rank": 0}, tmp_path / "no such folder")

    assert [] == read_drafts(tmp_path)
    assert [pending.name] == os.listdir(tmp_path / "drafts")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"method": "m", "rank": 0, "refused": {"odd": 1}}'])
def test_draft_that_is_malformed_is_told(tmp_path: Path, text: str) -> None:
    """With its path."""
    leave_draft(tmp_path, {"method": "main_decode", "rank": 0})
    (path,) = tmp_path.glob("drafts/*/draft.json")
    path.write_text(text)

    with pytest.raises(DocumentError, match=str(path)):
        read_drafts(tmp_path)


def test_refusal_is_read_as_it_was_left(tmp_path: Path) -> None:
    """None before; the reason after; a damaged one is an error."""
    assert refusal(tmp_path) is None

    leave_refusal(tmp_path, REASON)

    assert REASON == refusal(tmp_path)
    (tmp_path / "refused.json").write_text("{")
    with pytest.raises(DocumentError):
        refusal(tmp_path)


def test_environment_is_written_down_without_what_lets_somebody_in(tmp_path: Path) -> None:
    """A secret is there and empty; a URL has no credentials; the rest is itself."""
    environ = {"HF_TOKEN": "hidden", "STORE": "https://me:hidden@host/x", "GAIN": "2"}

    found = sayable_environment(environ)

    assert {"HF_TOKEN", "STORE", "GAIN"} == found.keys()
    assert "hidden" not in json.dumps(found)
    assert ("", "2") == (found["HF_TOKEN"], found["GAIN"])
