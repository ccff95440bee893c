"""Runs a command as a child: its signals, its exit code, and whoever else ends meanwhile.

Owns what exec and record do between the start of CMD and its end. Standard library only: it stands in every start.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from cachectl.boot.report import say
from cachectl.boot.watch import StartWatch

__all__ = ["DEFAULT_AGAIN", "Beside", "not_run", "run_command"]

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
_SIGNALLED = 128
_FORWARDED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH}
)
# Python ignores these two, and an ignored signal stays ignored in a child: `CMD | head` would not end.
DEFAULT_AGAIN = (signal.SIGPIPE, signal.SIGXFSZ)


class Beside(Protocol):
    """What works beside CMD in processes of its own; see cachectl.publishing."""

    told_to_stop: bool

    def prepare(self, mask: Iterable[int]) -> None: ...
    def ended(self, pid: int, code: int) -> None: ...


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    publishing: Beside | None = None,
    watch: StartWatch | None = None,
    stdout: int | None = None,
) -> int:
    """Run CMD as a child, forward signals to it, and return its exit code as a shell would say it.

    The signals stay blocked in this process: what comes while the report is completed must not take CMD's exit code.

    Args:
        stdout: the descriptor that CMD writes its results to; None for this process's own.
    """
    watched = _FORWARDED | {signal.SIGCHLD}
    # Inherited as ignored it would never arrive, and nobody could wait for the child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        child = os.posix_spawnp(
            command[0],
            list(command),
            dict(environ),
            file_actions=[] if stdout is None else [(os.POSIX_SPAWN_DUP2, stdout, 1)],
            setsigmask=before,
            setsigdef=DEFAULT_AGAIN,
        )
    except OSError as error:
        return not_run(command[0], error)
    if watch is not None:
        watch.command_pid = child
    if publishing is not None:
        publishing.prepare(before)
    while True:
        arrived = signal.sigwaitinfo(watched)
        if arrived.si_signo == signal.SIGCHLD:
            code = _reaped(child, publishing)
            if code is not None:
                return code
        elif arrived.si_code <= 0:
            # Sent to us by a process. What a terminal sends goes to its whole foreground group: CMD has got it.
            os.kill(child, arrived.si_signo)
            if watch is not None:
                watch.asked_to_end(arrived.si_signo)
            if publishing is not None and arrived.si_signo == signal.SIGTERM:
                publishing.told_to_stop = True


def _reaped(child: int, publishing: Beside | None) -> int | None:
    """Collect every child that ended: as a container's first process we inherit orphans. Return CMD's exit code."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == 0:
            return code
        exit_code = os.waitstatus_to_exitcode(status)
        if ended == child:
            code = exit_code if exit_code >= 0 else _SIGNALLED - exit_code
        elif publishing is not None:
            publishing.ended(ended, exit_code)


def not_run(name: str, error: OSError) -> int:
    """Say why a command could not be run; return the exit code that a shell gives."""
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    reason = "command not found" if missing and os.sep not in name else error.strerror
    say(f"{name}: {reason}")
    return _NOT_FOUND if missing else _NOT_EXECUTABLE
