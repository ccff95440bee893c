"""`cachectl init`: makes a store."""

from __future__ import annotations

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options

__all__ = ["command"]


@click.command("init", context_settings=HELP_NAMES, epilog=example("cachectl init --store /mnt/cache"))
@session_options
def command(session: Session) -> int:
    """Make a store.

    Makes the folder and its database, or does nothing when the store is there. A folder that holds other things is
    refused.
    """
    from cachectl.services.init import init_store

    document = init_store(session.layout())
    text = "made the store" if document["created"] else "there is a store already:"
    session.out.report(document, lambda: session.out.line(f"{text} {document['store']}"))
    return 0
