"""`cachectl doctor`: checks what this machine has and lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output
from cachectl.cli.reasons import show_hints

if TYPE_CHECKING:
    from cachectl.schemas.report import DoctorReport

__all__ = ["command", "render"]


@click.command("doctor", context_settings=HELP_NAMES, epilog=example("cachectl doctor --store /mnt/cache"))
@session_options
def command(session: Session) -> int:
    """Check what this machine has and lacks.

    Looks at Python, torch, torch_npu, CANN, the driver, the compiler for the simulation, and the store. Changes
    nothing.
    """
    from cachectl.services.doctor import doctor

    report = doctor(session.layout())
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: DoctorReport) -> None:
    """Write the report for people."""
    out.table(["CHECK", "STATE", "DETAIL"], [[check.name, check.state, check.detail] for check in report.checks])
    show_hints(out, [check.hint for check in report.checks if check.state != "ok" and check.hint])
