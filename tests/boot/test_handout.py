"""The hand-out document: whole or not there, read back equal, and only by whom it is for."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.handout import HANDOUT_VARIABLE, HandedEntry, Handout, HookSeconds
from cachectl.boot.hook import HookOptions, run_hook
from cachectl.errors import DocumentError
from cachectl.schemas.boot import Reason
from cachectl.schemas.report import HookReport
from tests.stores import MadeStore


@pytest.fixture
def handout(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> Handout:
    """A warm hand-out as the hook makes it."""
    monkeypatch.syspath_prepend(str(made.site))
    handout = run_hook(HookOptions(recipe=str(made.recipe)), made.hook_environ())
    assert "warm" == handout.outcome
    return handout


def document_of(handout: Handout) -> Path:
    """Return where the document lies."""
    return Path(handout.env[HANDOUT_VARIABLE])


def test_read_gives_what_was_written(handout: Handout) -> None:
    """Everything the process compares with comes back equal; times and reasons are the hook's own."""
    read = Handout.read(document_of(handout))

    for name in ("outcome", "recipe_path", "warm_set", "folder", "sets", "roots", "entries"):
        assert getattr(handout, name) == getattr(read, name), name
    assert ((), HookSeconds()) == (read.reasons, read.seconds)


def test_report_is_the_contracts_document(handout: Handout) -> None:
    """The report that is printed is what the report's schema says, warm and cold."""
    reason = Reason("device", "soc", "ascend910b1", None, "absent", "set SOC_VERSION")
    cold = Handout("cold", Path("/r.yaml"), reasons=(reason,))

    assert HookReport.model_validate(handout.report()).outcome == "warm"
    assert HookReport.model_validate(cold.report()).outcome == "cold"
    assert {"outcome", "warm_set", "cache_dir", "env", "entries", "reasons", "seconds"} == cold.report().keys()
    assert [reason.to_json()] == cold.report()["reasons"]
    json.dumps(handout.report(), allow_nan=False)


def test_env_is_the_document_only(handout: Handout) -> None:
    """Never a bare cache home: nothing is loaded unproved. A cold start sets nothing."""
    assert {HANDOUT_VARIABLE, "PYTHONPATH"} == handout.env.keys()
    assert document_of(handout).is_file()
    assert {} == Handout("cold", Path("/r.yaml")).env


def test_write_leaves_one_private_file(handout: Handout) -> None:
    """The document is 0600 and its temporary name is gone."""
    folder = document_of(handout).parent

    assert 0o600 == document_of(handout).stat().st_mode & 0o7777
    assert {".claim", "handout.json"} == {path.name for path in folder.iterdir() if path.is_file()}


def test_write_does_not_follow_a_planted_link(handout: Handout, tmp_path: Path) -> None:
    """A link under the temporary name is refused (field report P9)."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "victim").write_text("mine")
    (folder / ".handout.json").symlink_to(tmp_path / "victim")

    with pytest.raises(FileExistsError):
        replace(handout, folder=folder).write()
    assert "mine" == (tmp_path / "victim").read_text()


def test_write_cold_is_a_mistake() -> None:
    """A cold start leaves no document."""
    with pytest.raises(ValueError, match="no folder"):
        Handout("cold", Path("/r.yaml")).write()


@pytest.mark.parametrize("name", ["schema", "recipe_path", "roots", "sets", "left_s"])
def test_read_without_a_field_refused(handout: Handout, name: str) -> None:
    """Every field that is written is needed (field report W19)."""
    path = document_of(handout)
    document = json.loads(path.read_bytes())
    del document[name]
    path.write_text(json.dumps(document))

    with pytest.raises(DocumentError, match="can't read the hand-out"):
        Handout.read(path)


@pytest.mark.parametrize("value", [-1, "30", [1], float("inf")])
def test_read_strange_patience_refused(handout: Handout, value: Any) -> None:
    """How long ranks may wait for each other is a number of seconds."""
    path = document_of(handout)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "left_s": value}))

    with pytest.raises(DocumentError, match="left_s"):
        Handout.read(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema":"cachectl/handout/v3"}'],
    ids=["empty", "object", "list", "null", "no text", "deep", "newer"],
)
def test_read_strange_document_refused(tmp_path: Path, data: bytes) -> None:
    """What no hook wrote is refused in words."""
    (tmp_path / "handout.json").write_bytes(data)

    with pytest.raises(DocumentError):
        Handout.read(tmp_path / "handout.json")


def test_read_changed_entry_refused(handout: Handout) -> None:
    """An entry's parts have to give its key here, too."""
    path = document_of(handout)
    document: dict[str, Any] = json.loads(path.read_bytes())
    document["sets"][0]["entries"][0]["document"]["parts"]["guards"] = {"name": "other"}
    path.write_text(json.dumps(document))

    with pytest.raises(DocumentError, match="its parts give"):
        Handout.read(path)


@pytest.mark.parametrize("kind", ["missing", "link", "fifo", "held fifo", "folder"])
def test_read_no_regular_file_refused_at_once(handout: Handout, tmp_path: Path, kind: str) -> None:
    """A name that leads nowhere, to a link or to a special file neither hangs nor raises anything else."""
    path = tmp_path / kind
    holder = None
    if kind == "link":
        path.symlink_to(document_of(handout))
    elif kind == "folder":
        path.mkdir()
    elif "fifo" in kind:
        os.mkfifo(path)
        holder = os.open(path, os.O_RDWR) if "held" in kind else None

    with pytest.raises(DocumentError):
        Handout.read(path)
    if holder is not None:
        os.close(holder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file away")
def test_read_of_another_uid_refused(handout: Handout) -> None:
    """What another user wrote is not loaded (field report P9)."""
    os.chown(document_of(handout), 1234, 1234)

    with pytest.raises(DocumentError, match="belongs to uid 1234"):
        Handout.read(document_of(handout))


def test_report_read_only_has_no_paths(handout: Handout) -> None:
    """What was not laid down has no path."""
    seen = tuple(HandedEntry(item.entry, None, item.document) for item in handout.entries)

    report = replace(handout, folder=None, sets=(replace(handout.sets[0], entries=seen),)).report()

    assert ({}, None, {None}) == (report["env"], report["cache_dir"], {entry["path"] for entry in report["entries"]})
