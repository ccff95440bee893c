"""Work in several threads: each item once, the first failure told, nobody left running."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from cachectl.boot.together import each, workers_for
from tests.boot.hook_stores import handouts, overwrite
from tests.stores import MadeStore


@pytest.mark.parametrize("workers", [1, 2, 4, 9])
def test_each_does_every_item_once(workers: int) -> None:
    """However many threads share the items."""
    done: list[int] = []

    each(done.append, list(range(50)), workers)

    assert list(range(50)) == sorted(done)


def test_each_runs_at_once() -> None:
    """Three items that wait for each other end only where three threads do them."""
    barrier = threading.Barrier(3, timeout=60)
    met: list[int] = []

    each(lambda _: met.append(barrier.wait()), [0, 1, 2], 3)

    assert [0, 1, 2] == sorted(met)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_each_failure_is_raised_when_nobody_runs(workers: int) -> None:
    """What failed first in the items' order is raised; no item is begun after it, no thread is left."""
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number >= 2:
            raise ValueError(number)

    before = threading.active_count()
    with pytest.raises(ValueError, match="2"):
        each(work, list(range(100)), workers)

    assert len(begun) <= 2 + workers
    assert before == threading.active_count()


def test_each_without_threads_to_be_had_does_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on processes is no reason to be cold."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []

    each(done.append, [1, 2, 3], 4)

    assert [1, 2, 3] == done


def test_each_interrupted_is_raised_when_nobody_runs() -> None:
    """Also who only waits for the others any more."""
    met, over = threading.Barrier(2, timeout=60), threading.Event()

    def work(_: int) -> None:
        met.wait()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)
            over.set()

    with pytest.raises(KeyboardInterrupt):
        each(work, [0, 1], 2)

    assert over.is_set()


@pytest.mark.parametrize(("limit", "workers"), [(256, 4), (8, 1)])
def test_workers_for_have_their_files_open(monkeypatch: pytest.MonkeyPatch, limit: int, workers: int) -> None:
    """A process that may open few more files lays entries down one by one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7})
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "sysconf", lambda _: opened + limit)

    assert workers == workers_for(1 << 30)


def test_workers_for_where_the_system_does_not_say_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that knows no affinity is no reason to be cold."""

    def refuse(_: int) -> set[int]:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)

    assert 1 == workers_for(1 << 30)


def test_workers_for_another_user_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acting as somebody else is the whole process's: no other thread may be under way."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7})
    assert (1, 4) == (workers_for(1 << 20), workers_for(1 << 30))

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    assert 1 == workers_for(1 << 30)


@pytest.fixture
def large(made: MadeStore) -> MadeStore:
    """A store whose two entries are laid down at once."""
    made.publish("large", size_bytes=9 << 20)
    return made


def sizes(made: MadeStore) -> list[int]:
    """Return the sizes of the compiled modules that were handed out."""
    return [path.stat().st_size for path in handouts(made.warm_dir) if path.name == "compiled_module"]


@pytest.mark.parametrize("node", ["never", "always"])
def test_hook_large_entries_are_whole(large: MadeStore, node: str) -> None:
    """From the store, and from a node copy that is filled and then read; the parts of the time fit into its whole."""
    for _ in range(2):
        hooked = large.hook(environ={"CACHECTL_NODE_COPY": node})
        seconds = hooked.report["seconds"]

        assert ("warm", []) == (hooked.outcome, hooked.report["reasons"])
        assert seconds["verify"] + seconds["materialize"] <= seconds["total"]
        for entry in hooked.report["entries"]:
            module = Path(entry["path"]) / "compiled_module"
            assert large.blob("large", case=entry["case"]).read_bytes() == module.read_bytes()

    assert [9 << 20] * 4 == sizes(large)


@pytest.mark.parametrize("case", ["b4", "b2"])
def test_hook_large_entry_damaged_leaves_nothing_of_its_set(large: MadeStore, case: str) -> None:
    """Whichever of those laid down at once is damaged: nobody still writes, and the older set is taken."""
    overwrite(large.blob("large", case=case), b"x" * (9 << 20))

    hooked = large.hook()

    assert ("warm", [3000, 3000]) == (hooked.outcome, sizes(large))
    assert ["artifact"] == [part for part, _, _ in hooked.against]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
def test_hook_large_entries_with_room_for_one_node_copy_are_warm(made: MadeStore, tmp_path: Path) -> None:
    """Each thread finds room for its blob's copy, and there is none for all: the hand-out comes first."""
    made.publish("large", size_bytes=40 << 20)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=148m,mode=0700", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        hooked = made.hook("--warm-dir", disk / "warm", environ={"CACHECTL_NODE_COPY": "always"})
        found = [path.stat().st_size for path in (disk / "warm").rglob("compiled_module")]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)

    assert ("warm", [], [40 << 20] * 2) == (hooked.outcome, hooked.against, found)
