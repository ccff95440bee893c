"""Starting rank processes, following their phases, and reading what they found.

Owns processes, logs and time-outs of a build on this machine. Light: torch is imported by the ranks only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cachectl.build.job import ENDED, Job, failure_of
from cachectl.build.leftovers import MARK, end_marked
from cachectl.build.worker import RESULTS
from cachectl.errors import BuildError

__all__ = ["RankPhase", "run_phase"]

_POLL_S = 0.05
# A phase that takes longer is told again: whoever reads a log wants to know that it goes on.
_TOLD_AGAIN_S = 60.0
# After SIGTERM a rank gets this long to end before it is killed.
_GRACE_S = 5.0
# torch raises instead of warning where CI is set: npu_fused_infer_attention_score.out gives back what it was given, and
# its schema doesn't say so (torch 2.13.0, torch._functorch.config). Pods don't set CI; their builds do.
_RANK_DEFAULTS = {"TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING": "0"}
# A rank may have logged gigabytes; its last words are in here.
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class RankPhase:
    """A rank entered a phase; `case` is the case's index in the job, None for the rank as a whole."""

    rank: int
    case: int | None
    phase: str
    elapsed_s: float


def run_phase(
    job: Job,
    phase: str,
    *,
    environ: Mapping[str, str],
    log_path: Path,
    timeout_s: float | None,
    progress: Callable[[RankPhase], None],
    told: Callable[[int, dict[int, dict[str, Any]]], None] | None = None,
    rank: int | None = None,
    stop: threading.Event | None = None,
) -> dict[int, dict[str, Any]]:
    """Run `record` or `reload` of a job in a fresh process a rank; return the ranks' result documents by rank.

    One rank is started here, several by torchrun. What is started leads a session of its own, so that stopping it stops
    what it started; all of it dies with this process, however this one ends.

    Args:
        log_path: where what is started here prints: the one rank, or torchrun, whose ranks have logs of their own.
        timeout_s: bound on each rank, seconds; they all start together.
        told: called with a case's index and what was found of it by rank as soon as all of them have found it, while
            they go on with the next one; also for cases that were done before the phase failed.
        rank: the one rank to run, as the launcher of this process told it; None for all.
        stop: set by another thread to have them stopped.

    Raises:
        CachectlError: what `told` raises; what the first rank to fail reports, with its `rank`; a BuildError where one
            died without a result, or ran out of time.
    """
    world = _World(job, phase, log_path, rank, told)
    environ = {**_RANK_DEFAULTS, **environ, MARK: str(job.workspace)}
    started = time.monotonic()
    with open(log_path, "ab") as log:
        process = None
        try:
            process = subprocess.Popen(
                world.command(),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=job.workspace,
                start_new_session=True,
            )
            while not _has_ended(process.pid):
                world.report(started, progress)
                if timeout_s is not None and time.monotonic() - started > timeout_s:
                    raise world.out_of_time(timeout_s)
                if stop is not None and stop.is_set():
                    raise BuildError(f"stopped in {phase}", log_path=log_path)
                time.sleep(_POLL_S)
        finally:
            # Interrupted while it was being started, it is known by its mark only.
            if process is not None:
                _stop(process)
            end_marked(str(job.workspace))
    world.report(started, progress)
    return world.results(process.returncode)


