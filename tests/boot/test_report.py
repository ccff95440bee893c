"""The report of a run: what several processes found becomes one document."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.report import ExecNote, overall
from cachectl.errors import DocumentError
from cachectl.schemas.boot import Reason

REASON = Reason("guards", "L['x']", 1, 2, hint="build again").to_json()


def hook(outcome: str = "warm") -> dict[str, Any]:
    """Return a hook's document."""
    return {
        "outcome": outcome,
        "warm_set": None,
        "cache_dir": None,
        "env": {},
        "entries": [],
        "reasons": [],
        "seconds": {"resolve": 0.0, "verify": 0.0, "materialize": 0.0, "total": 0.25},
    }


def part(outcome: str, first_call: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Return one process's findings."""
    stages = {"import": 2.0, "hook": 0.25, "proof": 0.1, "load": 0.1, "capture": None, "first_call": first_call}
    proofs = [{"key": "sha256:00", "rank": 0, "guards": 3, "failed": [], "seconds": 0.1}]
    return {**hook(), "outcome": outcome, "proofs": proofs, "agreement": None, "stages": stages, **changes}


@pytest.fixture
def note(tmp_path: Path) -> ExecNote:
    """A note in a folder of its own, with a report beside it."""
    (tmp_path / "note").mkdir()
    return ExecNote(tmp_path / "note", tmp_path / "recipe.yaml", hook(), tmp_path / "report.json")


def leave(note: ExecNote, pid: int, rank: int | None, found: dict[str, Any]) -> None:
    """Leave another process's part."""
    (note.folder / f"{pid}.json").write_text(json.dumps({**found, "rank": rank, "pid": pid}))


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        ([], "unused"),
        (["unused", "warm"], "warm"),
        (["warm", "observed"], "observed"),
        (["warm", "inert", "observed"], "inert"),
        (["warm", "cold", "inert"], "cold"),
    ],
)
def test_overall_is_the_worst(outcomes: list[str], whole: str) -> None:
    """Several outcomes together are the worst of them; a method that was never called takes nothing away."""
    assert whole == overall(outcomes)


def test_note_round_trip(note: ExecNote) -> None:
    """A program's process reads what exec wrote."""
    note.write()

    assert note == ExecNote.read(note.folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "cachectl/exec/v9"}'])
def test_note_malformed_is_a_document_error(note: ExecNote, text: str) -> None:
    """What is no note is said to be none."""
    (note.folder / "exec.json").write_text(text)

    with pytest.raises(DocumentError):
        ExecNote.read(note.folder)


@pytest.mark.parametrize(("handed", "outcome", "reasons"), [("warm", "unused", 1), ("cold", "cold", 0)])
def test_document_without_processes_is_completed(note: ExecNote, handed: str, outcome: str, reasons: int) -> None:
    """A program that never wrote leaves `unused`, with a hint, or `cold` where no set was handed out."""
    document = ExecNote(note.folder, note.recipe_path, hook(handed)).document()

    assert (outcome, reasons, [], None) == (
        document["outcome"],
        len(document["reasons"]),
        document["proofs"],
        document["agreement"],
    )
    assert {"import", "hook", "proof", "load", "capture", "first_call"} == document["stages"].keys()
    assert (0.25, None) == (document["stages"]["hook"], document["stages"]["first_call"])


def test_add_one_process_is_the_report(note: ExecNote) -> None:
    """One process's findings are the report as they are."""
    note.add(part("warm"), rank=0)

    assert note.report is not None
    assert part("warm") == json.loads(note.report.read_text())


def test_document_several_ranks_are_listed_in_order(note: ExecNote) -> None:
    """Under several ranks the whole is the worst of them, the slowest of each stage, and each is listed."""
    leave(note, 300, 1, part("cold", 3.0, reasons=[REASON]))
    leave(note, 200, 0, part("warm", 1.0, reasons=[REASON]))

    document = note.document()

    assert ("cold", [REASON], 2) == (document["outcome"], document["reasons"], len(document["proofs"]))
    assert (3.0, None) == (document["stages"]["first_call"], document["stages"]["capture"])
    assert [(0, 200, "warm"), (1, 300, "cold")] == [
        (rank["rank"], rank["pid"], rank["outcome"]) for rank in document["ranks"]
    ]


def test_document_verdict_of_several_ranks_is_told_once(note: ExecNote) -> None:
    """As the rank that wrote it tells it, with the longest wait; a method that a rank agreed on alone stands, too."""
    own = {"method": "decode", "verdict": "cold", "by": 1, "reason": REASON, "seconds": 0.5}
    told = {**own, "reason": Reason("agreement", "rank 1", "cold: …", "warm").to_json(), "seconds": 2.0}
    lost = {"method": "draft", "verdict": "cold", "by": None, "reason": REASON, "seconds": 0.1}
    leave(note, 200, 0, part("cold", agreement=[told]))
    leave(note, 300, 1, part("cold", agreement=[own, lost]))
    leave(note, 400, None, part("unused"))

    document = note.document()

    assert [{**own, "seconds": 2.0}, lost] == document["agreement"]
    assert [[told], [own, lost], None] == [rank["agreement"] for rank in document["ranks"]]


def test_document_two_methods_of_one_name_have_two_verdicts(note: ExecNote) -> None:
    """A target and its draft model each have a decode."""
    both = [
        {"method": "decode", "verdict": "warm", "by": 0, "reason": None, "seconds": seconds} for seconds in (1.0, 2.0)
    ]
    leave(note, 200, 0, part("warm", agreement=both))
    leave(note, 300, 1, part("warm", agreement=both))

    assert both == note.document()["agreement"]


def test_add_never_raises_when_the_folder_is_gone(note: ExecNote) -> None:
    """A program that outlives exec ends as it would have."""
    note.folder.rmdir()

    note.add(part("warm"), rank=None)

    assert note.report is not None
    assert not note.report.exists()


def test_add_unwritable_report_leaves_no_pending_file(note: ExecNote, tmp_path: Path) -> None:
    """A report that is a folder by now is not replaced, and nothing is left beside it."""
    assert note.report is not None
    note.report.mkdir()

    note.add(part("warm"), rank=None)

    assert ["note", "report.json"] == sorted(os.listdir(tmp_path))


def test_handout_that_is_gone_is_cold_with_the_reason(note: ExecNote) -> None:
    """What the hook handed out and the process can't read any more is a cold start."""
    handout = note.handout(str(note.folder / "handout.json"))

    assert ("cold", 0.25) == (handout.outcome, handout.seconds.total)
    assert ["hand-out"] == [reason.name for reason in handout.reasons]
