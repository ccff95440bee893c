"""The process that proves what a program's processes recorded: which case a draft is, and whether it holds here.

Owns the way from drafts to entries under `exec --record`, in a fresh process that builds the recipe's own model: the
recipe's inputs say which draft is which case, the eager steps run under the watch of the environment as a build's do,
and then the artifact has to pass what a build's second process asks (cachectl/build/reloading.py). What the program
itself computed is not asked. Rank processes only: imports torch.
"""

from __future__ import annotations

import importlib
import json
import shutil
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from cachectl import __version__
from cachectl.build.call_drafts import CallDraft, read_drafts
from cachectl.build.drafts import entry_document
from cachectl.build.job import CaseJob, EventLog, Job, absent_document, write_json
from cachectl.build.program import RankProgram
from cachectl.build.recording import eager_run, refuse_written_parameters
from cachectl.build.reloading import reload_case
from cachectl.build.state import Snapshot
from cachectl.errors import BuildError
from cachectl.identity.environment import environment_part
from cachectl.identity.inputs import bind_call, check_call
from cachectl.identity.relations import check_relations, relations_of
from cachectl.identity.request import entry_model_part
from cachectl.identity.topology import rank_topology

__all__ = ["adopt_case"]


def adopt_case(program: RankProgram, job: Job, case: CaseJob, events: EventLog) -> dict[str, Any]:
    """Prove one case from the draft that looks like it.

    Returns:
        `{"draft": name, "document", "reloaded"}`, the manifest's document as it was proved; `{"unrecorded": true}`
        where no draft is of this case, in this rank or in another one; `{"absent": …}` where the case is proved and
        this rank has no method for it.

    Raises:
        CachectlError: what was refused.
    """
    absence = program.absence(case) if job.world_size > 1 else None
    if absence is not None:
        found = {"absent": absent_document(absence, program.roots)}
        return found if _is_recorded("absent", job.world_size) else {"unrecorded": True}
    drafts = [
        draft
        for draft in read_drafts(job.workspace)
        if draft.is_of(case.method) and draft.rank == program.rank and case.case["inputs"] in draft.document["sources"]
    ]
    with program.environment.watching():
        events.phase(case, "eager")
        inputs = program.inputs(case)
        drafts = list(_like(program, case, drafts, inputs))
        if not _is_recorded("held" if drafts else "lacking", job.world_size):
            return {"unrecorded": True}
        # As a build's first process does: what model code reads in here belongs to the key.
        snapshot = Snapshot(program.model, inputs)
        eager_run(program.method(case), program.step_inputs(case, inputs, snapshot), snapshot)
    refuse_written_parameters(case, snapshot)
    # A program may have several models with such a method. Ranks can't try apart: they wait for each other.
    while len(drafts) > 1 and job.world_size == 1:
        draft = drafts.pop(0)
        try:
            return _prove(program, job, case, draft, events)
        except Exception:  # noqa: BLE001 - the artifact runs in here, and may raise anything; the last one is told
            traceback.print_exc()
            snapshot.restore()
    return _prove(program, job, case, drafts[0], events)


def _prove(program: RankProgram, job: Job, case: CaseJob, draft: CallDraft, events: EventLog) -> dict[str, Any]:
    """Hold one draft against the case, as a build's second process does what the first one found."""
    document = _document(program, job, case, draft)
    folder = job.case_folder(program.rank, case)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "entry.json", document)
    shutil.copytree(draft.harvest, folder / "harvest")
    try:
        reloaded = reload_case(program, job, case, document, events)
    except BuildError as error:
        if "does not load what was saved" in error.message:
            error.hint = "the recipe's factory and inputs have to give what the program compiles, in the same modes"
        raise
    return {"draft": draft.folder.name, "document": document, "reloaded": reloaded}


def _like(
    program: RankProgram, case: CaseJob, drafts: Sequence[CallDraft], inputs: dict[str, Any]
) -> Iterator[CallDraft]:
    """Yield the drafts whose call looks like the case's inputs."""
    signature = program.signature(program.method(case))
    arguments = bind_call(signature, (), inputs)
    for draft in drafts:
        different = check_call(
            draft.document["inputs"], arguments, program.runtime.tensor_type, program.runtime.format_of
        ) or check_relations(relations_of(draft.document["guards"], signature.parameters), arguments)
        if not different:
            yield draft


def _is_recorded(here: str, world_size: int) -> bool:
    """Say whether every rank that has the method has a draft of the case.

    One without must not leave the others waiting in a collective.

    Args:
        here: `held`, `lacking`, or `absent` where this rank has no such method.
    """
    if world_size == 1:
        return here == "held"
    distributed: Any = importlib.import_module("torch.distributed")
    found: list[str] = [""] * world_size
    distributed.all_gather_object(found, here)
    return "held" in found and "lacking" not in found


def _document(program: RankProgram, job: Job, case: CaseJob, draft: CallDraft) -> dict[str, Any]:
    """Return the entry manifest's document of a draft that is this case."""
    kept = draft.document
    sources = kept["sources"][case.case["inputs"]]
    names = program.environment.names | set(kept["variables"])
    # Groups and device as they were where it was compiled; what model code reads of the launcher is known here only.
    artifact = draft.harvest / "compiled_module"
    placed = {**program.runtime.placed(artifact, names, kept["environ"]), **kept["placed"]}
    found = {
        "parts": {
            "model": entry_model_part(job.recipe, case.method, case.case),
            "sources": sources["document"],
            "inputs": kept["inputs"],
            "topology": rank_topology(job.request["topology"], program.rank, placed),
            "options": {**job.request["options"], "found": kept["found"]},
            "toolchain": job.request["toolchain"],
            "device": job.request["device"],
            "environment": environment_part(job.recipe, names, kept["environ"], kept["started"]),
            "guards": kept["guards"],
        },
        "raw_sources": sources["raw"],
        "runtime": kept["runtime"],
        "runtime_path": kept["runtime_path"],
        "cold_seconds": kept["cold_seconds"],
        "gates": {},
        "warnings": kept["warnings"],
    }
    files = json.loads(draft.files.read_bytes())["files"]
    document = entry_document(job, job.recipe["name"], program.rank, case, found, files)
    document["provenance"]["builder"] = f"cachectl {__version__} exec --record"
    return document
