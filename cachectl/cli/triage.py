"""`cachectl triage`: finds the first stage, from eager to a loaded cache, at which a recipe goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, rank_timeout, session_options
from cachectl.cli.output import Output, human_seconds, human_value

if TYPE_CHECKING:
    from cachectl.schemas.triage import TriageFinding, TriageReport, TriageStage
    from cachectl.services.triage import TriageEvent

__all__ = ["command", "event_text", "render"]

_SHOWN_FINDINGS = 8


@click.command(
    "triage",
    context_settings=HELP_NAMES,
    epilog=example(
        "cachectl triage recipe.yaml",
        "cachectl triage recipe.yaml --case b4 --steps 8 --report triage.md   # a page to attach to an issue",
    ),
)
@click.argument("recipe", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--case", "cases", metavar="NAME", multiple=True, help="Only this case, or METHOD/CASE; may be repeated.")
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=3, max=64),
    default=4,
    show_default=True,
    help="Calls of the method in each stage.",
)
@rank_timeout
@click.option(
    "--report", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write a Markdown page."
)
@click.option(
    "--keep", metavar="DIR", type=click.Path(path_type=Path, file_okay=False), help="Keep the ranks' logs in DIR."
)
@session_options
def command(
    session: Session,
    recipe: Path,
    cases: tuple[str, ...],
    steps: int,
    timeout_s: float | None,
    report: Path | None,
    keep: Path | None,
) -> int:
    """Find the first stage at which a recipe goes wrong.

    The stages are those of the vendor's guide: eager, aot_eager (on the CPU), force_eager, npugraph_ex, then the cache:
    saved, and loaded in a second process. Each runs in fresh rank processes; it stops at the first that fails or
    differs from eager. Publishes nothing and needs no store. Exits 0 when every stage is right, 1 when one stopped it.
    """
    from cachectl.services.triage import triage

    out = session.out
    found = triage(
        recipe,
        cases=cases,
        steps=steps,
        timeout_s=timeout_s,
        keep=keep,
        report=report,
        progress=lambda event: out.log(event_text(event)),
    )
    out.report(found, lambda: render(out, found))
    return found.exit_code


def event_text(event: TriageEvent) -> str:
    """Return one line for an event."""
    after = f", {human_seconds(event.elapsed_s)}" if event.elapsed_s else ""
    return f"{event.stage}: {event.text}{after}"


def render(out: Output, report: TriageReport) -> None:
    """Write the report for people."""
    evidence = ", simulated" if report.evidence == "simulated" else f" on {report.evidence}"
    out.line(f"{report.recipe}{evidence}")
    out.line()
    out.table(
        ["STAGE", "VERDICT", "SECONDS", "WHAT"],
        [
            [
                stage.stage,
                stage.verdict,
                f"{stage.seconds:.1f}" if stage.verdict != "skipped" or stage.seconds else "-",
                _what(stage),
            ]
            for stage in report.stages
        ],
        right=["SECONDS"],
    )
    shown = [
        (stage, found)
        for stage in report.stages
        for found in stage.findings
        if out.verbose or stage.stage == report.stage
    ]
    for stage, found in shown if out.verbose else shown[:_SHOWN_FINDINGS]:
        _finding(out, stage, found)
    if not out.verbose and len(shown) > _SHOWN_FINDINGS:
        out.line(f"and {len(shown) - _SHOWN_FINDINGS} more findings (-v shows them)")
    if out.verbose:
        for stage in report.stages:
            for note in stage.notes:
                out.line(f"{stage.stage}: {note}")
    out.line()
    out.line("Every stage is right." if report.stage is None else f"Stopped at {report.stage}. Next:")
    for number, step in enumerate(report.advice, 1):
        out.line(f"  {number}. {step}")


def _what(stage: TriageStage) -> str:
    if stage.findings:
        return human_value(f"{stage.findings[0].kind}: {stage.findings[0].what}", limit=70)
    return human_value(stage.notes[0], limit=70) if stage.notes else ""


def _finding(out: Output, stage: TriageStage, found: TriageFinding) -> None:
    of = f" of {found.method} [{found.case}]" if found.method else ""
    at = f" at {found.where}" if found.where else ""
    out.line()
    out.line(f"{found.kind}{of}{at}")
    out.line(f"  {human_value(found.what, whole=bool(out.verbose), limit=400)}")
