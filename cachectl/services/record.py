"""Record: prove what a program under `exec --record` compiled, and publish it as a build would.

Owns what happens before the program's first compile (the request, so that its process compares itself with it) and
after its end. What is published was proved in a fresh process (cachectl/build/adopting.py) and lies under the key that
a build here would give it; a draft that is no case of the recipe, or fails, is a reason.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachectl.build.call_drafts import CallDraft, leave_refusal, read_drafts
from cachectl.build.drafts import proved
from cachectl.build.job import Job, write_json
from cachectl.build.launcher import run_phase
from cachectl.build.workspace import forget_workspaces, workspace
from cachectl.errors import CachectlError
from cachectl.identity.environment import is_placement
from cachectl.schemas.boot import Absence, Reason
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.keying import is_secret_name
from cachectl.schemas.report import ReasonModel, RecordReport
from cachectl.services.build import built_entry, publication_of, ready_set
from cachectl.services.build_parts import in_own_cut
from cachectl.services.init import init_store
from cachectl.services.plan import LineState, known_absences, plan_lines
from cachectl.services.request import RecipeRequest, read_request
from cachectl.store.absences import Files, note_absences
from cachectl.store.layout import StoreLayout, bare_hex
from cachectl.store.locks import file_lock
from cachectl.store.manifest import ManifestRepo
from cachectl.store.writing import add_artifact, name_recipe, publish, publish_entries

__all__ = ["prepare_record", "publish_drafts"]

# Another order of every set of strings than the program had, as a build's second process.
_HASH_SEEDS = ("2", "1")


def prepare_record(recipe: Path, folder: Path) -> None:
    """Leave in a record folder what may be recorded: the request on this machine, or why there is none.

    Raises:
        OSError: the folder can't be written.
    """
    try:
        request = read_request(recipe)
        if request.missing:
            leave_refusal(folder, request.missing[0])
            return
    except CachectlError as error:
        leave_refusal(folder, _fault(error))
        return
    _job(request, folder).write()


def publish_drafts(layout: StoreLayout, recipe: Path, folder: Path, *, timeout_s: float) -> RecordReport:
    """Prove and publish the drafts of one run; what is not published has its reason in the report.

    Entries that were proved are kept for the next build or record where the warm set is not whole.

    Args:
        recipe: the recipe that exec was given.
        folder: the record folder.
        timeout_s: bound on waiting for another builder and on the process that proves, together, in seconds.
    """
    run = _Run(layout, folder, time.monotonic() + timeout_s)
    started = time.monotonic()
    try:
        run.publish(recipe)
    except CachectlError as error:
        run.reasons.append(_fault(error))
    return RecordReport(
        entries=tuple(built_entry(manifest) for manifest in run.published),
        warm_set=run.warm_set,
        reasons=tuple(ReasonModel.of(reason) for reason in {str(reason): reason for reason in run.reasons}.values()),
        seconds=time.monotonic() - started,
    )


@dataclass
class _Run:
    """One publishing: what it has found so far."""

    layout: StoreLayout
    folder: Path
    deadline_s: float
    reasons: list[Reason] = field(default_factory=list)
    published: list[EntryManifest] = field(default_factory=list)
    warm_set: str | None = None

    def publish(self, recipe: Path) -> None:
        """Do all of it. Raises CachectlError: nothing more is published."""
        drafts = read_drafts(self.folder)
        self.reasons += [draft.refused for draft in drafts if draft.refused is not None]
        drafts = [draft for draft in drafts if draft.refused is None]
        if not drafts:
            return
        # Its ranks are started here, whatever started exec.
        request = in_own_cut(read_request(recipe), {})
        recorded = Job.read(self.folder / "job.json")
        if (request.request, request.document) != (recorded.request, recorded.recipe):
            hint = "recipe or toolchain changed while the program ran: run it again"
            self.reasons.append(Reason("policy", "request", kind="policy", hint=hint))
            return
        init_store(self.layout)
        forget_workspaces()
        name = f"build-{bare_hex(request.loaded.digest)}"
        with ManifestRepo.open(self.layout.database) as repo, file_lock(self.layout, name, self._left_s()):
            lines = list(plan_lines(self.layout, repo, request))
            if all(line.state == "ready" for line in lines) and (known := ready_set(self.layout, request, lines)):
                self._leave_ready(request, known)
                return
            self._publish(repo, request, lines, *self._prove(request, lines, drafts))

    def _leave_ready(self, request: RecipeRequest, warm_set: str) -> None:
        """Say that there is nothing to publish: somebody else was first, or the program's model is another one."""
        name_recipe(self.layout, request.loaded.raw_digest, request.loaded.digest, request.loaded.trail)
        self.warm_set = warm_set
        hint = "the recipe's set is ready: where the program was cold all the same, its model or calls are others"
        self.reasons.append(Reason("store", "warm set", warm_set, None, "policy", hint))

    def _prove(
        self, request: RecipeRequest, lines: Sequence[LineState], drafts: Sequence[CallDraft]
    ) -> tuple[list[EntryManifest], dict[Absence, Files]]:
        """Return the entries that hold in a fresh process, their blobs in the store, and methods that ranks lack."""
        of_draft = {draft.folder.name: draft for draft in drafts}
        lacking = {line.place for line in lines if line.state != "ready"}
        wanted = {
            line.case.index
            for line in lines
            if line.place in lacking and any(draft.is_of(line.case.method) for draft in drafts)
        }
        if not wanted:
            self.reasons += [_no_case(draft, request.world_size) for draft in drafts]
            return [], {}
        with workspace(self.layout) as (work, logs):
            like: dict[str, dict[str, str]] = {}
            for name, draft in of_draft.items():
                shutil.copytree(draft.folder, work / "drafts" / name)
                # Ranks of one method differ in a few bytes.
                files = add_artifact(self.layout, draft.harvest, like=like.get(draft.method))
                like.setdefault(draft.method, {file["path"]: file["digest"] for file in files})
                write_json(CallDraft(work / "drafts" / name, {}).files, {"files": files})
            rank_logs = tuple(logs / f"rank{rank}.log" for rank in range(request.world_size))
            job = _job(request, work, wanted, rank_logs)
            job.write()
            results = run_phase(
                job,
                "adopt",
                environ={**request.environ, **_changes(drafts), "PYTHONHASHSEED": _hash_seed(drafts)},
                log_path=rank_logs[0] if request.world_size == 1 else logs / "launcher.log",
                timeout_s=self._left_s(),
                progress=lambda phase: None,
            )
        manifests: list[EntryManifest] = []
        absent: dict[Absence, Files] = {}
        for rank, result in results.items():
            for case in job.cases:
                found = result["cases"][str(case.index)]
                of_draft.pop(str(found.get("draft")), None)
                if "absent" in found:
                    absent[Absence(case.method, case.name, rank)] = found["absent"].get("files", {})
                elif "failure" in found:
                    of_draft = {name: draft for name, draft in of_draft.items() if not draft.is_of(case.method)}
                    hint = str(found["failure"]["hint"]).replace("the rank's log", str(rank_logs[rank]))
                    self.reasons.append(Reason("policy", "record", None, found["failure"]["message"], "policy", hint))
                elif "document" in found and (case.method, case.name, rank) in lacking:
                    # All ranks prove a case of which one lacks its entry; the others have theirs.
                    document = proved(found["document"], {"gates": {}}, found["reloaded"])
                    manifests.append(EntryManifest.from_document(document))
        self.reasons += [_no_case(draft, request.world_size) for draft in of_draft.values()]
        return manifests, absent

    def _publish(
        self,
        repo: ManifestRepo,
        request: RecipeRequest,
        lines: Sequence[LineState],
        manifests: Sequence[EntryManifest],
        absent: Mapping[Absence, Files],
    ) -> None:
        """Publish entries, and the warm set where nothing is missing."""
        digest = request.loaded.digest
        made = {(manifest.method, manifest.case, manifest.rank) for manifest in manifests}
        if made or absent:
            looked_at = [*(Absence(*place) for place in made), *absent]
            note_absences(self.layout, digest, digest_of(request.request), looked_at=looked_at, absent=absent)
        there = [line for line in lines if line.place not in made and Absence(*line.place) not in absent]
        missing = [line for line in there if line.state != "ready"]
        if missing:
            publish_entries(self.layout, repo, manifests, digest)
            names = sorted({f"{line.case.method} [{line.case.name}] rank {line.rank}" for line in missing})
            hint = "let the program make these calls too, or run: cachectl build"
            hint = f"what was proved is kept: {hint}" if manifests else hint
            self.reasons.append(Reason("store", "warm set", None, names, "absent", hint))
        else:
            warm_set = publish(
                self.layout,
                repo,
                publication_of(
                    request,
                    manifests,
                    there,
                    known_absences(self.layout, digest, request.request, request.roots),
                ),
            )
            self.warm_set = warm_set.warm_set
        self.published += manifests

    def _left_s(self) -> float:
        return max(1.0, self.deadline_s - time.monotonic())


