"""What an earlier build recorded of a case and did not come to prove: whether all of it holds here.

Owns the comparison, which is plan's own of an entry: a draft is held against the sources, the request and the blobs
before a fresh process proves it. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachectl.build.job import CaseJob
from cachectl.errors import DocumentError
from cachectl.identity.explain import compare_entry, is_noise
from cachectl.identity.source_files import is_unchanged
from cachectl.schemas.boot import StoredEntry
from cachectl.schemas.canonical import digest_of
from cachectl.services.request import RecipeRequest
from cachectl.store.blobs import BlobStore
from cachectl.store.drafts import DraftLine
from cachectl.store.layout import StoreLayout

__all__ = ["draft_line", "held_draft"]


def draft_line(layout: StoreLayout, request: RecipeRequest, case: CaseJob) -> DraftLine:
    """Return where the draft of a recipe's case lies."""
    return DraftLine(layout, request.loaded.digest, digest_of(request.request), case.method, case.name)


def held_draft(layout: StoreLayout, request: RecipeRequest, case: CaseJob) -> dict[int, dict[str, Any]] | None:
    """Return what an earlier build recorded of a case in each rank; None where not all of it holds here."""
    found = draft_line(layout, request, case).read()
    if found is None or set(found) != set(range(request.world_size)):
        return None
    return found if all(_holds(layout, request, case, rank, item) for rank, item in found.items()) else None


def _holds(layout: StoreLayout, request: RecipeRequest, case: CaseJob, rank: int, item: Mapping[str, Any]) -> bool:
    try:
        if "absent" in item:
            return is_unchanged(item["absent"]["files"], request.roots)
        document = item["document"]
        entry = StoredEntry.from_document(document)
        place = (entry.recipe, entry.method, entry.case, entry.rank)
        if place != (request.loaded.recipe.name, case.method, case.name, rank) or not isinstance(item["shown"], dict):
            return False
    except (DocumentError, KeyError, TypeError, AttributeError):
        return False
    blobs = BlobStore(layout)
    return all(is_noise(reason) for reason in compare_entry(document, request.asked(case, rank, layout.root))) and all(
        blobs.exists(file.digest, file.size_bytes) for file in entry.files
    )
