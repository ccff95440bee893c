"""Locks: one holder, bounded waits that name it, nothing left by a killed one."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from cachectl.errors import StoreError, StoreLockTimeoutError
from cachectl.store.layout import StoreLayout
from cachectl.store.locks import file_lock

HOLD = """
import sys, time
from pathlib import Path
from cachectl.store.layout import StoreLayout
from cachectl.store.locks import file_lock
with file_lock(StoreLayout(Path(sys.argv[1])), "build-x", 100.0):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    """An empty store."""
    layout = StoreLayout(tmp_path / "store")
    layout.create()
    return layout


@pytest.fixture
def holder(layout: StoreLayout) -> subprocess.Popen[str]:
    """Another process that holds the lock and sleeps."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(layout.root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "held\n" == process.stdout.readline()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process as the kernel would, and wait for its end."""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=200)


def test_file_lock_held_elsewhere_waits_no_longer_than_told(layout: StoreLayout, holder: subprocess.Popen[str]) -> None:
    """A holder that sleeps forever is named, and the wait ends (field reports C10, F5)."""
    started = time.monotonic()
    try:
        with pytest.raises(StoreLockTimeoutError) as raised, file_lock(layout, "build-x", 0.3):
            pass
    finally:
        kill(holder)

    assert time.monotonic() - started < 100
    assert (0.3, layout.lock("build-x")) == (raised.value.timeout_s, raised.value.lock_path)
    assert f"pid {holder.pid} on " in str(raised.value)
    assert isinstance(raised.value, TimeoutError)


def test_file_lock_killed_holder_leaves_nothing_to_clean_up(layout: StoreLayout, holder: subprocess.Popen[str]) -> None:
    """The kernel drops the lock of a killed process (field report C4)."""
    kill(holder)

    with file_lock(layout, "build-x", 100.0):
        pass


def test_file_lock_of_another_name_is_free(layout: StoreLayout) -> None:
    """Two recipes are built at once."""
    with file_lock(layout, "build-x", 1.0), file_lock(layout, "build-y", 1.0):
        pass


def test_file_lock_block_that_raises_frees_it(layout: StoreLayout) -> None:
    """The block's own error comes out as it is, OSError and TimeoutError too, and the lock is free."""
    for error in (ValueError("mine"), OSError(5, "mine"), TimeoutError("mine")):
        with pytest.raises(type(error), match="mine"), file_lock(layout, "build-x", 1.0):
            raise error

    with file_lock(layout, "build-x", 0.0):
        pass


def test_file_lock_files_are_written_by_the_owner_only(layout: StoreLayout) -> None:
    """A lock that anybody may write is one that anybody may hold (field report C4)."""
    before = os.umask(0)
    try:
        with file_lock(layout, "build-x", 1.0):
            pass
    finally:
        os.umask(before)

    assert 0o644 == layout.lock("build-x").stat().st_mode & 0o777


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_file_lock_without_kernel_locks_never_hangs(
    layout: StoreLayout, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where flock fails there is an error in words, or filelock's own lock file; no endless wait (field report F5)."""

    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    started = time.monotonic()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with file_lock(layout, "build-x", 0.5):
                pass
        except StoreError:
            pass  # Which of the two it is depends on filelock's version.

    assert time.monotonic() - started < 100


def test_file_lock_unreadable_holder_is_unknown(layout: StoreLayout, holder: subprocess.Popen[str]) -> None:
    """Half a holder's note is no reason to fail in another way."""
    layout.lock("build-x").with_suffix(".holder").write_text('{"pid":')
    try:
        with pytest.raises(StoreLockTimeoutError, match="holder unknown"), file_lock(layout, "build-x", 0.1):
            pass
    finally:
        kill(holder)


def test_file_lock_no_place_for_it_is_a_store_error(tmp_path: Path) -> None:
    """Where the lock file can't be made the error names it."""
    (tmp_path / "store").write_text("a file")

    with pytest.raises(StoreError, match="can't lock"), file_lock(StoreLayout(tmp_path / "store"), "x", 0.1):
        pass
