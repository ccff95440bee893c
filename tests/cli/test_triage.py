"""`cachectl triage` for people: one short page, what -v adds, and options that make no sense."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from cachectl.cli.output import Output
from cachectl.cli.triage import event_text, render
from cachectl.schemas.triage import STAGES, TriageReport
from cachectl.services.triage import TriageEvent
from tests.stores import MadeStore

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def report(findings: int = 1, **fields: Any) -> TriageReport:
    """Return a report that stopped at the second stage."""
    stages: list[dict[str, Any]] = [{"stage": name, "verdict": "skipped", "seconds": 0.0} for name in STAGES]
    stages[0].update(verdict="ok", seconds=3.26, notes=["main_decode [b4]: 4 calls"])
    found = {"what": "print", "where": "model.py:3 in f", "method": "main_decode", "case": "b4", "next": "take it out"}
    stages[1].update(
        verdict="failed",
        seconds=2.0,
        findings=[{**found, "kind": f"graph-break-{number}"} for number in range(findings)],
    )
    return TriageReport.model_validate(
        {
            "stage": "aot_eager",
            "stages": stages,
            "advice": ["take it out", "then run again: cachectl triage recipe.yaml"],
            "recipe": "recipe.yaml",
            "evidence": "simulated",
            "versions": {"torch": "2.13.0"},
            **fields,
        }
    )


def page(document: TriageReport, *, verbose: int = 0) -> list[str]:
    """Return the lines that people get."""
    out = Output("human", verbose=verbose, stdout=io.StringIO(), stderr=io.StringIO())
    render(out, document)
    assert isinstance(out.stdout, io.StringIO)
    return out.stdout.getvalue().splitlines()


def test_page_has_stages_finding_and_what_to_do_next() -> None:
    """Evidence in the first line, a row a stage, the findings of the bad one, numbered steps."""
    lines = page(report())

    assert "recipe.yaml, simulated" == lines[0]
    assert ["STAGE", "VERDICT", "SECONDS", "WHAT"] == lines[2].split()
    assert ["eager", "ok", "3.3"] == lines[3].split()[:3]
    assert "aot_eager    failed       2.0  graph-break-0: print" == lines[4]
    assert ["cache", "skipped", "-"] == lines[7].split()
    assert ["", "graph-break-0 of main_decode [b4] at model.py:3 in f", "  print", ""] == lines[8:12]
    assert ["Stopped at aot_eager. Next:", "  1. take it out"] == lines[12:14]


def test_page_of_a_good_recipe_says_so_and_on_what() -> None:
    """On a device it names the SoC."""
    lines = page(report(findings=0, stage=None, evidence="ascend910b1", advice=("run: cachectl build recipe.yaml",)))

    assert "recipe.yaml on ascend910b1" == lines[0]
    assert ["Every stage is right.", "  1. run: cachectl build recipe.yaml"] == lines[-2:]


def test_page_cuts_many_findings_and_verbose_does_not() -> None:
    """Eight are enough to begin with."""
    short, long = page(report(findings=10)), page(report(findings=10), verbose=1)

    assert "and 2 more findings (-v shows them)" in short
    assert 10 == sum(line.startswith("graph-break-") for line in long)
    assert "eager: main_decode [b4]: 4 calls" in long


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (TriageEvent("eager", "begins"), "eager: begins"),
        (TriageEvent("eager", "rank 0: import", 1.5), "eager: rank 0: import, 1.50 s"),
    ],
)
def test_event_text_is_one_line(event: TriageEvent, text: str) -> None:
    """What goes to stderr meanwhile."""
    assert text == event_text(event)


@pytest.mark.parametrize("options", [("--steps", "2"), ("--timeout", "0"), ("--timeout", "nan"), ("--report", ".")])
def test_triage_refuses_options_that_make_no_sense(made: MadeStore, cachectl: Run, options: tuple[str, str]) -> None:
    """Before anything is started."""
    done = cachectl("triage", str(made.recipe), *options)

    assert (2, "") == (done.returncode, done.stdout)


def test_triage_of_no_recipe_is_usage(cachectl: Run) -> None:
    """With its name."""
    done = cachectl("triage", "none.yaml", "--json")

    assert 2 == done.returncode
    assert "none.yaml" in done.stderr


def test_commands_document_explains_stages_verdicts_and_findings(repository: Any) -> None:
    """The stages are in the command's section, every kind of finding in its own document."""
    text = (repository / "docs" / "commands.md").read_text(encoding="utf-8")
    section = text.partition("## `triage`\n")[2].partition("\n## `")[0]
    kinds = (repository / "docs" / "triage.md").read_text(encoding="utf-8")

    assert [] == [name for name in (*STAGES, "ok", "failed", "differs", "skipped") if name not in section]
    assert [] == [kind for kind in KINDS if f"`{kind}`" not in kinds]


KINDS = (
    "raises",
    "not-finite",
    "not-repeatable",
    "graph-break",
    "not-traced",
    "host-read",
    "recompile-shape",
    "recompile-value",
    "recompile-attribute",
    "recompile-container",
    "recompile-identity",
    "recompile-ambient",
    "recompile",
    "attention-lengths",
    "differs",
    "capture",
    "option",
    "tried",
    "static-kernel",
    "capture-limit",
    "not-saved",
    "inert",
    "not-loaded",
    "reload-differs",
    "parameter-written",
    "random",
    "refused",
    "died",
    "timeout",
    "skipped",
)
