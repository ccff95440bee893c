"""The folder that a build works in, and what builds that were killed left of theirs.

Owns the workspace's place, outside the store, and the lock by which a living build's is known.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachectl.build.leftovers import end_marked
from cachectl.store.layout import StoreLayout, describe_os_error

__all__ = ["forget_workspaces", "private_workspace", "workspace"]

_PREFIX = "cachectl-build."
# In a workspace, locked for as long as its build lives.
_LOCK = "lock"


@contextmanager
def workspace(layout: StoreLayout) -> Iterator[tuple[Path, Path]]:
    """Make a private folder to build in, and a folder for this build's logs in the store; the first goes at the end.

    Raises:
        StoreError: logs can't be written.
    """
    with private_workspace() as folder:
        logs = layout.logs / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{folder.name[-8:]}"
        try:
            logs.mkdir(parents=True)
        except OSError as error:
            raise describe_os_error(error, f"can't write logs to {logs}") from error
        yield folder, logs


@contextmanager
def private_workspace() -> Iterator[Path]:
    """Make a private folder for rank processes to work in; it goes at the end."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with open(folder / f".{_LOCK}", "wb") as lock:
            # Locked before it has its name: whoever finds it unlocked knows that its build is gone.
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, folder / _LOCK)
            yield folder
    finally:
        _delete(folder)


def forget_workspaces() -> None:
    """Delete what builds that were killed left in the folder for temporary files, and end what of theirs still runs."""
    uid = os.getuid()
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            if found.st_uid != uid or not stat.S_ISDIR(found.st_mode):
                continue
            with open(folder / _LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for inner in folder.iterdir():
                    # The ranks died with their build; what they had started may run on.
                    end_marked(str(inner))
                _delete(folder)
        except OSError:
            continue  # A living build holds the lock, or is about to make it.


def _delete(folder: Path) -> None:
    """Delete a workspace, the lock last: killed half-way, it is still known as what a killed build left."""
    try:
        inner = [path for path in folder.iterdir() if path.name != _LOCK]
    except OSError:
        return  # Somebody cleared up.
    for path in inner:
        shutil.rmtree(path, ignore_errors=True)
        try:
            path.unlink(missing_ok=True)
        except OSError:
            continue  # What is left of a folder that can't be deleted.
    shutil.rmtree(folder, ignore_errors=True)
