"""Reindex: make the database say what the store's files say; after it was lost, or drifted from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cachectl.errors import CachectlError
from cachectl.schemas.boot import BootRecord
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import NewEntry
from cachectl.store.reading import read_manifest_file, stored_manifests

__all__ = ["reindex"]


def reindex(layout: StoreLayout) -> dict[str, Any]:
    """Rebuild the database from entry manifests and boot records, in one transaction; say what changed.

    Known entries keep their state, pin and last use. Files that can't be read are left out and listed in `unreadable`.

    Raises:
        StoreError, ManifestError: no store, or the database can't be written; it is as before then.
    """
    layout.check()
    unreadable: list[str] = []

    def entries() -> Iterator[NewEntry]:
        for path in stored_manifests(layout):
            try:
                read = read_manifest_file(path)
                yield NewEntry.from_document(read.document, manifest=read.manifest)
            except CachectlError as error:
                unreadable.append(error.message)

    def records() -> Iterator[BootRecord]:
        for path in sorted(layout.boot_record("x").parent.glob("*.json")):
            try:
                yield BootRecord.from_bytes(path.read_bytes())
            except CachectlError as error:
                unreadable.append(f"{path}: {error.message}")

    with ManifestRepo.open(layout.database, create=True) as repo:
        result = repo.reindex(entries(), records())
    return {
        "added": result.added,
        "removed": result.removed,
        "kept": result.kept,
        "warm_sets": result.warm_sets,
        "incomplete": list(result.incomplete),
        "unreadable": unreadable,
    }
