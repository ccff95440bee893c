"""Plan: what of a recipe is ready on this machine, what is missing, what is stale and why."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from cachectl.build.job import CaseJob
from cachectl.errors import CachectlError
from cachectl.identity.explain import Asked, compare_entry, distance, is_noise
from cachectl.identity.source_files import is_unchanged
from cachectl.schemas.boot import Absence, BootRecord, Member, Reason
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.keying import warm_set_id
from cachectl.schemas.report import LostSet, PlanEntry, PlanReport, ReasonModel
from cachectl.services.build_parts import in_own_cut
from cachectl.services.captures import capture_reason
from cachectl.services.framework import framework_reports, not_built
from cachectl.services.request import RecipeRequest, read_request, rehearse
from cachectl.store.absences import read_absences
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import EntryRow, FailureRow
from cachectl.store.reading import read_boot_record, read_manifest

__all__ = [
    "LineState",
    "against_entry",
    "expected_seconds",
    "known_absences",
    "plan",
    "plan_lines",
    "unnamed_set",
]

# So many of a request line's newest entries are compared; a line that has seen more rebuilds is asked for the newest.
_CANDIDATES = 16


@dataclass(frozen=True)
class LineState:
    """One request line: its case and rank, and the entry that holds, or the nearest one and what stands against it."""

    case: CaseJob
    rank: int
    row: EntryRow | None
    state: str
    reasons: tuple[Reason, ...]

    @property
    def place(self) -> tuple[str, str, int]:
        """Method, case and rank."""
        return self.case.method, self.case.name, self.rank

    @property
    def member(self) -> Member:
        """The entry as a member of a warm set; only for a ready line."""
        assert self.row is not None
        return Member(self.row.key, self.row.manifest, self.case.method, self.case.name, self.rank)


def plan(layout: StoreLayout, recipes: Sequence[Path], *, toolchain: Mapping[str, str] | None = None) -> PlanReport:
    """Return what is ready, missing or stale of each recipe, entry by entry.

    Args:
        toolchain: versions to rehearse instead of the ones here, by name; the warm sets that hold today and would not
            then are in the report's `lost`.

    Raises:
        ConfigError: a recipe or a version's name is wrong.
        StoreError, ManifestError: the store can't be read.
    """
    requests = [in_own_cut(read_request(path, to_build=False), os.environ) for path in recipes]
    rehearsed = [rehearse(request, toolchain or {}) for request in requests]
    layout.check()
    with ManifestRepo.open(layout.database, read_only=True) as repo:
        found = [(request, list(plan_lines(layout, repo, request))) for request in rehearsed]
        today = [list(plan_lines(layout, repo, request)) for request in requests] if toolchain else []
        shown = [
            (
                request,
                _with_captures(
                    layout,
                    _with_failures(repo, request, planned if toolchain else _published(layout, request, planned)),
                ),
            )
            for request, planned in found
        ]
    lines = [line for _, planned in found for line in planned]
    return PlanReport.of(
        (_plan_entry(request, line) for request, planned in shown for line in planned),
        expected_seconds=expected_seconds([line for line in lines if line.state != "ready"]),
        lost=tuple(
            lost
            for (request, then), now in zip(found, today, strict=bool(toolchain))
            if (lost := _lost_set(request, now, then)) is not None
        ),
        framework=framework_reports(*(request.loaded for request in requests)),
    )


def unnamed_set(record: BootRecord | None, keys: Collection[str], build: str) -> Reason | None:
    """Return why entries that all hold are not handed out: no boot record names them together. None where one does.

    Args:
        record: the recipe's boot record, None where there is none.
        keys: of the entries, one for each line.
        build: the command that publishes them again.
    """
    sets = record.sets if record is not None else ()
    if any({member.key for member in warm_set.members} == set(keys) for warm_set in sets):
        return None
    what = "boot record" if record is None else "warm set"
    text = f"every entry holds, but no {what} names them; building publishes them again and compiles nothing"
    return Reason("store", what, None, text, "absent", f"run: {build}")


def _published(layout: StoreLayout, request: RecipeRequest, lines: Sequence[LineState]) -> Sequence[LineState]:
    """Return the lines as a boot finds them: none is ready where no boot record names the entries that hold."""
    if not lines or any(line.state != "ready" for line in lines):
        return lines
    build = request.asked(lines[0].case, lines[0].rank, layout.root).commands.build()
    reason: Reason | None
    try:
        record = read_boot_record(layout, recipe_digest=request.loaded.digest)
        if record is None:
            # Where not all can be seen that a recipe means, its bytes may still be known, as they are to the hook.
            record = read_boot_record(layout, raw_digest=request.loaded.raw_digest)
    except CachectlError as error:
        reason = Reason("store", "boot record", error.message, kind="corrupt", hint=f"run: {build}")
    else:
        reason = unnamed_set(record, {line.member.key for line in lines}, build)
    return lines if reason is None else [replace(line, state="stale", reasons=(reason,)) for line in lines]


def _with_failures(repo: ManifestRepo, request: RecipeRequest, lines: Sequence[LineState]) -> list[LineState]:
    """Return the lines; those that are not ready with how their last build under this toolchain failed."""
    failures = repo.failures(
        recipe=request.loaded.recipe.name,
        toolchain=digest_of(request.request["toolchain"]),
        now=datetime.now(timezone.utc),
    )
    last = {(failure.method, failure.case, failure.rank): failure for failure in reversed(failures)}
    return [
        replace(line, reasons=(*line.reasons, _failure_reason(failure)))
        if line.state != "ready" and (failure := last.get(line.place)) is not None
        else line
        for line in lines
    ]


def _with_captures(layout: StoreLayout, lines: Sequence[LineState]) -> list[LineState]:
    """Return the lines; a case's first ready one with what its entry warns of graph captures, which ranks share."""
    told: set[int] = set()
    found = []
    for line in lines:
        if line.state == "ready" and line.case.index not in told:
            told.add(line.case.index)
            member = line.member
            if (reason := capture_reason(layout, member.key, member.manifest)) is not None:
                line = replace(line, reasons=(*line.reasons, reason))
        found.append(line)
    return found


