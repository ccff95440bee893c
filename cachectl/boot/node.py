"""The node copy: blobs of a store that lies elsewhere, kept by content on the node, so that it is read once.

Owns `<warm dir>/node`: one immutable file per blob, 0400, hashed while it was written and put in place by a rename. The
hand-outs of one user share it; none of their files is a link to it. Laid down once however many ranks start: who comes
second waits for the first, half of the time that is left and no longer, and then reads from the store. What lies here
is hashed again each time it is read: rotten files are dropped and told. Nothing here is fsynced, for the same reason.

Where the store lies on the warm dir's own file system there is none: it would be a second write of the same bytes to
the same disk. Nor where the warm dir is in memory. CACHECTL_NODE_COPY=always|never overrules both. Standard library
only; the store is only read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cachectl.boot.acting import acting_as, own_folder
from cachectl.boot.claims import try_lock
from cachectl.schemas.boot import Reason
from cachectl.store.layout import bare_hex
from cachectl.values import dataclass, field

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["NODE_BYTES_KEPT", "NODE_DAYS_KEPT", "NODE_FILES_KEPT", "NODE_VARIABLE", "NodeCopy", "Pending", "node_copy"]

NODE_VARIABLE = "CACHECTL_NODE_COPY"
NODE_BYTES_KEPT = 8 << 30
NODE_FILES_KEPT = 4096
NODE_DAYS_KEPT = 30
# No node copy is begun where less than its size and so much more is free: the hand-out itself needs the room.
_SPARE_BYTES = 64 << 20
_SPARE_FILES = 256
_PAUSES_S = (0.002, 0.005, 0.01, 0.02, 0.05)
# For room that is about to be free; both together once a hook.
_ROOM_WAITS, _ROOM_PAUSE_S = 10, 0.02
_TOUCHED_S = 3600.0
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_IN_MEMORY = ("tmpfs", "ramfs")


def node_copy(root: Path, store: Path, environ: Mapping[str, str]) -> NodeCopy | None:
    """Return the node copy of a warm dir for a store; None where there is to be none. Never raises."""
    asked = environ.get(NODE_VARIABLE, "auto")
    if asked == "never":
        return None
    try:
        here = os.stat(root).st_dev
        with acting_as(os.getuid()):
            there = os.stat(store).st_dev
        if asked != "always" and (there == here or _kind_of(here) in _IN_MEMORY):
            return None
        made = NodeCopy(root / "node")
        for folder in (made.root, made.root / "blobs", made.root / "locks"):
            own_folder(folder)
        return made
    except OSError:
        return None  # A full disk, or planted folders: the hand-out is laid out without.


@dataclass
class Pending:
    """A blob that is being laid down: where its bytes go."""

    descriptor: int
    written: int = 0
    failed: bool = False

    def write(self, chunk: memoryview) -> None:
        """Write the next bytes; a full disk is noted and no error: the hand-out matters more."""
        if self.failed:
            return
        try:
            view = chunk
            # Without a name it is given up: somebody needed the room (`make_room`).
            while view and os.fstat(self.descriptor).st_nlink:
                view = view[os.write(self.descriptor, view) :]
            self.failed = len(view) > 0
            self.written += len(chunk)
        except OSError:
            self.failed = True
        if self.failed:
            _empty(self.descriptor)


@dataclass
class NodeCopy:
    """Blobs by content below one folder. `told` is what went wrong with them and was mended.

    Several threads of one hook may use it.
    """

    root: Path
    told: list[Reason] = field(default_factory=list)
    # Whether this process has added a blob: only then is there something to bound.
    added: bool = False
    _room_waits: int = _ROOM_WAITS

    def path(self, digest: str) -> Path:
        """Return where a blob lies."""
        name = bare_hex(digest)
        return self.root / "blobs" / name[:2] / name

    def open(self, digest: str) -> BinaryIO | None:
        """Open a blob of this user's; None where it is not there. The bytes are unchecked: hash what you read."""
        try:
            descriptor = os.open(self.path(digest), os.O_RDONLY | _FILE)
        except OSError:
            return None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.EINVAL, "not ours")
            if time.time() - found.st_mtime > _TOUCHED_S:
                # By its last use it is known which is the oldest.
                os.utime(descriptor)
            return os.fdopen(descriptor, "rb", buffering=0)
        except OSError:
            os.close(descriptor)
            return None

    def drop(self, digest: str) -> None:
        """Remove a blob whose bytes are not what its name says, and tell. Never raises."""
        path = self.path(digest)
        try:
            os.unlink(path)
        except OSError:
            pass  # Another rank was faster.
        hint = "it was read from the store again: if it happens more than once, check this node's disk"
        self.told.append(Reason("artifact", "node copy", str(path), digest, "corrupt", hint))

    @contextmanager
    def adding(self, digest: str, size_bytes: int, deadline_s: float) -> Iterator[Pending | None]:
        """Lay a blob down: what the block writes is put in place if `keep` is called within it.

        None where there is no room, where another process is at it for longer than half of the time that is left, or
        where another process has done it meanwhile: look with `open` again.
        """
        lock = self._lock(digest, deadline_s) if self._has_room(size_bytes) else None
        if lock is None or os.path.lexists(self.path(digest)):
            _let_go(lock)
            yield None
            return
        pending: Pending | None = None
        try:
            pending = self._begin(digest)
            yield pending
        finally:
            if pending is not None:
                os.close(pending.descriptor)
                _unlink(self._pending_path(digest))
            _let_go(lock)

    def keep(self, digest: str, pending: Pending, size_bytes: int) -> None:
        """Put a blob in place, whose bytes the caller has hashed and found right. Never raises."""
        if pending.failed or pending.written != size_bytes:
            return
        try:
            os.fchmod(pending.descriptor, 0o400)
            os.rename(self._pending_path(digest), self.path(digest))
            self.added = True
        except OSError:
            pass  # As without.

    def make_room(self) -> bool:
        """Remove every blob, for a hand-out that does not fit on the disk; say whether it may fit now. Never raises.

        Those too that are being laid down, by whichever thread or hook. Where another one has just removed them, or
        somebody still reads them, the room is there a moment later: that is waited for, not long and not often.
        """
        paths = [path for _, _, path in self._all()]
        went = [_give_up(path) if path.name.startswith(".") else _unlink(path) for path in paths]
        if any(went):
            return True
        if self._room_waits <= 0:
            return False
        self._room_waits -= 1
        time.sleep(_ROOM_PAUSE_S)
        return True

    def forget_old(self, now_s: float | None = None) -> int:
        """Remove what was not used for long, and the longest unused beyond the bounds; say how many. Never raises.

        Who reads one of them goes on reading it.
        """
        now_s = time.time() if now_s is None else now_s
        removed = total = 0
        found = sorted((max(0.0, now_s - used_s), size_bytes, path) for used_s, size_bytes, path in self._all())
        for files, (age_s, size_bytes, path) in enumerate(found, start=1):
            total += size_bytes
            if age_s > NODE_DAYS_KEPT * 86400 or files > NODE_FILES_KEPT or total > NODE_BYTES_KEPT:
                _unlink(path)
                removed += 1
        return removed

    def _begin(self, digest: str) -> Pending | None:
        try:
            path = self._pending_path(digest)
            own_folder(path.parent)
            # What a killed hook left; nobody else writes here, since we hold the lock.
            _unlink(path)
            return Pending(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600))
        except OSError:
            return None

    def _lock(self, digest: str, deadline_s: float) -> int | None:
        """Return a descriptor that holds the lock; None where it is not free in time or can't be had."""
        try:
            name = self.root / "locks" / bare_hex(digest)[:2]
            lock = os.open(name, os.O_RDWR | os.O_CREAT | _FILE, 0o600)
        except OSError:
            return None
        until_s = time.monotonic() + max(0.0, deadline_s - time.monotonic()) / 2
        tries = 0
        while (taken := try_lock(lock, fcntl.LOCK_EX)) is False and time.monotonic() < until_s:
            if os.path.lexists(self.path(digest)):
                break
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
        if taken:
            return lock
        os.close(lock)
        return None

    def _has_room(self, size_bytes: int) -> bool:
        try:
            found = os.statvfs(self.root)
        except OSError:
            return False
        # Some file systems count no inodes.
        files = found.f_favail if found.f_files else _SPARE_FILES
        return found.f_bavail * found.f_frsize >= 2 * size_bytes + _SPARE_BYTES and files >= _SPARE_FILES

    def _pending_path(self, digest: str) -> Path:
        path = self.path(digest)
        return path.with_name(f".{path.name}")

    def _all(self) -> Iterator[tuple[float, int, Path]]:
        """Yield last use, size and path of every file, those that were being laid down too."""
        try:
            for folder in os.scandir(self.root / "blobs"):
                if not folder.is_dir(follow_symlinks=False):
                    continue
                for item in os.scandir(folder):
                    try:
                        found = item.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    yield found.st_mtime, found.st_size, Path(item.path)
        except OSError:
            return


def _kind_of(device: int) -> str:
    """Return the type of the file system with this number, as the kernel names it; "" where it does not say."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                words = line.split()
                if words[2] == wanted:
                    return words[words.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return ""


def _unlink(path: Path) -> bool:
    """Remove a file; say whether it went."""
    try:
        os.unlink(path)
        return True
    except OSError:
        return False  # Gone, or not ours: it is looked at again the next time.


def _give_up(path: Path) -> bool:
    """Remove a file that somebody is writing, and free its room before it is closed; say whether it went."""
    try:
        descriptor = os.open(path, os.O_WRONLY | _FILE)
    except OSError:
        return _unlink(path)
    # Its name first: what was put in place meanwhile is whole, and stays so.
    gone = _unlink(path)
    if gone:
        _empty(descriptor)
    os.close(descriptor)
    return gone


def _empty(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
    except OSError:
        pass  # It keeps its room until it is closed.


def _let_go(lock: int | None) -> None:
    if lock is not None:
        # A process that was forked meanwhile holds it, too.
        try_lock(lock, fcntl.LOCK_UN)
        os.close(lock)
