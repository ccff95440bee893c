"""`cachectl diff`: in what two entries differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output
from cachectl.cli.reasons import differing_parts, show_differences

if TYPE_CHECKING:
    from cachectl.schemas.report import DiffReport

__all__ = ["command", "render"]


@click.command(
    "diff", context_settings=HELP_NAMES, epilog=example("cachectl diff 31ffc6232de5 bd3e6f12eca2 --store /mnt/cache")
)
@click.argument("stored", metavar="KEY")
@click.argument("wanted", metavar="KEY")
@session_options
def command(session: Session, stored: str, wanted: str) -> int:
    """Say in what two entries differ.

    KEY is an entry's key, or its first digits as `ls` prints them. All nine parts are compared, and beside them what is
    in no key, as noise.
    """
    from cachectl.services.diff import diff

    report = diff(session.layout(), stored, wanted)
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: DiffReport) -> None:
    """Write the report for people."""
    out.line(f"{out.key(report.stored)} → {out.key(report.wanted)}: {differing_parts(report.distance)}")
    show_differences(out, report.differs)