def _failure_reason(failure: FailureRow) -> Reason:
    log = f"; its log: {failure.log_path}" if failure.log_path else ""
    hint = f"the build of {failure.failed_at:%Y-%m-%dT%H:%M:%SZ} failed{log}"
    return Reason("store", "last build", failure.error, None, "noise", hint)


def _lost_set(request: RecipeRequest, now: Sequence[LineState], then: Sequence[LineState]) -> LostSet | None:
    """Return the recipe's warm set if it holds now and not then."""
    gone = [line for line in then if line.state != "ready"]
    if not gone or not now or any(line.state != "ready" for line in now):
        return None
    return LostSet(
        recipe=request.loaded.recipe.name,
        warm_set=warm_set_id(line.member.key for line in now),
        lost=len(gone),
        entries=len(then),
        seconds=expected_seconds(gone),
    )


def expected_seconds(lines: Sequence[LineState]) -> float | None:
    """Return how long compiling these lines took when they were built last; None where that is not known of each.

    The ranks of a case compile it at the same time.
    """
    known = [line for line in lines if line.row is not None and line.row.cold_seconds is not None]
    if not lines or len(known) != len(lines):
        return None
    slowest: dict[int, float] = {}
    for line in known:
        assert line.row is not None
        assert line.row.cold_seconds is not None
        slowest[id(line.case)] = max(slowest.get(id(line.case), 0.0), line.row.cold_seconds)
    return sum(slowest.values())


def _plan_entry(request: RecipeRequest, line: LineState) -> PlanEntry:
    return PlanEntry.model_validate(
        {
            # Another cut's entry is none of this line's.
            "key": line.row.key if line.row is not None and line.state != "missing" else None,
            "recipe": request.loaded.recipe.name,
            "method": line.case.method,
            "case": line.case.name,
            "rank": line.rank,
            "state": line.state,
            "reasons": tuple(ReasonModel.of(reason) for reason in line.reasons),
        }
    )


