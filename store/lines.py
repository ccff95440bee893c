"""What earlier builds of a method's case left for the next one: which artifact its ranks' look like, and its pace.

Owns boot/lines/. Advice only: a note that is missing, damaged or out of date costs bytes or an estimate, so reading one
never fails. Changed under a lock, replaced atomically.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cachectl.errors import StoreError
from cachectl.schemas.canonical import canonical_bytes, digest_of, is_digest
from cachectl.store.blobs import write_atomically
from cachectl.store.layout import StoreLayout, bare_hex, read_bounded
from cachectl.store.locks import file_lock

__all__ = ["LineNote", "note_line", "noted_blobs", "read_line"]

_SCHEMA = "cachectl/line/v1"
_LOCK_TIMEOUT_S = 30.0
_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class LineNote:
    """One note.

    `files` are the digests by path of an artifact that lies in the store whole; `manifest` that of the blob which
    manifests are kept against (store/manifest_deltas.py); `seconds` how long each phase of a build took last time, the
    slowest rank's.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    manifest: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def read_line(layout: StoreLayout, recipe_digest: str, method: str, case: str) -> LineNote:
    """Return the note of one method's case of a recipe; an empty one where there is none that can be read."""
    return _read(layout.line(_name(recipe_digest, method, case)))


def noted_blobs(layout: StoreLayout) -> set[str]:
    """Return the blobs that notes name: the next build's entries will stand on them."""
    folder = layout.line("x").parent
    notes = [_read(path) for path in (folder.glob("*.json") if folder.is_dir() else ())]
    named = {digest for note in notes for digest in note.files.values()}
    return named | {note.manifest for note in notes if note.manifest is not None}


def _read(path: Path) -> LineNote:
    try:
        document = json.loads(read_bounded(path, _LIMIT_BYTES))
        if document["schema"] != _SCHEMA:
            return LineNote()
        files = {str(path): digest for path, digest in document["files"].items() if is_digest(digest)}
        seconds = {str(name): float(value) for name, value in document["seconds"].items() if float(value) >= 0}
        return LineNote(files, document["manifest"] if is_digest(document["manifest"]) else None, seconds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return LineNote()


def note_line(
    layout: StoreLayout,
    recipe_digest: str,
    method: str,
    case: str,
    *,
    files: Mapping[str, str] | None = None,
    manifest: str | None = None,
    seconds: Mapping[str, float] | None = None,
) -> None:
    """Change what is given of a note. A note that can't be written is left as it was."""
    name = _name(recipe_digest, method, case)
    given = {"files": files, "manifest": manifest, "seconds": seconds}
    changes = {field_: value for field_, value in given.items() if value is not None}
    try:
        with file_lock(layout, f"line-{bare_hex(name)}", _LOCK_TIMEOUT_S):
            before = read_line(layout, recipe_digest, method, case)
            after = replace(before, **changes)  # type: ignore[arg-type]
            if after != before:
                write_atomically(layout, layout.line(name), canonical_bytes({"schema": _SCHEMA, **asdict(after)}))
    except StoreError:
        pass  # Publishing, which comes next, says what is wrong with the store.


def _name(recipe_digest: str, method: str, case: str) -> str:
    return digest_of([recipe_digest, method, case])
