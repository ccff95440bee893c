"""Ends processes that a build's ranks left behind, wherever they stand in the tree of processes.

Owns the mark by which they are known: a variable that every rank is started with and its children inherit. torchrun
gives each rank a session of its own, and what a rank started may outlive both. Linux only, as all of cachectl.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MARK", "end_marked"]

MARK = "CACHECTL_BUILD"
# A killed process is seen until the kernel has ended it, which takes its time on a starved machine.
_ROUNDS, _PAUSE_S = 250, 0.02


def end_marked(value: str) -> None:
    """Kill every process of this user whose environment has the mark with this value; returns when there is none.

    Bounded: what still starts new processes after some rounds, or can't be killed, is let be.
    """
    for _ in range(_ROUNDS):
        found = list(_marked(f"{MARK}={value}".encode()))
        for descriptor in found:
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
        if not found:
            return
        time.sleep(_PAUSE_S)


def _marked(wanted: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Opened before its environment is read: the number may be somebody else's a moment later.
            descriptor = os.pidfd_open(int(folder.name))
        except (OSError, ValueError):
            continue
        try:
            marked = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            marked = False
        if marked:
            yield descriptor
        else:
            os.close(descriptor)
