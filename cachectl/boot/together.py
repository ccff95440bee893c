"""Several pieces of one hook's work at once, in threads: where reading and hashing many bytes leaves the GIL free.

Owns that all of them have ended before anything is raised: a hand-out that is thrown away must have no writer left.
Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import TypeVar

    Item = TypeVar("Item")

__all__ = ["each", "workers_for"]

# Copying less is done before threads are worth their start (bench/hook.py: 16 x 450 KB gain nothing).
_SHARED_FROM_BYTES = 16 << 20
# More wait for one disk and one memory bus; and the job's other ranks have hooks, too.
_MOST_WORKERS = 4
# Source, target, node copy, its lock and a folder's list, with room.
_FILES_OF_WORKER = 8


def workers_for(size_bytes: int) -> int:
    """Return how many threads should copy and hash so many bytes.

    One where the process acts as another user: that switch is the whole process's (cachectl/boot/acting.py). No more
    than may have their files open.
    """
    if size_bytes < _SHARED_FROM_BYTES or os.geteuid() != os.getuid():
        return 1
    try:
        files = os.sysconf("SC_OPEN_MAX") - len(os.listdir("/proc/self/fd"))
        return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)), files // _FILES_OF_WORKER))
    except (OSError, ValueError):
        return 1  # A sandbox that does not say.


def each(work: Callable[[Item], None], items: Sequence[Item], workers: int) -> None:
    """Do the work on each item, in `workers` threads; after a failure no further item is begun.

    Raises:
        BaseException: what the work raised on the first item, in their order, of those that failed. Nothing runs then.
    """
    if workers < 2 or len(items) < 2:
        for item in items:
            work(item)
        return
    import threading  # 1 ms of the hook's start

    failures: dict[int, BaseException] = {}
    numbers = iter(range(len(items)))

    def go_on() -> None:
        # An iterator over a range gives each number once, whichever threads ask.
        for number in numbers:
            if failures:
                return
            try:
                work(items[number])
            except BaseException as error:  # noqa: BLE001 - raised below, when nobody runs
                failures[number] = error

    def go_on_and_tell(over: threading.Event) -> None:
        try:
            go_on()
        finally:
            over.set()

    started: list[tuple[threading.Thread, threading.Event]] = []
    try:
        for _ in range(min(workers, len(items)) - 1):
            over = threading.Event()
            # A daemon: a read that hangs must not keep the program of a `warm_start` from ending.
            thread = threading.Thread(target=go_on_and_tell, args=(over,), daemon=True)
            thread.start()
            started.append((thread, over))
    except (RuntimeError, MemoryError):
        pass  # No thread is to be had (a limit on processes): this one does what is left.
    go_on()
    for thread, over in started:
        while not over.is_set():
            try:
                # Not join: interrupted, it takes a running thread for ended (CPython 3.10 to 3.12).
                over.wait()
            except BaseException as error:  # noqa: BLE001 - interrupted: raised below, when nobody runs
                failures.setdefault(len(items), error)
        thread.join()
    if failures:
        raise failures[min(failures)]
