"""Laying files down: the bytes that were hashed, private, in time, or an error that says which."""

from __future__ import annotations

import _thread
import errno
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.materialize import DeadlineError, Timing, lay_down
from cachectl.errors import ArtifactCorruptedError, ArtifactNotFoundError, StoreError
from cachectl.schemas.boot import ArtifactFile, StoredEntry
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import bare_hex
from tests.stores import blobs_of

DATA = {"compiled_module": b"code" * 1000, "static/ts1/x.run": b"#!/bin/sh\n", "empty": b""}


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """A store that holds the entry's files."""
    return blobs_of(tmp_path / "store", DATA.values())


@pytest.fixture
def entry() -> StoredEntry:
    """An entry of three files, one of them run, one empty."""
    files = tuple(
        ArtifactFile(path, digest_bytes(data), len(data), 0o755 if path.endswith(".run") else 0o644)
        for path, data in DATA.items()
    )
    return StoredEntry(
        digest_bytes(b"key"),
        "made-up",
        "main_decode",
        "b4",
        0,
        {},
        "npugraph_ex",
        "1.0.6",
        "Model_x/main_decode",
        files,
    )


@pytest.fixture
def handout(tmp_path: Path) -> Path:
    """An empty private folder."""
    folder = tmp_path / "handout"
    folder.mkdir(mode=0o700)
    return folder


def lay(blobs: BlobStore, entry: StoredEntry, handout: Path, *, within_s: float = 200.0) -> Path:
    """Lay the entry down."""
    return lay_down(blobs, entry, handout, deadline_s=time.monotonic() + within_s, timing=Timing())


def test_lay_down_writes_all_files_where_the_runtime_looks(blobs: BlobStore, entry: StoredEntry, handout: Path) -> None:
    """Content, place and modes are the runtime's: 0600, 0700 where the file is run, folders 0700 (K10)."""
    before = os.umask(0)
    try:
        folder = lay(blobs, entry, handout)
    finally:
        os.umask(before)

    assert handout / bare_hex(entry.key) / "Model_x" / "main_decode" == folder
    assert DATA == {name: (folder / name).read_bytes() for name in DATA}
    modes = {path.relative_to(handout).as_posix(): path.stat().st_mode & 0o7777 for path in handout.rglob("*")}
    assert {"compiled_module": 0o600, "empty": 0o600, "x.run": 0o700} == {
        Path(name).name: mode for name, mode in modes.items() if (handout / name).is_file()
    }
    assert {0o700} == {mode for name, mode in modes.items() if (handout / name).is_dir()}


def test_lay_down_copies_never_links(blobs: BlobStore, entry: StoredEntry, handout: Path) -> None:
    """The runtime may write and delete its files: none of them is the store's."""
    folder = lay(blobs, entry, handout)

    (folder / "compiled_module").write_bytes(b"overwritten")
    assert {1} == {path.stat().st_nlink for path in handout.rglob("*") if path.is_file()}
    blobs.check(digest_bytes(DATA["compiled_module"]))


def test_lay_down_counts_its_seconds(blobs: BlobStore, entry: StoredEntry, handout: Path) -> None:
    """Reading and writing are timed apart (field report B1)."""
    timing = Timing()

    lay_down(blobs, entry, handout, deadline_s=time.monotonic() + 200, timing=timing)

    assert timing.verify_s > 0
    assert timing.write_s > 0


@pytest.mark.parametrize("data", [b"", b"code" * 999 + b"kode", b"code" * 500, b"code" * 1001], ids=len)
def test_lay_down_damaged_blob_corrupted(blobs: BlobStore, entry: StoredEntry, handout: Path, data: bytes) -> None:
    """The digest counts, whatever the size (field reports D4, D6, D7)."""
    path = blobs.layout.blob(digest_bytes(DATA["compiled_module"]))
    path.unlink()
    path.write_bytes(data)

    with pytest.raises(ArtifactCorruptedError, match="holds other bytes") as raised:
        lay(blobs, entry, handout)
    assert path == raised.value.path


def test_lay_down_blob_of_another_size_than_the_manifest_says_corrupted(
    blobs: BlobStore, entry: StoredEntry, handout: Path
) -> None:
    """The recorded size is compared, too (field report W19)."""
    wrong = replace(entry, files=(replace(entry.files[0], size_bytes=3999),))

    with pytest.raises(ArtifactCorruptedError, match="4000 of 3999 bytes"):
        lay(blobs, wrong, handout)


def test_lay_down_endless_blob_stops_soon_after_its_size(blobs: BlobStore, entry: StoredEntry, handout: Path) -> None:
    """A blob that has grown must not fill the node's disk."""
    path = blobs.layout.blob(digest_bytes(DATA["compiled_module"]))
    path.chmod(0o600)
    os.truncate(path, 1 << 40)

    with pytest.raises(ArtifactCorruptedError):
        lay(blobs, entry, handout)
    assert sum(found.stat().st_size for found in handout.rglob("*") if found.is_file()) < 4 << 20


