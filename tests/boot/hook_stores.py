"""Places in a made store, for the tests of the hook."""

from __future__ import annotations

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


def handouts(folder: Path) -> list[Path]:
    """Return everything that lies in a warm dir's hand-outs."""
    return sorted((folder / "handouts").rglob("*"))
