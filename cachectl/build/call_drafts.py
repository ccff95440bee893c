"""Call drafts: what a program's process recorded of its cold calls, before anything of it is proved.

Owns the folder that lies between the program's processes and the one that publishes, and the draft's document:

    <exec's folder>/record/
      job.json             what may be recorded: the recipe, and the request as this machine has it (cachectl.build.job)
      refused.json         in its place: the reason why nothing is recorded
      drafts/<pid>-<n>/    one recorded call; appears whole, by rename
        draft.json
        files.json           the artifact's files, once they are in the store
        harvest/           the artifact's folder, as the runtime saved it

The document, `draft.json`: `{"method", "rank", "refused": reason}` for a call of which nothing can be kept, else

    {"method", "rank", "sources": {inputs reference: {"document", "raw"}}, "inputs", "found", "placed", "guards",
     "environ": {name: value}, "started": {name: value}, "variables": [name], "hash_seed",
     "runtime", "runtime_path", "guard_count", "cold_seconds", "warnings"}

Which case a call is, only the process that proves it can tell, since only the recipe's inputs function says what a case
looks like; so what depends on the case is there for each. Values that hold secrets are in no draft. Light: no torch.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachectl.build.job import write_json
from cachectl.errors import DocumentError
from cachectl.schemas.boot import Reason
from cachectl.schemas.keying import is_secret_name, without_credentials

__all__ = [
    "CallDraft",
    "leave_draft",
    "leave_refusal",
    "read_drafts",
    "record_folder",
    "refusal",
    "sayable_environment",
]

_count = itertools.count()


@dataclass(frozen=True)
class CallDraft:
    """One recorded call: its folder and its document."""

    folder: Path
    document: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.document["method"])

    def is_of(self, method: str) -> bool:
        """Say whether a recipe's method may be the draft's: of a path like `draft.main_decode` the program's process
        knows the last part.
        """
        return method.rpartition(".")[2] == self.method

    @property
    def rank(self) -> int:
        return int(self.document["rank"])

    @property
    def harvest(self) -> Path:
        """The artifact's folder."""
        return self.folder / "harvest"

    @property
    def files(self) -> Path:
        """Where the publishing process lists the artifact's files with their digests."""
        return self.folder / "files.json"

    @property
    def refused(self) -> Reason | None:
        """Why nothing of the call was kept; None for a whole draft."""
        found = self.document.get("refused")
        return Reason(**found) if found is not None else None


def record_folder(exec_folder: Path) -> Path:
    """Return where the drafts of one run of exec lie."""
    return exec_folder / "record"


def leave_draft(folder: Path, document: Mapping[str, Any], artifact: Path | None = None) -> None:
    """Leave one draft in a record folder; a reader sees all of it or nothing. Raises OSError."""
    name = f"{os.getpid()}-{next(_count)}"
    pending = folder / "drafts" / f".{name}"
    try:
        pending.mkdir(parents=True)
        if artifact is not None:
            shutil.copytree(artifact, pending / "harvest")
        write_json(pending / "draft.json", dict(document))
        os.rename(pending, folder / "drafts" / name)
    except BaseException:
        shutil.rmtree(pending, ignore_errors=True)
        raise


def leave_refusal(folder: Path, reason: Reason) -> None:
    """Say in a record folder that nothing is recorded, and why. Raises OSError."""
    write_json(folder / "refused.json", reason.to_json())


def refusal(folder: Path) -> Reason | None:
    """Return why nothing is recorded; None where that was not said. Raises DocumentError."""
    path = folder / "refused.json"
    try:
        return Reason(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DocumentError(f"can't read {path}: {error}") from error


def read_drafts(folder: Path) -> list[CallDraft]:
    """Return the drafts of a record folder, in the order of their names. Raises DocumentError."""
    drafts = []
    for path in sorted(folder.glob("drafts/[0-9]*/draft.json")):
        try:
            draft = CallDraft(path.parent, json.loads(path.read_bytes()))
            _ = draft.method, draft.rank, draft.refused
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DocumentError(f"can't read the draft {path}: {error}") from error
        drafts.append(draft)
    return drafts


def sayable_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that may be written down: of a secret only that it is set, of a URL no credentials."""
    return {name: "" if is_secret_name(name) else without_credentials(value) for name, value in environ.items()}
