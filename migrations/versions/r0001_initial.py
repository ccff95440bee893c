"""Initial schema: entries with files and parts, warm sets with members, boot sequences, build failures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "r0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

_row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_digest = sa.String(71).with_variant(sa.String(71, collation="C"), "postgresql")
_utc = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "entries",
        sa.Column("id", _row_id, nullable=False),
        sa.Column("key", _digest, nullable=False),
        sa.Column("manifest", _digest, nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("recipe_digest", _digest, nullable=True),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("case_name", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("state_reason", sa.Text(), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cold_seconds", sa.Double(), nullable=True),
        sa.Column("warm_seconds", sa.Double(), nullable=True),
        sa.Column("created_at", _utc, nullable=False),
        sa.Column("last_used_at", _utc, nullable=True),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("evidence", sa.String(16), nullable=False),
        sa.CheckConstraint("state IN ('ready', 'invalid', 'quarantined')", name=op.f("ck_entries_state")),
        sa.CheckConstraint("evidence IN ('simulated', 'device')", name=op.f("ck_entries_evidence")),
        sa.CheckConstraint("rank >= 0 AND rank < world_size", name=op.f("ck_entries_rank")),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_entries_size_bytes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_entries")),
        sa.UniqueConstraint("manifest", name=op.f("uq_entries_manifest")),
    )
    op.create_index(op.f("ix_entries_key_created_at"), "entries", ["key", "created_at"])
    op.create_index(
        op.f("ix_entries_recipe_method_case_name_rank_created_at"),
        "entries",
        ["recipe", "method", "case_name", "rank", "created_at"],
    )
    op.create_index(op.f("ix_entries_state_created_at"), "entries", ["state", "created_at"])
    op.create_index(op.f("ix_entries_created_at"), "entries", ["created_at"])

    op.create_table(
        "entry_files",
        sa.Column("entry_id", _row_id, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", _digest, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("mode", sa.Integer(), nullable=False),
        sa.CheckConstraint("size_bytes >= 0", name=op.f("ck_entry_files_size_bytes")),
        sa.ForeignKeyConstraint(
            ["entry_id"], ["entries.id"], name=op.f("fk_entry_files_entry_id_entries"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("entry_id", "path", name=op.f("pk_entry_files")),
    )
    op.create_index(op.f("ix_entry_files_digest"), "entry_files", ["digest"])

    op.create_table(
        "entry_parts",
        sa.Column("entry_id", _row_id, nullable=False),
        sa.Column("part", sa.String(32), nullable=False),
        sa.Column("digest", _digest, nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["entry_id"], ["entries.id"], name=op.f("fk_entry_parts_entry_id_entries"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("entry_id", "part", name=op.f("pk_entry_parts")),
    )

    op.create_table(
        "warm_sets",
        sa.Column("id", _row_id, nullable=False),
        sa.Column("warm_set", _digest, nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("recipe_digest", _digest, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", _utc, nullable=False),
        sa.CheckConstraint("state IN ('ready', 'invalid')", name=op.f("ck_warm_sets_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_warm_sets")),
    )
    op.create_index(op.f("ix_warm_sets_recipe_digest_sequence"), "warm_sets", ["recipe_digest", "sequence"])
    op.create_index(op.f("ix_warm_sets_warm_set"), "warm_sets", ["warm_set"])

    op.create_table(
        "warm_set_members",
        sa.Column("warm_set_id", _row_id, nullable=False),
        sa.Column("entry_id", _row_id, nullable=False),
        sa.ForeignKeyConstraint(
            ["warm_set_id"],
            ["warm_sets.id"],
            name=op.f("fk_warm_set_members_warm_set_id_warm_sets"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["entry_id"], ["entries.id"], name=op.f("fk_warm_set_members_entry_id_entries"), ondelete="RESTRICT"
        ),
        sa.PrimaryKeyConstraint("warm_set_id", "entry_id", name=op.f("pk_warm_set_members")),
    )
    op.create_index(op.f("ix_warm_set_members_entry_id"), "warm_set_members", ["entry_id"])

    op.create_table(
        "boot_sequences",
        sa.Column("recipe_digest", _digest, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("recipe_digest", name=op.f("pk_boot_sequences")),
    )

    op.create_table(
        "build_failures",
        sa.Column("id", _row_id, nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("case_name", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("toolchain", _digest, nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("log_path", sa.Text(), nullable=True),
        sa.Column("failed_at", _utc, nullable=False),
        sa.Column("expires_at", _utc, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_build_failures")),
        sa.UniqueConstraint(
            "recipe",
            "method",
            "case_name",
            "rank",
            "toolchain",
            name=op.f("uq_build_failures_recipe_method_case_name_rank_toolchain"),
        ),
    )
    op.create_index(op.f("ix_build_failures_expires_at"), "build_failures", ["expires_at"])


def downgrade() -> None:
    """Drop the tables, members before what they belong to."""
    for table in (
        "build_failures",
        "boot_sequences",
        "warm_set_members",
        "warm_sets",
        "entry_parts",
        "entry_files",
        "entries",
    ):
        op.drop_table(table)
