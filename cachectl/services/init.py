"""Making a store: folders, mark and the embedded database."""

from __future__ import annotations

from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo

__all__ = ["init_store"]


def init_store(layout: StoreLayout) -> dict[str, object]:
    """Make a store, or check the one that is there; say where it is and whether it is new. Idempotent.

    Raises:
        StoreError: a file, a folder with other things in it, or not writable.
        ManifestError: the database there can't be used.
    """
    created = layout.create()
    with ManifestRepo.open(layout.database, create=True):
        return {"store": str(layout.root), "created": created}
