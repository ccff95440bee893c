"""Builds the cases of one recipe in all its ranks: launches, failures, what the launches proved.

Owns which cases are launched together, and what a failed launch means for them. What is published, and when, is for
cachectl.services.build to say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cachectl.build.drafts import draft_entry, proved, store_harvest
from cachectl.build.job import CaseJob, Job
from cachectl.build.launcher import RankPhase, run_phase
from cachectl.errors import BuildError, CachectlError, ConfigError
from cachectl.schemas.boot import Absence
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.report import Boot, Built, Failed
from cachectl.services.build_pace import Pace
from cachectl.services.captures import capture_warning, captured_by_a_start, first_call_seconds
from cachectl.services.plan import LineState, expected_seconds
from cachectl.services.request import HASH_SEEDS, RecipeRequest
from cachectl.store.absences import Files
from cachectl.store.layout import StoreLayout, bare_hex
from cachectl.store.lines import LineNote, note_line, read_line
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import FailureRow
from cachectl.store.refusals import Refusal
from cachectl.store.writing import note_base

__all__ = ["BuildEvent", "CaseBuilder", "Outcome", "built_entry"]

_FAILURE_KEPT = timedelta(hours=24)
# What a gate may say where the machine was at fault: it may be better the next time.
_PASSING = ("no space left", "quota exceeded", "out of memory", "cannot allocate", "too many open files", "timed out")
_SEED_OF = {"record": HASH_SEEDS[0], "reload": HASH_SEEDS[1]}


@dataclass(frozen=True)
class BuildEvent:
    """Something that happened in a build: start, phase, done, note, failed or reused; seconds since the launch's start.

    `estimate_s` is what compiling took last time, `left_s` how long this rank will go on; None where not known.
    `recipe` is named where several are built.
    """

    kind: str
    method: str = ""
    case: str = ""
    rank: int = 0
    phase: str = ""
    elapsed_s: float = 0.0
    estimate_s: float | None = None
    left_s: float | None = None
    text: str = ""
    log: str | None = None
    recipe: str = ""
    # Of a warm first call, part by part.
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of one recipe's lines.

    `absent` are methods that ranks were found not to have, of cases built now, each with the code that this follows
    from; `refused` what a gate refused, to be kept for a while.
    """

    built: list[Built] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    absent: dict[Absence, Files] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    warm_set: str | None = None
    boot: Boot | None = None


