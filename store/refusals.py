"""Which cases of a recipe a gate refused lately, and what all of it was that could be seen: so nobody tries blindly.

Owns boot/refused/. Only a gate's own refusal is kept, and only for a while: what was killed, ran out of time, memory or
disk, or is another program's fault may go well the next time, and a cause that can't be seen may be mended (field
report D3). Advice only: a note that is missing, damaged or from the future is none. Changed under a lock, replaced
atomically.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

from cachectl.errors import StoreError
from cachectl.schemas.canonical import canonical_bytes
from cachectl.store.blobs import write_atomically
from cachectl.store.layout import StoreLayout, bare_hex, read_bounded
from cachectl.store.locks import file_lock

__all__ = ["REFUSAL_KEPT_S", "Refusal", "note_refusals", "read_refusals"]

_SCHEMA = "cachectl/refusals/v1"
# Long enough for the restarts of a job that fails, short enough for a cause that nobody can see.
REFUSAL_KEPT_S = 3600.0
_LOCK_TIMEOUT_S = 30.0
_LIMIT_BYTES = 4 << 20
_KEPT = 256


@dataclass(frozen=True)
class Refusal:
    """One line that a gate refused; `seen` is the digest of what the build could see, `at` seconds since the epoch."""

    seen: str
    method: str
    case: str
    rank: int
    error: str
    log: str | None
    at: float


def read_refusals(layout: StoreLayout, recipe_digest: str, seen: str, now: float) -> list[Refusal]:
    """Return the refusals of a recipe that still hold; none where the note can't be read."""
    return [
        refusal
        for refusal in _read(layout, recipe_digest)
        if refusal.seen == seen and 0.0 <= now - refusal.at < REFUSAL_KEPT_S
    ]


def note_refusals(
    layout: StoreLayout, recipe_digest: str, refused: Collection[Refusal], tried: Iterable[tuple[str, str, int]]
) -> None:
    """Note refusals and forget those of lines that were tried since. A note that can't be written stays as it was.

    Args:
        tried: method, case and rank of each line that was built or failed in any way.
    """
    gone = {*tried}
    try:
        with file_lock(layout, f"refused-{bare_hex(recipe_digest)}", _LOCK_TIMEOUT_S):
            before = _read(layout, recipe_digest)
            kept = [item for item in before if (item.method, item.case, item.rank) not in gone]
            after = [*kept, *refused][-_KEPT:]
            if after != before:
                document = {"schema": _SCHEMA, "refused": [asdict(item) for item in after]}
                write_atomically(layout, layout.refusals(recipe_digest), canonical_bytes(document))
    except StoreError:
        pass  # The failure itself is told and kept elsewhere.


def _read(layout: StoreLayout, recipe_digest: str) -> list[Refusal]:
    try:
        document = json.loads(read_bounded(layout.refusals(recipe_digest), _LIMIT_BYTES))
        if document["schema"] != _SCHEMA:
            return []
        return [
            Refusal(
                seen=str(item["seen"]),
                method=str(item["method"]),
                case=str(item["case"]),
                rank=int(item["rank"]),
                error=str(item["error"]),
                log=None if item["log"] is None else str(item["log"]),
                at=float(item["at"]),
            )
            for item in document["refused"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
