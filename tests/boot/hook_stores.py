"""Places in a made store, for the tests of the hook."""

from __future__ import annotations

import os
from pathlib import Path

from cachectl.schemas.boot import BootRecord
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.reading import read_boot_record
from tests.stores import MadeStore


def record_of(made: MadeStore) -> tuple[Path, BootRecord]:
    """Return a made store's boot record and where it lies."""
    record = read_boot_record(made.layout, raw_digest=digest_bytes(made.recipe.read_bytes()))
    assert record is not None
    return made.layout.boot_record(record.recipe_digest), record


def manifest_of(made: MadeStore, case: str = "b4") -> Path:
    """Return the path of one entry manifest of the newest set."""
    member = made.member(record_of(made)[1].sets[0], case)
    return made.layout.manifest(member.key, member.manifest)


def overwrite(path: Path, data: bytes) -> None:
    """Replace a stored file's bytes, read-only as it is."""
    path.unlink()
    path.write_bytes(data)


def uid_of_nobody() -> int:
    """Return a uid as a container gets one: no passwd entry, and no other test's folder below /var/tmp has its number.

    Tests of several processes, or of several checkouts, run at once, and one that was killed leaves its folder.
    """
    uid = 1_002_000_000 + os.getpid() % 900_000
    while Path(f"/var/tmp/cachectl-{uid}").exists():
        uid += 1_000_000
    return uid


def handouts(folder: Path) -> list[Path]:
    """Return everything that lies in a warm dir's hand-outs."""
    return sorted((folder / "handouts").rglob("*"))
