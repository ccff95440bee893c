"""Triage: the ladder eager, aot_eager, force_eager, npugraph_ex, cache, each stage in rank processes of its own.

Owns the order of the stages, where it stops, and what a rank's findings become in the report. What a stage runs is a
rank's (cachectl/build/triage.py). Nothing goes into a store.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachectl.build.drafts import draft_entry
from cachectl.build.job import CaseJob, Job, write_json
from cachectl.build.launcher import RankPhase, run_phase
from cachectl.build.triage_files import INERT_ADVICE, SETTINGS, identity_file, stage_file
from cachectl.build.triage_reasons import refusal_kind, user_place
from cachectl.build.workspace import private_workspace
from cachectl.errors import BuildError, ConfigError, EnvironmentFault
from cachectl.schemas.canonical import DIGEST_PREFIX
from cachectl.schemas.triage import STAGES, StageName, TriageFinding, TriageReport, TriageStage, Verdict
from cachectl.services.audit import what_starts_here
from cachectl.services.request import HASH_SEEDS, RecipeRequest, read_request
from cachectl.services.triage_kernels import static_kernels
from cachectl.services.triage_report import Redaction, markdown, tail_of, versions
from cachectl.store.layout import StoreLayout

__all__ = ["STEPS", "TriageEvent", "triage"]

STEPS = 4


@dataclass(frozen=True)
class TriageEvent:
    """A stage began or ended, or a rank entered a phase of it; seconds since the stage's start."""

    stage: StageName
    text: str
    elapsed_s: float = 0.0


@dataclass
class _Judged:
    """One stage in the making: its worst verdict over cases and ranks."""

    verdict: Verdict = "ok"
    findings: list[TriageFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, findings: Iterable[TriageFinding], notes: Iterable[str] = ()) -> None:
        order: Sequence[Verdict] = ("ok", "skipped", "differs", "failed")
        self.verdict = max(self.verdict, verdict, key=order.index)
        for found in findings:
            # Every rank finds the same in most models; the first one's says it.
            if not any(found.model_copy(update={"rank": known.rank}) == known for known in self.findings):
                self.findings.append(found)
        self.notes += [note for note in notes if note not in self.notes]


def triage(
    path: Path,
    *,
    cases: Sequence[str] = (),
    steps: int = STEPS,
    timeout_s: float | None = None,
    keep: Path | None = None,
    report: Path | None = None,
    progress: Callable[[TriageEvent], None] = lambda event: None,
    stop: threading.Event | None = None,
) -> TriageReport:
    """Climb the ladder for a recipe until a stage fails or differs; return what was found.

    Args:
        cases: names of cases, or `method/case`; empty for all of the recipe's.
        steps: calls in each stage, at least 3.
        timeout_s: bound on each rank process, seconds.
        keep: folder for the ranks' logs; it is made.
        report: Markdown file to write, replaced whole.

    Raises:
        ConfigError: the recipe, an unknown case, or a report or folder that can't be written.
        EnvironmentFault: no runtime, no device.
    """
    request = read_request(path, modes=("npugraph_ex", "ge_graph"))
    chosen = _chosen(list(request.cases()), cases)
    if request.missing:
        raise EnvironmentFault(f"{request.missing[0]}", hint=request.missing[0].hint)
    with private_workspace() as folder:
        logs = _logs_folder(keep, folder)
        ladder = _Ladder(request, chosen, folder, logs, steps, timeout_s, progress, stop)
        stages = ladder.climb()
        hide = Redaction.of(request, folder)
        document = _report(request, stages, hide)
        if report is not None:
            _write(report, markdown(document, request, ladder.log_paths, hide))
    return document


def _chosen(known: list[CaseJob], wanted: Sequence[str]) -> list[CaseJob]:
    if not wanted:
        return known
    chosen = [case for case in known if {case.name, f"{case.method}/{case.name}"} & set(wanted)]
    for name in wanted:
        if not any(name in (case.name, f"{case.method}/{case.name}") for case in chosen):
            names = ", ".join(f"{case.method}/{case.name}" for case in known)
            raise ConfigError(f"the recipe has no case {name!r}", hint=f"it has: {names}")
    return chosen


def _logs_folder(keep: Path | None, workspace: Path) -> Path:
    folder = keep if keep is not None else workspace / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make {folder}: {error.strerror}", hint="pass another folder to --keep") from error
    return folder.absolute()


