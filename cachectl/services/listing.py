"""What is stored: the list of entries, and one entry whole."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cachectl.schemas.report import LsEntry, LsReport
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import EntryRow
from cachectl.store.reading import read_manifest

__all__ = ["list_entries", "show_entry"]


def list_entries(layout: StoreLayout, recipe: str | None = None) -> LsReport:
    """Return the stored entries, newest first; of one recipe name only if given.

    Raises:
        StoreError, ManifestError: the store can't be read.
    """
    layout.check()
    with ManifestRepo.open(layout.database, read_only=True) as repo:
        return LsReport(entries=tuple(_ls_entry(row) for row in repo.entries(recipe=recipe)))


def show_entry(layout: StoreLayout, key: str) -> dict[str, Any]:
    """Return an entry's manifest document with what the database knows of it beside.

    Raises:
        ConfigError: no such key, or more than one begins so.
        StoreError: the manifest can't be read, or is not what its name says.
    """
    layout.check()
    with ManifestRepo.open(layout.database, read_only=True) as repo:
        row = repo.entry(key)
    read = read_manifest(layout, row.key, row.manifest)
    return {
        **read.document,
        "manifest": row.manifest,
        "state": row.state,
        "state_reason": row.state_reason,
        "pinned": row.pinned,
        "last_used_at": _text(row.last_used_at),
        "size_bytes": row.size_bytes,
        "signatures": [signature.keyid for signature in read.envelope.signatures],
    }


def _ls_entry(row: EntryRow) -> LsEntry:
    return LsEntry.model_validate(
        {
            "key": row.key,
            "recipe": row.recipe,
            "method": row.method,
            "case": row.case,
            "rank": row.rank,
            "state": row.state,
            "size_bytes": row.size_bytes,
            "created_at": _text(row.created_at),
            "last_used_at": _text(row.last_used_at),
            "pinned": row.pinned,
        }
    )


def _text(when: datetime | None) -> str | None:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ") if when is not None else None
