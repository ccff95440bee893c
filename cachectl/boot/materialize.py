"""Laying an entry's files down: hashed while they are written, private, complete or not there at all.

Owns the copy into a hand-out: from the node copy where there is one, else from the store; as a clone where the file
system can share blocks. What is hashed is what was written. Standard library only; the store is only read.
"""

from __future__ import annotations

import _thread  # The module threading takes 1 ms of the hook's start.
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cachectl.boot.acting import acting_as
from cachectl.boot.node import NodeCopy, Pending
from cachectl.boot.relocate import repoint
from cachectl.errors import ArtifactCorruptedError, StoreError
from cachectl.schemas.boot import ArtifactFile, StoredEntry
from cachectl.schemas.canonical import DIGEST_PREFIX
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import bare_hex, describe_os_error
from cachectl.values import dataclass, field

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["DEADLINE_HINT", "DeadlineError", "NoRoomError", "Timing", "describe_write_error", "lay_down"]

DEADLINE_HINT = "give more with --deadline SECONDS, or put the store nearer to the node"
# Small enough to stay in the processor's cache between reading, hashing and writing (bench/hook.py: 1.77 to 1.61).
_CHUNK_BYTES = 256 << 10
# Linux: _IOW(0x94, 9, int), linux/fs.h. Btrfs, XFS, bcachefs; the others refuse.
_FICLONE = 0x40049409
_LONGEST_S = 24 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DeadlineError(StoreError):
    """The hook's deadline passed before it was done."""


class NoRoomError(StoreError):
    """The hand-out's disk is full."""


@dataclass
class Timing:
    """Seconds spent reading and hashing, seconds spent writing, and bytes laid down."""

    verify_s: float = 0.0
    write_s: float = 0.0
    size_bytes: int = 0
    # Whether a file system has refused to clone: it is asked once.
    clones: bool = field(default=True, repr=False)

    def add(self, others: Iterable[Timing], elapsed_s: float) -> None:
        """Add what was done at once within `elapsed_s` seconds: its seconds by their share of those, on one clock."""
        others = tuple(others)
        verify_s, write_s = sum(one.verify_s for one in others), sum(one.write_s for one in others)
        share = min(1.0, elapsed_s / (verify_s + write_s)) if verify_s + write_s else 0.0
        self.verify_s += verify_s * share
        self.write_s += write_s * share
        self.size_bytes += sum(one.size_bytes for one in others)


def lay_down(
    blobs: BlobStore,
    entry: StoredEntry,
    handout: Path,
    *,
    deadline_s: float,
    timing: Timing,
    node: NodeCopy | None = None,
    unpacking: _thread.LockType | None = None,
) -> Path:
    """Write an entry's files below `handout` as the runtime wants them; return the method's folder.

    Every file is 0600 (0700 where the artifact needs its x bit), every folder 0700, nothing is a link. The bytes that
    were hashed are the bytes that were written.

    Args:
        deadline_s: on the monotonic clock; checked between chunks.
        node: the node copy, which is taken first and gets what it does not have; None for none.
        unpacking: held while a blob is copied that the store has as a delta; of threads that lay down entries at once.

    Raises:
        ArtifactNotFoundError, ArtifactCorruptedError, StoreError: the entry can't be handed out; what was written so
            far lies in the hand-out's folder, which the caller throws away.
        DeadlineError: out of time.
    """
    base = handout / bare_hex(entry.key)
    method_folder = base / entry.runtime_path
    copier = _Copier(blobs, deadline_s, timing, node, unpacking)
    try:
        _refuse_noexec(entry, handout)
        _private_parents(method_folder, handout)
        for item in entry.files:
            target = method_folder / item.path
            _private_parents(target.parent, handout)
            # The runtime wants exactly 0600, or refuses and deletes (facts: _validate_owner_and_permissions).
            mode = 0o700 if item.mode & 0o100 else 0o600
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            try:
                os.fchmod(descriptor, mode)
                copier.copy(item, descriptor)
            finally:
                os.close(descriptor)
            timing.size_bytes += item.size_bytes
        repoint(entry, method_folder)
    except OSError as error:
        raise describe_write_error(error, handout) from error
    return method_folder


def describe_write_error(error: OSError, handout: Path) -> StoreError:
    """Return the error for a hand-out that can't be written."""
    reason = error.strerror or type(error).__name__
    return (NoRoomError if error.errno in _FULL else StoreError)(
        f"can't write the hand-out {handout}: {reason}",
        hint="free space or inodes there, or pass --warm-dir DIR to a folder with room",
    )


