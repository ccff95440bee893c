"""`cachectl show`: prints an entry's whole manifest."""

from __future__ import annotations

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options

__all__ = ["command"]


@click.command("show", context_settings=HELP_NAMES, epilog=example("cachectl show 3f9c2a7be014 --store /mnt/cache"))
@click.argument("key", metavar="KEY")
@session_options
def command(session: Session, key: str) -> int:
    """Print an entry's whole manifest.

    KEY is an entry's key, or its first digits as `ls` prints them. The manifest is JSON with and without --json.
    """
    from cachectl.services.listing import show_entry

    document = show_entry(session.layout(), key)
    session.out.report(document, lambda: session.out.document(document))
    return 0
