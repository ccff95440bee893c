"""What became of starts after a hand-out, and which entries a node keeps away from after two deaths.

Owns `<warm dir>/starts`. Each process that starts on a hand-out leaves an open log there and holds its lock, so the
kernel lets go of it when the process is gone, however it went. Lines are added when the runtime begins to load an
entry, when the first call through it came back, and when the process ends of its own will:

    starts/open/<id>            the log of a start that is not settled (boot/start_log.py)
    starts/entries/<id>.json    {"schema", "key", "name", "deaths": [{"start", "at", "at_s", "how"}…]}
    starts/lock                 held while a file of `entries` is changed

A log whose lock is free is settled by the next hook or the next start: entries that were begun and did not succeed
died; where none was begun and none succeeded, all that were held did, unless the process ended of its own will. An
entry with two deaths and no success in between is refused here until `cachectl release KEY`, until it is built anew
(its id takes in the artifact), or for a week. A success forgets its deaths.

What can't be read or written is ignored and told; nothing here raises into a boot, and later calls cost nothing.
Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cachectl.boot.acting import own_folder
from cachectl.boot.claims import try_lock
from cachectl.boot.start_log import StartLog, describe
from cachectl.errors import StoreError
from cachectl.schemas.boot import Reason, StoredEntry
from cachectl.schemas.canonical import canonical_bytes
from cachectl.store.layout import bare_hex, read_bounded
from cachectl.values import dataclass, field, replace

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["DEATHS_ALLOWED", "DEATH_DAYS", "Death", "QuarantinedError", "Starts"]

DEATHS_SCHEMA = "cachectl/deaths/v1"
# The third start is cold.
DEATHS_ALLOWED = 2
DEATH_DAYS = 7
# Of Linux; the module `signal` costs each hook a millisecond.
_LAST_SIGNAL = 64
_ENTRIES_KEPT = 256
_DEATHS_KEPT = 8
_LIMIT_BYTES = 1 << 20
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.01
_ABANDONED_S = 60.0
_MEND = "build it anew, or find out why and run: cachectl release"
_MALFORMED = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class QuarantinedError(StoreError):
    """A warm set holds entries that this node keeps away from; `reason` says which and why."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        first, others = reasons[0], reasons[1:]
        # One command for all of them.
        words = [reason.hint.rpartition(" ")[2] for reason in others]
        self.reason = replace(first, hint=" ".join([first.hint, *words]))
        super().__init__(str(self.reason), hint=self.reason.hint)


