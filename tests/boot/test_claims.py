"""Claims end with their process; what nobody holds goes within bounds, and what somebody holds never does."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachectl.boot import claims
from cachectl.boot.claims import IDLE_BYTES_KEPT, UNUSED_KEPT, USED_KEPT, claim, note_size, release, sweep, try_lock
from cachectl.boot.warmdir import WarmDir, remove_tree

HOLDER = """
import os, sys, time
from pathlib import Path
from cachectl.boot.claims import claim
if sys.argv[2:] == ["forked"]:
    claim(Path(sys.argv[1]))
    if os.fork() == 0:
        print("held", flush=True)
        time.sleep(600)
    os._exit(0)
print(claim(Path(sys.argv[1])) or "held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def warm(tmp_path: Path) -> WarmDir:
    """A warm dir of this user's."""
    (tmp_path / "warm").mkdir(mode=0o700)
    return WarmDir(tmp_path / "warm")


def lay(warm: WarmDir, *, age_s: float = 0.0, used: bool = False, whole: bool = True, size_bytes: int = 0) -> Path:
    """Make a hand-out that nobody holds."""
    folder = warm.new_handout()
    note_size(folder, size_bytes)
    release(folder)
    if used:
        assert claim(folder) is None
        release(folder)
    if whole:
        (folder / "handout.json").touch()
    os.utime(folder / ".claim", (time.time() - age_s,) * 2)
    return folder


def swept(warm: WarmDir) -> int:
    """Sweep, however short ago the last one was."""
    return sweep(warm.root, remove_tree, pause_s=0)


@contextmanager
def holder(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert "held\n" == process.stdout.readline()
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass  # It has ended.
        process.wait()
        process.stdout.close()


def test_sweep_used_handouts_keep_a_few(warm: WarmDir) -> None:
    """Of a crash loop's hand-outs the newest stay, so that a container started again finds its own."""
    folders = [lay(warm, age_s=10 * number, used=True) for number in range(USED_KEPT + 5)]

    assert 5 == swept(warm)
    assert folders[:USED_KEPT] == [folder for folder in folders if folder.exists()]


def test_sweep_used_handout_goes_after_a_day(warm: WarmDir) -> None:
    """However few there are."""
    lay(warm, age_s=25 * 3600, used=True)

    assert 1 == swept(warm)


def test_sweep_unused_handouts_stay_an_hour(warm: WarmDir) -> None:
    """A slow main container finds what its init container laid out."""
    young, old = lay(warm, age_s=3500), lay(warm, age_s=3700)

    assert 1 == swept(warm)
    assert (True, False) == (young.exists(), old.exists())


def test_sweep_unused_handouts_are_counted(warm: WarmDir) -> None:
    """Starts that die before they read their hand-out must not fill the node either."""
    folders = [lay(warm, age_s=5 * number) for number in range(UNUSED_KEPT + 3)]

    assert 3 == swept(warm)
    assert folders[:UNUSED_KEPT] == [folder for folder in folders if folder.exists()]


def test_sweep_leaves_what_256_hooks_at_once_have_laid_out(warm: WarmDir) -> None:
    """On a node with many ranks the first program finds its hand-out when the last hook is done."""
    folders = [lay(warm, age_s=number / 5) for number in range(256)]

    assert 0 == swept(warm)
    assert all(folder.exists() for folder in folders)


def test_sweep_bytes_are_bounded_oldest_and_used_first(warm: WarmDir) -> None:
    """What may still wait for its program goes last."""
    third = IDLE_BYTES_KEPT // 3
    used = lay(warm, age_s=1, used=True, size_bytes=third)
    waiting = [lay(warm, age_s=10 * number, size_bytes=third) for number in range(3)]

    assert 1 == swept(warm)
    assert (False, [True] * 3) == (used.exists(), [folder.exists() for folder in waiting])


def test_sweep_half_of_a_handout_goes_at_once(warm: WarmDir) -> None:
    """Its hook is dead: it would hold it."""
    half = lay(warm, whole=False)

    assert 1 == swept(warm)
    assert not half.exists()


def test_sweep_killed_while_it_removed_is_done_by_the_next(warm: WarmDir) -> None:
    """What it had put out of the way goes, whatever is still in it."""
    folder = lay(warm)
    gone = folder.rename(folder.with_name(f".{folder.name}"))
    os.utime(gone, (time.time() - 100,) * 2)

    assert 1 == swept(warm)
    assert not gone.exists()


@pytest.mark.parametrize("finished", ["whole", "used"])
def test_sweep_handout_finished_between_look_and_lock_stays(
    warm: WarmDir, finished: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was half made, or never used, when it was looked at may be whole or used once its lock is free."""
    folder = lay(warm, whole=finished == "used", age_s=4000)

    def lock_late(descriptor: int, how: int) -> bool | None:
        if finished == "whole" and os.path.samestat(os.fstat(descriptor), (folder / ".claim").stat()):
            (folder / "handout.json").touch()
        elif how == fcntl.LOCK_EX and os.path.samestat(os.fstat(descriptor), (folder / ".claim").stat()):
            with (folder / ".claim").open("ab") as file:
                file.write(b"used\n")
        return try_lock(descriptor, how)

    monkeypatch.setattr(claims, "try_lock", lock_late)

    assert 0 == swept(warm)
    assert (folder / "handout.json").exists()


def test_sweep_handout_in_the_making_stays(warm: WarmDir) -> None:
    """The hook that lays it down holds it, however long it takes."""
    folder = warm.new_handout()
    os.utime(folder / ".claim", (0, 0))

    assert 0 == swept(warm)
    release(folder)
    assert 1 == swept(warm)


@pytest.mark.parametrize("how", [(), ("forked",)], ids=["process", "its forked child"])
def test_sweep_never_takes_what_a_process_holds(warm: WarmDir, how: tuple[str, ...]) -> None:
    """Another pod on a shared volume lives; once it is killed, its hand-out goes."""
    folder = lay(warm)
    with holder(folder, *how) as process:
        os.utime(folder / ".claim", (0, 0))

        assert 0 == swept(warm)
        os.killpg(process.pid, 9)
        process.wait()
        deadline_s = time.monotonic() + 120
        while swept(warm) == 0 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert not folder.exists()


def test_sweep_cold_folder_goes_with_its_process(warm: WarmDir) -> None:
    """A killed process can't clear away what it compiled."""
    mine, dead = warm.new_cold(), warm.new_cold()
    (dead / "Model_x").mkdir()
    release(dead)

    assert 1 == swept(warm)
    assert (True, False) == (mine.exists(), dead.exists())


def test_sweep_leaves_links_files_and_strangers(warm: WarmDir, tmp_path: Path) -> None:
    """Nothing is followed, and nothing outside of the two folders is touched (field report C7)."""
    lay(warm)
    (warm.root / "handouts" / "link").symlink_to(tmp_path)
    (warm.root / "handouts" / "file").touch()
    (warm.root / "mine").mkdir()

    assert 0 == swept(warm)
    assert {"link", "file"} < set(os.listdir(warm.root / "handouts"))
    assert (warm.root / "mine").is_dir()


def test_sweep_folder_without_a_claim_goes_by_its_age(warm: WarmDir) -> None:
    """What an older version left has none; what is about to get one is moments old."""
    (warm.root / "handouts").mkdir(mode=0o700)
    for name, age_s in (("old", 90000), ("young", 80000), (".old", 90), (".young", 0)):
        (warm.root / "handouts" / name).mkdir()
        os.utime(warm.root / "handouts" / name, (time.time() - age_s,) * 2)

    assert 2 == swept(warm)
    assert {"young", ".young"} == set(os.listdir(warm.root / "handouts"))


def test_sweep_clock_that_jumped_keeps_the_fresh_and_bounds_the_rest(warm: WarmDir) -> None:
    """A time in the future is now, one of 1970 is old (field report F15)."""
    future, past = lay(warm, age_s=-1e6), lay(warm, age_s=time.time())

    assert 1 == swept(warm)
    assert (True, False) == (future.exists(), past.exists())


def test_sweep_of_many_hooks_at_once_is_one(warm: WarmDir) -> None:
    """A sweep of a moment ago is enough, and one at a time."""
    lay(warm, whole=False)
    assert 1 == sweep(warm.root, remove_tree)
    lay(warm, whole=False)

    assert 0 == sweep(warm.root, remove_tree, now_s=(warm.root / ".swept").stat().st_mtime + 1)
    os.utime(warm.root / ".swept", (time.time() + 1e6,) * 2)
    assert 1 == sweep(warm.root, remove_tree)


def test_sweep_without_locks_goes_by_age(warm: WarmDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that can't tell who holds what keeps everything for a day (field report F5)."""
    young, old = lay(warm, whole=False), lay(warm, age_s=90000, whole=False)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)

    assert 1 == swept(warm)
    assert (True, False) == (young.exists(), old.exists())


def test_sweep_nothing_there_is_nothing(tmp_path: Path) -> None:
    """And no error."""
    assert 0 == sweep(tmp_path / "nowhere", remove_tree)


def test_claim_of_a_handout_that_goes_is_refused(warm: WarmDir) -> None:
    """Who comes while it is removed starts cold, and is told."""
    folder = lay(warm)
    descriptor = os.open(folder / ".claim", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    against = claim(folder)

    os.close(descriptor)
    assert "it is being removed" == against
    remove_tree(folder)
    assert "it is gone" == claim(folder)


def test_claim_of_a_handout_that_is_only_looked_at_waits(warm: WarmDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that finds it whole lets go of it: no reason to start cold."""
    folder = lay(warm)
    descriptor = os.open(folder / ".claim", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(descriptor, fcntl.LOCK_UN))

    against = claim(folder)

    os.close(descriptor)
    release(folder)
    assert against is None


def test_claim_of_a_handout_that_was_removed_meanwhile_is_refused(
    warm: WarmDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking it the folder may have gone."""
    folder = lay(warm)
    lock = claims.try_lock

    def slow(descriptor: int, how: int) -> bool | None:
        folder.rename(folder.with_name(".gone"))
        return lock(descriptor, how)

    monkeypatch.setattr(claims, "try_lock", slow)

    assert "it is being removed" == claim(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
def test_claim_through_a_read_only_mount_holds(warm: WarmDir, tmp_path: Path) -> None:
    """The program's container may mount the hand-out read-only: the lock is the file's."""
    folder = lay(warm)
    script = f"mount --bind {warm.root} {warm.root} && mount -o remount,ro,bind {warm.root} && exec {sys.executable} -c"
    script += f" 'import os, sys; sys.argv[1:] = [sys.argv[1]]; exec(sys.stdin.read())' {folder}"
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(HOLDER)
    process.stdin.close()
    try:
        assert "held\n" == process.stdout.readline()
        os.utime(folder / ".claim", (0, 0))
        assert 0 == swept(warm)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
