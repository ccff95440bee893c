"""The documents a boot reads and writes: boot record, stored entry, reason, hook report.

Owns their shape and the strict reading of them; what is newer than this program, or malformed, is a DocumentError and
so a cold start. Standard library only: the hook runs where neither torch nor pydantic is. The pydantic models of the
same documents (`entry`, `report`) are for the side that writes; a test holds both against each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cachectl.errors import DocumentError
from cachectl.schemas.canonical import canonical_bytes, digest_of_parsed, is_digest
from cachectl.schemas.keying import KEY_PARTS, READABLE_KEY_VERSIONS, compute_key
from cachectl.values import dataclass, field

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "BOOT_RECORD_SCHEMA",
    "ENTRY_SCHEMA",
    "KINDS",
    "PARTS",
    "Absence",
    "ArtifactFile",
    "BootRecord",
    "Member",
    "Reason",
    "StoredEntry",
    "WarmSet",
]

BOOT_RECORD_SCHEMA = "cachectl/boot-record/v1"
ENTRY_SCHEMA = "cachectl/entry/v1"

# The parts a reason may name.
PARTS = (*KEY_PARTS, "trust", "artifact", "store", "policy", "agreement")
KINDS = ("semantic", "noise", "absent", "corrupt", "policy")


@dataclass(frozen=True)
class Reason:
    """Why something is not warm: one name in one part, both values, and what mends it.

    `stored` and `wanted` are JSON values; None where that side has nothing. `kind` is one of KINDS, `hint` a command
    or a sentence, never empty for what a user can act on.
    """

    part: str
    name: str
    stored: Any = None
    wanted: Any = None
    kind: str = "semantic"
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the reason as the contract's JSON object."""
        return {
            "part": self.part,
            "name": self.name,
            "stored": self.stored,
            "wanted": self.wanted,
            "kind": self.kind,
            "hint": self.hint,
        }

    def __str__(self) -> str:
        text = f"{self.part}: {self.name}"
        if self.stored is not None or self.wanted is not None:
            text += f": stored {_brief(self.stored)}, wanted {_brief(self.wanted)}"
        return f"{text} ({self.kind})"


@dataclass(frozen=True)
class ArtifactFile:
    """One file of an artifact: its place below the method's directory, its content and its permission bits."""

    path: str
    digest: str
    size_bytes: int
    mode: int


@dataclass(frozen=True)
class StoredEntry:
    """What an entry manifest says, as the boot path needs it; `parts` are the key parts' whole documents."""

    key: str
    recipe: str
    method: str
    case: str
    rank: int
    parts: Mapping[str, Any]
    runtime: str
    format_version: str
    runtime_path: str
    files: tuple[ArtifactFile, ...]
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> StoredEntry:
        """Read an entry manifest's payload.

        Raises:
            DocumentError: another schema, a missing or mistyped field, a file path that leaves the artifact's
                directory, or a key that is not that of the parts.
        """
        if document.get("schema") != ENTRY_SCHEMA:
            raise DocumentError(
                f"entry manifest has schema {document.get('schema')!r}, this program reads {ENTRY_SCHEMA!r}"
            )
        try:
            artifact = document["artifact"]
            files = tuple(
                ArtifactFile(
                    _inner_path(item["path"]), _digest(item["digest"]), _count(item["size_bytes"]), _mode(item["mode"])
                )
                for item in artifact["files"]
            )
            entry = cls(
                key=_digest(document["key"]),
                recipe=_text(document["recipe"]),
                method=_text(document["method"]),
                case=_text(document["case"]),
                rank=_count(document["rank"]),
                parts=dict(document["parts"]),
                runtime=_text(artifact["runtime"]),
                format_version=_text(artifact["format_version"]),
                runtime_path=_inner_path(artifact["runtime_path"]),
                files=files,
                evidence=dict(document["evidence"]),
            )
            # An earlier version's is read, listed and verified; its request says that it is never used.
            version = document["key_version"]
            if type(version) is not int or version not in READABLE_KEY_VERSIONS:
                raise ValueError(f"key_version {version!r}")
            computed = compute_key(entry.parts, digest_of_parsed, version=version)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"entry manifest is malformed: {type(error).__name__}: {error}") from error
        if computed != entry.key:
            raise DocumentError(f"entry manifest says key {entry.key}, its parts give {computed}")
        return entry


