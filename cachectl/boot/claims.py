"""Who uses which folder of a warm dir: claims that end with their process, and the removal of what nobody holds.

A claim is a lock on a folder's `.claim` file, shared by all who use the folder. The kernel lets go of it when the last
of them is gone, however it went, so no claim is ever stale; and it holds across containers on one local file system.
A forked child shares its parent's claim, a program that is started anew makes its own. Standard library only.

What is removed, by `sweep`, and never what somebody holds:

    half of a hand-out          at once: its hook is dead
    a hand-out that was used    beyond the newest USED_KEPT, or after a day: a container may be started again on it
    one that never was          beyond the newest UNUSED_KEPT, or after an hour: an init container may be long before
                                its program
    any of these                the oldest, while they hold more than IDLE_BYTES_KEPT
    a cold folder               at once: its process is dead

A file system without locks can't tell who holds what: only what is older than a day goes there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cachectl.values import dataclass

__all__ = [
    "IDLE_BYTES_KEPT",
    "UNUSED_KEPT",
    "USED_KEPT",
    "claim",
    "hold",
    "note_size",
    "release",
    "sweep",
    "try_lock",
]

USED_KEPT = 4
# Twice as many as the hooks at once that the budget speaks of: the first of them must be there when the last is done.
UNUSED_KEPT = 512
IDLE_BYTES_KEPT = 8 << 30
_USED_S = 24 * 3600.0
_UNUSED_S = 3600.0
# What has no claim: half made under its first name, by an older version, or on a file system without locks.
_PENDING_S = 60.0
_UNCLAIMED_S = 24 * 3600.0
# Of many hooks at once one sweeps.
_PAUSE_S = 5.0
# A sweep looks for less than a millisecond. One that removes moves the folder away first: that is waited for no longer.
_LOOKED_AT_PAUSE_S, _LOOKED_AT_TRIES = 0.01, 100
_NAME = ".claim"
_USED = b"used\n"
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# Claims of this process, by folder: their descriptors are closed when it ends.
_held: dict[str, int] = {}


def try_lock(descriptor: int, how: int) -> bool | None:
    """Take a lock without waiting: whether it was free; None where this file system can't say."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None


def hold(folder: Path, name: Path | None = None) -> None:
    """Claim a new folder for this process, as long as it lives. Raises OSError where the claim can't be written.

    Args:
        name: the folder's name from now on, where it is about to be renamed.
    """
    descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | _FILE, 0o600)
    try_lock(descriptor, fcntl.LOCK_SH)
    _held[str(name or folder)] = descriptor


def note_size(folder: Path, size_bytes: int) -> None:
    """Note what a folder that this process holds takes on the disk; never raises."""
    try:
        os.write(_held[str(folder)], b"%d\n" % size_bytes)
    except (KeyError, OSError):
        pass  # Counted as nothing.


def release(folder: Path) -> None:
    """Let go of a folder that this process holds; does nothing for others."""
    descriptor = _held.pop(str(folder), None)
    if descriptor is not None:
        os.close(descriptor)


def claim(folder: Path) -> str | None:
    """Claim a hand-out for this process, as long as it lives; return what stands against using it at all.

    None also where a claim can't be made: a hand-out of an older version, or a file system without locks.
    """
    if str(folder) in _held:
        return None
    try:
        descriptor, writable = _open_claim(folder)
    except FileNotFoundError:
        return None if folder.is_dir() else "it is gone"
    except OSError:
        return None
    if not _shared(folder, descriptor):
        os.close(descriptor)
        return "it is being removed"
    if writable:
        try:
            os.write(descriptor, _USED)
        except OSError:
            pass  # A full disk; it is held all the same.
    _held[str(folder)] = descriptor
    return None


def _shared(folder: Path, descriptor: int) -> bool:
    """Lock a claim for use; False where its folder is being removed.

    A sweep that holds it may be looking only, to find a hand-out whole that was half made when it was listed.
    """
    tries = 0
    while (taken := try_lock(descriptor, fcntl.LOCK_SH)) is False and tries < _LOOKED_AT_TRIES:
        if not _still_there(folder, descriptor):
            return False
        time.sleep(_LOOKED_AT_PAUSE_S)
        tries += 1
    return taken is not False and _still_there(folder, descriptor)


def _still_there(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / _NAME).lstat())
    except OSError:
        return False


def _open_claim(folder: Path) -> tuple[int, bool]:
    try:
        return os.open(folder / _NAME, os.O_RDWR | os.O_APPEND | _FILE), True
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        # The program's mount may be read-only. The lock is the file's, not the mount's.
        return os.open(folder / _NAME, os.O_RDONLY | _FILE), False


@dataclass(frozen=True)
class _Idle:
    """A folder that may be removed if nobody holds it."""

    folder: Path
    used: bool
    whole: bool
    size_bytes: int
    # Seconds since it was last written; a time in the future counts as now (field report F15).
    age_s: float


