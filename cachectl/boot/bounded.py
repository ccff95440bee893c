"""Work that ends in time even where a system call does not: a store on a mount that hangs blocks whoever reads it.

Owns the two ways to give such work up. A child process is left behind whole: where its system call can't be
interrupted, as with a file server that is gone, only the child stays stuck, and it holds none of its parent's output
open. It needs a parent without threads. A thread is for the program's process, which goes on; it ends with the process.
Standard library only.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import select
import time
from collections.abc import Callable, Mapping

from cachectl.boot.materialize import DEADLINE_HINT, DeadlineError
from cachectl.errors import StoreError

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any, TypeVar

    Result = TypeVar("Result")

__all__ = ["NoAnswerError", "in_child", "in_thread", "own_deadline"]

# What work that looks at its own deadline is left to answer and to tidy up with, seconds.
_GRACE_S = 0.5
_LEAST_S = 0.25
# Longer waits are no waits; select takes no infinity.
_LONGEST_S = 7 * 24 * 3600.0
_LATE = "the deadline passed without an answer: a system call may hang"
# Its number in POSIX; the module signal took 1 ms of the hook's start.
_SIGKILL = 9
# A child that has answered is gone in less than a millisecond.
_REAP_PAUSES_S = (0.0005, 0.001, 0.002, *[0.005] * 20)
_KILLED_AT = 3


class NoAnswerError(StoreError):
    """The child process ended without an answer."""


def own_deadline(limit_s: float) -> float:
    """Return when work should give up by itself so that it has answered within `limit_s`, seconds."""
    return limit_s - min(_GRACE_S, 0.1 * limit_s) if limit_s > 0 else limit_s


def in_child(work: Callable[[], Mapping[str, Any]], limit_s: float) -> dict[str, Any]:
    """Return the JSON document that `work` returns in a forked process; one that is late is killed and left alone.

    Raises:
        DeadlineError: no answer within `limit_s`, or a moment after it where `own_deadline` leaves less than that.
        NoAnswerError: the process ended without one.
        OSError: no process could be made.
    """
    reading, writing = _pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if child == 0:
        _answer(work, reading, writing)
    os.close(writing)
    until_s = time.monotonic() + _longest(limit_s)
    try:
        data = _read(reading, until_s)
    finally:
        os.close(reading)
        status = _end(child)
    if data is None:
        raise DeadlineError(_LATE, hint=DEADLINE_HINT)
    try:
        document = json.loads(data)
    except ValueError:
        raise NoAnswerError(
            f"the hook's process ended without an answer (status {status})",
            hint="look at the memory limit and the kernel's log of this container",
        ) from None
    return dict(document)


def in_thread(work: Callable[[], Result], limit_s: float) -> Result:
    """Return what `work` returns in a thread of its own; `work` must not raise.

    Raises:
        DeadlineError: no result within `limit_s`, or a moment after it; the thread is left alone.
    """
    import threading  # 1 ms of the hook's start, which makes a process

    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(work()), name="cachectl-hook", daemon=True)
    thread.start()
    thread.join(_longest(limit_s))
    if not found:
        raise DeadlineError(_LATE, hint=DEADLINE_HINT)
    return found[0]


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends are neither stdin, stdout nor stderr, also where some of these are closed."""
    ends = []
    for low in os.pipe():
        ends.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3))
        os.close(low)
    return ends[0], ends[1]


def _longest(limit_s: float) -> float:
    """Return how long to wait for work that has `own_deadline` of this limit."""
    seconds = max(limit_s, max(0.0, own_deadline(limit_s)) + _LEAST_S)
    return _LONGEST_S if math.isnan(seconds) else min(seconds, _LONGEST_S)


def _answer(work: Callable[[], Mapping[str, Any]], reading: int, writing: int) -> None:
    """Be the child: write the answer and end, past every exit handler of the parent's."""
    status = 1
    # A process of one second frees nothing by it, and pages shared with the parent would be copied.
    gc.disable()
    try:
        os.close(reading)
        # A shell that waits for the end of our output must not wait for a child that hangs.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        data = json.dumps(work()).encode()
        while data:
            data = data[os.write(writing, data) :]
        status = 0
    finally:
        os._exit(status)


def _read(descriptor: int, until_s: float) -> bytes | None:
    """Return all that is written until the other end is closed; None when that is late."""
    chunks: list[bytes] = []
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            return None
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _end(child: int) -> int | None:
    """Collect the child, which has answered or is late; None where it is stuck in the kernel."""
    for attempt, pause_s in enumerate(_REAP_PAUSES_S):
        try:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if attempt == _KILLED_AT:
                os.kill(child, _SIGKILL)
        except (ChildProcessError, ProcessLookupError):
            return None  # Whoever made us ignore SIGCHLD had it collected.
        time.sleep(pause_s)
    return None
