"""The manifest database's rows as values: what is published into it, and what it answers.

Owns nothing but their shape; the database itself stands in store/manifest.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from cachectl.errors import DocumentError
from cachectl.schemas.boot import ArtifactFile, StoredEntry, WarmSet

__all__ = [
    "EntryRow",
    "FailureRow",
    "NewEntry",
    "NewWarmSet",
    "ReindexResult",
    "Stats",
    "WarmSetRow",
    "time_of",
    "time_text",
]


@dataclass(frozen=True)
class EntryRow:
    """One entry as the database knows it; `manifest` is the digest of its manifest's file, `evidence` the kind."""

    id: int
    key: str
    manifest: str
    recipe: str
    recipe_digest: str | None
    method: str
    case: str
    rank: int
    world_size: int
    state: str
    state_reason: str | None
    size_bytes: int
    cold_seconds: float | None
    warm_seconds: float | None
    created_at: datetime
    last_used_at: datetime | None
    pinned: bool
    evidence: str


@dataclass(frozen=True)
class WarmSetRow:
    """A warm set of one recipe; `sequence` is the boot record's that named it last. Members are in rank order."""

    recipe: str
    recipe_digest: str
    sequence: int
    state: str
    created_at: datetime
    warm_set: WarmSet


@dataclass(frozen=True)
class FailureRow:
    """A build that failed, kept until `expires_at`; `toolchain` is the digest of that key part."""

    recipe: str
    method: str
    case: str
    rank: int
    toolchain: str
    error: str
    log_path: str | None
    failed_at: datetime
    expires_at: datetime


@dataclass(frozen=True)
class NewEntry:
    """An entry to publish, as its manifest says it.

    `recipe_digest` is None where nobody knows the recipe, the seconds where they were not measured. `state` is ready
    but where an older state is restored.
    """

    key: str
    manifest: str
    recipe: str
    recipe_digest: str | None
    method: str
    case: str
    rank: int
    world_size: int
    cold_seconds: float | None
    warm_seconds: float | None
    created_at: datetime
    evidence: str
    files: tuple[ArtifactFile, ...]
    parts: Mapping[str, Any]
    state: str = "ready"
    state_reason: str | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, manifest: str, recipe_digest: str | None = None) -> NewEntry:
        """Read an entry manifest's payload.

        Args:
            document: the payload, of schema cachectl/entry/v1.
            manifest: the digest of the manifest's file.
            recipe_digest: the digest of the recipe's bytes, where known.

        Raises:
            DocumentError: what `StoredEntry.from_document` refuses, or no provenance, world size or evidence.
        """
        stored = StoredEntry.from_document(document)
        try:
            provenance = document["provenance"]
            return cls(
                key=stored.key,
                manifest=manifest,
                recipe=stored.recipe,
                recipe_digest=recipe_digest,
                method=stored.method,
                case=stored.case,
                rank=stored.rank,
                world_size=int(stored.parts["topology"]["world_size"]),
                cold_seconds=_seconds(provenance.get("cold_seconds")),
                warm_seconds=_seconds(provenance.get("warm_seconds")),
                created_at=time_of(provenance["created_at"]),
                evidence=str(stored.evidence["kind"]),
                files=stored.files,
                parts=stored.parts,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"entry manifest {manifest} is malformed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class NewWarmSet:
    """A warm set to publish for a recipe, which `recipe_digest` (of its meaning) tells from others of its name."""

    recipe: str
    recipe_digest: str
    warm_set: WarmSet


@dataclass(frozen=True)
class ReindexResult:
    """What a rebuild did; `incomplete` are the warm sets left out because a member's manifest is not in the store."""

    added: int
    removed: int
    kept: int
    warm_sets: int
    incomplete: tuple[str, ...]


@dataclass(frozen=True)
class Stats:
    """Counts over the whole database; `blob_bytes` counts each distinct file once, `size_bytes` once for each entry."""

    entries: int
    ready: int
    invalid: int
    quarantined: int
    pinned: int
    size_bytes: int
    blobs: int
    blob_bytes: int
    warm_sets: int
    failures: int


def time_of(text: object) -> datetime:
    """Return a document's time in UTC; raises ValueError for what is none, or has no time zone."""
    # fromisoformat reads the Z only from Python 3.11 on.
    when = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    if when.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return when.astimezone(timezone.utc)


def time_text(when: datetime) -> str:
    """Return a time as documents write it."""
    return when.isoformat().replace("+00:00", "Z")


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
