"""Cases that a build recorded and has not proved yet: where it is killed, the next one proves them, compiling nothing.

Owns boot/drafts/. A draft is no entry: nobody is handed one, and it becomes an entry by the proof that every entry has
passed. Its files are blobs like any. Advice only: a draft that is missing, damaged or does not hold any more costs a
compile. Replaced atomically; builds of one recipe take turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cachectl.errors import StoreError
from cachectl.schemas.canonical import digest_of, is_digest
from cachectl.store.blobs import write_atomically
from cachectl.store.layout import StoreLayout, read_bounded

__all__ = ["DRAFT_KEPT_S", "DraftLine", "drafted_blobs", "forget_old_drafts"]

_SCHEMA = "cachectl/draft/v1"
# A manifest comes to some ten kilobytes a rank.
_LIMIT_BYTES = 256 << 20
# Whoever has not built again by now builds something else.
DRAFT_KEPT_S = 7 * 24 * 3600.0


class DraftLine:
    """The draft of one method's case of a recipe, for one request: what each of its ranks recorded.

    Args:
        request_digest: of the key parts that are known before tracing; builders with another toolchain share the store.
    """

    def __init__(self, layout: StoreLayout, recipe_digest: str, request_digest: str, method: str, case: str) -> None:
        self._layout = layout
        self._path = layout.draft(digest_of([recipe_digest, request_digest, method, case]))

    def read(self) -> dict[int, dict[str, Any]] | None:
        """Return what was noted, by rank; None where there is nothing that can be read."""
        return _read(self._path)

    def note(self, ranks: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep what all ranks recorded: `document` and `shown` of each, or `absent`. Their files are blobs by now.

        One that can't be written is none: publishing, which comes next, says what is wrong with the store.
        """
        document = {"schema": _SCHEMA, "ranks": {str(rank): dict(item) for rank, item in ranks.items()}}
        try:
            write_atomically(self._layout, self._path, json.dumps(document).encode())
        except StoreError:
            self.forget()

    def forget(self) -> None:
        """Delete the draft. Idempotent; one that can't be deleted is left, and held against the sources when read."""
        _delete(self._path)


def drafted_blobs(layout: StoreLayout) -> set[str]:
    """Return the blobs that drafts name: they are entries' files as soon as those are proved."""
    return {
        str(file["digest"])
        for path in _paths(layout)
        for item in (_read(path) or {}).values()
        for file in _files(item)
        if is_digest(file["digest"])
    }


def forget_old_drafts(layout: StoreLayout, now: float) -> None:
    """Delete drafts that no build came back for. A folder that can't be listed or changed is left."""
    for path in _paths(layout):
        try:
            old = now - path.lstat().st_mtime > DRAFT_KEPT_S
        except OSError:
            continue
        if old:
            _delete(path)


def _paths(layout: StoreLayout) -> Iterator[Path]:
    folder = layout.draft("x").parent
    try:
        yield from sorted(folder.glob("*.json"))
    except OSError:
        return


def _read(path: Path) -> dict[int, dict[str, Any]] | None:
    try:
        document = json.loads(read_bounded(path, _LIMIT_BYTES))
        if document["schema"] != _SCHEMA:
            return None
        return {int(rank): dict(item) for rank, item in document["ranks"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _files(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    try:
        return [{"digest": file["digest"]} for file in item["document"]["artifact"]["files"]]
    except (KeyError, TypeError):
        return []


def _delete(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
