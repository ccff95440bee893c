"""The second process of a build: load what the first one saved, and recompute.

Owns the proof at build time that an entry works where nothing is left of its making: the artifact is copied to another
folder, checked as a program's process would check it, loaded, and run against eager. What the entry says of its gates
is found here. Rank processes only: imports torch.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachectl.boot.handout import HandedEntry, HandedSet, Handout
from cachectl.boot.instrument import CachedMethod
from cachectl.build import gates
from cachectl.build.job import RECORDED, CaseJob, EventLog, Job
from cachectl.build.program import RankProgram
from cachectl.build.recording import eager_run
from cachectl.build.shown import captured, shown_by_reloading, static_kernels_rung
from cachectl.build.state import Snapshot
from cachectl.build.steps import run_steps
from cachectl.errors import BuildError
from cachectl.identity.environment import environment_part
from cachectl.identity.inputs import bind_call, describe_call
from cachectl.identity.request import entry_model_part
from cachectl.identity.topology import rank_topology
from cachectl.runtimes.artifact import ArtifactSummary, inspect_artifact
from cachectl.schemas.boot import StoredEntry

__all__ = ["reload_case"]


def reload_case(
    program: RankProgram, job: Job, case: CaseJob, document: dict[str, Any], events: EventLog
) -> dict[str, Any]:
    """Run one case from its artifact; return seconds and gates.

    Args:
        document: the entry manifest's document as it is about to be published.

    Raises:
        BuildError: it was not loaded, something was traced anew, or values differ from eager; with the reason.
    """
    events.phase(case, "reload")
    method = program.method(case)
    with program.environment.watching():
        inputs = program.inputs(case)
        snapshot = Snapshot(program.model, inputs)
        calls = program.step_inputs(case, inputs, snapshot)
        eager, _ = eager_run(method, calls, snapshot)
    cached = _moved(program, job, case, document, method)
    folder = _moved_folder(job.case_folder(program.rank, case), document)
    summary = inspect_artifact((folder / "compiled_module").read_bytes())
    recorded = _recorded(job.case_folder(program.rank, case))
    # As it is before the runtime's own code runs, which is when the first process looked. A program under
    # `exec --record` is another one than this, and is compared in what counts.
    here = _parts_here(program, job, case, document["parts"], inputs, folder, summary) if recorded else None
    before = program.runtime.captures()
    ran = run_steps(cached, calls, snapshot, golden=True)
    snapshot.restore()
    _refuse_cold(case, cached)
    if here is not None:
        gates.refuse_other_key(case, document["parts"], here)
    options = program.runtime.effective_options(program.options)
    passed = {
        # The runtime keeps the graph and drops what torch wraps around it, which may be what writes the state.
        f"reloaded {name}": difference
        for name, difference in gates.compare_runs(
            case, calls, snapshot, eager, ran, rtol=program.rtol, atol=program.atol, found_by="reloaded"
        ).items()
    }
    held = gates.held_values(case, eager, ran, options, found_by="reloaded")
    if recorded is not None:
        gates.refuse_other_held(case, recorded["held"], held)
    decided = cached.cases[0]
    return {
        "warm_seconds": ran.seconds[0],
        "gates": passed,
        "seconds": decided.seconds,
        "proof_guards": decided.proof.guards if decided.proof is not None else 0,
        "shown": shown_by_reloading(
            ran,
            held,
            captured(program.runtime, before),
            recorded=recorded,
            keys=program.runtime.graph_keys(summary, document["parts"]["inputs"]),
            seconds=decided.seconds,
            static_kernels=static_kernels_rung(options, folder),
            rtol=program.rtol,
            atol=program.atol,
        ),
    }


def _parts_here(
    program: RankProgram,
    job: Job,
    case: CaseJob,
    parts: Mapping[str, Any],
    inputs: Mapping[str, Any],
    folder: Path,
    summary: ArtifactSummary,
) -> dict[str, Any]:
    """Return the key parts as this process finds them; sources and guards, which were proved, are the entry's."""
    runtime, observed = program.runtime, set(parts["environment"]["observed"])
    names = program.environment.names | observed
    spec = describe_call(
        bind_call(program.signature(program.method(case)), (), inputs), runtime.tensor_type, runtime.format_of
    )
    # A place that stayed symbolic was compared with its range when the call was checked.
    symbolic = {place: leaf for place, leaf in parts["inputs"].items() if place in spec and _is_symbolic(leaf)}
    found = {
        **runtime.found(program.options, strict=True),
        "operators": runtime.operators(summary.ops, strict=True),
    }
    place = runtime.placed(folder / "compiled_module", names if job.world_size > 1 else (), os.environ)
    return {
        **parts,
        "model": entry_model_part(job.recipe, case.method, case.case),
        "inputs": {**spec, **symbolic},
        "topology": rank_topology(job.request["topology"], program.rank, place),
        "options": {**job.request["options"], "found": found},
        "toolchain": job.request["toolchain"],
        "device": job.request["device"],
        "environment": environment_part(job.recipe, names, os.environ, program.started),
    }


def _recorded(folder: Path) -> dict[str, Any] | None:
    """Return what the first process showed; None where there was none, as under `exec --record`."""
    try:
        document: dict[str, Any] = json.loads((folder / RECORDED).read_bytes())
    except FileNotFoundError:
        return None
    return document or None


def _is_symbolic(leaf: Mapping[str, Any]) -> bool:
    return "integer" in leaf or any(isinstance(size, dict) for size in leaf.get("tensor", {}).get("shape", ()))


def _moved(
    program: RankProgram, job: Job, case: CaseJob, document: dict[str, Any], method: types.MethodType
) -> CachedMethod:
    """Return the method as a program would have it, cached by a copy of the artifact in another folder."""
    entry = StoredEntry.from_document(document)
    case_folder = job.case_folder(program.rank, case)
    folder = _moved_folder(case_folder, document)
    _copy_private(case_folder / "harvest", entry, folder)
    handed = HandedSet(request=job.request, entries=(HandedEntry(entry, folder, document),))
    return CachedMethod(
        method,
        Handout("warm", job.recipe_folder, sets=(handed,), roots=program.roots),
        program.runtime,
        dynamic=program.dynamic,
        options=program.options,
        new_cold_folder=lambda: case_folder / "unexpected",
    )


def _moved_folder(case_folder: Path, document: dict[str, Any]) -> Path:
    return case_folder / "moved" / str(document["artifact"]["runtime_path"])


def _refuse_cold(case: CaseJob, cached: CachedMethod) -> None:
    if cached.outcome != "warm":
        reasons = "; ".join(str(reason) for reason in cached.reasons[:3])
        raise BuildError(
            f"{case.method} [{case.name}]: a fresh process does not load what was saved: {reasons}",
            hint="the entry is not cacheable as it stands: the part named differs between two processes",
        )


def _copy_private(source: Path, entry: StoredEntry, folder: Path) -> None:
    for item in entry.files:
        target = folder / item.path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes((source / item.path).read_bytes())
        target.chmod(item.mode)
