"""exec's part of --record: a process beside CMD that says what may be recorded, and one after it that publishes.

Owns when there is anything to publish, the bound on it, and what the report says of it. Both processes are
cachectl.recorded; whatever they need or run into is theirs, and exec can stop them. Standard library only: it is
imported at every exec.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cachectl.boot.report import ExecNote
from cachectl.schemas.boot import Reason

__all__ = ["DEFAULT_TIMEOUT_S", "Publishing"]

DEFAULT_TIMEOUT_S = 600.0
# The publishing process is told to stop, cleans up, and is killed after this.
_GRACE_S = 5.0
# It bounds itself; this much later it hangs in a system call.
_SLACK_S = 10.0
_POLL_S = 0.02
_STOPPED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# Without the working folder, whose modules are the user's: `-m` and `-c` put it first.
_START = "import sys; sys.path[:1] = [part for part in sys.path[:1] if part]; from cachectl.recorded import main; "


class Publishing:
    """The recording of one run of exec, seen from exec.

    Args:
        note: of the run; its `recipe_path` is absolute.
        store: of the command line or the environment; None for the default.
        timeout_s: bound on publishing, seconds.
        environ: exec's own environment, in which a build would run.
        say: prints one line for people.
    """

    def __init__(
        self,
        note: ExecNote,
        *,
        store: str | None,
        timeout_s: float,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._recipe = str(note.recipe_path)
        self._folder = note.folder / "record"
        self._store = store or ""
        self._timeout_s = timeout_s
        self._environ = dict(environ)
        self._say = say
        self._mask: Iterable[int] = ()
        self._pid: int | None = None
        self._code: int | None = None
        # exec was told to stop, and passed it on.
        self.told_to_stop = False

    def prepare(self, mask: Iterable[int]) -> None:
        """Start the process beside CMD; `mask` are the signals that were blocked before exec blocked its own."""
        self._mask = mask
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._start("prepare", self._recipe, str(self._folder))
        except OSError as error:
            self._say(f"--record: {error.strerror}; nothing is recorded")

    def ended(self, pid: int, code: int) -> None:
        """Take note of a child of exec's that was reaped."""
        if pid != self._pid:
            return
        self._pid, self._code = None, code
        if code != 0 and not (self._folder / "job.json").exists():
            # A process of the program may be waiting for it.
            reason = Reason("policy", "record", None, self._last_words(), "policy", "run: cachectl build RECIPE")
            try:
                (self._folder / "refused.json").write_text(json.dumps(reason.to_json()), encoding="utf-8")
            except OSError:
                pass  # It waits its time and says so.

    def finish(self, code: int) -> dict[str, Any]:
        """Publish what was recorded, if CMD ended well; return the report's `recorded`. Never raises.

        Well is exit code 0, and the end by a SIGTERM that exec was sent: that is how a server ends.

        Args:
            code: CMD's exit code, as exec returns it.
        """
        self._stop()
        started = time.monotonic()
        well = code == 0 or (self.told_to_stop and code == 128 + signal.SIGTERM)
        try:
            drafts = any(not name.startswith(".") for name in os.listdir(self._folder / "drafts"))
        except OSError:
            drafts = False
        if not drafts:
            return _recorded([], started)
        if not well:
            hint = "only what a program recorded that ended with exit code 0 is published"
            return _recorded([Reason("policy", "exit code", 0, code, "policy", hint)], started)
        self._say(f"proving what was recorded, for at most {self._timeout_s:g} s")
        try:
            words = (self._recipe, str(self._folder), self._store, f"{self._timeout_s:g}")
            self._start("publish", *words)
            stopped = self._wait()
            report: dict[str, Any] = json.loads((self._folder / "report.json").read_bytes())
        except (OSError, ValueError):
            reason = stopped or Reason("policy", "record", None, self._last_words(), "policy", "run: cachectl build")
            return _recorded([reason], started)
        return report

    def _start(self, what: str, *words: str) -> None:
        command = [sys.executable, "-c", f"{_START}sys.exit(main(sys.argv[1:]))", what, *words]
        log = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._code = None
        self._pid = os.posix_spawn(
            command[0],
            command,
            self._environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(self._folder / "log"), log, 0o600),
            ],
            setsigmask=self._mask,
            setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ],
        )

    def _wait(self) -> Reason | None:
        """Wait for the publishing process, in bounds; return why it was stopped. The signals are blocked here."""
        deadline_s = time.monotonic() + self._timeout_s + _SLACK_S
        watched = _STOPPED | {signal.SIGCHLD}
        while self._pid is not None:
            arrived = signal.sigtimedwait(watched, max(0.0, deadline_s - time.monotonic()))
            if arrived is None:
                self._stop()
                return Reason("policy", "record", None, f"not done after {self._timeout_s:g} s", "policy", _LONGER)
            if arrived.si_signo in _STOPPED:
                self._stop()
                name = signal.Signals(arrived.si_signo).name
                return Reason("policy", "record", None, f"stopped by {name}", "policy", "run: cachectl build RECIPE")
            self._reap()
        return None

    def _stop(self) -> None:
        """End the process of ours that still runs, and reap it."""
        for number, grace_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            if self._pid is not None:
                os.kill(self._pid, number)
            deadline_s = time.monotonic() + grace_s
            while self._pid is not None and time.monotonic() < deadline_s:
                self._reap()
                time.sleep(_POLL_S)

    def _reap(self) -> None:
        """Collect whoever ended: as a container's first process exec inherits orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._pid = None
                return
            if pid == 0:
                return
            self.ended(pid, os.waitstatus_to_exitcode(status))

    def _last_words(self) -> str:
        try:
            lines = (self._folder / "log").read_text("utf-8", "replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:500] if lines else f"the publishing process ended with {self._code}"


_LONGER = "pass a longer --record-timeout, or run: cachectl build RECIPE"


def _recorded(reasons: Iterable[Reason], started: float) -> dict[str, Any]:
    return {
        "entries": [],
        "warm_set": None,
        "reasons": [reason.to_json() for reason in reasons],
        "seconds": time.monotonic() - started,
    }