@dataclass
class _Ladder:
    """One climb. `log_paths` are the logs of its stages, in their order."""

    request: RecipeRequest
    cases: list[CaseJob]
    folder: Path
    logs: Path
    steps: int
    timeout_s: float | None
    progress: Callable[[TriageEvent], None]
    stop: threading.Event | None
    log_paths: list[tuple[str, Path]] = field(default_factory=list)

    def climb(self) -> list[TriageStage]:
        """Return all five stages; those after the first bad one are skipped."""
        stages: list[TriageStage] = []
        graph_engine = self.request.loaded.document["compile"]["mode"] == "ge_graph"
        for name in STAGES:
            if any(stage.verdict in ("failed", "differs") for stage in stages):
                stages.append(
                    TriageStage(stage=name, verdict="skipped", seconds=0, notes=("an earlier stage stopped it",))
                )
                continue
            if graph_engine and name not in ("eager", "aot_eager"):
                note = (
                    "this version can't compile for GE: stopped after aot_eager"
                    if name == "force_eager"
                    else "mode ge_graph"
                )
                stages.append(TriageStage(stage=name, verdict="skipped", seconds=0, notes=(note,)))
                continue
            stages.append(self._stage(name))
        return stages

    def _stage(self, name: StageName) -> TriageStage:
        self.progress(TriageEvent(name, "begins"))
        started, judged = time.monotonic(), _Judged()
        if name == "cache":
            self._cache(judged)
        else:
            self._phase(judged, name, f"triage-{name}")
            if name == "npugraph_ex" and judged.verdict in ("failed", "differs") and _is_worth_restoring(judged):
                restored = _Judged()
                self._phase(restored, name, "triage-options")
                judged.findings += restored.findings
        seconds = time.monotonic() - started
        self.progress(TriageEvent(name, judged.verdict, seconds))
        return TriageStage(
            stage=name,
            verdict=judged.verdict,
            seconds=round(seconds, 3),
            findings=tuple(judged.findings),
            notes=tuple(judged.notes),
        )

    def _phase(self, judged: _Judged, name: StageName, phase: str, job: Job | None = None) -> bool:
        """Run one phase in fresh processes and judge what its ranks found; False where it ended in an error."""
        job = job or self._job(phase)
        job.write()
        write_json(job.workspace / SETTINGS, {"steps": self.steps})
        log_path = self._log_of(phase)

        def follow(entered: RankPhase) -> None:
            case = next((case for case in job.cases if case.index == entered.case), None)
            of = f" of {case.method} [{case.name}]" if case is not None else ""
            self.progress(TriageEvent(name, f"rank {entered.rank}: {entered.phase}{of}", entered.elapsed_s))

        try:
            told = run_phase(
                job,
                phase,
                environ=self.request.rank_environ(HASH_SEEDS[phase == "triage-cache"]),
                log_path=log_path,
                timeout_s=self.timeout_s,
                progress=follow,
                stop=self.stop,
            )
        except BuildError as error:
            self._judge_files(judged, job, phase)
            if judged.verdict not in ("failed", "differs"):
                found = _of_error(error, job, phase, self.request.roots)
                # Nobody can read a log that goes with this process.
                gone = rf"see {re.escape(str(self.folder))}[^\s,]*"
                advice = re.sub(gone, "run it again with --keep FOLDER, where its log stays", found.next)
                judged.add("failed", [found.model_copy(update={"next": advice})])
            return False
        if phase != "record":
            self._judge_files(judged, job, phase)
            return True
        for (rank, case), document in _by_case(told, job):
            if "absent" not in document:
                # Only drafted: the layout is asked for a place when files are stored, and none are.
                layout = StoreLayout(self.folder / "store")
                draft_entry(layout, job, self.request.loaded.recipe.name, rank, case, document, later=True)
        return True

    def _judge_files(self, judged: _Judged, job: Job, phase: str) -> None:
        for rank in range(job.world_size):
            for case in job.cases:
                try:
                    document = json.loads(stage_file(job, rank, phase, case).read_bytes())
                except FileNotFoundError:
                    continue  # Not there yet when the process ended, or this rank has no such method.
                named = {"method": case.method, "case": case.name, "rank": rank}
                findings = [TriageFinding(**{**found, **named}) for found in document["findings"]]
                judged.add(document["verdict"], findings, document["notes"])

    def _cache(self, judged: _Judged) -> None:
        job = self._job("record")
        for rank in range(job.world_size):
            for case in job.cases:
                seen = identity_file(self.folder / "triage-npugraph_ex", rank, case)
                if seen.exists():
                    shutil.copyfile(seen, identity_file(job.workspace, rank, case))
                    self._unstable(judged, json.loads(seen.read_bytes())["unstable"], case, rank)
        if judged.verdict == "failed":
            return
        if not self._phase(judged, "cache", "record", job):
            return
        self._phase(judged, "cache", "triage-cache", job)
        if self.request.document["compile"]["options"].get("static_kernel_compile"):
            self._static_kernels(judged, job)

    def _unstable(self, judged: _Judged, changed: str | None, case: CaseJob, rank: int) -> None:
        if changed is not None:
            what = f"str(model) is another text each time: {changed}"
            named: dict[str, Any] = {"method": case.method, "case": case.name, "rank": rank}
            judged.add("failed", [TriageFinding(kind="inert", what=what, next=INERT_ADVICE, **named)])

    def _static_kernels(self, judged: _Judged, job: Job) -> None:
        seen = what_starts_here(environ=self.request.environ)
        for rank in range(job.world_size):
            for case in job.cases:
                cache = job.case_folder(rank, case) / "cache"
                if cache.is_dir():
                    judged.add(*static_kernels(cache, seen, method=case.method, case=case.name, rank=rank))

    def _job(self, phase: str) -> Job:
        folder = self.folder / phase
        folder.mkdir()
        world_size = self.request.world_size
        logs = tuple(self.logs / f"{phase}.rank{rank}.log" for rank in range(world_size)) if world_size > 1 else ()
        return Job(
            recipe=self.request.document,
            recipe_folder=self.request.loaded.folder,
            workspace=folder,
            request=self.request.request,
            cases=tuple(self.cases),
            world_size=world_size,
            logs=logs,
            meeting=f"triage/{self.request.loaded.digest.removeprefix(DIGEST_PREFIX)}/{phase}",
        )

    def _log_of(self, phase: str) -> Path:
        path = self.logs / f"{phase}.log"
        # Logs are appended to, and a kept folder may hold those of a triage before.
        for old in (path, *(self.logs / f"{phase}.rank{rank}.log" for rank in range(self.request.world_size))):
            old.unlink(missing_ok=True)
        if self.request.world_size > 1:
            self.log_paths += [
                (f"{phase}, rank {rank}", self.logs / f"{phase}.rank{rank}.log")
                for rank in range(self.request.world_size)
            ]
        self.log_paths.append((phase, path))
        return path


