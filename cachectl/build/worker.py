"""A rank process of a build: `python -m cachectl.build.worker record|reload|adopt|check|triage-<stage> JOB [LAUNCHER]`.

Owns the process's entry: read the job, run its cases, report or fail in one document. Started once per rank by the
launcher, or by torchrun, whose RANK it obeys. Its stdout and stderr are the rank's log. It does not outlive the
launcher whose process id it was given, not even one that was killed. The last thing a rank of several does is to wait
for the others, after its document is written.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from cachectl.build.job import CaseJob, EventLog, Job, absent_document, die_with, failure_document, write_json
from cachectl.errors import BuildError, CachectlError, ConfigError, EnvironmentFault

__all__ = ["main"]

RESULTS = {"record": "record.json", "reload": "reload.json", "adopt": "adopt.json", "check": "check.json"}
TRIAGE_STAGES = ("eager", "aot_eager", "force_eager", "npugraph_ex", "options", "cache")
RESULTS |= {f"triage-{stage}": f"triage-{stage}.json" for stage in TRIAGE_STAGES}
# Phases whose cases are kept one by one: a build that is killed loses the one it is at.
_TOLD = ("record", "reload")
# Set for the second attempt of a check, whose model can't be made under fake tensors.
_CHECK_REAL = "CACHECTL_CHECK_REAL"


def main(arguments: list[str]) -> int:
    """Run one phase of a job on this rank; return 0, or 1 with the failure in the rank's result document."""
    phase, job_path, *launcher = arguments
    for pid in launcher:
        die_with(int(pid))
    job = Job.read(Path(job_path))
    rank = int(os.environ.get("RANK", "0")) if job.world_size > 1 else 0
    if job.logs:
        _write_to(job.logs[rank])
    folder = job.rank_folder(rank)
    events = EventLog(folder)
    document: dict[str, Any] = {"rank": rank, "cases": {}, "failure": None}
    program: Any = None
    case: CaseJob | None = None
    try:
        # Imports torch: a broken installation is a failure with a document too.
        program = _program(phase, job, rank, events, arguments)
        program.start(phase)
        for case in job.cases:
            document["cases"][str(case.index)] = found = _run(phase, program, job, case, events)
            if phase in _TOLD:
                _tell(phase, job, rank, case, found, events)
        case = None
        if phase == "check":
            document |= program.summary()
    except CachectlError as error:
        traceback.print_exc()
        of_peer = _is_of_peer(program, error)
        refused = isinstance(error, BuildError) and case is not None and not of_peer
        document["failure"] = failure_document(error, case, of_peer=of_peer, refused=refused)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code runs in here, and may raise anything
        traceback.print_exc()
        blamed = _blamed(error, phase, program, case)
        document["failure"] = failure_document(blamed, case, of_peer=_is_of_peer(program, error))
    write_json(folder / RESULTS[phase], document)
    events.close()
    code = 0 if document["failure"] is None else 1
    if code == 0 and job.world_size > 1:
        program.leave()
    if program is not None and program.ran_script:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _program(phase: str, job: Job, rank: int, events: EventLog, arguments: list[str]) -> Any:
    if phase != "check":
        from cachectl.build.program import RankProgram

        return RankProgram(job, rank, events)
    from cachectl.build.checking import CheckedProgram

    def again() -> NoReturn:
        # In place: the launcher follows this process, and what ran in it under fakes is gone.
        os.environ[_CHECK_REAL] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "cachectl.build.worker", *arguments])  # noqa: S606 - no shell

    return CheckedProgram(job, rank, events, real=_CHECK_REAL in os.environ, again=again)


def _write_to(log_path: Path) -> None:
    """Let what this process and its children print go to a file of this rank's own."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _is_of_peer(program: Any, error: BaseException) -> bool:
    return program is not None and bool(program.is_of_peer(error))


def _run(phase: str, program: Any, job: Job, case: CaseJob, events: EventLog) -> dict[str, Any]:
    if phase == "adopt":
        return _adopt(program, job, case, events)
    if phase == "check":
        program.check(case)
        return {}
    if job.world_size > 1 and (absence := program.absence(case)) is not None:
        events.phase(case, "absent")
        return {"absent": absent_document(absence, program.roots)}
    if phase.startswith("triage-"):
        from cachectl.build.triage import run_stage

        return run_stage(phase, program, job, case, events)
    if phase == "record":
        from cachectl.build.recording import record_case

        return record_case(program, job, case, events)
    from cachectl.build.reloading import reload_case

    manifest = json.loads((job.case_folder(program.rank, case) / "entry.json").read_bytes())
    return reload_case(program, job, case, manifest, events)


def _tell(phase: str, job: Job, rank: int, case: CaseJob, found: dict[str, Any], events: EventLog) -> None:
    """Leave what was found of one case where the build reads it at once."""
    path = job.told(rank, case, phase)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    events.told(case, phase)


def _adopt(program: Any, job: Job, case: CaseJob, events: EventLog) -> dict[str, Any]:
    """Prove a recorded case; where no other rank waits for this one, a case that fails does not end the others."""
    from cachectl.build.adopting import adopt_case

    try:
        return adopt_case(program, job, case, events)
    except (Exception, SystemExit) as error:
        if job.world_size > 1:
            raise
        traceback.print_exc()
        refused = error if isinstance(error, CachectlError) else _blamed(error, "reload", program, case)
        program.doing = None
        return {"failure": failure_document(refused, case)}


def _blamed(error: BaseException, phase: str, program: Any, case: CaseJob | None) -> CachectlError:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:800]}"
    if program is None:
        return EnvironmentFault(f"torch can't be imported: {text}", hint="see the rank's log for its traceback")
    if program.doing is not None:
        # triage calls the recipe's code to find out where it fails.
        kind = BuildError if phase.startswith("triage-") and ": importing " not in program.doing.what else ConfigError
        return kind(f"{program.doing.what} raised {text}", hint=program.doing.hint)
    where = f"{case.method} [{case.name}]: " if case is not None else ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFault(f"{where}{text}", hint="free space, or set TMPDIR to a folder with room to build in")
    if phase == "reload" and case is not None:
        # As for inputs that share memory and are written: the runtime drops what torch puts around the graph.
        return BuildError(
            f"{where}a fresh process can't run what was saved: {text}",
            hint="the entry is not cacheable as it stands; see the rank's log for the traceback",
        )
    return BuildError(f"{where}{text}", hint="see the rank's log for its traceback")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
