"""What `cachectl triage` and its ranks tell each other beside the job: names of files in the workspace.

Owns those names. Light: imported by the launcher's side too, so no torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cachectl.build.job import CaseJob, Job

__all__ = ["INERT_ADVICE", "SETTINGS", "identity_file", "stage_file"]

# In the workspace: what the command line said.
SETTINGS: Final = "triage.json"
INERT_ADVICE: Final = (
    "the runtime's key is str(model) and the options: give the module a repr without addresses, and custom passes no "
    "inner functions"
)


def stage_file(job: Job, rank: int, phase: str, case: CaseJob) -> Path:
    """Return where a rank writes what a stage found for a case, also where the process then fails."""
    return job.rank_folder(rank) / f"{phase}.case{case.index}.json"


def identity_file(workspace: Path, rank: int, case: CaseJob) -> Path:
    """Return where a rank writes what the runtime's key of a case is made of, for a later process to compare."""
    return workspace / f"identity.rank{rank}.case{case.index}.json"
