"""`cachectl audit`: what a cache directory that nobody manages holds."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output, human_size, human_value, ranks_text

if TYPE_CHECKING:
    from cachectl.schemas.audit import AuditArtifact, AuditReport

__all__ = ["command", "render"]

_SHOWN_FINDINGS = 20


def _minor(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"3\.\d{1,2}", value):
        raise click.BadParameter(f"{value!r} is no CPython minor, such as 3.11", ctx, param)
    return value


@click.command(
    "audit",
    context_settings=HELP_NAMES,
    epilog=example(
        "cachectl audit .torchair_cache",
        "cachectl audit /mnt/compile_cache --uid 1000 --python 3.11   # as the pod will see it",
    ),
)
@click.argument("directory", metavar="DIR")
@click.option("--uid", type=click.IntRange(min=0), help="Who will start the program.  [default: this user]")
@click.option(
    "--python", metavar="MINOR", callback=_minor, help="Its CPython, such as 3.11.  [default: this interpreter's]"
)
@session_options
def command(session: Session, directory: str, uid: int | None, python: str | None) -> int:
    """Say what an unmanaged cache directory holds, and what is wrong.

    Takes a cache_dir, .torchair_cache, or a folder above several. Reads only: runs nothing of what it finds, writes
    nothing, and needs neither store, torch nor NPU.
    """
    from cachectl.services.audit import audit, what_starts_here

    report = audit(directory, what_starts_here(uid=uid, python=python))
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: AuditReport) -> None:
    """Write the report for people."""
    seen = report.seen
    wheels = f"torch_npu {seen.torch_npu}" if seen.torch_npu else "no torch_npu to compare with"
    cann = f"CANN {seen.cann}" if seen.cann else "no CANN to compare with"
    out.line(f"{report.path}, for uid {seen.uid} with CPython {seen.python}, {wheels}, {cann}")
    if report.artifacts:
        out.line()
        _artifacts(out, report)
    _findings(out, report)
    out.line()
    out.line("The runtime's key ignores:")
    for gap in report.ignored:
        out.line(f"  {gap.name}: {gap.detail}")
        if gap.here and out.verbose:
            out.line(f"    here: {'; '.join(gap.here)}")
    if report.changes:
        out.line()
        out.line("What a change makes of it:")
        for change in report.changes:
            of = f"{change.artifacts} artifact{'s' if change.artifacts != 1 else ''}"
            out.line(f"  {change.change}: {of} {change.effect}; {change.detail}")
    out.line()
    wasted = f", {human_size(report.orphaned_bytes)} of them orphaned" if report.orphaned_bytes else ""
    count = len(report.findings)
    out.line(f"{human_size(report.size_bytes)}{wasted}; {count or 'no'} finding{'s' if count != 1 else ''}")


def _artifacts(out: Output, report: AuditReport) -> None:
    groups: dict[tuple[object, ...], list[AuditArtifact]] = defaultdict(list)
    for artifact in report.artifacts:
        # Verbose: one row each. Else the ranks of a world in one row.
        own = (artifact.path,) if out.verbose else ()
        groups[artifact.cache, artifact.graph, artifact.method, artifact.world_size, artifact.state, own].append(
            artifact
        )
    rows = []
    for artifacts in groups.values():
        first = artifacts[0]
        content = next((item.content for item in artifacts if item.content is not None), None)
        ranks = [artifact.rank for artifact in artifacts if artifact.rank is not None]
        rows.append(
            [
                first.cache,
                first.graph if out.verbose else _short(first.graph),
                first.method,
                f"{ranks_text(ranks)} of {first.world_size}" if ranks else "-",
                first.state,
                f"{content.runtime} {content.format_version}" if content else "-",
                content.python.minor if content else "-",
                content.created_at if content else "-",
                human_size(sum(item.size_bytes for item in artifacts)),
            ]
        )
    columns = ["CACHE", "GRAPH", "METHOD", "RANKS", "STATE", "FORMAT", "PYTHON", "CREATED", "SIZE"]
    out.table(columns, rows, right=["SIZE"])


def _short(graph: str) -> str:
    kind, _, md5 = graph.rpartition("_")
    return f"{kind}_{md5[:8]}"


def _findings(out: Output, report: AuditReport) -> None:
    # What is said of many paths in the same words is said once; verbose names them all.
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for finding in report.findings:
        groups[finding.kind, finding.effect, finding.detail, finding.hint].append(finding.path)
    shown = list(groups.items()) if out.verbose else list(groups.items())[:_SHOWN_FINDINGS]
    for (kind, effect, detail, hint), paths in shown:
        out.line()
        more = f" and {len(paths) - 1} more" if len(paths) > 1 and not out.verbose else ""
        out.line(f"{kind} ({effect}) {paths[0]}{more}")
        for path in paths[1:] if out.verbose else ():
            out.line(f"  also {path}")
        out.line(f"  {human_value(detail, whole=bool(out.verbose), limit=240)}")
        out.line(f"  {hint}")
    if len(shown) < len(groups):
        out.line()
        out.line(f"and {len(groups) - len(shown)} more kinds of finding (-v shows them)")
