"""Work in a child or a thread: its answer, or an error in time; hook, exec and warm_start on a mount that hangs.

The mount is played by a library that is loaded before libc: opening a file below a folder never returns, as on a file
server that is gone. A real one can't be had without a kernel module.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot import bounded
from cachectl.boot.bounded import NoAnswerError, in_child, in_thread, own_deadline
from cachectl.boot.materialize import DeadlineError
from tests.stores import MadeStore

HANGING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_for_ever(const char *path) {
    const char *below = getenv("TEST_HANGS_BELOW");
    if (below && path && strncmp(path, below, strlen(below)) == 0)
        for (;;) pause();
}
#define MODE mode_t mode = 0; va_list list; va_start(list, flags); if (flags & (O_CREAT | O_TMPFILE)) \\
    mode = va_arg(list, mode_t); va_end(list)
#define OPEN(name) int name(const char *path, int flags, ...) { MODE; wait_for_ever(path); \\
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { MODE; wait_for_ever(path); \\
    return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(folder, path, flags, mode); }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
"""


def test_in_child_returns_the_document() -> None:
    """Whatever its size: more than a pipe holds, and text that is no text."""
    document = {"text": "ü\udcff" * 500_000, "list": [1, None, True]}

    assert document == in_child(lambda: document, 200.0)


def test_in_child_late_answer_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that hangs is ended; nobody waits for it."""
    started = time.monotonic()
    fork, children = os.fork, []

    def forked() -> int:
        children.append(fork())
        return children[-1]

    def hang() -> dict[str, Any]:
        time.sleep(250)
        return {}

    monkeypatch.setattr(os, "fork", forked)
    with pytest.raises(DeadlineError):
        in_child(hang, 0.3)
    assert time.monotonic() - started < 60.0
    try:
        # Not before it has been collected, unless the machine was too slow for that.
        assert signal.SIGKILL == os.waitpid(children[0], 0)[1]
    except ChildProcessError:
        pass
    assert time.monotonic() - started < 120.0


def test_in_child_that_dies_is_an_error_at_once() -> None:
    """Killed by the kernel for its memory, or ended by a fault of its own: an error, long before the deadline."""
    started = time.monotonic()

    # Nobody waits for the status of a process that takes a while to end.
    with pytest.raises(NoAnswerError, match=r"status (-9|None)"):
        in_child(lambda: os.kill(os.getpid(), 9) or {}, 200.0)
    with pytest.raises(NoAnswerError, match=r"status (1|None)"):
        in_child(lambda: {"object": object()}, 200.0)
    assert time.monotonic() - started < 100.0


def test_in_child_writes_nowhere_and_runs_no_exit_handler(capfd: pytest.CaptureFixture[str]) -> None:
    """What the child prints is nobody's: who reads our output till its end does not wait for the child."""

    def print_much() -> dict[str, Any]:
        os.write(1, b"out")
        os.write(2, b"err")
        return {"pid": os.getpid()}

    assert os.getpid() != in_child(print_much, 200.0)["pid"]
    assert ("", "") == capfd.readouterr()


def test_in_thread_returns_or_gives_up() -> None:
    """A thread that hangs is left alone."""
    over = threading.Event()

    assert 7 == in_thread(lambda: 7, 200.0)
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        in_thread(lambda: over.wait(120), 0.1)
    assert time.monotonic() - started < 60.0
    over.set()


@pytest.mark.parametrize(("limit", "own"), [(30.0, 29.5), (2.0, 1.8), (0.01, 0.009), (0.0, 0.0), (-1.0, -1.0)])
def test_own_deadline_leaves_room_for_an_answer(limit: float, own: float) -> None:
    """Half a second, and a tenth of short ones."""
    assert own == pytest.approx(own_deadline(limit))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_in_child_any_limit_gets_a_quick_answer(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also no time at all is time for a child that has its answer ready: the least there is, here of a slow machine."""
    monkeypatch.setattr(bounded, "_LEAST_S", 200.0)

    assert {} == in_child(dict, limit)


# A store that hangs

# Time to come to where it hangs. What hangs does so for ever: that a process ends at all shows that it gave up.
DEADLINE = "3"


@pytest.fixture(scope="session")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library."""
    folder = tmp_path_factory.mktemp("hanging")
    (folder / "hanging.c").write_text(HANGING)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", "hanging.so", "hanging.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "hanging.so"


def hangs(hanging: Path, place: Path) -> dict[str, str]:
    """Return the environment of a process for which everything below a folder hangs."""
    return {"LD_PRELOAD": str(hanging), "TEST_HANGS_BELOW": str(place)}


@pytest.mark.parametrize("place", ["", "boot", "entries", "blobs"])
def test_hook_store_that_hangs_is_cold_in_time(made: MadeStore, hanging: Path, place: str) -> None:
    """Wherever the mount stops answering: cold by the deadline, with the reason; no old hand-out in the env file."""
    assert "warm" == made.hook().outcome
    assert "CACHECTL_HANDOUT" in (made.warm_dir / "cachectl.env").read_text()

    hooked = made.hook("--deadline", DEADLINE, environ=hangs(hanging, made.layout.root / place))

    assert ("cold", [("policy", "deadline", "policy")], 0) == (hooked.outcome, hooked.against, hooked.returncode)
    assert "may hang" in hooked.report["reasons"][0]["stored"]
    assert "CACHECTL_HANDOUT" not in (made.warm_dir / "cachectl.env").read_text()


def test_hook_warm_dir_that_hangs_is_cold_in_time(made: MadeStore, hanging: Path) -> None:
    """The node's own disk may be what hangs."""
    made.warm_dir.mkdir()

    hooked = made.hook("--deadline", DEADLINE, environ=hangs(hanging, made.warm_dir))

    assert ("cold", [("policy", "deadline", "policy")], 0) == (hooked.outcome, hooked.against, hooked.returncode)


def test_exec_store_that_hangs_runs_the_program_in_time(made: MadeStore, hanging: Path) -> None:
    """The program runs, cold, with its own exit code; the report says why."""
    command = [sys.executable, "-m", "cachectl", "exec", str(made.recipe), "--deadline", DEADLINE, "--report", "r.json"]

    done = subprocess.run(
        [*command, "--", "sh", "-c", "echo ran; exit 7"],
        cwd=made.folder,
        env={**made.hook_environ(), **hangs(hanging, made.layout.root)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert (7, "ran\n") == (done.returncode, done.stdout), done.stderr
    report = json.loads((made.folder / "r.json").read_text())
    assert ("cold", ["deadline"]) == (report["outcome"], [reason["name"] for reason in report["reasons"]])


def test_warm_start_store_that_hangs_is_cold_in_time(made: MadeStore, hanging: Path) -> None:
    """The program's own process goes on, cold, and ends as it likes."""
    program = (
        f"import cachectl, sys; warm = cachectl.warm_start(sys.argv[1], deadline_s={DEADLINE})\n"
        "print(warm.outcome, [reason.name for reason in warm.reasons])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(made.recipe)],
        cwd=made.folder,
        env={**made.hook_environ(), **hangs(hanging, made.layout.root)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert (0, "cold ['deadline']\n") == (done.returncode, done.stdout), done.stderr
