"""What exec leaves for the program's processes, and the report that they and exec make of it.

Owns the folder between them, private to one run:

    <folder>/
      lift            there where torch.compile is to be replaced, too
      seen.*          how far CMD's processes came; see cachectl.boot.reach
      exec.json       what was asked for and the hook's document, written by exec before CMD starts
      <pid>.json      what one process found; replaced after the first call of each case, and when it ends
      lock            held while the report is put together

The report file that the user named is always whole: it is replaced, by whichever process has something new. Standard
library only. Nothing here raises into a program.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cachectl.boot.handout import Handout, HookSeconds
from cachectl.boot.reach import unreached
from cachectl.errors import DocumentError
from cachectl.schemas.boot import Reason

__all__ = ["EXEC_VARIABLE", "ExecNote", "overall", "say"]

EXEC_SCHEMA = "cachectl/exec/v1"
EXEC_VARIABLE = "CACHECTL_EXEC"
# The worst first; what none says is left out of the whole.
_WORST_FIRST = ("cold", "inert", "degraded", "observed", "warm", "unused")
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.01
_STAGES = ("import", "hook", "proof", "load", "capture", "first_call")


def overall(outcomes: Iterable[str]) -> str:
    """Return what several methods or ranks are together: what the worst of them is; `unused` where there is none."""
    found = set(outcomes)
    return next((outcome for outcome in _WORST_FIRST if outcome in found), "unused")


def say(text: str) -> None:
    """Write one line of ours to the program's stderr; never raises."""
    try:
        sys.stderr.write(f"cachectl: {' '.join(text.split())}\n")
    except (OSError, ValueError):
        pass  # Nobody listens.


