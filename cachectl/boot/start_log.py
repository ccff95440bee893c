"""The log of one start on a hand-out: what its process writes and who reads it when that is gone.

Owns the log's form:

    {"at", "exec", "pid", "held": [[id, key, name]…], "handout"}     first line; at in seconds since 1970
    {"using": true}  {"begin": [id, key, name]}  {"success": id}  {"withdrawn": id}  {"cold": true}  {"end": true}

`using` says that the process made a cached method: others that have the hand-out in their environment, such as workers
of a pool, never load anything. `exec` is the name of the log of the exec that the process runs under, `handout` the
document of the hand-out where `held` is empty. Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path

from cachectl.boot.handout import Handout
from cachectl.errors import DocumentError
from cachectl.schemas.boot import StoredEntry
from cachectl.schemas.canonical import canonical_bytes, digest_bytes
from cachectl.store.layout import bare_hex, read_bounded
from cachectl.values import dataclass, field

__all__ = ["StartLog", "describe", "state_id"]

_LIMIT_BYTES = 1 << 20


def state_id(entry: StoredEntry) -> str:
    """Return what an entry's deaths are kept by: its key and its files, so that one that was built anew is another."""
    files = [[item.path, item.digest, item.mode] for item in entry.files]
    return bare_hex(digest_bytes(canonical_bytes([entry.key, sorted(files)])))


def describe(entry: StoredEntry) -> tuple[str, str, str]:
    """Return id, key and name of an entry, as the logs hold it."""
    return state_id(entry), entry.key, f"{entry.method}/{entry.case} rank {entry.rank}"


@dataclass
class StartLog:
    """An open log as it was read."""

    path: Path
    start: str
    at_s: float = 0.0
    pid: int = 0
    exec_id: str | None = None
    handout: str | None = None
    held: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    begun: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    succeeded: set[str] = field(default_factory=set)
    using: bool = False
    cold: bool = False
    ended: bool = False

    @classmethod
    def read(cls, path: Path) -> StartLog:
        """Read a log, also one that breaks off. Raises OSError, ValueError, KeyError or TypeError."""
        lines = read_bounded(path, _LIMIT_BYTES).split(b"\n")
        head = json.loads(lines[0])
        held = {item[0]: (str(item[0]), str(item[1]), str(item[2])) for item in head["held"]}
        at_s, exec_id, handout = float(head["at"]), head["exec"], head.get("handout")
        log = cls(path, exec_id or path.name, at_s, int(head["pid"]), exec_id, handout, held)
        for line in lines[1:]:
            if not line.endswith(b"}"):
                continue  # Its process died while it wrote.
            event = json.loads(line)
            if "begin" in event:
                item = event["begin"]
                log.begun[item[0]] = (str(item[0]), str(item[1]), str(item[2]))
            log.begun.pop(event.get("withdrawn"), None)
            if "success" in event:
                log.succeeded.add(event["success"])
            log.using = log.using or "using" in event
            log.cold = log.cold or "cold" in event
            log.ended = log.ended or "end" in event
        return log

    def lost(self, *, count_held: bool = True) -> list[tuple[str, str, str]]:
        """Return the entries that died with this process, given that it is gone.

        Args:
            count_held: whether a process that is gone without a word, before anything was loaded, died of what it held.
        """
        lost = [item for name, item in self.begun.items() if name not in self.succeeded]
        if lost or self.ended or self.cold or self.succeeded or not count_held:
            return lost
        return list(self.held.values()) or self._handed()

    def _handed(self) -> list[tuple[str, str, str]]:
        """Return what the hand-out holds that this log names; exec's names no entries."""
        try:
            return [describe(item.entry) for item in Handout.read(Path(self.handout)).entries] if self.handout else []
        except DocumentError:
            return []  # Removed meanwhile.
