"""What the launcher tells a rank process, and what the rank process answers: documents in the build's workspace.

Owns the workspace's layout and the event lines. Light: imported by the launcher too, so no torch here.

    <workspace>/
      job.json                what to build
      ended.json              how ranks ended that ended badly, where torchrun started them
      rank<r>/events.jsonl    one line a phase, appended
      rank<r>/record.json     what recording found, written last
      rank<r>/reload.json     what the second process found
      rank<r>/<case id>/cache the runtime's cache_dir of one case
      rank<r>/<case id>/shown.json what recording showed, for the second process to compare
      rank<r>/<case id>/told-<phase>.json what a phase found of this case, as soon as it is known
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachectl.errors import BuildError, CachectlError, ConfigError, DocumentError, EnvironmentFault
from cachectl.identity.source_files import imported_files

__all__ = [
    "ENDED",
    "RECORDED",
    "CaseJob",
    "EventLog",
    "Job",
    "absent_document",
    "die_with",
    "failure_document",
    "failure_of",
    "write_json",
]

ENDED = "ended.json"
RECORDED = "shown.json"


@dataclass(frozen=True)
class CaseJob:
    """One case to build: `index` names its folder; `case` is the recipe's case document."""

    index: int
    method: str
    case: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.case["name"])


@dataclass(frozen=True)
class Job:
    """A build of some cases of one recipe on every rank of its world.

    `logs` are the ranks' own log files, by rank; without them a rank writes where whoever started it said. `meeting`
    names the build where ranks meet through a launcher's store. `ranks_per_node` is how the world is cut into nodes,
    None for a world of one and where nobody knows.
    """

    recipe: dict[str, Any]
    recipe_folder: Path
    workspace: Path
    request: dict[str, Any]
    cases: tuple[CaseJob, ...]
    world_size: int
    logs: tuple[Path, ...] = ()
    meeting: str = "build"
    ranks_per_node: int | None = None

    def rank_folder(self, rank: int) -> Path:
        return self.workspace / f"rank{rank}"

    def case_folder(self, rank: int, case: CaseJob) -> Path:
        return self.rank_folder(rank) / f"case{case.index}"

    def told(self, rank: int, case: CaseJob, phase: str) -> Path:
        return self.case_folder(rank, case) / f"told-{phase}.json"

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(self.recipe["model"]["path"])

    def write(self) -> Path:
        """Write job.json; return its path."""
        path = self.workspace / "job.json"
        write_json(
            path,
            {
                "recipe": self.recipe,
                "recipe_folder": str(self.recipe_folder),
                "workspace": str(self.workspace),
                "request": self.request,
                "cases": [{"index": case.index, "method": case.method, "case": case.case} for case in self.cases],
                "world_size": self.world_size,
                "logs": [str(path) for path in self.logs],
                "meeting": self.meeting,
                "ranks_per_node": self.ranks_per_node,
            },
        )
        return path

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read job.json. Raises DocumentError."""
        try:
            document = json.loads(path.read_bytes())
            return cls(
                recipe=document["recipe"],
                recipe_folder=Path(document["recipe_folder"]),
                workspace=Path(document["workspace"]),
                request=document["request"],
                cases=tuple(CaseJob(item["index"], item["method"], item["case"]) for item in document["cases"]),
                world_size=int(document["world_size"]),
                logs=tuple(Path(path) for path in document["logs"]),
                meeting=str(document["meeting"]),
                ranks_per_node=document["ranks_per_node"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"can't read the build job {path}: {error}") from error


class EventLog:
    """Appends a rank's phases to its events file; the launcher follows it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / "events.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - as long as the process

    def phase(self, case: CaseJob | None, phase: str) -> None:
        """Say which phase begins, for which case (None: for the rank)."""
        line = {"case": case.index if case is not None else None, "phase": phase, "at": time.time()}
        self._file.write(json.dumps(line) + "\n")

    def told(self, case: CaseJob, phase: str) -> None:
        """Say that what a phase found of a case lies there, while the rank goes on with the next one."""
        self._file.write(json.dumps({"case": case.index, "told": phase}) + "\n")

    def close(self) -> None:
        """Close the file; no phase can be said any more."""
        self._file.close()


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document of the workspace; a reader sees all of it or nothing."""
    pending = path.with_name(f".{path.name}.{os.getpid()}")
    pending.write_text(json.dumps(document), encoding="utf-8")
    os.replace(pending, path)


_FAILURES: dict[str, type[CachectlError]] = {
    "config": ConfigError,
    "environment": EnvironmentFault,
    "build": BuildError,
}


def failure_document(
    error: CachectlError, case: CaseJob | None, *, of_peer: bool = False, refused: bool = False
) -> dict[str, Any]:
    """Return an error as the rank process reports it.

    Args:
        of_peer: whether it says no more than that another rank is gone: then that one's error is the first.
        refused: whether a gate refused what the case is, so that trying once more ends in the same way.
    """
    kind = next((name for name, known in _FAILURES.items() if isinstance(error, known)), "environment")
    return {
        "kind": kind,
        "message": error.message,
        "hint": error.hint,
        "case": case.index if case is not None else None,
        "of_peer": of_peer,
        "refused": refused,
        "at": time.time(),
    }


def absent_document(error: CachectlError, roots: Mapping[str, Path]) -> dict[str, Any]:
    """Return how a rank says that its model has no method for a case, with the code from which that follows."""
    return {"message": error.message, "hint": error.hint, "files": imported_files(roots)}


def failure_of(document: dict[str, Any], rank: int, log_path: Path) -> CachectlError:
    """Return the error that a rank process reported; its hint names the log."""
    kind = _FAILURES.get(str(document.get("kind")), BuildError)
    error = kind(str(document.get("message")), hint=document.get("hint"))
    if isinstance(error, BuildError):
        error.log_path = log_path
        error.refused = bool(document.get("refused"))
    else:
        error.hint = (error.hint or "see the rank's log").replace("the rank's log", str(log_path))
    error.rank = rank
    return error


def die_with(pid: int) -> None:
    """Have the kernel kill this process when process `pid`, which started it, is gone."""
    # prctl(2) PR_SET_PDEATHSIG; the watch is the kernel's, so that a process stuck in native code ends too.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != pid:
        os.kill(os.getpid(), signal.SIGKILL)  # It went before it was watched.