@dataclass(frozen=True)
class CaseBuilder:
    """Builds cases of one recipe. One call of `build` a workspace.

    Args:
        workspace: an empty folder.
        logs: where the ranks' logs go.
        keep_going: a launch a case, so that one that fails takes no other with it.
        timeout_s: bound on each rank process, seconds.
        rank: the one rank to build, which a launcher started this process as; None for all, which are started here.
        stop: set by another thread to have the ranks stopped.
        seen: digest of what can be seen of all that may make a case fail; None where a refusal is not kept.
        outcome: what was built, failed and absent is added to it.
    """

    layout: StoreLayout
    repo: ManifestRepo
    request: RecipeRequest
    workspace: Path
    logs: Path
    keep_going: bool
    timeout_s: float | None
    rank: int | None
    stop: threading.Event
    seen: str | None
    outcome: Outcome
    progress: Callable[[BuildEvent], None]

    def build(self, lines: Sequence[LineState], wanted: Sequence[LineState]) -> Iterator[EntryManifest]:
        """Build the wanted of a recipe's lines; yield each proved entry's manifest, its blobs in the store.

        All ranks build a case of which one lacks its entry: they wait for each other in its collectives.

        Raises:
            ConfigError: unless keep_going; the code that the recipe names is at fault.
            EnvironmentFault, StoreError: nothing more can be built here.
        """
        indices = list(dict.fromkeys(line.case.index for line in wanted))
        groups = [[index] for index in indices] if self.keep_going else ([indices] if indices else [])
        made: dict[int, list[EntryManifest]] = {}
        for number, group in enumerate(groups):
            of_group = [line for line in lines if line.case.index in group]
            ready = {line.place for line in of_group if line not in wanted}
            suffix = f"-{number}" if len(groups) > 1 else ""
            job, log_path = self._job(of_group, number, suffix)
            try:
                for manifest in self._run(job, log_path):
                    # What was ready was built for the other ranks' sake.
                    if (manifest.method, manifest.case, manifest.rank) not in ready:
                        made.setdefault(manifest.rank, []).append(manifest)
                        self.outcome.built.append(built_entry(manifest))
                        yield manifest
            except (BuildError, ConfigError) as error:
                if isinstance(error, ConfigError) and not self.keep_going:
                    raise
                self._fail(of_group, error, str(self.logs / f"rank{error.rank or 0}{suffix}.log"))
                if not self.keep_going:
                    return

        if made and len(wanted) == len(lines):
            self._tell_captures(made)

    def _tell_captures(self, made: Mapping[int, Sequence[EntryManifest]]) -> None:
        """Tell what a start of one rank pays again, warm or cold."""
        rank = max(made, key=lambda rank: len(made[rank]))
        found = captured_by_a_start(manifest.provenance.shown_document for manifest in made[rank])
        if found is not None and found[0]:
            graphs = f"{found[0]} graph{'s' if found[0] > 1 else ''}"
            where = " (simulated)" if made[rank][0].evidence.kind == "simulated" else ""
            text = f"each start captures {graphs}, warm or cold: {found[1]:.2f} s here{where}"
            self.progress(BuildEvent("note", rank=rank, text=text))

    def _job(self, group: Sequence[LineState], number: int, suffix: str) -> tuple[Job, Path]:
        """Return the job of one launch, and where the launched process itself prints."""
        request, folder = self.request, self.workspace / str(number)
        folder.mkdir()
        rank_logs = tuple(self.logs / f"rank{rank}{suffix}.log" for rank in range(request.world_size))
        alone = request.world_size == 1 or self.rank is not None
        job = Job(
            recipe=request.document,
            recipe_folder=request.loaded.folder,
            workspace=folder,
            request=request.request,
            cases=tuple({line.case.index: line.case for line in group}.values()),
            world_size=request.world_size,
            logs=() if request.world_size == 1 else rank_logs,
            meeting=f"{bare_hex(request.loaded.digest)}/{number}",
        )
        log_path = rank_logs[self.rank or 0] if alone else self.logs / f"launcher{suffix}.log"
        self.progress(
            BuildEvent(
                "start",
                text=request.loaded.recipe.name,
                estimate_s=expected_seconds(group),
                left_s=Pace([case.index for case in job.cases], self._paces(job)).whole_s(),
                log=str(log_path if alone else self.logs),
            )
        )
        return job, log_path

    def _run(self, job: Job, log_path: Path) -> Iterator[EntryManifest]:
        """Record and reload a job's cases in all ranks."""
        cases = {case.index: case for case in job.cases}
        job.write()
        pace = Pace(tuple(cases), self._paces(job))
        started_s = time.monotonic()
        recorded = self._phase(job, "record", log_path, pace, started_s)
        told = {(rank, index): document["cases"][str(index)] for rank, document in recorded.items() for index in cases}
        absent = _absences(job, told)
        found = {place: item for place, item in told.items() if "absent" not in item}
        drafts: dict[tuple[int, int], dict[str, Any]] = {}
        # Of ranks that were started one by one the first stores its files at once, so that the others find them.
        later = self.rank not in (None, 0)
        for (rank, index), item in found.items():
            drafts[rank, index] = draft = draft_entry(
                self.layout,
                job,
                self.request.loaded.recipe.name,
                rank,
                cases[index],
                item,
                like=self._like(cases[index]),
                later=later,
            )
            if not later:
                self._note_files(cases[index], draft)
        reloaded = self._phase(job, "reload", log_path, pace, started_s)
        self.outcome.absent |= absent
        for (rank, index), draft in drafts.items():
            if later:
                store_harvest(self.layout, job, draft, self._like(cases[index]))
                self._note_files(cases[index], draft)
            document = proved(draft, found[rank, index], reloaded[rank]["cases"][str(index)])
            manifest = EntryManifest.from_document(document)
            shown = manifest.provenance.shown_document
            seconds = first_call_seconds(shown)
            self.progress(BuildEvent("done", manifest.method, manifest.case, rank, text=manifest.key, seconds=seconds))
            # Ranks of one case have the same graph.
            if (text := capture_warning(shown)) is not None and rank == min(recorded):
                self.progress(BuildEvent("note", manifest.method, manifest.case, rank, text=text))
            yield manifest
        for index, case in cases.items():
            if seconds := pace.of_case(index):
                note_line(self.layout, self.request.loaded.digest, case.method, case.name, seconds=seconds)

    def _paces(self, job: Job) -> dict[int, Mapping[str, float]]:
        return {case.index: self._note(case).seconds for case in job.cases}

    def _note(self, case: CaseJob) -> LineNote:
        return read_line(self.layout, self.request.loaded.digest, case.method, case.name)

    def _like(self, case: CaseJob) -> Mapping[str, str] | None:
        """Return digests by path of files that a rank's are nearly the same as: ranks differ in a few bytes."""
        return self._note(case).files if self.request.world_size > 1 else None

    def _note_files(self, case: CaseJob, draft: dict[str, Any]) -> None:
        """Note a rank's files and manifest for the other ranks to stand on, unless they stand on noted ones."""
        if self.request.world_size > 1:
            note_base(self.layout, self.request.loaded.digest, draft)

    def _phase(self, job: Job, phase: str, log_path: Path, pace: Pace, started_s: float) -> dict[int, dict[str, Any]]:
        cases = {case.index: case for case in job.cases}

        def follow(entered: RankPhase) -> None:
            case = cases.get(entered.case) if entered.case is not None else None
            method, name = (case.method, case.name) if case is not None else ("", "")
            now_s = time.monotonic()
            pace.enter(entered.rank, phase, entered.case, now_s)
            left_s = pace.left_s(entered.rank, now_s)
            self.progress(
                BuildEvent("phase", method, name, entered.rank, entered.phase, now_s - started_s, left_s=left_s)
            )

        for rank in range(job.world_size) if self.rank is None else (self.rank,):
            pace.enter(rank, phase, None, time.monotonic())
        results = run_phase(
            job,
            phase,
            environ=self.request.rank_environ(_SEED_OF[phase]),
            log_path=log_path,
            timeout_s=self.timeout_s,
            progress=follow,
            rank=self.rank,
            stop=self.stop,
        )
        pace.end(time.monotonic())
        return results

    def _fail(self, group: Sequence[LineState], error: CachectlError, log: str) -> None:
        """Keep a failure, of the lines that it is about, and tell it."""
        now, text = datetime.now(timezone.utc), str(error)
        refused = isinstance(error, BuildError) and error.refused and not _is_passing(error)
        for line in _blamed(group, error):
            method, case, rank = line.place
            if refused and self.seen is not None:
                self.outcome.refused.append(Refusal(self.seen, method, case, rank, text, log, now.timestamp()))
            self.repo.record_failure(
                FailureRow(
                    recipe=self.request.loaded.recipe.name,
                    method=method,
                    case=case,
                    rank=rank,
                    toolchain=digest_of(self.request.request["toolchain"]),
                    error=text,
                    log_path=log,
                    failed_at=now,
                    expires_at=now + _FAILURE_KEPT,
                )
            )
            self.outcome.failed.append(Failed(method=method, case=case, rank=rank, error=text, log=log))
            self.progress(BuildEvent("failed", method, case, rank, text=text, log=log))


