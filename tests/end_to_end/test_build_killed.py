"""A real build that is killed while it records and while it proves: the next ones compile nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]


def kill_build(program: Any, when: Callable[[], bool]) -> None:
    """Build, and kill the build when something has come true; it must not be done by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cachectl", "build", "recipe.yaml"],
        cwd=program.folder,
        env={**os.environ, "CACHECTL_STORE": str(program.store)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not when() and process.poll() is None:
        time.sleep(0.01)
    process.kill()

    assert -signal.SIGKILL == process.wait()


def drafts(program: Any) -> int:
    """Return of how many cases a build left what it recorded."""
    return len([*program.store.glob("boot/drafts/*.json")])


def entries(program: Any) -> int:
    """Return how many entry manifests lie in the store."""
    return len([*program.store.glob("entries/*/*/*.json")])


def compiled(stderr: str) -> list[str]:
    """Return the cases that a build's progress says were compiled."""
    return [line.partition("/")[2].partition(" ")[0] for line in stderr.splitlines() if ": compile" in line]


def test_build_that_is_killed_twice_compiles_nothing_again_and_starts_warm(empty_program: Any) -> None:
    """Killed at its second case, then after its first proof: the third build only proves, and the program is right."""
    program = empty_program
    kill_build(program, lambda: drafts(program) == 1)
    between = entries(program)
    # The draft goes last, when its entry is known.
    kill_build(program, lambda: (drafts(program), entries(program)) == (1, 1))

    done = program.cachectl("build", "recipe.yaml", "--json")

    report = json.loads(done.stdout)
    assert (0, 0) == (done.returncode, between), done.stderr
    assert (1, 1, 0) == (len(report["built"]), len(report["reused"]), drafts(program))
    assert [] == compiled(done.stderr)
    warm = program.generate()
    assert ("warm", []) == (warm["outcome"], warm["reasons"])
    assert program.generate("--eager")["tokens"] == warm["tokens"]
