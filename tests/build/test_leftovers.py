"""Processes that ranks left behind are ended wherever they stand, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cachectl.build.leftovers import MARK, end_marked

SLEEPER = "import signal, time; signal.signal(15, 1); print('up', flush=True); time.sleep(600)"


def start(value: str) -> subprocess.Popen[str]:
    """Start a process with a mark, in a session of its own, that ignores SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        env={**os.environ, MARK: value},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_marked_processes_are_killed_and_others_are_not(tmp_path: Path) -> None:
    """The value counts whole: another build's processes run on."""
    mine, others = start(f"{tmp_path}/one"), start(f"{tmp_path}/one.more")
    try:
        end_marked(f"{tmp_path}/one")

        assert (-9, None) == (mine.wait(240), others.poll())
    finally:
        others.kill()
        for process in (mine, others):
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_nothing_marked_is_nothing_done(tmp_path: Path) -> None:
    """The usual case: it only looks."""
    others = start(f"{tmp_path}/somebody")

    end_marked(f"{tmp_path}/nobody")

    assert others.poll() is None
    others.kill()
    others.wait()
    assert others.stdout is not None
    others.stdout.close()
