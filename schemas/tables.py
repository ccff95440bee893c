"""The database's tables: an index over the entry manifests in the store's files.

Owns names, types and constraints of every table; the revisions under migrations/ must lead to exactly these (a test
compares). Everything here can be rebuilt from the manifests and boot records, but for what only the database knows:
when an entry was last used, what is pinned, what was invalidated, and which builds failed lately. What no query looks
for stays in the manifests alone: the key parts' documents are ten times what is here. SQLite and PostgreSQL get the
same schema. No queries here, and nothing of ours is imported.
"""

from __future__ import annotations

from datetime import datetime, timezone

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

__all__ = [
    "ENTRY_STATES",
    "EVIDENCE_KINDS",
    "SCHEMA_REVISION",
    "WARM_SET_STATES",
    "boot_sequences",
    "build_failures",
    "entries",
    "entry_files",
    "metadata",
    "warm_set_members",
    "warm_sets",
]

# The revision that makes these tables; the newest file under migrations/versions (a test holds both together). Kept
# here so that opening an up-to-date database does not have to load Alembic.
SCHEMA_REVISION = "r0002"

ENTRY_STATES = ("ready", "invalid", "quarantined")
WARM_SET_STATES = ("ready", "invalid")
EVIDENCE_KINDS = ("simulated", "device")


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A point in time, in UTC: aware datetimes go in and come out, on SQLite too, which stores none of the zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Turn an aware datetime into UTC; one without a zone is refused, since nobody can say what it means."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        utc = value.astimezone(timezone.utc)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return what was stored, with the zone UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only where the primary key is exactly INTEGER, which is 64 bits wide there anyway.
_RowId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# A prefix is looked up as a range of the index, which is right and indexed only in byte order. SQLite has no other.
_Digest = sa.String(71).with_variant(sa.String(71, collation="C"), "postgresql")


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


entries = sa.Table(
    "entries",
    metadata,
    sa.Column("id", _RowId, primary_key=True),
    sa.Column("key", _Digest, nullable=False),
    sa.Column("manifest", _Digest, nullable=False),
    sa.Column("recipe", sa.Text, nullable=False),
    # Null after a rebuild where no boot record names the entry: the manifest does not hold the recipe's bytes.
    sa.Column("recipe_digest", _Digest, nullable=True),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("case_name", sa.Text, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("state_reason", sa.Text, nullable=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    # Null where that side was not measured.
    sa.Column("cold_seconds", sa.Double, nullable=True),
    sa.Column("warm_seconds", sa.Double, nullable=True),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("last_used_at", UtcDateTime, nullable=True),
    sa.Column("pinned", sa.Boolean, nullable=False),
    sa.Column("evidence", sa.String(16), nullable=False),
    # The digest of the model part, by which entries of a renamed recipe are found.
    sa.Column("model", _Digest, nullable=True),
    sa.UniqueConstraint("manifest"),
    sa.CheckConstraint(_one_of("state", ENTRY_STATES), name="state"),
    sa.CheckConstraint(_one_of("evidence", EVIDENCE_KINDS), name="evidence"),
    sa.CheckConstraint("rank >= 0 AND rank < world_size", name="rank"),
    sa.CheckConstraint("size_bytes >= 0", name="size_bytes"),
    sa.Index(None, "key", "created_at"),
    sa.Index(None, "recipe", "method", "case_name", "rank", "created_at"),
    sa.Index(None, "state", "created_at"),
    sa.Index(None, "created_at"),
    sa.Index(None, "model", "created_at"),
)

entry_files = sa.Table(
    "entry_files",
    metadata,
    sa.Column("entry_id", _RowId, sa.ForeignKey("entries.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("path", sa.Text, primary_key=True),
    sa.Column("digest", _Digest, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("mode", sa.Integer, nullable=False),
    sa.CheckConstraint("size_bytes >= 0", name="size_bytes"),
    sa.Index(None, "digest"),
)

warm_sets = sa.Table(
    "warm_sets",
    metadata,
    sa.Column("id", _RowId, primary_key=True),
    sa.Column("warm_set", _Digest, nullable=False),
    sa.Column("recipe", sa.Text, nullable=False),
    sa.Column("recipe_digest", _Digest, nullable=False),
    # The boot record's sequence that first named the set; a rebuilt database gives several sets the record's own.
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("request", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.CheckConstraint(_one_of("state", WARM_SET_STATES), name="state"),
    sa.Index(None, "recipe_digest", "sequence"),
    sa.Index(None, "warm_set"),
)

# An entry can't go while a set names it: whoever deletes it takes the set first, since a set is ready only when whole.
warm_set_members = sa.Table(
    "warm_set_members",
    metadata,
    sa.Column("warm_set_id", _RowId, sa.ForeignKey("warm_sets.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("entry_id", _RowId, sa.ForeignKey("entries.id", ondelete="RESTRICT"), primary_key=True),
    sa.Index(None, "entry_id"),
)

# The last sequence handed out for a recipe. Apart from warm_sets, because a node refuses a boot record older than one
# it has seen: the number must not fall when sets are invalidated, pruned or rebuilt.
boot_sequences = sa.Table(
    "boot_sequences",
    metadata,
    sa.Column("recipe_digest", _Digest, primary_key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
)

build_failures = sa.Table(
    "build_failures",
    metadata,
    sa.Column("id", _RowId, primary_key=True),
    sa.Column("recipe", sa.Text, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("case_name", sa.Text, nullable=False),
    sa.Column("rank", sa.Integer, nullable=False),
    sa.Column("toolchain", _Digest, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("log_path", sa.Text, nullable=True),
    sa.Column("failed_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("recipe", "method", "case_name", "rank", "toolchain"),
    sa.Index(None, "expires_at"),
)