class _World:
    """The ranks of one phase: their folders, logs, last phases and results."""

    def __init__(
        self,
        job: Job,
        phase: str,
        log_path: Path,
        rank: int | None,
        told: Callable[[int, dict[int, dict[str, Any]]], None] | None,
    ) -> None:
        self.job, self.phase, self.log_path = job, phase, log_path
        self.ranks = range(job.world_size) if rank is None else (rank,)
        # Started from here, and seen to end.
        self.directly = job.world_size == 1 or rank is not None
        for rank in self.ranks:
            job.rank_folder(rank).mkdir(parents=True, exist_ok=True)
        (job.workspace / ENDED).unlink(missing_ok=True)
        self._followers = {rank: _follow(job.rank_folder(rank) / "events.jsonl") for rank in self.ranks}
        self._tell = told
        self._found: dict[int, dict[int, dict[str, Any]]] = {}
        self._last: dict[int, str] = {}
        self._phases: dict[int, RankPhase] = {}
        self._told_at = time.monotonic()

    def command(self) -> list[str]:
        """Return the command that runs the phase in all ranks and does not outlive this process."""
        job_path = str(self.job.workspace / "job.json")
        if self.directly:
            return [sys.executable, "-m", "cachectl.build.worker", self.phase, job_path, str(os.getpid())]
        return [sys.executable, "-m", "cachectl.build.elastic", str(os.getpid()), self.phase, job_path]

    def report(self, started: float, progress: Callable[[RankPhase], None]) -> None:
        """Tell the phases that ranks have entered since the last time, and after a while the one that lasts longest.

        A case that all of them are done with is told, too.
        """
        for rank, follower in self._followers.items():
            while (line := next(follower)) is not None:
                if "told" in line:
                    self._case_found(rank, line["case"])
                    continue
                self._last[rank] = self._where(line)
                # First in the order stays who entered its phase first.
                self._phases.pop(rank, None)
                self._phases[rank] = RankPhase(rank, line["case"], line["phase"], time.monotonic() - started)
                self._told_at = time.monotonic()
                progress(self._phases[rank])
        if self._phases and time.monotonic() - self._told_at > _TOLD_AGAIN_S:
            self._told_at = time.monotonic()
            oldest = next(iter(self._phases.values()))
            progress(replace(oldest, elapsed_s=time.monotonic() - started))

    def _case_found(self, rank: int, index: int) -> None:
        if self._tell is None:
            return
        (case,) = [case for case in self.job.cases if case.index == index]
        of_case = self._found.setdefault(index, {})
        of_case[rank] = json.loads(self.job.told(rank, case, self.phase).read_bytes())
        if len(of_case) == len(self.ranks):
            self._tell(index, {rank: of_case[rank] for rank in self.ranks})
            del self._found[index]

    def log_of(self, rank: int) -> Path:
        return self.job.logs[rank] if self.job.logs else self.log_path

    def out_of_time(self, timeout_s: float) -> BuildError:
        """Return the error for ranks that have no result yet; the first of them is its rank."""
        late = [rank for rank in self.ranks if not isinstance(self._result(rank), dict)] or list(self.ranks)
        who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        where = {rank: self._last.get(rank, "starting") for rank in late}
        at = ", ".join(f"rank {rank} in {phase}" for rank, phase in where.items())
        error = BuildError(
            f"{who} did not finish {self.phase} within {timeout_s:g} s"
            + (f": {at}" if self.job.world_size > 1 else ""),
            log_path=self.log_of(late[0]),
            hint=f"see {self.log_of(late[0])}, or pass a longer --timeout",
        )
        error.rank = late[0]
        return error

    def results(self, returncode: int) -> dict[int, dict[str, Any]]:
        """Return the ranks' results, all of them good. Raises CachectlError: the error that came first."""
        found = {rank: self._result(rank) for rank in self.ranks}
        told = {rank: item["failure"] for rank, item in found.items() if isinstance(item, dict) and item["failure"]}
        # A rank that lost its peer fails as well, and may be quicker: its words are an echo.
        own = {rank: failure for rank, failure in told.items() if not failure.get("of_peer")}
        lost = {rank: item for rank, item in found.items() if not isinstance(item, dict)}
        ended = self._exit_codes(returncode)
        if lost and not own and (not told or not ended or ended.keys() & lost.keys()):
            raise self._died(lost, ended, returncode)
        if failures := own or told:
            rank = min(failures, key=lambda rank: (failures[rank].get("at", 0.0), rank))
            raise failure_of(failures[rank], rank, self.log_of(rank))
        return {rank: item for rank, item in found.items() if isinstance(item, dict)}

    def _died(self, lost: Mapping[int, object], ended: Mapping[int, int], returncode: int) -> BuildError:
        """Return the error for a rank that left no result: one that torchrun saw end, if it did."""
        rank = min(ended.keys() & lost.keys() or ended or lost)
        who, log_path = f"rank {rank}", self.log_of(rank)
        if not ended:
            # torchrun itself is gone, and took the ranks with it.
            who, log_path = "the launcher of the ranks", self.log_path
        code = ended.get(rank, returncode)
        error = BuildError(
            f"{who} died in {self.phase} {_how(code)}: {_last_line(log_path)}",
            returncode=code,
            log_path=log_path,
            hint=f"see {log_path}",
        )
        error.rank = rank
        cause = lost.get(rank)
        error.__cause__ = cause if isinstance(cause, Exception) else None
        return error

    def _exit_codes(self, returncode: int) -> dict[int, int]:
        """Return how ranks ended that ended badly; empty where nobody saw it."""
        if self.directly:
            return dict.fromkeys(self.ranks, returncode)
        try:
            ended = json.loads((self.job.workspace / ENDED).read_bytes())
            return {int(rank): int(code) for rank, code in ended["exit_codes"].items()}
        except (OSError, ValueError, KeyError):
            return {}

    def _result(self, rank: int) -> dict[str, Any] | Exception:
        try:
            result = json.loads((self.job.rank_folder(rank) / RESULTS[self.phase]).read_bytes())
        except (OSError, ValueError) as error:
            return error
        return result if isinstance(result, dict) else ValueError("no document")

    def _where(self, line: Mapping[str, Any]) -> str:
        case = next((case for case in self.job.cases if case.index == line["case"]), None)
        return f"{line['phase']} of {case.method} [{case.name}]" if case is not None else str(line["phase"])


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"with exit code {returncode}"
    try:
        return f"by signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"by signal {-returncode}"


def _has_ended(pid: int) -> bool:
    # Not poll(): while the leader is not reaped nobody else can get its number, so the session can still be signalled.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End what was started here with its session, and reap it; what ended by itself may have left children."""
    if not _has_ended(process.pid):
        os.killpg(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        while not _has_ended(process.pid) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # Nobody left.
    process.wait()


def _follow(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield each whole line of a growing file as JSON, and None when there is no more now."""
    offset, rest = (path.stat().st_size if path.exists() else 0), b""
    while True:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            data = b""
        offset += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
        yield None


def _last_line(path: Path) -> str:
    try:
        with open(path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    return lines[-1][:500] if lines else "its log is empty"
