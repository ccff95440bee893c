"""`cachectl ls`: lists entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output, human_size

if TYPE_CHECKING:
    from cachectl.schemas.report import LsReport

__all__ = ["command", "render"]


@click.command(
    "ls",
    context_settings=HELP_NAMES,
    epilog=example("cachectl ls --store /mnt/cache", "cachectl ls tiny-decoder --json"),
)
@click.argument("recipe", required=False)
@session_options
def command(session: Session, recipe: str | None) -> int:
    """List entries.

    RECIPE is a recipe's name; without it every entry of the store is listed.
    """
    from cachectl.services.listing import list_entries

    report = list_entries(session.layout(), recipe=recipe)
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: LsReport) -> None:
    """Write the report for people."""
    if report.entries:
        out.table(
            ["KEY", "RECIPE", "METHOD", "CASE", "RANK", "STATE", "SIZE", "CREATED", "LAST USED", "PINNED"],
            [
                [
                    out.key(entry.key),
                    entry.recipe,
                    entry.method,
                    entry.case,
                    entry.rank,
                    entry.state,
                    human_size(entry.size_bytes),
                    entry.created_at,
                    entry.last_used_at or "-",
                    "yes" if entry.pinned else "no",
                ]
                for entry in report.entries
            ],
            right=["RANK", "SIZE"],
        )
        out.line()
    total = human_size(sum(entry.size_bytes for entry in report.entries))
    out.line(f"{len(report.entries)} entr{'y' if len(report.entries) == 1 else 'ies'}, {total}")
