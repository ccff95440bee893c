"""Ends a script from within, at a call that it makes: by an exception, and by interrupting whoever caught it.

Owns that a script which has shown what was asked for ends, in whichever thread it made the last call and whatever it
does with the exception, and that nothing of it reaches what comes after the script. Standard library only.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ScriptEnd"]

# A script's clean-up has so long before its main thread is interrupted, and so long before it is again.
PATIENCE_S, AGAIN_S = 15.0, 5.0
_POLL_S = 0.002


class _Ended(BaseException):
    """Raised into the script when it has shown what was asked for; no handler of anybody's is meant to take it."""


class ScriptEnd:
    """The end of one script.

    Attributes:
        asked: whether the script is being ended; what it raises from then on is its clean-up's.
        left: whether its code has been left; what puts the process back after it is not interrupted. Whoever runs the
            script sets it as the very next step, without a call: a call is where Python looks for signals.
    """

    def __init__(self) -> None:
        self.asked = self.left = False
        self._over = threading.Event()
        self._nudging = threading.Lock()
        self._nudge: threading.Thread | None = None
        self._caller: threading.Thread | None = None

    def now(self) -> None:
        """End the script. Raises into it."""
        self.asked, self._caller = True, threading.current_thread()
        # In another thread the main one may be waiting for this one, and for others.
        after_s = PATIENCE_S if threading.current_thread() is threading.main_thread() else 0.0
        nudge = threading.Thread(target=self._interrupt, args=(after_s,), daemon=True)
        nudge.start()
        # Now that it can be joined: the main thread may be leaving the script just then.
        self._nudge = nudge
        raise _Ended

    def again(self) -> None:
        """Raise into a script that goes on though it was ended."""
        if self.asked:
            raise _Ended

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the script, in the main thread, ended when that is asked for; what comes after it is never interrupted.

        Threads that are ended end without a word.
        """
        told = threading.excepthook

        def quiet(arguments: Any) -> None:
            if arguments.exc_type is not _Ended:
                told(arguments)

        def interrupted(number: int, frame: types.FrameType | None) -> None:
            if not self.asked:
                signal.default_int_handler(number, frame)
            if not self.left:
                raise _Ended

        threading.excepthook = quiet
        # It may be ignored, where a shell started it all in the background.
        before = signal.signal(signal.SIGINT, interrupted)
        try:
            yield
        finally:
            self.left = True
            with self._nudging:
                self._over.set()
            if self._nudge is not None:
                self._nudge.join()
            signal.signal(signal.SIGINT, before)
            self._wait_for_caller()
            threading.excepthook = told

    def _wait_for_caller(self) -> None:
        """Wait a while for the thread that made the last call: it may still be on its way out of it."""
        caller, until_s = self._caller, time.monotonic() + AGAIN_S
        if caller is None or caller is threading.current_thread():
            return
        # Not join(): where the script was interrupted in a join of its own, CPython takes the thread for ended.
        while caller.ident in sys._current_frames() and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _interrupt(self, after_s: float) -> None:
        """Interrupt the main thread until the script is over: whoever caught the exception may be waiting there."""
        main = threading.main_thread().ident
        assert main is not None
        while not self._over.wait(after_s):
            with self._nudging:
                # After it the signal would be somebody else's.
                if not self._over.is_set():
                    signal.pthread_kill(main, signal.SIGINT)
            after_s = AGAIN_S
