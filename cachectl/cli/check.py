"""`cachectl check`: whether a model is ready for graph mode and a cache."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, positive_seconds, session_options
from cachectl.cli.output import Output

if TYPE_CHECKING:
    from cachectl.schemas.check import CheckReport, Finding

__all__ = ["command", "render"]


@click.command(
    "check",
    context_settings=HELP_NAMES,
    epilog=example("cachectl check recipe.yaml", "cachectl check recipe.yaml --no-trace   # runs nothing of the model"),
)
@click.argument("recipe", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--no-trace", is_flag=True, help="Read the source alone; no torch is needed, and no code of yours runs.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=float,
    default=600.0,
    show_default=True,
    callback=positive_seconds,
    help="Bound on the process that traces.",
)
@session_options
def command(session: Session, recipe: Path, no_trace: bool, timeout: float) -> int:
    """Say whether a model is ready for graph mode and a cache.

    Before any time on an NPU: reads the source of the recipe's methods and of what they call, then traces them under
    fake tensors, in a process of its own. Compiles nothing, and needs neither NPU nor store. Exits 1 with an error or a
    warning.
    """
    from cachectl.services.check import check

    report = check(
        recipe,
        traces=not no_trace,
        timeout_s=timeout,
        progress=lambda phase: session.out.log(phase) if session.out.verbose else None,
    )
    session.out.report(report.as_document(), lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: CheckReport) -> None:
    """Write the report for people: by file, each finding with its rewrite; the ladder last."""
    last = [finding for finding in report.findings if finding.rule in ("mode", "ladder")]
    found = [finding for finding in report.findings if finding not in last]
    for path, group in groupby(found, key=lambda finding: finding.path or ""):
        out.line(path or "the model")
        for finding in group:
            _finding(out, finding)
        out.line()
    for finding in last:
        out.line(f"advice: {finding.what}")
        for line in finding.rewrite.splitlines():
            out.line(f"  {line}")
    for note in report.notes:
        out.line(f"note: {note}")
    out.line(_summary(report))


def _finding(out: Output, finding: Finding) -> None:
    place = f"{finding.path}:{finding.line}" if finding.path and finding.line else finding.path or "-"
    severity = "" if finding.severity == "error" else f" ({finding.severity})"
    of_method = f"  [{finding.method}]" if out.verbose and finding.method else ""
    out.line(f"  {place} {finding.rule}{severity}: {finding.what}{of_method}")
    for line in finding.rewrite.splitlines():
        out.line(f"    {line}")


def _summary(report: CheckReport) -> str:
    counts = [(report.count("error"), "error"), (report.count("warning"), "warning")]
    words = ", ".join(f"{count or 'no'} {word}{'s' if count != 1 else ''}" for count, word in counts)
    traced = len(report.traced)
    return f"{words}; {traced or 'no'} case{'s' if traced != 1 else ''} traced"
