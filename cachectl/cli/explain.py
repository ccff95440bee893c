"""`cachectl explain`: why a start is warm or why not, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachectl.cli.framework import show_framework
from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output
from cachectl.cli.reasons import differing_parts, show_differences, show_hints

if TYPE_CHECKING:
    from cachectl.schemas.report import ExplainReport

__all__ = ["command", "render"]


@click.command(
    "explain",
    context_settings=HELP_NAMES,
    epilog=example(
        "cachectl explain recipe.yaml --store /mnt/cache",
        "cachectl explain recipe.yaml --key 31ffc6232de5 --json   # beside one entry",
    ),
)
@click.argument("recipe", metavar="RECIPE", type=click.Path(path_type=Path))
@click.option("--key", metavar="KEY", help="Compare with this entry, not with the nearest ones.")
@session_options
def command(session: Session, recipe: Path, key: str | None) -> int:
    """Say why a start is warm or why not, and what mends it.

    Decides as the hook would here, and compares the recipe with the entries that come nearest, part by
    part. Run it where the program runs. Writes nothing. Exits 0 when warm, 1 when cold.
    """
    from cachectl.services.explain import explain

    report = explain(session.layout(), recipe, key=key)
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: ExplainReport) -> None:
    """Write the report for people."""
    out.line(report.outcome)
    show_differences(out, report.reasons)
    for entry in report.nearest:
        out.line()
        out.line(f"{out.key(entry.key)} {entry.line}: {differing_parts(entry.distance)}")
        show_differences(out, entry.differs)
    show_framework(out, report.framework)
    hints = [reason.hint for reason in report.reasons if reason.hint]
    show_hints(out, list(dict.fromkeys(hints)))