@dataclass(frozen=True)
class Member:
    """One entry of a warm set: what it is for, its key, and the digest of its manifest's file."""

    key: str
    manifest: str
    method: str
    case: str
    rank: int


@dataclass(frozen=True)
class Absence:
    """A method that one rank's model does not have, as building found: a set without it is whole."""

    method: str
    case: str
    rank: int


@dataclass(frozen=True)
class WarmSet:
    """All entries one job needs, and the request they were built for (key part documents by name).

    Ranks may hold different members; `absent` are those that a rank has no method for. `ranks_per_node` is the cut into
    nodes that the set is tied to: None for one whose artifacts fit every cut, and where that was not noted.
    """

    warm_set: str
    created_at: str
    request: Mapping[str, Any]
    members: tuple[Member, ...]
    absent: tuple[Absence, ...] = ()
    ranks_per_node: int | None = None


@dataclass(frozen=True)
class BootRecord:
    """What the hook reads for one recipe: its ready warm sets, newest first. `sequence` only grows.

    `paths` are the recipe's `model.path` entries, relative to the recipe's folder: where its sources are looked for.
    """

    recipe: str
    recipe_digest: str
    sequence: int
    created_at: str
    paths: tuple[str, ...]
    sets: tuple[WarmSet, ...]

    def to_bytes(self) -> bytes:
        """Return the record as canonical JSON."""
        return canonical_bytes(
            {
                "schema": BOOT_RECORD_SCHEMA,
                "recipe": self.recipe,
                "recipe_digest": self.recipe_digest,
                "sequence": self.sequence,
                "created_at": self.created_at,
                "paths": list(self.paths),
                "sets": [
                    {
                        "warm_set": item.warm_set,
                        "created_at": item.created_at,
                        "request": item.request,
                        "members": [vars(member) for member in item.members],
                        **({"absent": [vars(absence) for absence in item.absent]} if item.absent else {}),
                        **({} if item.ranks_per_node is None else {"ranks_per_node": item.ranks_per_node}),
                    }
                    for item in self.sets
                ],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> BootRecord:
        """Read a boot record.

        Raises:
            DocumentError: not JSON, another schema, or a missing or mistyped field.
        """
        try:
            document = json.loads(data)
            if document["schema"] != BOOT_RECORD_SCHEMA:
                raise DocumentError(
                    f"boot record has schema {document['schema']!r}, this program reads {BOOT_RECORD_SCHEMA!r}"
                )
            return cls(
                recipe=_text(document["recipe"]),
                recipe_digest=_digest(document["recipe_digest"]),
                sequence=_count(document["sequence"]),
                created_at=_text(document["created_at"]),
                paths=tuple(_text(path) for path in document["paths"]),
                sets=tuple(
                    WarmSet(
                        warm_set=_digest(item["warm_set"]),
                        created_at=_text(item["created_at"]),
                        request=dict(item["request"]),
                        members=tuple(
                            Member(
                                key=_digest(member["key"]),
                                manifest=_digest(member["manifest"]),
                                method=_text(member["method"]),
                                case=_text(member["case"]),
                                rank=_count(member["rank"]),
                            )
                            for member in item["members"]
                        ),
                        absent=tuple(
                            Absence(_text(absence["method"]), _text(absence["case"]), _count(absence["rank"]))
                            for absence in item.get("absent", ())
                        ),
                        ranks_per_node=_count(item["ranks_per_node"]) if "ranks_per_node" in item else None,
                    )
                    for item in document["sets"]
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DocumentError(f"boot record is malformed: {type(error).__name__}: {error}") from error


def _digest(value: object) -> str:
    if not is_digest(value):
        raise ValueError(f"{value!r} is no digest")
    return str(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no text")
    return value


def _count(value: object) -> int:
    # JSON has one kind of number, and True is an int to Python: 1.7, true and -1 are no counts.
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _mode(value: object) -> int:
    mode = int(_text(value), 8)
    if mode & ~0o777:
        raise ValueError(f"{value!r} is no file mode")
    return mode


def _inner_path(value: object) -> str:
    # Manifests come from other machines: a path that climbs out would write outside the warm dir.
    if not isinstance(value, str) or not value or "\\" in value or "\0" in value:
        raise ValueError(f"{value!r} is no relative path")
    if value.startswith("/") or any(step in ("", ".", "..") for step in value.split("/")):
        raise ValueError(f"{value!r} leaves the artifact's directory")
    return value


def _brief(value: Any, limit: int = 80) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