@dataclass(frozen=True)
class ExecNote:
    """What exec tells the program's processes: the hook's document, and what to do with what they find."""

    folder: Path
    recipe_path: Path
    hook: Mapping[str, Any] = field(default_factory=dict)
    report: Path | None = None
    observe: bool = False
    warm_dir: str | None = None
    # Whether cold calls are recorded, and what became of it; None while CMD runs.
    record: bool = False
    recorded: Mapping[str, Any] | None = None
    # Whether torch.compile is replaced; a file `lift` says so to the start-up module.
    lift: bool = False
    # What of CMD keeps the start-up module out; see cachectl.boot.reach.
    isolated: str | None = None

    def write(self) -> None:
        """Leave the note. Raises OSError."""
        document = {
            "schema": EXEC_SCHEMA,
            "recipe_path": str(self.recipe_path),
            "hook": self.hook,
            "report": str(self.report) if self.report is not None else None,
            "observe": self.observe,
            "warm_dir": self.warm_dir,
            "record": self.record,
            "lift": self.lift,
        }
        _replace(self.folder / "exec.json", document)
        if self.lift:
            (self.folder / "lift").touch()

    @classmethod
    def read(cls, folder: Path) -> ExecNote:
        """Read what exec left.

        Raises:
            DocumentError: not there, not this user's, or malformed.
        """
        path = folder / "exec.json"
        try:
            with path.open("rb") as file:
                owner = os.fstat(file.fileno()).st_uid
                if owner != os.getuid():
                    raise DocumentError(f"{path} belongs to uid {owner}, this process is {os.getuid()}")
                document = json.loads(file.read())
            if document["schema"] != EXEC_SCHEMA:
                raise DocumentError(f"{path} has schema {document['schema']!r}, this program reads {EXEC_SCHEMA!r}")
            return cls(
                folder,
                Path(document["recipe_path"]),
                dict(document["hook"]),
                Path(document["report"]) if document["report"] is not None else None,
                bool(document["observe"]),
                document["warm_dir"],
                bool(document["record"]),
                lift=bool(document["lift"]),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DocumentError(f"can't read {path}: {error}") from error

    def handout(self, left: str | None) -> Handout:
        """Return the hook's result as it was in exec's process; what can't be read any more is a cold start.

        Args:
            left: path of the hand-out's document; None where the hook was cold.
        """
        reasons = tuple(Reason(**reason) for reason in self.hook["reasons"])
        seconds = HookSeconds(**self.hook["seconds"])
        cold = Handout(self.hook["outcome"], self.recipe_path, reasons=reasons, seconds=seconds)
        if self.hook["outcome"] != "warm":
            return cold
        try:
            found = Handout.read(Path(left or ""))
        except DocumentError as error:
            hint = "run the program as the user of exec"
            gone = Reason("store", "hand-out", error.message, kind="corrupt", hint=hint)
            return replace(cold, outcome="cold", reasons=(*reasons, gone))
        return replace(found, reasons=reasons, seconds=seconds)

    def add(self, part: Mapping[str, Any], *, rank: int | None) -> None:
        """Leave one process's findings and bring the report up to date; never raises.

        The process that is not let in by another one's lock leaves it to that one, and to exec at the end.
        """
        try:
            _replace(self.folder / f"{os.getpid()}.json", {**part, "rank": rank, "pid": os.getpid()})
            if self.report is not None:
                self.publish()
        except (OSError, ValueError, TypeError):
            pass  # A report that can't be written must not end a program.

    def publish(self) -> dict[str, Any]:
        """Put the report together from what there is, and write it where it was asked for. Raises OSError."""
        with (self.folder / "lock").open("w") as lock:
            locked = _try_lock(lock.fileno())
            document = self.document()
            if self.report is not None and locked:
                _replace(self.report, document)
            return document

    def document(self) -> dict[str, Any]:
        """Return the report: the hook's document, what the processes found, and what became of recording if asked."""
        return {**self._found(), **({"recorded": self.recorded} if self.record else {})}

    def _found(self) -> dict[str, Any]:
        """Return the hook's document with what the processes found; several of them are `ranks`."""
        parts = self._parts()
        if len(parts) == 1:
            return {name: value for name, value in parts[0].items() if name not in ("rank", "pid")}
        hook = dict(self.hook)
        if not parts:
            outcome, reasons = hook["outcome"], list(hook["reasons"])
            if outcome == "warm":
                outcome = "unused"
                reasons.append(unreached(self.folder, self.isolated).to_json())
            stages = {**dict.fromkeys(_STAGES), "hook": hook["seconds"]["total"]}
            found = {"outcome": outcome, "reasons": reasons, "proofs": [], "agreement": None, "stages": stages}
            return {**hook, **found}
        outcome = overall(part["outcome"] for part in parts)
        # A process that called nothing says why; beside others that did nobody asked.
        telling = [part for part in parts if part["outcome"] != "unused" or outcome == "unused"]
        told = {json.dumps(reason, sort_keys=True): reason for part in telling for reason in part["reasons"]}
        slowest: dict[str, float | None] = {}
        for name in _STAGES:
            seconds = [part["stages"][name] for part in parts if part["stages"][name] is not None]
            slowest[name] = max(seconds, default=None)
        return {
            **hook,
            "outcome": outcome,
            "reasons": list(told.values()),
            "proofs": [proof for part in parts for proof in part["proofs"]],
            "agreement": _agreed(parts),
            "stages": slowest,
            "ranks": [
                {
                    "rank": part["rank"],
                    "pid": part["pid"],
                    "outcome": part["outcome"],
                    "reasons": part["reasons"],
                    "proofs": part["proofs"],
                    "agreement": part["agreement"],
                    "stages": part["stages"],
                }
                for part in parts
            ],
        }

    def _parts(self) -> list[dict[str, Any]]:
        parts = []
        for path in self.folder.glob("[0-9]*.json"):
            try:
                parts.append(json.loads(path.read_bytes()))
            except (OSError, ValueError):
                continue  # Gone, or not ours: the others count.
        return sorted(parts, key=lambda part: (part["rank"] is None, part["rank"] or 0, part["pid"]))


def _agreed(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return each verdict once, as the rank that wrote it tells it, with the longest wait; None where there is none.

    One method has several verdicts only where ranks lost the store; each stands for itself.
    """
    verdicts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        ordinals: Counter[str] = Counter()
        for verdict in part["agreement"] or ():
            method, by = verdict["method"], verdict["by"]
            key = (method, ordinals[method], verdict["verdict"], by)
            ordinals[method] += 1
            before = verdicts.get(key)
            told = verdict if before is None or part["rank"] == by else before
            longest = max(verdict["seconds"], before["seconds"] if before is not None else 0.0)
            verdicts[key] = {**told, "seconds": longest}
    return list(verdicts.values()) or None


def _try_lock(descriptor: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    return False


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    pending = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pending.write_text(json.dumps(document) + "\n", encoding="utf-8")
        os.replace(pending, path)
    except BaseException:
        pending.unlink(missing_ok=True)
        raise
