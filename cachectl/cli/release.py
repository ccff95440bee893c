"""`cachectl release`: lets an entry start again on this node."""

from __future__ import annotations

from typing import Any

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options
from cachectl.cli.output import Output

__all__ = ["command", "render"]


@click.command(
    "release",
    context_settings=HELP_NAMES,
    epilog=example("cachectl release 3f9c2a7be014", "cachectl release 3f9c2a7be014 --warm-dir /warm --dry-run"),
)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option("--warm-dir", metavar="DIR", help="The warm dir, as for hook.  [env: CACHECTL_WARM_DIR]")
@click.option("--uid", metavar="N", type=click.IntRange(min=0), help="Whose warm dir, for root.")
@click.option("--reason", metavar="TEXT", help="Why; printed with the rest.")
@click.option("--dry-run", is_flag=True, help="Change nothing.")
@session_options
def command(
    session: Session, keys: tuple[str, ...], warm_dir: str | None, uid: int | None, reason: str | None, dry_run: bool
) -> int:
    """Let an entry start again on this node.

    An entry is kept away from after two starts that died with it and no success in between. KEY is its key, or the
    first digits. The store is not touched.
    """
    from cachectl.services.release import release_entries

    released = release_entries(keys, warm_dir=warm_dir, uid=uid, dry_run=dry_run)
    document = {"released": released, "reason": reason, "dry_run": dry_run}
    session.out.report(document, lambda: render(session.out, document))
    return 0


def render(out: Output, document: dict[str, Any]) -> None:
    """Write the report for people."""
    for item in document["released"]:
        deaths = ", ".join(f"{death['at']} ({death['how']})" for death in item["deaths"])
        would = "would release" if document["dry_run"] else "released"
        why = f": {document['reason']}" if document["reason"] else ""
        out.line(f"{would} {item['name']}, key {out.key(item['key'])}{why}; starts died at {deaths}")
