"""Blobs: what goes in comes out, what is damaged is told, and what fails leaves nothing visible."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachectl.errors import ArtifactCorruptedError, ArtifactNotFoundError, StoreError
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.blobs import BlobStore, write_atomically
from cachectl.store.layout import StoreLayout


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """An empty store's blobs."""
    layout = StoreLayout(tmp_path / "store")
    layout.create()
    return BlobStore(layout)


def left(blobs: BlobStore) -> list[Path]:
    """Return the files in tmp/."""
    return list(blobs.layout.tmp.iterdir())


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.binary(max_size=2000))
def test_add_bytes_round_trip(blobs: BlobStore, data: bytes) -> None:
    """Adding gives the digest of the bytes, and opening that digest gives the bytes."""
    digest, size_bytes = blobs.add_bytes(data)

    with blobs.open(digest) as file:
        assert data == file.read()
    assert (digest_bytes(data), len(data)) == (digest, size_bytes)
    assert blobs.exists(digest, len(data))
    blobs.check(digest)


def test_add_file_large_is_hashed_while_it_is_copied(blobs: BlobStore, tmp_path: Path) -> None:
    """More than one chunk is one blob, read-only for all, with nothing left in tmp/."""
    data = os.urandom((1 << 20) * 2 + 17)
    (tmp_path / "file").write_bytes(data)

    digest, size_bytes = blobs.add_file(tmp_path / "file")

    assert (digest_bytes(data), len(data)) == (digest, size_bytes)
    assert 0o444 == blobs.layout.blob(digest).stat().st_mode & 0o777
    assert [] == left(blobs)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_add_umask_any_is_readable_by_all(blobs: BlobStore, umask: int) -> None:
    """A blob and its folders are read by other users' pods and written by nobody (field report P7)."""
    before = os.umask(umask)
    try:
        digest, _ = blobs.add_bytes(b"x")
    finally:
        os.umask(before)

    path = blobs.layout.blob(digest)
    assert (0o444, 0o755) == (path.stat().st_mode & 0o7777, path.parent.stat().st_mode & 0o7777)


def test_add_equal_content_is_stored_once(blobs: BlobStore) -> None:
    """The second add gives the same digest and one file."""
    first, second = blobs.add_bytes(b"x"), blobs.add_bytes(b"x")

    assert first == second
    assert [(first[0], blobs.layout.blob(first[0]))] == list(blobs.all())


@pytest.mark.parametrize("damage", [b"y", b"", b"xx"], ids=["other byte", "empty", "longer"])
def test_add_mends_a_damaged_blob(blobs: BlobStore, damage: bytes) -> None:
    """Storing the right bytes again replaces wrong ones, of the same size too (field report D6)."""
    digest, _ = blobs.add_bytes(b"x")
    path = blobs.layout.blob(digest)
    path.unlink()
    path.write_bytes(damage)

    blobs.add_bytes(b"x")

    blobs.check(digest)