def _job(request: RecipeRequest, folder: Path, wanted: set[int] | None = None, logs: tuple[Path, ...] = ()) -> Job:
    """Return the job of a record folder or of a workspace; of some cases, or of all."""
    return Job(
        recipe=request.document,
        recipe_folder=request.loaded.folder,
        workspace=folder,
        request=request.request,
        cases=tuple(case for case in request.cases() if wanted is None or case.index in wanted),
        world_size=request.world_size,
        logs=logs if request.world_size > 1 else (),
        meeting=f"{bare_hex(request.loaded.digest)}/record",
        ranks_per_node=request.ranks_per_node,
    )


def _changes(drafts: Sequence[CallDraft]) -> dict[str, str]:
    """Return what the program set in its own environment before it compiled: the fresh process has to have it too.

    Secrets it has not got, and a name that the program took away it keeps; where that matters it will refuse.
    """
    changed: dict[str, str] = {}
    for draft in drafts:
        started: Mapping[str, Any] = draft.document["started"]
        for name, value in draft.document["environ"].items():
            if started.get(name) != value and not is_secret_name(name) and not is_placement(name):
                changed.setdefault(name, value)
    return changed


def _hash_seed(drafts: Sequence[CallDraft]) -> str:
    taken = {draft.document["hash_seed"] for draft in drafts}
    return next((seed for seed in _HASH_SEEDS if seed not in taken), _HASH_SEEDS[0])


def _no_case(draft: CallDraft, world_size: int) -> Reason:
    hint = "this call is no case of the recipe that is still to build: add a case with these inputs"
    if world_size > 1:
        hint += "; or record all ranks under one exec: they can be proved together only"
    shapes = {place: leaf.get("tensor", leaf).get("shape", leaf) for place, leaf in draft.document["inputs"].items()}
    return Reason("inputs", draft.method, None, shapes, "absent", hint)


def _fault(error: CachectlError) -> Reason:
    hint = error.hint or "run: cachectl build RECIPE"
    return Reason("policy", "record", None, error.message, "policy", hint)
