"""The first process of a build: compile each case through the runtime and record what the artifact is valid for.

Owns what happens to one case in a rank process: eager, compile, later calls with other values, and what was seen
meanwhile. Rank processes only: imports torch.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cachectl.build import gates
from cachectl.build.job import CaseJob, EventLog, Job
from cachectl.build.program import RankProgram
from cachectl.build.recorder import CompileRecorder
from cachectl.build.shown import captured, shown_by_recording
from cachectl.build.state import Snapshot
from cachectl.build.steps import Ran, StepInputs, run_steps
from cachectl.errors import BuildError
from cachectl.identity.environment import environment_part
from cachectl.identity.inputs import InputError, bind_call, describe_call
from cachectl.identity.request import entry_model_part
from cachectl.identity.topology import rank_topology
from cachectl.runtimes.artifact import ArtifactSummary

__all__ = ["eager_run", "forget_traces", "record_case", "refuse_written_parameters"]


def record_case(program: RankProgram, job: Job, case: CaseJob, events: EventLog) -> dict[str, Any]:
    """Compile one case and return what was found: part documents, artifact folder, seconds, gates.

    Raises:
        BuildError: a graph break, a recompile, an artifact that was not saved, unequal values, guards or inputs that
            can't be kept; with the upstream text.
    """
    forget_traces()
    method = program.method(case)
    environment = program.environment
    with environment.watching():
        events.phase(case, "eager")
        inputs = program.inputs(case)
        snapshot = Snapshot(program.model, inputs)
        spec = _input_spec(program, case, method, inputs)
        calls = program.step_inputs(case, inputs, snapshot)
        eager, rebound = eager_run(method, calls, snapshot)
    refuse_written_parameters(case, snapshot)
    cache_dir = job.case_folder(program.rank, case) / "cache"
    cache_dir.mkdir(parents=True)
    compiled = program.runtime.compile(method, dynamic=program.dynamic, options=program.options, cache_dir=cache_dir)
    recorder = CompileRecorder(program.runtime, method, program.options, keep_warnings=True)
    before = program.runtime.captures()
    ran = _compiled_steps(compiled, calls, snapshot, case, events, recorder, rebound)
    passed = _passed_gates(program, case, cache_dir, calls, snapshot, eager, ran, recorder, rebound)
    kept = recorder.kept(case, spec, passed.summary.ops, dynamic=program.dynamic)
    folder = passed.folder.resolve()
    own = program.own_functions(case)
    document, raw = recorder.sources.document(program.roots, (), program.extra_files(), asked=own)
    return {
        "parts": {
            "model": entry_model_part(job.recipe, case.method, case.case),
            "sources": document,
            "inputs": kept.inputs,
            "topology": rank_topology(
                job.request["topology"],
                program.rank,
                program.runtime.placed(
                    folder / "compiled_module", environment.names if job.world_size > 1 else (), recorder.environ
                ),
            ),
            "options": {**job.request["options"], "found": kept.found},
            "toolchain": job.request["toolchain"],
            "device": job.request["device"],
            "environment": environment_part(
                job.recipe, environment.names | kept.variables, recorder.environ, program.started
            ),
            "guards": kept.sheet,
        },
        "raw_sources": raw,
        "runtime": program.runtime.name,
        "runtime_path": folder.relative_to(cache_dir.resolve()).as_posix(),
        "artifact": str(folder),
        "guard_count": kept.guard_count,
        "cold_seconds": ran.seconds[0],
        "gates": passed.differences,
        "warnings": kept.warnings,
        "shown": shown_by_recording(ran, passed.held, captured(program.runtime, before)),
    }


def _compiled_steps(
    compiled: Any,
    calls: StepInputs,
    snapshot: Snapshot,
    case: CaseJob,
    events: EventLog,
    recorder: CompileRecorder,
    rebound: list[str],
) -> Ran:
    """Run the steps compiled and put everything back. Raises BuildError at the first one that is traced anew."""

    def step(**inputs: Any) -> Any:
        output = _step(compiled, inputs, case)
        if recorder.guards.compilations > 1:
            raise _TracedAnewError
        return output

    events.phase(case, "compile")
    try:
        with recorder:
            ran = run_steps(step, calls, snapshot, golden=True, after_first=lambda: events.phase(case, "check"))
    except _TracedAnewError:
        # What the runtime says of it is known when the recorder is done.
        with _telling(rebound):
            gates.refuse_recompiles(case, recorder.guards.compilations, recorder.messages.skipped())
        raise
    # The next case starts where this one did.
    snapshot.restore()
    return ran


class _TracedAnewError(Exception):
    """A later step was traced anew: no further one is worth its compile."""


@dataclass(frozen=True)
class _Passed:
    """What the gates found: the artifact's folder and own account, the largest differences, what is overwritten."""

    folder: Path
    summary: ArtifactSummary
    differences: dict[str, float]
    held: dict[str, list[str]]


