"""One process on a hand-out: its claim, its log, and what of the hand-out it had better leave alone.

Owns the log that this process writes and holds (boot/starts.py reads it). A forked child has a log of its own from the
moment it loads something, and lets go of its parent's. Standard library only. Nothing here raises; where nothing can be
written, as on a read-only mount, nothing is, and the program runs the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cachectl.boot.claims import claim, try_lock
from cachectl.boot.handout import HandedEntry, Handout
from cachectl.boot.start_log import describe
from cachectl.boot.starts import Starts
from cachectl.schemas.boot import Reason, StoredEntry

__all__ = ["StartWatch", "warm_dir_of"]

# Signals by which somebody asks a program to end; a rollout is no crash.
_ASKED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE})
_watches: weakref.WeakSet[StartWatch] = weakref.WeakSet()


def warm_dir_of(folder: Path) -> Path | None:
    """Return the warm dir that a hand-out's folder lies in; None where it is in none of this user's."""
    root = folder.parent.parent
    if folder.parent.name != "handouts":
        return None
    for step in (root, folder.parent, folder):
        try:
            found = step.lstat()
        except OSError:
            return None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            return None
    return root


class StartWatch:
    """What this process tells the node about the hand-out it started on.

    `against` is why the hand-out can't be used at all; `refused` by entry why that one can't.

    Args:
        handout: the hand-out of this start; nothing is claimed where it is not warm.
        exec_id: name of the exec that this process runs under; None without one.
        is_exec: whether this process is that exec.
        ranks: the global ranks of this process, whose entries it may load; None for all.
    """

    def __init__(
        self,
        handout: Handout,
        *,
        exec_id: str | None = None,
        is_exec: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        self.against: Reason | None = None
        self.problems: list[Reason] = []
        self._exec_id = exec_id
        self._name = exec_id if is_exec and exec_id is not None else os.urandom(8).hex()
        self._starts: Starts | None = None
        self._descriptor: int | None = None
        self._pid = os.getpid()
        # As exec: CMD's process, and whether it was asked to end.
        self.command_pid = 0
        self._asked = False
        self._using = False
        self._handout = handout
        self._open: set[str] = set()
        self._refused: dict[str, Reason | None] = {}
        self._held: list[tuple[str, str, str]] = []
        if handout.outcome != "warm" or handout.folder is None:
            return
        try:
            self._start(handout, handout.folder, None if ranks is None else set(ranks))
        except OSError as error:
            self._tell(error)

    def refused(self, handed: HandedEntry) -> list[Reason]:
        """Return why this node keeps away from an entry; empty where it does not."""
        return self._refusal(handed.entry)

    def using(self) -> None:
        """Note that this process has a method which may load something of the hand-out."""
        if not self._using and self._pid == os.getpid():
            self._using = True
            self._add({"using": True})

    def begin(self, handed: HandedEntry) -> None:
        """Note that the runtime is about to load an entry."""
        item = describe(handed.entry)
        if self._pid != os.getpid():
            # A forked child: its parent's log is its parent's.
            self._pid, self._descriptor, self._open = os.getpid(), None, set()
            self._name = os.urandom(8).hex()
            self._open_log()
        self._open.add(item[0])
        self._add({"begin": item})

    def success(self, handed: HandedEntry) -> None:
        """Note that the first call through an entry came back."""
        name = describe(handed.entry)[0]
        self._open.discard(name)
        self._add({"success": name})
        if self._starts is not None:
            self._starts.succeeded(name)

    def cold(self) -> None:
        """Note that a first call came back that used nothing of the hand-out: a later end is not its doing."""
        if self._pid == os.getpid() and self._descriptor is not None:
            self._add({"cold": True})

    def withdraw(self, handed: HandedEntry) -> None:
        """Note that a load ended in another way than by the entry's fault: it was refused, or somebody interrupted."""
        name = describe(handed.entry)[0]
        self._open.discard(name)
        self._add({"withdrawn": name})

    def end(self) -> None:
        """Note that this process ends of its own will. Its log goes, unless there is something to settle."""
        if self._pid != os.getpid() or self._descriptor is None:
            return
        self._add({"end": True})
        if self._exec_id is None and not self._open:
            try:
                os.unlink(self._path())
            except OSError:
                pass  # The next start settles it.
        os.close(self._descriptor)
        self._descriptor = None

    def asked_to_end(self, signal_number: int) -> None:
        """Note, as exec, that somebody sent CMD a signal."""
        self._asked = self._asked or signal_number in _ASKED

    def end_of_command(self, code: int) -> None:
        """Note, as exec, CMD's exit code (128 + signal where one ended it); see `Starts.settle_exec`. Never raises."""
        if self._starts is not None and self._descriptor is not None:
            asked = self._asked or code - 128 in _ASKED
            self._starts.settle_exec(self._name, pid=self.command_pid, code=code, asked=asked)
            os.close(self._descriptor)
            self._descriptor = None

    def let_go(self) -> None:
        """Close, in a forked child, what is its parent's: else nobody would see the parent's end before the child's."""
        if self._descriptor is not None and self._pid != os.getpid():
            os.close(self._descriptor)
            self._descriptor = None

    def _start(self, handout: Handout, folder: Path, ranks: set[int] | None) -> None:
        problem = claim(folder)
        if problem is not None:
            hint = "run the hook again before the program"
            self.against = Reason("store", "hand-out", f"{folder}: {problem}", None, "absent", hint)
            return
        root = warm_dir_of(folder)
        if root is None:
            return
        self._starts = starts = Starts.of(root)
        starts.settle()
        self._held = [describe(item.entry) for item in handout.entries if ranks is None or item.entry.rank in ranks]
        for item in handout.entries:
            self._refusal(item.entry)
        self._open_log()
        self.problems += starts.problems

    def _refusal(self, entry: StoredEntry) -> list[Reason]:
        if self._starts is None:
            return []
        name = describe(entry)[0]
        if name not in self._refused:
            self._refused[name] = self._starts.refusal(entry)
        found = self._refused[name]
        return [found] if found is not None else []

    def _open_log(self) -> None:
        """Make this process's log: whole and locked before it can be seen."""
        if self._starts is None:
            return
        try:
            self._starts.own_folders()
            pending = self._starts.open / f".{self._name}"
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(pending, flags, 0o600)
        except OSError as error:
            self._tell(error)
            return
        # Without locks nobody could tell that this process lives.
        if not try_lock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            os.unlink(pending)
            return
        self._descriptor = descriptor
        held = [item for item in self._held if self._refused.get(item[0]) is None]
        head = {"at": time.time(), "exec": self._exec_id, "pid": os.getpid(), "held": held}
        if self._exec_id == self._name and self._handout.folder is not None:
            # exec has the hook's report only; who has to know reads the document.
            head["handout"] = str(self._handout.folder / "handout.json")
        self._add(head)
        os.rename(pending, self._path())
        _watches.add(self)

    def _add(self, event: Mapping[str, Any]) -> None:
        if self._descriptor is not None and self._pid == os.getpid():
            try:
                os.write(self._descriptor, json.dumps(event).encode() + b"\n")
            except OSError:
                pass  # A full disk. What is not noted is not known.

    def _path(self) -> Path:
        assert self._starts is not None
        return self._starts.open / self._name

    def _tell(self, error: OSError) -> None:
        hint = "what becomes of this start is not noted on this node"
        text = f"{error.filename or 'warm dir'}: {error.strerror}"
        self.problems.append(Reason("store", "starts", text, None, "policy", hint))


def _let_go() -> None:
    for watch in list(_watches):
        watch.let_go()


os.register_at_fork(after_in_child=_let_go)
