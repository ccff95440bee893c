"""Entries keep the digest of their model part; the documents of all parts are in the manifests alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "r0002"
down_revision: str | None = "r0001"
branch_labels: str | None = None
depends_on: str | None = None

_row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_digest = sa.String(71).with_variant(sa.String(71, collation="C"), "postgresql")


def upgrade() -> None:
    """Keep the one digest that entries are looked for by, and drop the parts."""
    op.add_column("entries", sa.Column("model", _digest, nullable=True))
    op.execute(
        "UPDATE entries SET model = (SELECT entry_parts.digest FROM entry_parts"
        " WHERE entry_parts.entry_id = entries.id AND entry_parts.part = 'model')"
    )
    op.create_index(op.f("ix_entries_model_created_at"), "entries", ["model", "created_at"])
    op.drop_table("entry_parts")


def downgrade() -> None:
    """Make the table of parts again; of its documents, which this database does not hold, null stands in the place."""
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
    op.execute(
        "INSERT INTO entry_parts (entry_id, part, digest, document)"
        " SELECT id, 'model', model, 'null' FROM entries WHERE model IS NOT NULL"
    )
    op.drop_index(op.f("ix_entries_model_created_at"), "entries")
    op.drop_column("entries", "model")
