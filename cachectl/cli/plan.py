"""`cachectl plan`: what is ready, missing or stale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachectl.cli.framework import show_framework
from cachectl.cli.options import HELP_NAMES, Session, example, recipes_argument, session_options
from cachectl.cli.output import Output, human_seconds
from cachectl.cli.reasons import show_reasons

if TYPE_CHECKING:
    from cachectl.schemas.report import PlanReport, ReasonModel

__all__ = ["command", "render"]


def _toolchain(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str] | None:
    """Read name=value pairs, parted by commas; None when the option was not given."""
    wanted: dict[str, str] = {}
    for pair in (pair for value in values for pair in value.split(",")):
        name, equals, version = (part.strip() for part in pair.partition("="))
        if not name or not equals or not version:
            raise click.BadParameter(f"{pair!r} is not name=version, as in cann=9.1.0,torch_npu=2.13.0", ctx, param)
        if wanted.setdefault(name, version) != version:
            raise click.BadParameter(f"{name} is given twice, as {wanted[name]} and {version}", ctx, param)
    return wanted or None


@click.command(
    "plan",
    context_settings=HELP_NAMES,
    epilog=example(
        "cachectl plan recipe.yaml --store /mnt/cache",
        "cachectl plan recipe.yaml --toolchain cann=9.1.0,torch_npu=2.13.0   # rehearse an upgrade",
    ),
)
@recipes_argument
@click.option(
    "--toolchain",
    metavar="NAME=VERSION,...",
    multiple=True,
    callback=_toolchain,
    help="Plan as if these versions were installed.",
)
@click.option("--require-ready", is_flag=True, help="Fail when nothing is planned, too: for a gate in a pipeline.")
@session_options
def command(session: Session, recipes: tuple[Path, ...], toolchain: dict[str, str] | None, require_ready: bool) -> int:
    """Say entry by entry what is ready, missing or stale, and why.

    Reads the recipes and the store; builds and changes nothing. Exits 0 when everything is ready, else 1.
    """
    from cachectl.services.plan import plan

    report = plan(session.layout(), list(recipes), toolchain=toolchain)
    session.out.report(report, lambda: render(session.out, report, toolchain=toolchain))
    all_ready = bool(report.entries) and all(entry.state == "ready" for entry in report.entries)
    return 1 if require_ready and not all_ready else report.exit_code


def render(out: Output, report: PlanReport, *, toolchain: Mapping[str, str] | None = None) -> None:
    """Write the report for people; of a rehearsal also which warm sets an upgrade to `toolchain` would take."""
    several = len({entry.recipe for entry in report.entries}) > 1
    out.table(
        [*(["RECIPE"] if several else []), "METHOD", "CASE", "RANK", "STATE", "KEY", "WHY"],
        [
            [
                *([entry.recipe] if several else []),
                entry.method,
                entry.case,
                entry.rank,
                entry.state,
                out.key(entry.key),
                _why(entry.reasons),
            ]
            for entry in report.entries
        ],
        right=["RANK"],
    )
    show_reasons(
        out,
        [
            (f"{entry.recipe} {entry.method}/{entry.case}" if several else f"{entry.method}/{entry.case}", *rest)
            for entry in report.entries
            for rest in [(entry.rank, entry.state, entry.reasons)]
        ],
    )
    show_framework(out, report.framework)
    if toolchain:
        _show_lost(out, report, toolchain)
    out.line()
    if report.expected_seconds is not None:
        out.line(f"compiling what is not ready took {human_seconds(report.expected_seconds)} when it was built last")
    out.line(f"{report.ready} ready, {report.missing} missing, {report.stale} stale")


def _show_lost(out: Output, report: PlanReport, toolchain: Mapping[str, str]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in toolchain.items())
    out.line()
    if not report.lost:
        out.line(f"with {versions} no warm set that is ready today is lost")
    for lost in report.lost:
        took = human_seconds(lost.seconds) if lost.seconds is not None else "an unknown time"
        title = f"with {versions} warm set {out.key(lost.warm_set)} of {lost.recipe} is lost"
        out.line(f"{title}: {lost.lost} of {lost.entries} entries, which took {took} to compile")


def _why(reasons: tuple[ReasonModel, ...]) -> str:
    """Name the parts that differ, for the table; the reasons themselves stand below it."""
    return ", ".join(dict.fromkeys(reason.part for reason in reasons))