def test_lay_down_missing_blob_not_found(blobs: BlobStore, entry: StoredEntry, handout: Path) -> None:
    """One absent file is enough (field report D8)."""
    blobs.layout.blob(digest_bytes(b"")).unlink()

    with pytest.raises(ArtifactNotFoundError):
        lay(blobs, entry, handout)


def test_lay_down_deadline_passed_stops(blobs: BlobStore, entry: StoredEntry, handout: Path) -> None:
    """Time is looked at before each chunk, and the hint says what to do."""
    with pytest.raises(DeadlineError, match="--deadline"):
        lay(blobs, entry, handout, within_s=-1)


def test_lay_down_unpacks_one_delta_at_a_time(
    blobs: BlobStore, entry: StoredEntry, handout: Path, tmp_path: Path
) -> None:
    """What a delta stands for lies in memory: one thread waits for another, in time; whole blobs wait for nobody."""
    data = b"x" + DATA["compiled_module"][1:]
    (tmp_path / "like").write_bytes(data)
    digest, size_bytes = blobs.add_like(tmp_path / "like", digest_bytes(DATA["compiled_module"]))
    as_delta = replace(
        entry, key=digest_bytes(b"other"), files=(ArtifactFile("compiled_module", digest, size_bytes, 0o644),)
    )
    assert not blobs.layout.blob(digest).exists()
    unpacking = _thread.allocate_lock()

    def laid(one: StoredEntry, folder: Path, within_s: float) -> Path:
        deadline_s = time.monotonic() + within_s
        return lay_down(blobs, one, folder, deadline_s=deadline_s, timing=Timing(), unpacking=unpacking)

    with unpacking:
        whole = laid(entry, handout, 200.0)
        with pytest.raises(DeadlineError, match="--deadline"):
            laid(as_delta, handout, 0.05)
    (tmp_path / "again").mkdir()
    module = laid(as_delta, tmp_path / "again", 200.0) / "compiled_module"

    assert (DATA["compiled_module"], data) == ((whole / "compiled_module").read_bytes(), module.read_bytes())
    assert not unpacking.locked()


def test_lay_down_planted_link_is_not_followed(
    blobs: BlobStore, entry: StoredEntry, handout: Path, tmp_path: Path
) -> None:
    """A file that stands where ours should be is never written to (field report P9)."""
    folder = handout / bare_hex(entry.key) / "Model_x" / "main_decode"
    folder.mkdir(parents=True)
    (tmp_path / "victim").write_bytes(b"mine")
    (folder / "compiled_module").symlink_to(tmp_path / "victim")

    with pytest.raises(StoreError, match="File exists"):
        lay(blobs, entry, handout)
    assert b"mine" == (tmp_path / "victim").read_bytes()


@pytest.mark.parametrize("call", ["write", "mkdir", "close", "fchmod"])
def test_lay_down_full_disk_says_where(
    blobs: BlobStore, entry: StoredEntry, handout: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room for the hand-out is not a fault of the store, and the hint names the warm dir (field report F10)."""

    def fail(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    real: Callable[[int], None] = os.close
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="No space left") as raised:
            lay(blobs, entry, handout)
    assert "--warm-dir" in str(raised.value.hint)
    assert str(handout) in raised.value.message
    assert real is os.close


def test_lay_down_short_writes_are_continued(
    blobs: BlobStore, entry: StoredEntry, handout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that takes seven bytes at a time gets them all (field report F10)."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))

    folder = lay(blobs, entry, handout)

    assert DATA["compiled_module"] == (folder / "compiled_module").read_bytes()


def test_lay_down_broken_read_is_the_stores_fault(
    blobs: BlobStore, entry: StoredEntry, handout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input/output error of the store is not told as one of the warm dir (field reports D5, F12)."""

    def broken(descriptor: int, buffers: list[memoryview]) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "readv", broken)

    with pytest.raises(StoreError, match=r"can't read blob .*Input/output error"):
        lay(blobs, entry, handout)


def test_lay_down_failures_leak_no_descriptor(blobs: BlobStore, entry: StoredEntry, tmp_path: Path) -> None:
    """A hundred refused hand-outs leave nothing open."""
    blobs.layout.blob(digest_bytes(b"")).unlink()
    gc.collect()  # What earlier tests left open is not closed in between.
    before = len(os.listdir("/proc/self/fd"))

    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ArtifactNotFoundError):
            lay(blobs, entry, folder)

    assert before >= len(os.listdir("/proc/self/fd"))
