"""Diff: two stored entries, part by part."""

from __future__ import annotations

from cachectl.identity.explain import compare_entries, distance
from cachectl.schemas.report import DiffReport, ReasonModel
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.reading import read_manifest

__all__ = ["diff"]

_SHORT = 12


def diff(layout: StoreLayout, stored: str, wanted: str) -> DiffReport:
    """Return in what two entries differ, named by keys or their first digits; of a key its newest build.

    Raises:
        ConfigError: no such key, or more than one begins so.
        StoreError, ManifestError, DocumentError: the store or a manifest can't be read.
    """
    layout.check()
    with ManifestRepo.open(layout.database, read_only=True) as repo:
        rows = [repo.entry(key) for key in (stored, wanted)]
    left, right = (read_manifest(layout, row.key, row.manifest).document for row in rows)
    digits = rows[1].key.partition(":")[2][:_SHORT]
    reasons = compare_entries(left, right, f"run: cachectl show {digits} --store {layout.root}")
    return DiffReport(
        stored=rows[0].key,
        wanted=rows[1].key,
        distance=distance(reasons),
        differs=tuple(ReasonModel.of(reason) for reason in reasons),
    )