def _passed_gates(
    program: RankProgram,
    case: CaseJob,
    cache_dir: Path,
    calls: StepInputs,
    snapshot: Snapshot,
    eager: Ran,
    ran: Ran,
    recorder: CompileRecorder,
    rebound: list[str],
) -> _Passed:
    """Hold the compiled steps against the gates. Raises BuildError at the first refusal."""
    with _telling(rebound):
        folder, summary = recorder.check_artifact(case, cache_dir)
        gates.refuse_changing_text(case, program.method(case).__self__)
        differences = gates.compare_runs(case, calls, snapshot, eager, ran, rtol=program.rtol, atol=program.atol)
        held = gates.held_values(case, eager, ran, program.runtime.effective_options(program.options))
    return _Passed(folder, summary, differences, held)


@contextmanager
def _telling(rebound: list[str]) -> Iterator[None]:
    """Let a refusal say which attributes each step binds anew."""
    try:
        yield
    except BuildError as error:
        if rebound:
            error.hint = f"each step binds {', '.join(rebound[:3])} anew: write it in place; else {error.hint}"
        raise


def eager_run(step: Callable[..., Any], calls: StepInputs, snapshot: Snapshot) -> tuple[Ran, list[str]]:
    """Run the steps eagerly and put everything back; return what was kept, and the attributes that a step binds anew.

    Which tensors a step writes is known to `calls` from here on.
    """
    rebound: list[str] = []

    def after_first() -> None:
        calls.written = snapshot.written()
        rebound.extend(snapshot.rebound())

    with torch.no_grad():
        ran = run_steps(step, calls, snapshot, after_first=after_first)
    snapshot.restore()
    return ran, rebound


def refuse_written_parameters(case: CaseJob, snapshot: Snapshot) -> None:
    """Raise BuildError if a step since the snapshot wrote a parameter: no copy of those is kept."""
    if changed := snapshot.changed_parameters():
        raise BuildError(
            f"{case.method} [{case.name}]: the step writes the parameter {changed[0]}",
            hint="register what changes as a buffer and write it in place",
        )


def _step(compiled: Any, inputs: Mapping[str, Any], case: CaseJob) -> Any:
    dynamo = importlib.import_module("torch._dynamo.exc")
    try:
        return compiled(**inputs)
    except dynamo.TorchDynamoException as error:
        text = " ".join(str(error).split())
        raise BuildError(
            f"{case.method} [{case.name}]: the runtime could not trace one whole graph: {text[:1500]}",
            hint="rewrite what the text names (no .item(), no branch on a tensor's value), see docs/model-rules.md",
        ) from error


def _input_spec(
    program: RankProgram, case: CaseJob, method: types.MethodType, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        arguments = bind_call(program.signature(method), (), inputs)
        return describe_call(arguments, program.runtime.tensor_type, program.runtime.format_of)
    except InputError as error:
        raise BuildError(
            f"{case.method} [{case.name}]: {error}", hint="pass tensors, numbers, strings or containers of them"
        ) from error


def forget_traces() -> None:
    """Have Dynamo forget what it traced in this process."""
    # The runtime's watcher looks through every code object Dynamo ever made for the method's code: what an earlier case
    # left there would be saved with this case's graph, or count as a recompile (torch_npu: ModelCacheWatcher.__exit__).
    importlib.import_module("torch._dynamo").reset()
    importlib.import_module("torch._dynamo.utils").orig_code_map.clear()