def _is_worth_restoring(judged: _Judged) -> bool:
    # A recompile or a graph break is there before any option counts, and so is what has the cause of one.
    kinds = ("differs", "raises", "capture", "not-traced")
    return any(found.kind in kinds and found.cause is None for found in judged.findings)


def _by_case(told: dict[int, dict[str, Any]], job: Job) -> Iterable[tuple[tuple[int, CaseJob], dict[str, Any]]]:
    for rank, document in told.items():
        for case in job.cases:
            yield (rank, case), document["cases"][str(case.index)]


def _place_in(log_path: Path | None, roots: Mapping[str, Path]) -> str | None:
    """Return where in the model's code the last traceback of a log came from."""
    trace = tail_of(log_path).rpartition("Traceback (most recent call last):")[2] if log_path is not None else ""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', trace)
    return user_place([(file, int(line), name) for file, line, name in frames], roots)


def _of_error(error: BuildError, job: Job, phase: str, roots: Mapping[str, Path]) -> TriageFinding:
    """Return the finding for an error that ended a phase: a gate's refusal, a rank that died or ran out of time."""
    case = next((case for case in job.cases if error.message.startswith(f"{case.method} [{case.name}]: ")), None)
    what = error.message if case is None else error.message.removeprefix(f"{case.method} [{case.name}]: ")
    kind = refusal_kind(what)
    if case is None:
        kind = "timeout" if "did not finish" in what else "died" if " died in " in what else "raises"
    return TriageFinding(
        kind=kind,
        what=what,
        where=_place_in(error.log_path, roots) if kind == "raises" else None,
        next=error.hint or f"see the log of {phase}",
        method=case.method if case is not None else "",
        case=case.name if case is not None else "",
        rank=error.rank or 0,
    )


def _report(request: RecipeRequest, stages: Sequence[TriageStage], hide: Redaction) -> TriageReport:
    bad = next((stage for stage in stages if stage.verdict in ("failed", "differs")), None)
    device = request.request["device"]
    document = TriageReport(
        stage=bad.stage if bad is not None else None,
        stages=tuple(stages),
        advice=tuple(_advice(request, bad)),
        recipe=request.loaded.path.name,
        evidence="simulated" if device["simulated"] else str(device["soc"]),
        versions=versions(request),
    )
    return TriageReport.model_validate(hide.document(document.model_dump(mode="json")))


def _advice(request: RecipeRequest, bad: TriageStage | None) -> list[str]:
    recipe = request.loaded.path.name
    if bad is None:
        if request.loaded.document["compile"]["mode"] == "ge_graph":
            return ["eager and Dynamo are right; compile for GE outside of this version"]
        return [f"every stage is right; run: cachectl build {recipe}"]
    steps = list(dict.fromkeys(found.next for found in bad.findings if found.next))
    return [*steps, f"then run again: cachectl triage {recipe}"]


def _write(path: Path, text: str) -> None:
    """Write the report; a reader sees the old one or the new one."""
    pending = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(pending, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(pending, path)
    except OSError as error:
        pending.unlink(missing_ok=True)
        raise ConfigError(f"can't write {path}: {error.strerror}", hint="pass another file to --report") from error