def built_entry(manifest: EntryManifest) -> Built:
    """Return what a report says of a new entry."""
    return Built(
        key=manifest.key,
        method=manifest.method,
        case=manifest.case,
        rank=manifest.rank,
        cold_seconds=manifest.provenance.cold_seconds,
        warm_seconds=manifest.provenance.warm_seconds,
    )


def _absences(job: Job, told: Mapping[tuple[int, int], dict[str, Any]]) -> dict[Absence, Files]:
    """Return which ranks have no method for which case. Raises ConfigError for a case that no rank has one for."""
    absent: dict[Absence, Files] = {}
    for case in job.cases:
        lacking = {
            rank: item["absent"] for (rank, index), item in told.items() if index == case.index and "absent" in item
        }
        if len(lacking) == job.world_size:
            first = next(iter(lacking.values()))
            raise ConfigError(first["message"], hint=first["hint"])
        absent |= {Absence(case.method, case.name, rank): item.get("files", {}) for rank, item in lacking.items()}
    return absent


def _is_passing(error: CachectlError) -> bool:
    """Say whether an error's text speaks of the machine's state rather than of the case."""
    return any(words in str(error).lower() for words in _PASSING)


def _blamed(group: Sequence[LineState], error: CachectlError) -> Sequence[LineState]:
    """Return the lines a failure is about: of the rank that failed, the case its message names, else all."""
    of_rank = [line for line in group if line.rank == (error.rank or 0)] or group
    named = [line for line in of_rank if error.message.startswith(f"{line.case.method} [{line.case.name}]")]
    return named or of_rank
