"""One builder per recipe and one writer per boot record, with bounded waits that name the holder.

Owns locks/. A builder's lock only saves work: every write is a rename, so one that gives up waiting may build on in its
private workspace (field report C10). A boot record's lock keeps one publisher's set from being lost in another's
record. Uses filelock; the boot path takes no lock.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from cachectl.errors import StoreError, StoreLockTimeoutError
from cachectl.store.layout import StoreLayout, describe_os_error

__all__ = ["file_lock"]


@contextmanager
def file_lock(layout: StoreLayout, name: str, timeout_s: float) -> Iterator[None]:
    """Hold the lock called `name` for the block.

    The kernel drops the lock with its process, so a killed holder leaves nothing to clean up. The holder's host, pid
    and start are written beside it for the message of who waits.

    Raises:
        StoreLockTimeoutError: not free after `timeout_s` seconds.
        StoreError: the lock file can't be made, or the file system has no locks.
    """
    path = layout.lock(name)
    holder = path.with_suffix(".holder")
    lock = filelock.FileLock(path, timeout=timeout_s, mode=0o644)
    try:
        layout.make_folder(path.parent)
        lock.acquire()
    except filelock.Timeout as error:
        raise StoreLockTimeoutError(
            f"another cachectl holds {path.name} ({_read_holder(holder)}), waited {timeout_s:g} s",
            lock_path=path,
            timeout_s=timeout_s,
            hint="wait for it, or stop it and build again",
        ) from error
    except OSError as error:
        raise describe_os_error(error, f"can't lock {path}") from error
    except NotImplementedError as error:
        # What filelock before 4 raises for ENOSYS (field report F5); a newer one falls back to a lock file.
        raise StoreError(f"can't lock {path}: {error}", hint="put the store on a file system that has flock") from error
    # Outside of the handlers above: what the block raises is the block's own.
    try:
        _write_holder(holder)
        yield
    finally:
        lock.release()


def _write_holder(path: Path) -> None:
    # Only a message: a failure to write it must not fail the build.
    try:
        path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())}))
    except OSError:
        pass


def _read_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"pid {int(holder['pid'])} on {holder['host']}, for {max(0, int(time.time()) - int(holder['since']))} s"
    except (OSError, ValueError, KeyError, TypeError):
        return "holder unknown"
