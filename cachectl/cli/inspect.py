"""`cachectl inspect`: reads an artifact without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output, human_size, human_value

if TYPE_CHECKING:
    from cachectl.schemas.report import InspectReport

__all__ = ["command", "render"]

# A 24-layer decoder has some 300 parameters; the first few tell dtype and device.
_SHOWN_INPUTS = 12


@click.command(
    "inspect",
    context_settings=HELP_NAMES,
    epilog=example(
        "cachectl inspect 3f9c2a7be014 --store /mnt/cache",
        "cachectl inspect .torchair_cache/Model_static_aclgraphcache_0f3c/decode/compiled_module",
    ),
)
@click.argument("target", metavar="KEY|FILE")
@session_options
def command(session: Session, target: str) -> int:
    """Read an artifact without running it.

    Takes a file, or the key of an entry in the store. Needs neither torch nor an NPU, and executes nothing of what it
    reads.
    """
    from cachectl.services.inspect import inspect

    # A file needs no store, not even a default one.
    layout = None if Path(target).exists() else session.layout()
    report = inspect(layout, target)
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


def render(out: Output, report: InspectReport) -> None:
    """Write the report for people."""
    whole = bool(out.verbose)
    python = f"{report.python.implementation} {report.python.minor}"
    fields = [
        ("name", report.name),
        ("key", out.key(report.key)),
        ("path", report.path),
        ("runtime", f"{report.runtime} {report.format_version}"),
        ("created", report.created_at or "-"),
        ("python", python if report.python.magic_ok else f"{python}: other bytecode than this Python's"),
        ("size", human_size(report.size_bytes)),
        *((f"option {name}", human_value(value, whole=whole)) for name, value in report.options.items()),
    ]
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        out.line(f"{name.ljust(width)}  {value}")
    user_first = sorted(report.inputs, key=lambda item: item.kind != "user")
    shown = user_first if whole else user_first[:_SHOWN_INPUTS]
    if shown:
        out.line()
        out.table(
            ["INPUT", "KIND", "DTYPE", "SHAPE", "STRIDE", "DEVICE", "SOURCE"],
            [
                [item.name, item.kind, item.dtype, _dims(item.shape), _dims(item.stride), item.device, item.source]
                for item in shown
            ],
        )
    if len(shown) < len(user_first):
        out.line(f"and {len(user_first) - len(shown)} more inputs (-v shows them)")
    if report.graph_ops:
        out.line()
        out.line(
            f"{len(report.graph_ops)} operators: {human_value(', '.join(report.graph_ops), whole=whole, limit=100)}"
        )
    for finding in report.findings:
        out.line()
        out.line(f"finding: {finding}")


def _dims(sizes: tuple[int | str, ...] | None) -> str:
    return "-" if sizes is None else "(" + ", ".join(str(size) for size in sizes) + ")"