def sweep(root: Path, remove: Callable[[Path], None], *, now_s: float | None = None, pause_s: float = _PAUSE_S) -> int:
    """Remove the idle folders of a warm dir as the module's docstring says; say how many. Never raises.

    Args:
        remove: deletes a folder with all that is in it.
        pause_s: does nothing if the last sweep was less than so many seconds ago.
    """
    now_s = time.time() if now_s is None else now_s
    try:
        stamp = os.open(root / ".swept", os.O_RDWR | os.O_CREAT | _FILE, 0o600)
    except OSError:
        return 0
    try:
        swept = os.fstat(stamp)
        fresh = swept.st_size > 0 and 0 <= now_s - swept.st_mtime < pause_s
        if fresh or try_lock(stamp, fcntl.LOCK_EX) is False:
            return 0
        os.pwrite(stamp, b"swept\n", 0)
        doomed = [*_doomed_handouts(list(_folders(root / "handouts", now_s))), *_folders(root / "cold", now_s)]
        return sum(_remove_if_idle(item, remove) for item in doomed)
    except OSError:
        return 0
    finally:
        # A process that was forked meanwhile holds it, too.
        try_lock(stamp, fcntl.LOCK_UN)
        os.close(stamp)


def _doomed_handouts(found: list[_Idle]) -> list[_Idle]:
    """Return what is to go of the hand-outs, provided nobody holds it; the newest are kept."""
    doomed = [item for item in found if not item.whole]
    kept: list[_Idle] = []
    for used, count, age_s in ((True, USED_KEPT, _USED_S), (False, UNUSED_KEPT, _UNUSED_S)):
        items = sorted((item for item in found if item.whole and item.used is used), key=lambda item: item.age_s)
        fit = [item for item in items[:count] if item.age_s <= age_s]
        kept += fit
        doomed += items[len(fit) :]
    total = 0
    # Those that may still be waiting for their first use go last.
    for item in sorted(kept, key=lambda item: (item.used, item.age_s)):
        total += item.size_bytes
        if total > IDLE_BYTES_KEPT:
            doomed.append(item)
    return doomed


def _folders(parent: Path, now_s: float) -> Iterator[_Idle]:
    try:
        with os.scandir(parent) as found:
            names = [item.name for item in found if item.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in names:
        try:
            item = _look(parent / name, now_s)
        except OSError:
            continue  # Removed meanwhile.
        if item is not None:
            yield item


def _look(folder: Path, now_s: float) -> _Idle | None:
    """Return what is known of a folder; None where its age alone says that it stays. Raises OSError."""
    try:
        descriptor = os.open(folder / _NAME, os.O_RDONLY | _FILE)
    except FileNotFoundError:
        descriptor = -1
    if descriptor < 0 or folder.name.startswith("."):
        if descriptor >= 0:
            os.close(descriptor)
        age_s = max(0.0, now_s - folder.lstat().st_mtime)
        bound_s = _PENDING_S if folder.name.startswith(".") else _UNCLAIMED_S
        return _Idle(folder, False, False, 0, age_s) if age_s > bound_s else None
    try:
        used, whole, size_bytes = _state_of(folder, descriptor)
        age_s = max(0.0, now_s - os.fstat(descriptor).st_mtime)
    finally:
        os.close(descriptor)
    return _Idle(folder, used, whole, size_bytes, age_s)


def _state_of(folder: Path, claimed: int) -> tuple[bool, bool, int]:
    """Return whether a hand-out was used, whether it is whole, and what it takes in bytes, given its open claim."""
    words = os.pread(claimed, 4096, 0).split()
    size_bytes = int(words[0]) if words and words[0].isdigit() else 0
    return _USED.strip() in words, os.path.lexists(folder / "handout.json"), size_bytes


def _remove_if_idle(item: _Idle, remove: Callable[[Path], None]) -> bool:
    """Remove a folder unless somebody holds it, or it is no longer what it was; nobody can claim it while it goes."""
    try:
        descriptor = os.open(item.folder / _NAME, os.O_RDWR | _FILE)
    except OSError:
        # Without a claim its age was looked at.
        remove(item.folder)
        return True
    try:
        free = try_lock(descriptor, fcntl.LOCK_EX)
        if free is False or (free is None and item.age_s <= _UNCLAIMED_S):
            return False
        # Between the look and the lock a hook may have finished it and ended, or a program used it and ended.
        used, whole, _ = _state_of(item.folder, descriptor)
        if (used, whole) != (item.used, item.whole) and not item.folder.name.startswith("."):
            return False
        # Out of the way first: who looks from now on finds nothing, and what is left if we are killed is found again.
        gone = item.folder.with_name(f".{item.folder.name.lstrip('.')}")
        os.rename(item.folder, gone)
        remove(gone)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
