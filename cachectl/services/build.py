"""Build: make what plan says is missing, prove it, publish it whole.

Several builds can share the work: shards of a matrix, and the ranks of a world that another launcher started. Each
publishes its own entries, and the one that finds the set whole closes it.

What a gate refused is not tried again blindly for a while (cachectl/store/refusals.py); every other failure is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from cachectl.build.drafts import now_text
from cachectl.build.workspace import forget_workspaces, workspace
from cachectl.errors import ConfigError, EnvironmentFault, StoreLockTimeoutError
from cachectl.schemas.boot import Absence, Member
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.report import Boot, BuildReport, Failed
from cachectl.services.build_parts import dealt, in_own_cut, launched_rank
from cachectl.services.build_sight import seen_digest
from cachectl.services.case_building import BuildEvent, CaseBuilder, Outcome, built_entry
from cachectl.services.framework import refuse_inert
from cachectl.services.init import init_store
from cachectl.services.plan import LineState, known_absences, plan_lines
from cachectl.services.request import RecipeRequest, read_request
from cachectl.store.absences import note_absences
from cachectl.store.drafts import forget_old_drafts
from cachectl.store.layout import StoreLayout, bare_hex
from cachectl.store.locks import file_lock
from cachectl.store.manifest import ManifestRepo
from cachectl.store.reading import read_boot_record
from cachectl.store.refusals import Refusal, note_refusals, read_refusals
from cachectl.store.writing import Publication, name_recipe, publish, publish_entries

__all__ = ["BuildEvent", "build", "built_entry", "publication_of", "ready_set"]

_LOCK_TIMEOUT_S = 3600.0
# A wait longer than this is told, with who holds the lock.
_PATIENCE_S = 1.0
# How long the rank that closes a set waits for the others' entries, where --timeout says nothing else.
_CLOSING_S = 600.0
_POLL_S = 0.25
_WATCH_STEP_S = 0.5


def build(
    layout: StoreLayout,
    recipes: Sequence[Path],
    *,
    force: bool = False,
    jobs: int = 1,
    keep_going: bool = False,
    timeout_s: float | None = None,
    shard: tuple[int, int] | None = None,
    progress: Callable[[BuildEvent], None] = lambda event: None,
) -> BuildReport:
    """Build the missing entries of each recipe and publish each recipe's warm set when it is whole.

    Entries are kept for the next build as soon as all ranks of their case proved it, and what was recorded for the next
    build to prove, also where this one fails or is killed then.

    Args:
        force: build also what is ready, and what a gate refused lately; a new manifest of the same key, the old stays
            until prune.
        jobs: recipes built at once.
        keep_going: go on with the next case or recipe after one that failed, also where the code that a recipe names is
            at fault.
        timeout_s: bound on each rank process, seconds.
        shard: (i, n): build the i-th of n parts of all the recipes' cases, dealt out in turn; n is part 0 again, so
            that counting from 0 and from 1 both make n parts. Other parts are others' to build at the same time.

    Raises:
        ConfigError: a recipe, or the code it names, is wrong.
        EnvironmentFault, StoreError, ManifestError: no new set of that recipe is visible.
    """
    started = time.monotonic()
    requests = [in_own_cut(read_request(path), os.environ) for path in recipes]
    for request in requests:
        refuse_inert(request.loaded)
    builds = [
        _RecipeBuild(
            layout,
            request,
            force,
            keep_going,
            timeout_s,
            mine,
            launched_rank(os.environ, request),
            _naming(request, progress) if len(requests) > 1 else progress,
        )
        for request, mine in zip(requests, dealt(requests, shard), strict=True)
    ]
    init_store(layout)
    forget_workspaces()
    forget_old_drafts(layout, time.time())
    with ManifestRepo.open(layout.database) as repo:
        repo.forget_expired_failures(datetime.now(timezone.utc))
    outcomes = _run_all(builds, jobs, keep_going)
    return BuildReport(
        built=tuple(entry for outcome in outcomes for entry in outcome.built),
        reused=tuple(key for outcome in outcomes for key in outcome.reused),
        failed=tuple(failure for outcome in outcomes for failure in outcome.failed),
        seconds=time.monotonic() - started,
        warm_set=outcomes[-1].warm_set if outcomes else None,
        boots=tuple(outcome.boot for outcome in outcomes if outcome.boot is not None),
    )


def _naming(request: RecipeRequest, progress: Callable[[BuildEvent], None]) -> Callable[[BuildEvent], None]:
    """Return a progress that says which recipe each event is about."""
    return lambda event: progress(replace(event, recipe=request.loaded.recipe.name))


def _run_all(builds: Sequence[_RecipeBuild], jobs: int, keep_going: bool) -> list[Outcome]:
    """Build the recipes, `jobs` at once; without keep_going none is begun after one that failed."""
    if jobs == 1 or len(builds) < 2:
        outcomes = []
        for item in builds:
            outcomes.append(item.build())
            if outcomes[-1].failed and not keep_going:
                break
        return outcomes
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(item.build) for item in builds]
        try:
            _watch(futures, keep_going)
        except BaseException:
            # Interrupted: the ranks are stopped, and the threads that wait for them come back.
            for item in builds:
                item.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures if not future.cancelled()]


def _watch(futures: Sequence[Future[Outcome]], keep_going: bool) -> None:
    """Wait for builds; after a failure those that have not begun are called off."""
    pending = {*futures}
    while pending:
        # In steps: a signal between Python's last look and the system call is answered when the wait is over.
        how = FIRST_EXCEPTION if keep_going else FIRST_COMPLETED
        done, pending = wait(pending, timeout=_WATCH_STEP_S, return_when=how)
        if not keep_going and any(future.exception() or future.result().failed for future in done):
            for future in pending:
                future.cancel()
            pending = {future for future in pending if not future.cancelled()}


@dataclass(frozen=True)
class _RecipeBuild:
    """The build of one recipe, or of this process's part of it.

    Args:
        mine: indices of the cases that are built here; None for all.
        rank: the one rank that is built here, others by other processes; None for all.
        stop: set by another thread to have the ranks stopped.
    """

    layout: StoreLayout
    request: RecipeRequest
    force: bool
    keep_going: bool
    timeout_s: float | None
    mine: frozenset[int] | None
    rank: int | None
    progress: Callable[[BuildEvent], None]
    stop: threading.Event = field(default_factory=threading.Event)

    def build(self) -> Outcome:
        """Build what is missing and publish it. Raises CachectlError."""
        if self.request.missing:
            raise EnvironmentFault(f"{self.request.missing[0]}", hint=self.request.missing[0].hint)
        with self._lock(), ManifestRepo.open(self.layout.database) as repo:
            lines = list(plan_lines(self.layout, repo, self.request))
            own = [line for line in lines if self.mine is None or line.case.index in self.mine]
            wanted = [line for line in own if self.force or line.state != "ready"]
            ready = [line for line in own if line not in wanted]
            outcome = Outcome(reused=[line.member.key for line in ready])
            for line in ready:
                self.progress(BuildEvent("reused", *line.place))
            if all(line.state == "ready" for line in lines) and not wanted:
                known = ready_set(self.layout, self.request, lines)
                if known is not None:
                    name_recipe(self.layout, self.request.loaded.raw_digest, self.request.loaded.digest)
                    outcome.warm_set, outcome.boot = known, _boot(self.request, known, (), lines)
                    return outcome
            # A rank that another launcher started waits for the others: they would have to see the very same.
            seen = seen_digest(self.request, self.layout.root) if wanted and self.rank is None else None
            wanted = self._without_refused(lines, wanted, seen, outcome)
            if outcome.failed and not self.keep_going:
                return outcome
            with workspace(self.layout) as (folder, logs):
                builder = CaseBuilder(
                    self.layout,
                    repo,
                    self.request,
                    folder,
                    logs,
                    not self.force,
                    self.keep_going,
                    self.timeout_s,
                    self.rank,
                    self.stop,
                    seen,
                    outcome,
                    lambda manifests: self._keep(repo, manifests, outcome),
                    self.progress,
                )
                manifests = builder.build(lines, wanted)
                if wanted:
                    tried = [line.place for line in wanted]
                    note_refusals(self.layout, self.request.loaded.digest, outcome.refused, tried)
                self._publish(repo, lines, wanted, manifests, outcome)
            return outcome

    def _without_refused(
        self, lines: Sequence[LineState], wanted: Sequence[LineState], seen: str | None, outcome: Outcome
    ) -> list[LineState]:
        """Return the wanted lines whose cases no gate refused lately; tell the others' failures again."""
        if self.force or seen is None:
            return list(wanted)
        now = time.time()
        refused = read_refusals(self.layout, self.request.loaded.digest, seen, now)
        cases = {(line.case.method, line.case.name) for line in wanted}
        for refusal in refused:
            if (refusal.method, refusal.case) in cases:
                text = _refusal_text(refusal, now)
                method, case, rank = refusal.method, refusal.case, refusal.rank
                outcome.failed.append(Failed(method=method, case=case, rank=rank, error=text, log=refusal.log))
                self.progress(BuildEvent("failed", method, case, rank, text=text, log=refusal.log))
        gone = {(refusal.method, refusal.case) for refusal in refused}
        return [line for line in wanted if (line.case.method, line.case.name) not in gone]

    def _keep(self, repo: ManifestRepo, manifests: Sequence[EntryManifest], outcome: Outcome) -> None:
        """Publish a proved case's entries at once, and which ranks lack it: a build killed next loses neither.

        A set is whole without what ranks were found not to have.
        """
        self._note_absent(manifests, outcome)
        publish_entries(self.layout, repo, manifests, self.request.loaded.digest)

    def _note_absent(self, manifests: Sequence[EntryManifest], outcome: Outcome) -> None:
        found = [Absence(manifest.method, manifest.case, manifest.rank) for manifest in manifests]
        note_absences(
            self.layout,
            self.request.loaded.digest,
            digest_of(self.request.request),
            looked_at=[*found, *outcome.absent],
            absent=outcome.absent,
        )

    def _publish(
        self,
        repo: ManifestRepo,
        lines: Sequence[LineState],
        wanted: Sequence[LineState],
        manifests: Sequence[EntryManifest],
        outcome: Outcome,
    ) -> None:
        """Publish the set when it is whole; the entries that were proved are kept already."""
        if outcome.failed:
            return
        if self.mine is None and self.rank is None:
            reused = [line for line in lines if line not in wanted and Absence(*line.place) not in outcome.absent]
            self._close(repo, manifests, reused, outcome)
        elif self.rank is None:
            whole = list(plan_lines(self.layout, repo, self.request))
            if all(line.state == "ready" for line in whole):
                self._close(repo, (), whole, outcome)
        elif self.rank == 0:
            self._close_for_all(repo, lines, wanted, outcome)

    def _close_for_all(
        self, repo: ManifestRepo, lines: Sequence[LineState], wanted: Sequence[LineState], outcome: Outcome
    ) -> None:
        """Wait until the other ranks have published what was to be built, and close the set."""
        timeout_s = self.timeout_s or _CLOSING_S
        deadline_s = time.monotonic() + timeout_s
        # All ranks build a case of which one lacks its entry, and publish what was lacking.
        before = {line.place: line.row.manifest if line.row is not None else None for line in wanted}
        while True:
            now = list(plan_lines(self.layout, repo, self.request))
            late = [
                line
                for line in now
                if line.state != "ready" or (line.place in before and before[line.place] == line.member.manifest)
            ]
            if not late:
                self._close(repo, (), now, outcome)
                return
            if time.monotonic() > deadline_s or self.stop.is_set():
                break
            time.sleep(_POLL_S)
        for line in late:
            method, case, rank = line.place
            text = f"rank {rank} did not publish {method} [{case}] within {timeout_s:g} s; see that rank's own output"
            outcome.failed.append(Failed(method=method, case=case, rank=rank, error=text, log=None))

    def _close(
        self, repo: ManifestRepo, manifests: Sequence[EntryManifest], ready: Sequence[LineState], outcome: Outcome
    ) -> None:
        """Publish a whole set. Raises ConfigError for a method that no rank has."""
        request = self.request
        absent = known_absences(self.layout, request.loaded.digest, request.request, request.roots)
        for case in request.cases():
            if all(Absence(case.method, case.name, rank) in absent for rank in range(request.world_size)):
                raise ConfigError(
                    f"functions: no rank's model has a method {case.method!r}",
                    hint="see model.factory and the ranks' logs",
                )
        warm_set = publish(self.layout, repo, publication_of(request, manifests, ready, absent))
        outcome.warm_set = warm_set.warm_set
        outcome.boot = _boot(request, warm_set.warm_set, manifests, ready)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one build of a recipe run at a time: the second waits, then finds what the first made (field report C9).

        Shards take turns with themselves only, and the ranks of one world would wait for each other for ever.
        """
        if self.rank is not None:
            yield
            return
        name = f"build-{bare_hex(self.request.loaded.digest)}"
        if self.mine is not None:
            name += f"-{bare_hex(digest_of(sorted(self.mine)))[:12]}"
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self.layout, name, _PATIENCE_S))
            except StoreLockTimeoutError as error:
                self.progress(BuildEvent("waiting", text=f"{self.request.loaded.recipe.name}: {error.message}"))
                held.enter_context(file_lock(self.layout, name, _LOCK_TIMEOUT_S))
            yield


def publication_of(
    request: RecipeRequest,
    manifests: Iterable[EntryManifest],
    ready: Iterable[LineState],
    absent: Iterable[Absence],
) -> Publication:
    """Return a whole set as it is published: what was made now, and what was ready before."""
    return Publication(
        recipe=request.loaded.recipe.name,
        recipe_digest=request.loaded.digest,
        raw_digest=request.loaded.raw_digest,
        trail=request.loaded.trail,
        paths=tuple(request.document["model"]["path"]),
        request=request.request,
        manifests=tuple(manifests),
        reused=tuple(line.member for line in ready),
        created_at=now_text(),
        absent=tuple(absent),
        ranks_per_node=request.ranks_per_node,
    )


def ready_set(layout: StoreLayout, request: RecipeRequest, ready: Sequence[LineState]) -> str | None:
    """Return the warm set that holds exactly these entries, if the boot record names it: that is what the hook reads.

    After a crash between the database and the record, or with a lost record, there is none and it is published again.
    """
    members: set[Member] = {line.member for line in ready}
    record = read_boot_record(layout, recipe_digest=request.loaded.digest)
    for warm_set in record.sets if record is not None else ():
        if set(warm_set.members) == members:
            return warm_set.warm_set
    return None


def _boot(
    request: RecipeRequest, warm_set: str, manifests: Sequence[EntryManifest], ready: Sequence[LineState]
) -> Boot:
    """Return what a start with a whole set saves: of each case the slowest rank, which the others wait for."""
    seconds: dict[tuple[str, str], list[tuple[float | None, float | None]]] = {}
    for manifest in manifests:
        of_case = seconds.setdefault((manifest.method, manifest.case), [])
        of_case.append((manifest.provenance.cold_seconds, manifest.provenance.warm_seconds))
    for line in ready:
        if line.row is not None:
            of_case = seconds.setdefault((line.case.method, line.case.name), [])
            of_case.append((line.row.cold_seconds, line.row.warm_seconds))
    saved = 0.0
    known = True
    for of_case in seconds.values():
        colds, warms = zip(*of_case, strict=True)
        if None in colds or None in warms:
            known = False
        else:
            saved += max(0.0, max(colds) - max(warms))
    simulated = bool(request.request["device"]["simulated"])
    return Boot(
        recipe=request.loaded.recipe.name,
        warm_set=warm_set,
        saved_seconds=saved if known else None,
        evidence="simulated" if simulated else "device",
    )


def _refusal_text(refusal: Refusal, now: float) -> str:
    minutes = max(0, round((now - refusal.at) / 60))
    when = f"{minutes} min ago" if minutes else "just now"
    return (
        f"not built again: it was refused {when}, and nothing that can be seen has changed since: {refusal.error}; "
        "change code, environment or toolchain, or pass --force"
    )