def test_add_again_renews_the_time_of_a_blob(blobs: BlobStore) -> None:
    """A prune that spares young blobs spares one that a builder has just found again."""
    digest, _ = blobs.add_bytes(b"x")
    os.utime(blobs.layout.blob(digest), (0, 0))

    blobs.add_bytes(b"x")

    assert blobs.layout.blob(digest).stat().st_mtime > 1_000_000


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "missing"])
def test_add_file_no_regular_file_refused(blobs: BlobStore, tmp_path: Path, kind: str) -> None:
    """An artifact with a link or a special file in it is not stored, and nothing hangs."""
    path = tmp_path / kind
    if kind == "link":
        path.symlink_to(__file__)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()

    with pytest.raises(StoreError, match=f"can't store {path}"):
        blobs.add_file(path)
    assert ([], []) == (list(blobs.all()), left(blobs))


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_add_failing_call_leaves_nothing(
    blobs: BlobStore, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a broken one is a StoreError, and neither blob nor temp file is there (field report F10)."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match=os.strerror(number)) as raised:
            blobs.add_bytes(b"x")

    assert 3 == raised.value.exit_code
    assert ([], []) == (list(blobs.all()), left(blobs))
    assert digest_bytes(b"x") == blobs.add_bytes(b"x")[0]


def test_add_when_cleaning_up_fails_too_tells_the_first_cause(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went wrong first is what is told (field reports D1, F1)."""

    def fail(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def busy(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "unlink", busy)
        with pytest.raises(StoreError, match="No space left"):
            blobs.add_bytes(b"x")


def test_add_with_tmpdir_elsewhere_never_uses_it(
    blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temp files lie in the store's own file system (field report F11)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))

    digest, _ = blobs.add_bytes(b"x")

    blobs.check(digest)


def test_add_after_tmp_was_cleared_makes_it_again(blobs: BlobStore) -> None:
    """A prune that took the empty folder away is no error."""
    shutil.rmtree(blobs.layout.tmp)

    blobs.check(blobs.add_bytes(b"x")[0])


def test_open_missing_and_planted(blobs: BlobStore) -> None:
    """Missing is told apart from what stands there and is no file of ours (field reports P9, D8)."""
    digest, _ = blobs.add_bytes(b"x")
    path = blobs.layout.blob(digest)
    path.unlink()
    with pytest.raises(ArtifactNotFoundError, match=digest):
        blobs.open(digest)
    for plant in (lambda: path.symlink_to(__file__), lambda: os.mkfifo(path), path.mkdir):
        plant()
        with pytest.raises(ArtifactCorruptedError, match="is no regular file"):
            blobs.open(digest)
        assert not blobs.exists(digest)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_open_leaks_no_descriptor(blobs: BlobStore) -> None:
    """A thousand refused files leave no descriptor open."""
    digest, _ = blobs.add_bytes(b"x")
    path = blobs.layout.blob(digest)
    path.unlink()
    os.mkfifo(path)
    gc.collect()  # What earlier tests left open is not closed in between.
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(1000):
        with pytest.raises(ArtifactCorruptedError):
            blobs.open(digest)

    assert before >= len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("data", [b"", b"y", b"x" * 3], ids=["empty", "flipped", "longer"])
def test_check_other_bytes_corrupted(blobs: BlobStore, data: bytes) -> None:
    """Every other content is corruption, with the file's path in the error (field reports D4, D6)."""
    digest, _ = blobs.add_bytes(b"x")
    path = blobs.layout.blob(digest)
    path.unlink()
    path.write_bytes(data)

    with pytest.raises(ArtifactCorruptedError) as raised:
        blobs.check(digest)
    assert path == raised.value.path
    assert (len(data) == 1) == blobs.exists(digest, 1)


def test_all_leaves_out_what_is_no_blob(blobs: BlobStore) -> None:
    """Strange names, links and folders among the blobs are not blobs (field report C6)."""
    digest, _ = blobs.add_bytes(b"x")
    folder = blobs.layout.blob(digest).parent
    (folder / "blob.tmp123").touch()
    (folder / ("Z" * 64)).touch()
    (folder / ("a" * 64)).symlink_to(blobs.layout.blob(digest))
    (blobs.layout.blobs / "stray").touch()

    assert [digest] == [found for found, _ in blobs.all()]


def test_all_while_files_vanish_goes_on(blobs: BlobStore) -> None:
    """A folder that a prune empties meanwhile is no error (field report C6)."""
    kept = sorted(blobs.add_bytes(bytes([number]))[0] for number in range(32))
    found = []
    for digest, _ in blobs.all():
        found.append(digest)
        if len(found) == 1:
            for other in kept[16:]:
                shutil.rmtree(blobs.layout.blob(other).parent, ignore_errors=True)

    assert set(kept[:1]) <= set(found) <= set(kept)


def test_all_without_store_is_empty(tmp_path: Path) -> None:
    """No folder, no blobs."""
    assert [] == list(BlobStore(StoreLayout(tmp_path / "nowhere")).all())


@pytest.mark.parametrize("kind", ["blob", "document"])
def test_write_order_is_data_then_name_then_folder(
    blobs: BlobStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut there is no name without its bytes: fsync, rename, fsync of the folder (field report C4)."""
    order: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        order.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def replace(source: str, target: Path) -> None:
        assert ("fsync", str(source)) in order
        order.append(("replace", str(target)))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)

    if kind == "blob":
        target = blobs.layout.blob(blobs.add_bytes(b"x")[0])
    else:
        target = blobs.layout.boot_record(digest_bytes(b"r"))
        write_atomically(blobs.layout, target, b"x")

    assert [("replace", str(target)), ("fsync", str(target.parent))] == order[-2:]
    # A folder that was made for it has its own name on disk before.
    assert kind == "document" or ("fsync", str(target.parent.parent)) in order[:-2]


def test_write_atomically_readers_see_old_or_new(blobs: BlobStore, tmp_path: Path) -> None:
    """While a file is replaced a thousand times no reader sees half of it or none (field report C2)."""
    target = blobs.layout.boot_record(digest_bytes(b"r"))
    contents = {bytes([letter]) * 70_000 for letter in b"ab"}
    write_atomically(blobs.layout, target, min(contents))
    reader = os.fork()
    if reader == 0:
        wrong = sum(target.read_bytes() not in contents for _ in range(2000))
        os._exit(min(wrong, 1))
    for _ in range(100):
        for content in sorted(contents):
            write_atomically(blobs.layout, target, content)

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    assert [] == left(blobs)


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
def test_write_atomically_failing_call_keeps_the_old(
    blobs: BlobStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that can't be replaced is as it was (field report F10)."""
    target = blobs.layout.boot_record(digest_bytes(b"r"))
    write_atomically(blobs.layout, target, b"old")

    def fail(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="No space left"):
            write_atomically(blobs.layout, target, b"new")

    assert (b"old", []) == (target.read_bytes(), left(blobs))
