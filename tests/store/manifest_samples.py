"""Entries and warm sets for tests of the database; also imported by the processes those tests start."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from cachectl.schemas.boot import ArtifactFile, BootRecord, Member, WarmSet
from cachectl.schemas.canonical import digest_of
from cachectl.store.manifest_rows import NewEntry, NewWarmSet

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=timezone.utc)
RECIPE_DIGEST = digest_of("tiny-decoder, version 1")


def new_entry(
    name: str = "a",
    *,
    recipe: str = "tiny-decoder",
    method: str = "main_decode",
    case: str = "b4",
    rank: int = 0,
    world_size: int = 8,
    minutes: int = 0,
    build: int = 0,
    **changes: Any,
) -> NewEntry:
    """Return an entry whose key follows from its name and line; `build` tells manifests of one key apart."""
    line = [recipe, method, case, rank]
    fields: dict[str, Any] = {
        "key": digest_of([*line, name]),
        "manifest": digest_of([*line, name, build]),
        "recipe": recipe,
        "recipe_digest": RECIPE_DIGEST,
        "method": method,
        "case": case,
        "rank": rank,
        "world_size": world_size,
        "cold_seconds": 7.5,
        "warm_seconds": 0.125,
        "created_at": START + timedelta(minutes=minutes),
        "evidence": "simulated",
        "files": (
            ArtifactFile("compiled_module", digest_of([*line, name, "module"]), 4096, 0o600),
            ArtifactFile("kernels/common.run", digest_of("common"), 1024, 0o700),
        ),
        "parts": {
            "model": {"factory": "tiny_decoder.model:build", "name": name},
            "toolchain": {"cann": "8.2.RC1", "torch_npu": "2.13.0"},
            "topology": {"world_size": world_size, "rank": rank},
        },
    }
    return NewEntry(**{**fields, **changes})


def member(entry: NewEntry) -> Member:
    """Return the entry as a member of a warm set."""
    return Member(entry.key, entry.manifest, entry.method, entry.case, entry.rank)


def new_set(*members: NewEntry, recipe: str = "tiny-decoder", recipe_digest: str = RECIPE_DIGEST) -> NewWarmSet:
    """Return the warm set that these entries make."""
    content = WarmSet(
        warm_set=digest_of(sorted(entry.key for entry in members)),
        created_at=max(entry.created_at for entry in members).isoformat().replace("+00:00", "Z"),
        request={"options": {"frozen_parameter": True}},
        members=tuple(member(entry) for entry in members),
    )
    return NewWarmSet(recipe, recipe_digest, content)


def boot_record(sequence: int, *sets: NewWarmSet) -> BootRecord:
    """Return the boot record that names these sets, the newest first."""
    return BootRecord(
        recipe="tiny-decoder",
        recipe_digest=RECIPE_DIGEST,
        sequence=sequence,
        created_at="2026-03-01T12:00:00Z",
        paths=(".",),
        sets=tuple(item.warm_set for item in sets),
    )