def plan_lines(layout: StoreLayout, repo: ManifestRepo, request: RecipeRequest) -> Iterator[LineState]:
    """Yield the state of each line of a recipe: its cases in the recipe's order, each with all its ranks.

    A method that a rank was found not to have is no line of that rank.
    """
    absent = known_absences(layout, request.loaded.digest, request.request, request.roots)
    for case in request.cases():
        for rank in range(request.world_size):
            if Absence(case.method, case.name, rank) not in absent:
                yield _line(layout, repo, request, case, rank)


def known_absences(
    layout: StoreLayout, recipe_digest: str, request: Mapping[str, Any], roots: Mapping[str, Path]
) -> frozenset[Absence]:
    """Return which ranks have no method of which case, as builds of this request noted.

    With other code below the roots than they had imported nobody knows: the line is missing, and a build looks again.
    """
    try:
        noted = read_absences(layout, recipe_digest, digest_of(request))
    except CachectlError:
        return frozenset()  # A build makes the note anew.
    holding: dict[str, bool] = {}
    found = []
    for absence, files in (noted or {}).items():
        name = digest_of(files)
        if name not in holding:
            holding[name] = is_unchanged(files, roots)
        if holding[name]:
            found.append(absence)
    return frozenset(found)


def _line(layout: StoreLayout, repo: ManifestRepo, request: RecipeRequest, case: CaseJob, rank: int) -> LineState:
    if (against := not_built(request.loaded)) is not None:
        return LineState(case, rank, None, "missing", (against,))
    nearest: LineState | None = None
    asked = request.asked(case, rank, layout.root)
    for found in repo.line(request.loaded.recipe.name, case.method, case.name, rank, limit=_CANDIDATES):
        reasons = tuple(reason for reason in against_entry(layout, asked, found) if not is_noise(reason))
        if not reasons:
            return LineState(case, rank, found, "ready", ())
        if nearest is None or _nearness(reasons) < _nearness(nearest.reasons):
            # What fits its own cut into nodes is not stale: this cut has none yet.
            of_other_cut = all((reason.part, reason.name) == ("topology", "node cut") for reason in reasons)
            nearest = LineState(case, rank, found, "missing" if of_other_cut else "stale", reasons)
    if nearest is not None:
        return nearest
    hint = f"run: {asked.commands.build()}"
    return LineState(
        case, rank, None, "missing", (*request.missing, Reason("store", "entry", kind="absent", hint=hint))
    )


def _nearness(reasons: Sequence[Reason]) -> tuple[int, int]:
    return distance(reasons), len(reasons)


class Candidate(Protocol):
    """What has to be known of a stored entry to compare it."""

    @property
    def key(self) -> str: ...
    @property
    def manifest(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def state_reason(self) -> str | None: ...


def against_entry(layout: StoreLayout, asked: Asked, row: Candidate) -> Iterator[Reason]:
    """Yield what stands against using an entry for a request line, and the noise in which they differ."""
    if row.state != "ready":
        hint = f"{row.state_reason or 'no reason given'}; run: {asked.commands.build()}"
        yield Reason("policy", "state", row.state, "ready", "policy", hint)
    try:
        read = read_manifest(layout, row.key, row.manifest)
    except CachectlError as error:
        hint = f"run: {asked.commands.build('--force')}"
        yield Reason("artifact", "manifest", error.message, kind="corrupt", hint=hint)
        return
    yield from compare_entry(read.document, asked)
    blobs = BlobStore(layout)
    for item in read.entry.files:
        if not blobs.exists(item.digest, item.size_bytes):
            hint = f"run: {asked.commands.build('--force')}"
            yield Reason("artifact", item.path, item.digest, kind="absent", hint=hint)
