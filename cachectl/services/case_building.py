"""Builds the cases of one recipe in all its ranks: launches, failures, what the launches proved.

Owns which cases are launched together, what a failed launch means for them, and what is kept while a launch goes on: a
case that all ranks recorded as a draft, one that all of them proved as entries. How entries are published is for
cachectl.services.build to say.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cachectl.build.drafts import draft_entry, proved, restore_draft, store_harvest
from cachectl.build.job import CaseJob, Job
from cachectl.build.launcher import RankPhase, run_phase
from cachectl.errors import BuildError, CachectlError, ConfigError, StoreError
from cachectl.schemas.boot import Absence
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.report import Boot, Built, Failed
from cachectl.services.build_pace import Pace
from cachectl.services.captures import capture_warning, captured_by_a_start, first_call_seconds
from cachectl.services.case_drafts import draft_line, held_draft
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


@dataclass
class _Launch:
    """One launch of some cases: what is known of them so far, by index.

    Args:
        ready: places that have their entries; proved again, not kept again.
        made: where the manifests go that were kept.

    `drafts` are the ranks' documents as recorded, `earlier` the cases whose drafts an earlier build left, `at` the case
    that each rank is at, `suspects` those at which the proof broke off.
    """

    job: Job
    log_path: Path
    ready: Collection[tuple[str, str, int]]
    made: list[EntryManifest]
    pace: Pace = field(default_factory=lambda: Pace((), {}))
    started_s: float = 0.0
    drafts: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    absent: dict[int, dict[Absence, Files]] = field(default_factory=dict)
    earlier: frozenset[int] = frozenset()
    at: dict[int, int] = field(default_factory=dict)
    proved: frozenset[int] = frozenset()
    suspects: frozenset[int] = frozenset()


@dataclass(frozen=True)
class CaseBuilder:
    """Builds cases of one recipe. One call of `build` a workspace.

    Args:
        workspace: an empty folder.
        logs: where the ranks' logs go.
        resume: whether a case that an earlier build recorded is proved as it lies there.
        keep_going: a launch a case, so that one that fails takes no other with it.
        timeout_s: bound on each rank process, seconds.
        rank: the one rank to build, which a launcher started this process as; None for all, which are started here.
        stop: set by another thread to have the ranks stopped.
        seen: digest of what can be seen of all that may make a case fail; None where a refusal is not kept.
        outcome: what was built, failed and absent is added to it.
        keep: called with each case's new manifests when all ranks have proved it, their blobs in the store.
    """

    layout: StoreLayout
    repo: ManifestRepo
    request: RecipeRequest
    workspace: Path
    logs: Path
    resume: bool
    keep_going: bool
    timeout_s: float | None
    rank: int | None
    stop: threading.Event
    seen: str | None
    outcome: Outcome
    keep: Callable[[Sequence[EntryManifest]], None]
    progress: Callable[[BuildEvent], None]

    def build(self, lines: Sequence[LineState], wanted: Sequence[LineState]) -> list[EntryManifest]:
        """Build the wanted of a recipe's lines; return the manifests of those that were proved, all of them kept.

        All ranks build a case of which one lacks its entry: they wait for each other in its collectives.

        Raises:
            ConfigError: unless keep_going; the code that the recipe names is at fault.
            EnvironmentFault, StoreError: nothing more can be built here.
        """
        indices = list(dict.fromkeys(line.case.index for line in wanted))
        groups = [[index] for index in indices] if self.keep_going else ([indices] if indices else [])
        made: list[EntryManifest] = []
        for number, group in enumerate(groups):
            of_group = [line for line in lines if line.case.index in group]
            suffix = f"-{number}" if len(groups) > 1 else ""
            # What is ready is built for the other ranks' sake.
            ready = {line.place for line in of_group if line not in wanted}
            try:
                self._build_group(of_group, ready, made, number, suffix)
            except (BuildError, ConfigError) as error:
                if isinstance(error, ConfigError) and not self.keep_going:
                    raise
                done = {(manifest.method, manifest.case) for manifest in made}
                rest = [line for line in of_group if line.place[:2] not in done]
                self._fail(rest or of_group, error, str(self.logs / f"rank{error.rank or 0}{suffix}.log"))
                if not self.keep_going:
                    return made
        if made and len(wanted) == len(lines):
            self._tell_captures(made)
        return made

    def _build_group(
        self,
        group: Sequence[LineState],
        ready: Collection[tuple[str, str, int]],
        made: list[EntryManifest],
        number: int,
        suffix: str,
    ) -> None:
        """Launch some cases; once more, recorded here, if the proof of what an earlier build recorded breaks off."""
        launch = self._launch(group, ready, made, str(number), suffix)
        try:
            self._run(launch)
        except (BuildError, ConfigError) as error:
            if not launch.suspects & launch.earlier or self.stop.is_set():
                raise
            for case in launch.job.cases:
                if case.index in launch.earlier - launch.proved:
                    draft_line(self.layout, self.request, case).forget()
            text = f"what an earlier build recorded could not be proved, and is recorded again: {error}"
            self.progress(BuildEvent("note", rank=error.rank or 0, text=text))
            rest = [line for line in group if line.case.index not in launch.proved]
            self._run(self._launch(rest, ready, made, f"{number}-again", suffix))

    def _tell_captures(self, made: Sequence[EntryManifest]) -> None:
        """Tell what a start of one rank pays again, warm or cold."""
        of_rank: dict[int, list[EntryManifest]] = {}
        for manifest in made:
            of_rank.setdefault(manifest.rank, []).append(manifest)
        rank = max(of_rank, key=lambda rank: len(of_rank[rank]))
        found = captured_by_a_start(manifest.provenance.shown_document for manifest in of_rank[rank])
        if found is not None and found[0]:
            graphs = f"{found[0]} graph{'s' if found[0] > 1 else ''}"
            where = " (simulated)" if of_rank[rank][0].evidence.kind == "simulated" else ""
            text = f"each start captures {graphs}, warm or cold: {found[1]:.2f} s here{where}"
            self.progress(BuildEvent("note", rank=rank, text=text))

    def _launch(
        self,
        group: Sequence[LineState],
        ready: Collection[tuple[str, str, int]],
        made: list[EntryManifest],
        folder_name: str,
        suffix: str,
    ) -> _Launch:
        """Prepare a launch, with what an earlier build recorded laid out in its workspace."""
        request, folder = self.request, self.workspace / folder_name
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
            meeting=f"{bare_hex(request.loaded.digest)}/{folder_name}",
            ranks_per_node=request.ranks_per_node,
        )
        log_path = rank_logs[self.rank or 0] if alone else self.logs / f"launcher{suffix}.log"
        launch = _Launch(job, log_path, ready, made)
        for case in job.cases if self.resume and self.rank is None else ():
            self._resume(launch, case)
        launch.earlier = frozenset(launch.drafts)
        launch.pace = Pace([case.index for case in job.cases], self._paces(job), launch.earlier)
        self.progress(
            BuildEvent(
                "start",
                text=request.loaded.recipe.name,
                estimate_s=expected_seconds([line for line in group if line.case.index not in launch.earlier]),
                left_s=launch.pace.whole_s(),
                log=str(log_path if alone else self.logs),
            )
        )
        for case in job.cases:
            if case.index in launch.earlier:
                text = "recorded by an earlier build that did not come to its end: only the proof is left"
                self.progress(BuildEvent("note", case.method, case.name, text=text))
        return launch

    def _resume(self, launch: _Launch, case: CaseJob) -> None:
        """Lay out what an earlier build recorded of a case, if all of it holds here."""
        found = held_draft(self.layout, self.request, case)
        if found is None:
            return
        try:
            for rank, item in found.items():
                if "document" in item:
                    restore_draft(self.layout, launch.job, rank, case, item["document"], item["shown"])
        except (StoreError, OSError):
            # Recorded again; what is in its way there is told then.
            for rank in found:
                shutil.rmtree(launch.job.case_folder(rank, case), ignore_errors=True)
            return
        launch.drafts[case.index] = {rank: item["document"] for rank, item in found.items() if "document" in item}
        launch.absent[case.index] = {
            Absence(case.method, case.name, rank): item["absent"]["files"]
            for rank, item in found.items()
            if "absent" in item
        }

    def _run(self, launch: _Launch) -> None:
        """Record what has no draft yet, and prove all of it, in all ranks; what is done is kept case by case."""
        job = launch.job
        launch.started_s = time.monotonic()
        if fresh := tuple(case for case in job.cases if case.index not in launch.earlier):
            self._phase(launch, replace(job, cases=fresh), "record", self._draft)
        try:
            self._phase(launch, job, "reload", self._prove)
        except (BuildError, ConfigError):
            if not self.stop.is_set():
                # Whatever it was, the next build compiles it anew: what is wrong may be what was recorded.
                launch.suspects = frozenset(launch.at.values()) - launch.proved
                for case in job.cases:
                    if case.index in launch.suspects:
                        draft_line(self.layout, self.request, case).forget()
            raise
        for case in job.cases:
            if seconds := launch.pace.of_case(case.index):
                note_line(self.layout, self.request.loaded.digest, case.method, case.name, seconds=seconds)

    def _draft(self, launch: _Launch, case: CaseJob, told: Mapping[int, dict[str, Any]]) -> None:
        """Store what all ranks recorded of a case: where this build is killed from now on, the next one proves it."""
        job = launch.job
        launch.absent[case.index] = _absences(job, case, told)
        # Of ranks that were started one by one the first stores its files at once, so that the others find them.
        later = self.rank not in (None, 0)
        drafts = launch.drafts[case.index] = {}
        for rank, item in told.items():
            if "absent" not in item:
                drafts[rank] = draft_entry(
                    self.layout,
                    job,
                    self.request.loaded.recipe.name,
                    rank,
                    case,
                    item,
                    like=self._like(case),
                    later=later,
                )
                if not later:
                    self._note_files(case, drafts[rank])
        # Ranks that were started one by one would have to agree on what each of them finds here.
        if self.rank is None:
            draft_line(self.layout, self.request, case).note(
                {
                    rank: {"document": drafts[rank], "shown": item.get("shown") or {}} if rank in drafts else item
                    for rank, item in told.items()
                }
            )

    def _prove(self, launch: _Launch, case: CaseJob, told: Mapping[int, dict[str, Any]]) -> None:
        """Keep a case that all ranks proved."""
        manifests = []
        for rank, draft in launch.drafts[case.index].items():
            if self.rank not in (None, 0):
                store_harvest(self.layout, launch.job, draft, self._like(case))
                self._note_files(case, draft)
            if "absent" in told[rank]:
                raise BuildError(
                    f"{case.method} [{case.name}]: rank {rank} has no such method in a fresh process",
                    hint="build the model's modules and methods alike in every process",
                )
            document = proved(draft, {"gates": draft["provenance"]["gates"]}, told[rank])
            manifests.append(EntryManifest.from_document(document))
        self.outcome.absent |= launch.absent[case.index]
        fresh = [item for item in manifests if (item.method, item.case, item.rank) not in launch.ready]
        self.keep(fresh)
        launch.proved |= {case.index}
        launch.made.extend(fresh)
        self.outcome.built.extend(built_entry(manifest) for manifest in fresh)
        if self.rank is None:
            draft_line(self.layout, self.request, case).forget()
        for number, manifest in enumerate(manifests):
            shown, rank = manifest.provenance.shown_document, manifest.rank
            seconds = first_call_seconds(shown)
            self.progress(BuildEvent("done", case.method, case.name, rank, text=manifest.key, seconds=seconds))
            # Ranks of one case have the same graph.
            if (text := capture_warning(shown)) is not None and number == 0:
                self.progress(BuildEvent("note", case.method, case.name, rank, text=text))

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

    def _phase(
        self,
        launch: _Launch,
        job: Job,
        phase: str,
        done: Callable[[_Launch, CaseJob, Mapping[int, dict[str, Any]]], None],
    ) -> None:
        """Run a phase of a launch, or of some of its cases; `done` takes each case as soon as all ranks are."""
        job.write()
        pace = launch.pace
        cases = {case.index: case for case in job.cases}
        waited = set(cases)

        def follow(entered: RankPhase) -> None:
            case = cases.get(entered.case) if entered.case is not None else None
            method, name = (case.method, case.name) if case is not None else ("", "")
            now_s = time.monotonic()
            pace.enter(entered.rank, phase, entered.case, now_s)
            if case is not None:
                launch.at[entered.rank] = case.index
            left_s = pace.left_s(entered.rank, now_s)
            elapsed_s = now_s - launch.started_s
            self.progress(BuildEvent("phase", method, name, entered.rank, entered.phase, elapsed_s, left_s=left_s))

        def told(index: int, found: Mapping[int, dict[str, Any]]) -> None:
            waited.discard(index)
            done(launch, cases[index], found)

        launch.at.clear()
        for rank in range(job.world_size) if self.rank is None else (self.rank,):
            pace.enter(rank, phase, None, time.monotonic())
        results = run_phase(
            job,
            phase,
            environ=self.request.rank_environ(_SEED_OF[phase]),
            log_path=launch.log_path,
            timeout_s=self.timeout_s,
            progress=follow,
            told=told,
            rank=self.rank,
            stop=self.stop,
        )
        pace.end(time.monotonic())
        for index in sorted(waited):
            told(index, {rank: document["cases"][str(index)] for rank, document in results.items()})

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


def _absences(job: Job, case: CaseJob, told: Mapping[int, dict[str, Any]]) -> dict[Absence, Files]:
    """Return which ranks have no method for a case. Raises ConfigError where no rank has one."""
    lacking = {rank: item["absent"] for rank, item in told.items() if "absent" in item}
    if len(lacking) == job.world_size:
        first = next(iter(lacking.values()))
        raise ConfigError(first["message"], hint=first["hint"])
    return {Absence(case.method, case.name, rank): item.get("files", {}) for rank, item in lacking.items()}


def _is_passing(error: CachectlError) -> bool:
    """Say whether an error's text speaks of the machine's state rather than of the case."""
    return any(words in str(error).lower() for words in _PASSING)


def _blamed(group: Sequence[LineState], error: CachectlError) -> Sequence[LineState]:
    """Return the lines a failure is about: of the rank that failed, the case its message names, else all."""
    of_rank = [line for line in group if line.rank == (error.rank or 0)] or group
    named = [line for line in of_rank if error.message.startswith(f"{line.case.method} [{line.case.name}]")]
    return named or of_rank
