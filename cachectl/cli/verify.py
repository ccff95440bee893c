"""`cachectl verify`: digests, closure, and the database against the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output

if TYPE_CHECKING:
    from cachectl.schemas.report import VerifyReport

__all__ = ["command", "render"]


@click.command(
    "verify",
    context_settings=HELP_NAMES,
    epilog=example("cachectl verify --store /mnt/cache", "cachectl verify recipe.yaml --quick"),
)
@click.argument("targets", metavar="[RECIPE|KEY]...", nargs=-1)
@click.option("--quick", is_flag=True, help="Compare sizes and names only; read no blob.")
@click.option("--deep", is_flag=True, hidden=True, help="Load and run each entry in a fresh process, too.")
@session_options
def command(session: Session, targets: tuple[str, ...], quick: bool, deep: bool) -> int:
    """Check digests, closure, and the database against the files.

    Without arguments the whole store is checked. Changes nothing. Exits 1 when something was found.
    """
    if quick and deep:
        raise click.UsageError("--quick and --deep exclude each other", click.get_current_context())
    from cachectl.services.verify import verify

    report = verify(session.layout(), list(targets), quick=quick, deep=deep)
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: VerifyReport) -> None:
    """Write the report for people."""
    if report.findings:
        out.table(
            ["KIND", "KEY", "PATH", "DETAIL"],
            [[finding.kind, out.key(finding.key), finding.path or "-", finding.detail] for finding in report.findings],
        )
        out.line()
    out.line(
        f"{report.checked} checked, {len(report.findings) or 'no'} finding{'s' if len(report.findings) != 1 else ''}"
    )
