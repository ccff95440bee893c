"""`cachectl db`: migrates, checks or rebuilds the store's database."""

from __future__ import annotations

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options

__all__ = ["command"]


@click.group(
    "db",
    no_args_is_help=False,
    context_settings=HELP_NAMES,
    epilog=example("cachectl db upgrade --store /mnt/cache", "cachectl db check --store /mnt/cache"),
)
def command() -> None:
    """Migrate, check or rebuild the store's database.

    The database is an index over the store's manifests; boots never need it.
    """


@command.command("upgrade", context_settings=HELP_NAMES, epilog=example("cachectl db upgrade --store /mnt/cache"))
@session_options
def upgrade(session: Session) -> int:
    """Bring the database to this version's schema.

    One transaction, safe when several processes do it at once. A database of a newer version is refused.
    """
    from cachectl.store import engine

    layout = session.layout()
    layout.check()
    database = engine.open_engine(layout.database, create=True)
    try:
        before = engine.current_revision(database)
        engine.upgrade(database)
        document = {
            "database": engine.location(database),
            "before": before,
            "revision": engine.current_revision(database),
        }
    finally:
        database.dispose()
    changed = document["before"] != document["revision"]
    text = f"upgraded from {before or 'nothing'} to" if changed else "was already at"
    session.out.report(document, lambda: session.out.line(f"{document['database']} {text} {document['revision']}"))
    return 0


@command.command("check", context_settings=HELP_NAMES, epilog=example("cachectl db check --store /mnt/cache"))
@session_options
def check(session: Session) -> int:
    """Say whether the database has this version's schema.

    Exits 3 when it is older or newer, and says what to do.
    """
    from cachectl.store import engine

    layout = session.layout()
    layout.check()
    database = engine.open_engine(layout.database, read_only=True)
    try:
        engine.check_schema(database)
        document = {"database": engine.location(database), "revision": engine.current_revision(database)}
    finally:
        database.dispose()
    session.out.report(document, lambda: session.out.line(f"{document['database']} is at {document['revision']}"))
    return 0


@command.command("reindex", context_settings=HELP_NAMES, epilog=example("cachectl db reindex --store /mnt/cache"))
@session_options
def reindex(session: Session) -> int:
    """Rebuild the database from the store's files.

    After it was lost or drifted from them. Exits 1 when a file could not be read.
    """
    from cachectl.services.reindex import reindex as rebuild

    document = rebuild(session.layout())

    def show() -> None:
        counts = ", ".join(f"{document[name]} {name}" for name in ("added", "removed", "kept"))
        session.out.line(f"entries: {counts}; warm sets: {document['warm_sets']}")
        for text in document["unreadable"]:
            session.out.line(f"left out: {text}")

    session.out.report(document, show)
    return 1 if document["unreadable"] else 0
