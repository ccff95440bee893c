"""Alembic's environment: runs the revisions over the connection that the caller opened and locked.

`cachectl db upgrade` comes here through store/engine with a connection inside the transaction that holds the migration
lock. A developer's `alembic -x database=URL ...` (to draft or check a revision) opens its own. Offline mode, which
prints SQL instead of running it, is refused: it could take no lock.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context

from cachectl.errors import ManifestError
from cachectl.schemas.tables import metadata


def run(connection: sa.Connection) -> None:
    """Run the revisions; SQLite, which can alter little, has its tables rebuilt instead (batch mode)."""
    settings: dict[str, Any] = {"render_as_batch": connection.dialect.name == "sqlite", "compare_type": True}
    context.configure(connection=connection, target_metadata=metadata, **settings)
    with context.begin_transaction():
        context.run_migrations()


def connect() -> sa.Engine:
    """Return an engine for the database that `-x database=URL` names."""
    arguments = context.get_x_argument(as_dictionary=True)
    if context.is_offline_mode() or "database" not in arguments:
        raise ManifestError(
            "no database to migrate", hint="run `cachectl db upgrade`, or alembic with `-x database=URL`"
        )
    return sa.create_engine(arguments["database"])


shared = context.config.attributes.get("connection")
if shared is not None:
    run(shared)
else:
    with connect().begin() as own:
        run(own)