@dataclass
class _Copier:
    """Copies blobs into open files."""

    blobs: BlobStore
    deadline_s: float
    timing: Timing
    node: NodeCopy | None
    unpacking: _thread.LockType | None
    # One for all chunks: a new one each time costs a tenth of reading, hashing and writing.
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_CHUNK_BYTES)), repr=False)

    def copy(self, item: ArtifactFile, descriptor: int) -> None:
        """Fill an empty file with a blob's bytes. Raises as lay_down."""
        if self.node is None:
            return self._from_store(item, descriptor, None)
        if self._from_node(self.node, item, descriptor):
            return None
        with self.node.adding(item.digest, item.size_bytes, self.deadline_s) as pending:
            if pending is None and self._from_node(self.node, item, descriptor):
                return None
            self._from_store(item, descriptor, pending)
            if pending is not None:
                self.node.keep(item.digest, pending, item.size_bytes)
        return None

    def _from_node(self, node: NodeCopy, item: ArtifactFile, descriptor: int) -> bool:
        """Copy from the node; False where it is not there, or was and is not what its name says."""
        source = node.open(item.digest)
        if source is None:
            return False
        with source:
            try:
                right = self._copy(item, source, descriptor, None) == (item.digest, item.size_bytes)
            except _UnreadableError:
                right = False
        if not right:
            node.drop(item.digest)
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
        return right

    def _from_store(self, item: ArtifactFile, descriptor: int, pending: Pending | None) -> None:
        with self._opened(item) as source:
            try:
                digest, size_bytes = self._copy(item, source, descriptor, pending)
            except _UnreadableError as error:
                raise describe_os_error(error.error, f"can't read blob {item.digest}") from error
        if digest != item.digest or size_bytes != item.size_bytes:
            raise ArtifactCorruptedError(
                f"blob {item.digest} holds other bytes ({size_bytes} of {item.size_bytes} bytes, {digest})",
                path=self.blobs.layout.blob(item.digest),
                hint="run: cachectl verify",
            )

    @contextmanager
    def _opened(self, item: ArtifactFile) -> Iterator[BinaryIO]:
        """Open a blob of the store, which is read with this process's own rights.

        What a delta stands for lies in memory, with its base, up to 64 MiB each: one at a time, since several would
        take the memory of an init container.
        """
        with acting_as(os.getuid()):
            held = None if os.path.lexists(self.blobs.layout.blob(item.digest)) else self.unpacking
        if held is not None and not held.acquire(timeout=min(max(0.0, self.deadline_s - time.monotonic()), _LONGEST_S)):
            raise _late()
        try:
            with acting_as(os.getuid()):
                opened = self.blobs.open(item.digest)
            with opened as source:
                yield source
        finally:
            if held is not None:
                held.release()

    def _copy(self, item: ArtifactFile, source: BinaryIO, descriptor: int, pending: Pending | None) -> tuple[str, int]:
        """Copy and return digest and size of what was written."""
        cloned = pending is None and self._clone(source, descriptor)
        # A clone is hashed as it lies there; it is the file's own bytes that count.
        reading = descriptor if cloned else source.fileno()
        timing = self.timing
        hasher = hashlib.sha256()
        size_bytes = 0
        # No more than one chunk beyond what the manifest says: a blob that has grown must not fill the node's disk.
        while size_bytes <= item.size_bytes:
            if time.monotonic() > self.deadline_s:
                raise _late()
            started = time.perf_counter()
            try:
                count = os.readv(reading, [self.buffer])
            except OSError as error:
                raise _UnreadableError(error) from error
            chunk = self.buffer[:count]
            hasher.update(chunk)
            hashed = time.perf_counter()
            timing.verify_s += hashed - started
            if not count:
                break
            size_bytes += count
            if not cloned:
                self._write(descriptor, chunk)
                if pending is not None:
                    pending.write(chunk)
                timing.write_s += time.perf_counter() - hashed
        return DIGEST_PREFIX + hasher.hexdigest(), size_bytes

    def _write(self, descriptor: int, view: memoryview) -> None:
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except OSError as error:
                # What the node keeps is for speed, the hand-out is for this boot.
                if error.errno not in _FULL or self.node is None or not self.node.make_room():
                    raise

    def _clone(self, source: BinaryIO, descriptor: int) -> bool:
        """Let the new file share the source's blocks; False where the file system can't."""
        if not self.timing.clones:
            return False
        try:
            if os.fstat(source.fileno()).st_dev != os.fstat(descriptor).st_dev:
                return False
            fcntl.ioctl(descriptor, _FICLONE, source.fileno())
            return True
        except OSError:
            self.timing.clones = False
            return False


def _late() -> DeadlineError:
    return DeadlineError("the deadline passed while the hand-out was being written", hint=DEADLINE_HINT)


class _UnreadableError(Exception):
    """A source can't be read further."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _refuse_noexec(entry: StoredEntry, handout: Path) -> None:
    """Raise where a static kernel's installer could not be run: the runtime would raise while its peers wait."""
    if any(item.mode & 0o100 for item in entry.files) and os.statvfs(handout).f_flag & os.ST_NOEXEC:
        raise StoreError(
            f"{handout} is mounted noexec, and the artifact holds programs (static kernels)",
            hint="pass --warm-dir DIR on a mount without noexec",
        )


def _private_parents(folder: Path, handout: Path) -> None:
    missing = []
    while folder != handout and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for step in reversed(missing):
        os.mkdir(step, 0o700)