@dataclass(frozen=True)
class Death:
    """One start that did not survive an entry. `start` counts once, whoever finds out first."""

    start: str
    # When it was found out, in seconds since 1970.
    at_s: float
    how: str

    @property
    def at(self) -> str:
        """When, in UTC."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.at_s))


@dataclass
class Starts:
    """The starts of one warm dir. Nothing is made before something has to be written."""

    root: Path
    # What could not be read or written, told once.
    problems: list[Reason] = field(default_factory=list)
    # Deaths that were found by `settle(write=False)`.
    _unwritten: dict[str, list[Death]] = field(default_factory=dict)

    @classmethod
    def of(cls, warm_dir: Path) -> Starts:
        """Return the starts of a warm dir."""
        return cls(warm_dir / "starts")

    @property
    def open(self) -> Path:
        """Where the logs of starts that are not settled lie."""
        return self.root / "open"

    def settle(self, *, write: bool = True) -> None:
        """Find the starts whose process is gone, and note what died with them. Never raises.

        The processes of an exec that lives are left to it: it knows how they ended.

        Args:
            write: else nothing is changed, and only this object knows what was found.
        """
        for path in sorted(self._logs(), key=self._is_of_process):
            with self._gone(path) as gone:
                if not gone:
                    continue
                log = self._read(path)
                if log is None or (log.exec_id not in (None, path.name) and self._lives(self.open / str(log.exec_id))):
                    continue
                # exec died with its program: the processes' own logs, settled after it, say more than exec's.
                alone = log.exec_id != path.name or not self._of_exec(path.name)
                # Nobody saw how it ended: what it only had in its environment is not to blame.
                lost = log.lost(count_held=log.using or log.exec_id == path.name) if alone else []
                self._note(log, lost, "gone without a word" if not log.ended else "its first call failed", write)

    def settle_exec(self, exec_id: str, *, pid: int, code: int, asked: bool) -> None:
        """Settle the processes of an exec that is about to end, and exec's own log. Never raises.

        Args:
            exec_id: name of exec's log.
            pid: CMD's process.
            code: CMD's exit code, above 128 where a signal ended it.
            asked: whether somebody asked CMD to end: a rollout is no crash.
        """
        # Above the signals' numbers it is a code of CMD's own, as 255 of sys.exit(-1).
        crashed = 128 < code <= 128 + _LAST_SIGNAL and not asked
        found = False
        for path in self._of_exec(exec_id):
            found = True
            with self._gone(path) as gone:
                log = self._read(path) if gone else None
                if log is not None:
                    # Of its own process exec knows how it ended; of CMD's children only that they are gone.
                    child_died = log.using and code != 0 and not asked
                    lost = log.lost(count_held=crashed if log.pid == pid else child_died)
                    how = f"exit code {code}" if log.pid == pid else "gone without a word"
                    self._note(log, lost, "its first call failed" if log.ended else how, True)
        path = self.open / exec_id
        log = self._read(path)
        if log is not None:
            self._note(log, log.lost(count_held=crashed and not found), f"exit code {code}", True)

    def refusal(self, entry: StoredEntry, now_s: float | None = None) -> Reason | None:
        """Return why this node keeps away from an entry; None where it does not. Never raises."""
        name, key, what = describe(entry)
        now_s = time.time() if now_s is None else now_s
        deaths = {death.start: death for death in self._deaths(name)}
        deaths.update((death.start, death) for death in self._unwritten.get(name, ()))
        recent = [death for death in deaths.values() if abs(now_s - death.at_s) <= DEATH_DAYS * 86400]
        if len(recent) < DEATHS_ALLOWED:
            return None
        recent = sorted(recent, key=lambda death: death.at_s)[-DEATHS_ALLOWED:]
        stored = f"{what}: starts died at {', '.join(death.at for death in recent)}"
        hint = f"{key}: starts died of it ({', '.join(death.how for death in recent)}); {_MEND} {bare_hex(key)[:12]}"
        return Reason("policy", "quarantine", stored, None, "policy", hint)

    def succeeded(self, name: str) -> None:
        """Forget an entry's deaths: a start came through. Never raises."""
        path = self._state(name)
        if os.path.lexists(path):
            with self._locked() as locked:
                if locked:
                    _unlink(path)

    def quarantined(self) -> list[dict[str, Any]]:
        """Return what is known of every entry with a death: key, name, deaths; the newest last. Never raises."""
        found = []
        for path in _listed(self.root / "entries"):
            try:
                document = _read_state(path)
                deaths = [{"at": death.at, "how": death.how} for death in _deaths_of(document)]
                found.append(
                    {"key": str(document["key"]), "name": str(document["name"]), "deaths": deaths, "path": path}
                )
            except _MALFORMED as error:
                self._tell(path, error)
        return sorted(found, key=lambda item: item["deaths"][-1]["at"] if item["deaths"] else "")

    def release(self, path: Path) -> None:
        """Forget an entry's deaths, given where they lie. Never raises."""
        with self._locked() as locked:
            if locked:
                _unlink(path)

    def note_death(self, item: tuple[str, str, str], death: Death) -> bool:
        """Add a death to an entry's; say whether it is noted now. Never raises."""
        name, key, what = item
        with self._locked() as locked:
            if not locked:
                return False
            known = {death.start: death for death in self._deaths(name)}
            known.setdefault(death.start, death)
            deaths = sorted(known.values(), key=lambda death: death.at_s)[-_DEATHS_KEPT:]
            document = {
                "schema": DEATHS_SCHEMA,
                "key": key,
                "name": what,
                "deaths": [{"start": d.start, "at": d.at, "at_s": d.at_s, "how": d.how} for d in deaths],
            }
            try:
                self._write_state(self._state(name), document)
                self._prune()
            except OSError as error:
                self._tell(self._state(name), error)
                return False
        return True

    def _note(self, log: StartLog, lost: Iterable[tuple[str, str, str]], how: str, write: bool) -> None:
        """Note the deaths of a log, then remove it: noted again after a kill in between, they are still the same."""
        noted = True
        for item in lost:
            death = Death(log.start, time.time(), how)
            if write:
                noted = self.note_death(item, death) and noted
            else:
                self._unwritten.setdefault(item[0], []).append(death)
        if write and noted:
            _unlink(log.path)

    def _logs(self) -> list[Path]:
        return [path for path in _listed(self.open, hidden=True) if not _left_over(path)]

    def _is_of_process(self, path: Path) -> bool:
        log = self._read(path, tell=False)
        return log is None or log.exec_id != path.name

    def _of_exec(self, exec_id: str) -> list[Path]:
        """Return the logs of an exec's processes."""
        found = []
        for path in self._logs():
            log = self._read(path, tell=False) if path.name != exec_id else None
            if log is not None and log.exec_id == exec_id:
                found.append(path)
        return found

    def _read(self, path: Path, *, tell: bool = True) -> StartLog | None:
        try:
            return StartLog.read(path)
        except FileNotFoundError:
            return None
        except _MALFORMED as error:
            if tell:
                self._tell(path, error)
                # Of no use to anybody, and it would be told at every start.
                _unlink(path)
            return None

    @contextmanager
    def _gone(self, path: Path) -> Iterator[bool]:
        """Hold a log's lock; False where its process lives, or another process is settling it."""
        try:
            descriptor = os.open(path, os.O_RDWR | _FILE)
        except OSError:
            yield False
            return
        try:
            yield try_lock(descriptor, fcntl.LOCK_EX) is True and os.path.lexists(path)
        finally:
            os.close(descriptor)

    def _lives(self, path: Path) -> bool:
        with self._gone(path) as gone:
            return not gone and os.path.lexists(path)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock on the entries' files; False where it is not to be had in half a second."""
        try:
            self.own_folders()
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | _FILE, 0o600)
        except OSError:
            yield False
            return
        try:
            for _ in range(_LOCK_TRIES):
                # A file system without locks: two writers may lose one death between them, no more.
                if try_lock(descriptor, fcntl.LOCK_EX) is not False:
                    yield True
                    return
                time.sleep(_LOCK_PAUSE_S)
            yield False
        finally:
            os.close(descriptor)

    def own_folders(self) -> None:
        """Make the folders where they are missing. Raises OSError."""
        for folder in (self.root, self.open, self.root / "entries"):
            own_folder(folder)

    def _state(self, name: str) -> Path:
        return self.root / "entries" / f"{name}.json"

    def _deaths(self, name: str) -> list[Death]:
        path = self._state(name)
        try:
            return _deaths_of(_read_state(path))
        except FileNotFoundError:
            return []
        except _MALFORMED as error:
            self._tell(path, error)
            return []

    def _write_state(self, path: Path, document: Mapping[str, Any]) -> None:
        pending = path.with_name(f".{path.name}")
        _unlink(pending)
        descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(canonical_bytes(document))
        os.replace(pending, path)

    def _prune(self) -> None:
        """Keep the newest files of entries."""
        paths = _listed(self.root / "entries")
        if len(paths) > _ENTRIES_KEPT:
            paths.sort(key=lambda path: path.lstat().st_mtime)
            for path in paths[:-_ENTRIES_KEPT]:
                _unlink(path)

    def _tell(self, path: Path, error: Exception) -> None:
        text = f"{path}: {error}"
        if all(problem.stored != text for problem in self.problems):
            hint = "what happened to earlier starts is not known: remove the file if it stays"
            self.problems.append(Reason("store", "starts", text, None, "corrupt", hint))


def _read_state(path: Path) -> Mapping[str, Any]:
    document = json.loads(read_bounded(path, _LIMIT_BYTES))
    if document["schema"] != DEATHS_SCHEMA:
        raise ValueError(f"schema {document['schema']!r}, this program reads {DEATHS_SCHEMA!r}")
    found: Mapping[str, Any] = document
    return found


def _deaths_of(document: Mapping[str, Any]) -> list[Death]:
    return [Death(str(item["start"]), float(item["at_s"]), str(item["how"])) for item in document["deaths"]]


def _listed(folder: Path, *, hidden: bool = False) -> list[Path]:
    try:
        names: Collection[str] = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in sorted(names) if hidden or not name.startswith(".")]


def _left_over(path: Path) -> bool:
    """Say whether a log is one that was never begun; what a killed process left goes after a while."""
    if not path.name.startswith("."):
        return False
    try:
        if time.time() - path.lstat().st_mtime > _ABANDONED_S:
            _unlink(path)
    except OSError:
        pass  # Renamed meanwhile.
    return True


def _unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # Gone, or not ours.
