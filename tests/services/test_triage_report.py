"""Triage's page and what may not stand in it: secrets, absolute paths, this machine's name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cachectl.schemas.triage import TriageFinding, TriageReport, TriageStage
from cachectl.services.request import read_request
from cachectl.services.triage_report import Redaction, markdown, tail_of
from tests.stores import MadeStore

WORDS = ("sesame-open-up", "swordfish1")


def hidden(made: MadeStore, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Redaction:
    """Return what is hidden for the made-up recipe, in a process with two secrets."""
    monkeypatch.setenv("HUB_TOKEN", WORDS[0])
    monkeypatch.setenv("DB_PASSWORD", WORDS[1])
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(socket, "gethostname", lambda: "build-node-7")
    return Redaction.of(read_request(made.recipe), workspace)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"curl -H {WORDS[0]} x", "curl -H *** x"),
        ("https://me:pw@host/x", "https://host/x"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("OTHER_SECRET=abc def", "OTHER_SECRET=*** def"),
        ("self.key == 3, key_cache: 4, next_token=5", "self.key == 3, key_cache: 4, next_token=5"),
        ("N_LAYERS=4", "N_LAYERS=4"),
        ("/home/somebody/models/a.py", "~/models/a.py"),
        ("/home/somebody-else/a.py", "/home/somebody-else/a.py"),
        ("on build-node-7 now", "on <host> now"),
    ],
)
def test_redaction_hides_and_leaves_the_rest(
    made: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, shown: str
) -> None:
    """By value, by name, by place; what only looks alike stays."""
    assert shown == hidden(made, tmp_path / "w", monkeypatch).text(text)


def test_redaction_says_places_in_words(made: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's folder is where its reader stands; the workspace is gone by then."""
    hide = hidden(made, tmp_path / "w", monkeypatch)

    assert "./decoder.py <workspace>/rank0" == hide.text(f"{made.source} {tmp_path}/w/rank0")
    assert {"a": ["./decoder.py", 3, None]} == hide.document({"a": [str(made.source), 3, None]})


def report(**fields: object) -> TriageReport:
    """Return a report that stopped at the second stage."""
    found = TriageFinding(
        kind="graph-break", what="print | is `bad`", where="model.py:3 in f", next="take it out", method="m", case="c"
    )
    stages = (
        TriageStage(stage="eager", verdict="ok", seconds=1.25, notes=("m [c]: 4 calls",)),
        TriageStage(stage="aot_eager", verdict="failed", seconds=2.0, findings=(found,)),
    )
    document = {
        "stage": "aot_eager",
        "stages": stages,
        "advice": ("take it out",),
        "recipe": "recipe.yaml",
        "evidence": "simulated",
        "versions": {"torch": "2.13.0"},
        **fields,
    }
    return TriageReport.model_validate(document)


def test_markdown_has_what_somebody_else_needs(
    made: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result, evidence, versions, stages, place, advice, recipe, and the logs' ends without secrets."""
    hide = hidden(made, tmp_path / "w", monkeypatch)
    log = tmp_path / "eager.log"
    log.write_text(f"started with {WORDS[1]}\nin {made.source}\n")

    page = markdown(report(), read_request(made.recipe), [("triage-eager", log), ("other", tmp_path / "none")], hide)

    for text in (
        "Stopped at **aot_eager**.",
        "on the simulated CANN, on no NPU",
        "| torch | 2.13.0 |",
        "| aot_eager | failed | 2.0 | graph-break: print \\| is `bad` |",
        "- **graph-break** m [c], rank 0: print | is `bad`",
        "at `model.py:3 in f`",
        "1. take it out",
        "name: made-up",
        "started with ***\nin ./decoder.py",
    ):
        assert text in page
    assert not any(word in page for word in (*WORDS, str(tmp_path), "### other"))


def test_markdown_of_a_good_recipe_says_so(made: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the page doesn't speak of a simulation."""
    hide = hidden(made, tmp_path / "w", monkeypatch)

    page = markdown(report(stage=None, evidence="ascend910b1"), read_request(made.recipe), [], hide)

    assert "Every stage is right." in page
    assert "simulated CANN" not in page


def test_markdown_keeps_secrets_of_the_recipe_out(
    made: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token written into the recipe's environment, whatever its length, and a fence inside the recipe."""
    text = made.recipe.read_text() + 'environment: {HUB_TOKEN: "t0", X_KEY: longer-one}\n# ```\n'
    made.recipe.write_text(text)
    hide = hidden(made, tmp_path / "w", monkeypatch)

    page = markdown(report(), read_request(made.recipe), [], hide)

    assert not any(word in page for word in ('"t0"', "longer-one"))
    assert "````yaml" in page


def test_texts_that_are_no_utf8_are_escaped(made: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's error may hold anything; neither document nor page ends over it."""
    found = TriageFinding(kind="raises", what="bad \ud800", where="mod\udcffel.py:1", next="mend \udc00")
    stage = TriageStage(stage="eager", verdict="failed", seconds=1.0, findings=(found,), notes=("\ud800",))

    whole = report(stage="eager", stages=(stage,), advice=("\ud800",))

    assert ("bad \\ud800", "mod\\udcffel.py:1") == (found.what, found.where)
    page = markdown(whole, read_request(made.recipe), [], hidden(made, tmp_path / "w", monkeypatch))
    assert b"bad \\ud800" in page.encode()


def test_tail_of_is_the_printable_end_of_a_log(tmp_path: Path) -> None:
    """Sixty lines, no escapes; nothing where there is no log."""
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(100)) + b"\x1b[31mred\xff\n")

    lines = tail_of(log).splitlines()

    assert (60, "line 41", "?[31mred\N{REPLACEMENT CHARACTER}") == (len(lines), lines[0], lines[-1])
    assert "" == tail_of(tmp_path / "none")
