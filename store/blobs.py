"""Blobs: files by content. Adding hashes while it writes; opening checks that the bytes are still theirs.

Owns blobs/ and nothing of what a blob means. A blob lies there whole, or as its delta against another one, which has to
stay as long as the delta does. Standard library only; reading writes nothing, not even a lock.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from cachectl.errors import ArtifactCorruptedError, ArtifactNotFoundError, DocumentError, StoreError
from cachectl.schemas.canonical import DIGEST_PREFIX, is_digest
from cachectl.store.deltas import DELTA_LIMIT_BYTES, Delta, encode_delta
from cachectl.store.layout import (
    DELTA_SUFFIX,
    NO_REGULAR_FILE,
    StoreLayout,
    describe_os_error,
    fsync_folder,
    read_bounded,
)

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["BlobStore", "digest_file", "write_atomically"]

_CHUNK_BYTES = 256 << 10


class BlobStore:
    """The blobs of one store: add exists open check all."""

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout

    def add_file(self, source: Path) -> tuple[str, int]:
        """Copy a file in and return its digest and its size in bytes.

        Durable when it returns. A crash leaves a file in tmp/ and nothing else. Equal content is stored once; a blob
        that is there already is replaced, which mends one whose bytes were damaged and makes its mtime that of its
        last use, so that a prune under way leaves it alone.

        Raises:
            StoreError: the source is no regular file, or a system call failed (the store is as before).
        """
        try:
            with _open_regular(source) as file:
                return self._add(iter(lambda: file.read(_CHUNK_BYTES), b""))
        except OSError as error:
            raise describe_os_error(error, f"can't store {source}") from error

    def add_bytes(self, data: bytes) -> tuple[str, int]:
        """Store bytes and return their digest and size; as `add_file`."""
        try:
            return self._add(iter([data]))
        except OSError as error:
            raise describe_os_error(error, f"can't store {len(data)} bytes") from error

    def add_like(self, source: Path, base: str) -> tuple[str, int]:
        """Store a file as `add_file` does, by what it has in common with another blob where that is nearly all.

        Args:
            base: digest of the other blob, which may be missing or damaged: then the file is stored whole.

        Raises:
            StoreError: as `add_file`.
        """
        try:
            with _open_regular(source) as file:
                data = file.read(DELTA_LIMIT_BYTES + 1)
        except OSError as error:
            raise describe_os_error(error, f"can't store {source}") from error
        digest = DIGEST_PREFIX + hashlib.sha256(data).hexdigest()
        delta = self._delta(data, base) if digest != base and not self.layout.blob(digest).exists() else None
        if delta is None:
            return self.add_file(source)
        write_atomically(self.layout, self.layout.blob_delta(digest), delta)
        return digest, len(data)

    def _delta(self, data: bytes, base: str) -> bytes | None:
        held = self.held_whole(base)
        return encode_delta(held, base, data) if held is not None else None

    def held_whole(self, digest: str) -> bytes | None:
        """Return the bytes of a blob that others may stand on; None where it is missing, damaged, large or a delta.

        It counts as used again, so that a prune under way leaves it alone.
        """
        path = self.layout.blob(digest)
        try:
            with _open_regular(path) as file:
                held = file.read(DELTA_LIMIT_BYTES + 1)
            os.utime(path)
        except OSError:
            return None
        return held if DIGEST_PREFIX + hashlib.sha256(held).hexdigest() == digest else None

    def base_of(self, digest: str) -> str | None:
        """Return the digest of the blob that this one stands on; None for one that lies there whole, or not at all.

        Raises:
            ArtifactCorruptedError, StoreError: its delta can't be read.
        """
        if self.layout.blob(digest).exists():
            return None
        delta = self._read_delta(digest)
        return delta.base if delta is not None else None

    def _read_delta(self, digest: str) -> Delta | None:
        path = self.layout.blob_delta(digest)
        try:
            return Delta.from_bytes(read_bounded(path, DELTA_LIMIT_BYTES))
        except FileNotFoundError:
            return None
        except DocumentError as error:
            raise ArtifactCorruptedError(f"{path}: {error.message}", path=path, hint="run: cachectl verify") from error
        except OSError as error:
            raise _describe_read_error(error, path) from error

    def _add(self, chunks: Iterator[bytes]) -> tuple[str, int]:
        self.layout.make_folder(self.layout.tmp)
        hasher = hashlib.sha256()
        size_bytes = 0
        # The temp file lies in the store itself: a rename from another file system would be a copy (field report F11).
        descriptor, name = _temporary(self.layout.tmp, "blob.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                for chunk in chunks:
                    hasher.update(chunk)
                    size_bytes += len(chunk)
                    file.write(chunk)
                file.flush()
                # Group-readable whatever the umask: other users' pods read the same store (field report P7).
                os.fchmod(file.fileno(), 0o444)
                os.fsync(file.fileno())
            digest = DIGEST_PREFIX + hasher.hexdigest()
            target = self.layout.blob(digest)
            self.layout.make_folder(target.parent)
            os.replace(name, target)
            fsync_folder(target.parent)
        except BaseException:
            _unlink_quietly(name)
            raise
        return digest, size_bytes

    def exists(self, digest: str, size_bytes: int | None = None) -> bool:
        """Say whether the blob is there (and has the size asked for), without reading it."""
        try:
            found = self.layout.blob(digest).lstat()
        except FileNotFoundError:
            try:
                delta = self._read_delta(digest)
            except StoreError:
                return False
            if delta is None or not stat.S_ISREG(_mode_of(self.layout.blob(delta.base))):
                return False
            return size_bytes is None or delta.size_bytes == size_bytes
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and (size_bytes is None or found.st_size == size_bytes)

    def open(self, digest: str) -> BinaryIO:
        """Open a blob for reading, following no link. The bytes are unchecked: hash what you read.

        Raises:
            ArtifactNotFoundError: not there.
            ArtifactCorruptedError: a link, a folder or a special file.
            StoreError: not readable.
        """
        path = self.layout.blob(digest)
        try:
            return _open_regular(path)
        except FileNotFoundError as error:
            if (delta := self._read_delta(digest)) is not None:
                return self._opened_delta(delta)
            raise ArtifactNotFoundError(f"blob {digest} is not in the store", hint="run: cachectl verify") from error
        except OSError as error:
            raise _describe_read_error(error, path) from error

    def _opened_delta(self, delta: Delta) -> BinaryIO:
        """Return the bytes that a delta stands for, in a file that lies in memory only."""
        path = self.layout.blob(delta.base)
        try:
            base = read_bounded(path, DELTA_LIMIT_BYTES)
        except FileNotFoundError as error:
            raise ArtifactNotFoundError(
                f"blob {delta.base} is not in the store, and another one stands on it", hint="run: cachectl verify"
            ) from error
        except OSError as error:
            raise _describe_read_error(error, path) from error
        file = os.fdopen(os.memfd_create("cachectl-blob"), "w+b")
        file.write(delta.apply(base))
        file.seek(0)
        return file

    def check(self, digest: str) -> None:
        """Read the whole blob and raise unless its bytes are what the digest says.

        Raises:
            ArtifactNotFoundError, ArtifactCorruptedError, StoreError.
        """
        hasher = hashlib.sha256()
        path = self.layout.blob(digest)
        with self.open(digest) as file:
            try:
                while chunk := file.read(_CHUNK_BYTES):
                    hasher.update(chunk)
            except OSError as error:
                raise describe_os_error(error, f"can't read blob {path}") from error
        if DIGEST_PREFIX + hasher.hexdigest() != digest:
            raise ArtifactCorruptedError(f"blob {digest} holds other bytes", path=path, hint="run: cachectl verify")

    def all(self) -> Iterator[tuple[str, Path]]:
        """Yield digest and path of every stored blob, sorted; files whose names are no digests are left out.

        Raises:
            StoreError: a folder can't be read.
        """
        for folder in _listed(self.layout.blobs, stat.S_ISDIR):
            for path in _listed(folder, stat.S_ISREG):
                name = path.name.removesuffix(DELTA_SUFFIX)
                if is_digest(DIGEST_PREFIX + name) and name.startswith(folder.name):
                    yield DIGEST_PREFIX + name, path


def digest_file(source: Path) -> tuple[str, int]:
    """Return the digest and size in bytes that a file would have as a blob. Raises StoreError as `add_file`."""
    hasher = hashlib.sha256()
    size_bytes = 0
    try:
        with _open_regular(source) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
                size_bytes += len(chunk)
    except OSError as error:
        raise describe_os_error(error, f"can't read {source}") from error
    return DIGEST_PREFIX + hasher.hexdigest(), size_bytes


def write_atomically(layout: StoreLayout, target: Path, data: bytes, *, mode: int = 0o444) -> None:
    """Put `data` at `target`: temp file in the store, fsync, rename, fsync of the folder. Readers see old or new.

    Raises:
        StoreError: a system call failed; the target is as before.
    """
    try:
        layout.make_folder(layout.tmp)
        layout.make_folder(target.parent)
        descriptor, name = _temporary(layout.tmp, f"{target.name[:32]}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            _unlink_quietly(name)
            raise
        fsync_folder(target.parent)
    except OSError as error:
        raise describe_os_error(error, f"can't write {target}") from error


def _describe_read_error(error: OSError, path: Path) -> StoreError:
    if error.errno in NO_REGULAR_FILE:
        return ArtifactCorruptedError(f"blob {path} is no regular file", path=path, hint="run: cachectl verify")
    return describe_os_error(error, f"can't read blob {path}")


def _mode_of(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _open_regular(path: Path) -> BinaryIO:
    # O_NONBLOCK: a FIFO planted here must not hang the reader; it is refused by the fstat that follows the open.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def _temporary(folder: Path, prefix: str) -> tuple[int, str]:
    # tempfile's own import costs the hook, which writes no blob, a millisecond at every start.
    import tempfile

    return tempfile.mkstemp(prefix=prefix, dir=folder)


def _unlink_quietly(name: str) -> None:
    try:
        os.unlink(name)
    except OSError:
        pass  # It lies in tmp/, where nothing is read; prune clears it.


def _listed(folder: Path, kind: Callable[[int], bool]) -> list[Path]:
    """Return what of a kind lies in a folder, no links; files may come and go meanwhile (field report C6)."""
    found = []
    try:
        for path in sorted(folder.iterdir()):
            try:
                if kind(path.lstat().st_mode):
                    found.append(path)
            except FileNotFoundError:
                continue
    except FileNotFoundError:
        return []
    except OSError as error:
        raise describe_os_error(error, f"can't list {folder}") from error
    return found
