"""The gates of a build: what a case has to pass before anything of it is published.

Owns the refusals and their words; each names the case, what was found, and the way out. Rank processes only: what is
compared are tensors.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from cachectl.build.job import CaseJob
from cachectl.build.state import Comparison, Snapshot, State, compare_values
from cachectl.build.steps import Ran, StepInputs, step_name
from cachectl.errors import BuildError, DocumentError
from cachectl.identity.request import differences
from cachectl.runtimes.artifact import ArtifactSummary, inspect_artifact
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.keying import compute_key

__all__ = [
    "compare_runs",
    "held_values",
    "refuse_changing_text",
    "refuse_host_reads",
    "refuse_other_held",
    "refuse_other_key",
    "refuse_recompiles",
    "refuse_uncacheable",
    "saved_artifact",
]

# Files of the runtime's own code; what torch does with `.item()` inside is its business.
_RUNTIME_FOLDERS = (f"{os.sep}torch{os.sep}", f"{os.sep}torch_npu{os.sep}", f"{os.sep}torchair{os.sep}")
# What the artifact itself shows that no other process may load.
_UNCACHEABLE = {
    "random": "draws random numbers in the graph; the runtime can't capture them: draw outside and pass a tensor",
    "process-handle": "holds a handle that means something in this process only: keep the operator out of the graph",
}


def compare_runs(
    case: CaseJob,
    calls: StepInputs,
    snapshot: Snapshot,
    eager: Ran,
    ran: Ran,
    *,
    rtol: float,
    atol: float,
    found_by: str = "compiled",
) -> dict[str, float]:
    """Hold a run against eager's, step by step; return the largest difference of each, by its name.

    Raises:
        BuildError: they differ, with the step, the place and the numbers.
    """
    largest: dict[str, float] = {}

    def keep(name: str, comparison: Comparison) -> None:
        if not comparison.equal:
            raise BuildError(
                f"{case.method} [{case.name}]: {found_by} and eager differ in the {name}: {comparison} "
                f"(rtol {rtol:g}, atol {atol:g})",
                hint="set option force_eager to see whether the graph or the model is at fault; nothing was published",
            )
        largest[name] = comparison.max_difference

    def keep_state(name: str, expected: State | None, found: State | None) -> None:
        assert expected is not None
        assert found is not None
        keep(name, snapshot.compare(expected, found, rtol=rtol, atol=atol))

    last = calls.count - 1
    for number in range(calls.count):
        if number == last:
            keep_state("state before the last step", eager.before_last, ran.before_last)
        values = compare_values(eager.outputs[number], ran.outputs[number], rtol=rtol, atol=atol)
        keep(step_name(number, calls.made(number)), values)
        if number == 0:
            keep_state("state after it", eager.after_first, ran.after_first)
    keep_state("state after the last step", eager.after_last, ran.after_last)
    keep("last step's inputs after it", compare_values(eager.last_inputs, ran.last_inputs, rtol=rtol, atol=atol))
    return largest


def held_values(
    case: CaseJob, eager: Ran, ran: Ran, options: Mapping[str, Any], *, found_by: str = "compiled"
) -> dict[str, list[str]]:
    """Return what a program that keeps it across calls finds overwritten: places of outputs, and of inputs.

    An input that is an output, too, is neither cloned nor kept (AclGraph `_userinput_ref_with_output`), whatever the
    options say.

    Args:
        options: as the runtime will use them, `clone_output` and `clone_input` among them.

    Raises:
        BuildError: an option says that it is kept.
    """
    overwritten = {"outputs": _overwritten_outputs(eager, ran), "inputs": _overwritten_inputs(eager, ran)}
    exempt = {"outputs": eager.input_outputs, "inputs": eager.returned_inputs}
    for kind, option in (("outputs", "clone_output"), ("inputs", "clone_input")):
        broken = [place for place in overwritten[kind] if place not in exempt[kind]]
        if broken and options.get(option) in (True, "True"):
            raise BuildError(
                f"{case.method} [{case.name}]: {option} is on, and a later {found_by} call overwrites "
                f"{broken[0]} of an earlier one",
                hint="a program that keeps it reads wrong values: see docs/model-rules.md, rule 19",
            )
    return overwritten


def refuse_other_held(case: CaseJob, compiled: Mapping[str, list[str]], reloaded: Mapping[str, list[str]]) -> None:
    """Raise BuildError if the loaded artifact overwrites what the compiled graph leaves alone: cold would be right."""
    for kind in ("outputs", "inputs"):
        if more := sorted(set(reloaded[kind]) - set(compiled[kind])):
            raise BuildError(
                f"{case.method} [{case.name}]: a later call of the loaded artifact overwrites {more[0]}, "
                "which the compiled graph leaves as it was",
                hint="the entry is not cacheable as it stands: return a copy",
            )


def _overwritten_outputs(eager: Ran, ran: Ran) -> list[str]:
    """Return places of outputs that later steps changed where eager's stay as they were returned."""
    places: set[str] = set()
    for expected, found in zip(eager.kept, ran.kept, strict=True):
        places.update(*(kept - still for kept, still in zip(expected, found, strict=True)))
    return sorted(places)


def _overwritten_inputs(eager: Ran, ran: Ran) -> list[str]:
    """Return places of the first step's inputs that later steps changed and eager's steps don't write."""
    assert eager.before_last is not None
    assert ran.before_last is not None
    found = ran.before_last.inputs
    return sorted(
        place
        for place, change in eager.before_last.inputs.items()
        if change.is_none and place in found and not found[place].is_none
    )


def refuse_recompiles(case: CaseJob, compilations: int, skipped: str | None) -> None:
    """Raise BuildError if Dynamo traced the method more than once; `skipped` is what the runtime said of it."""
    if compilations > 1:
        raise BuildError(
            f"{case.method} [{case.name}]: traced {compilations} times, the runtime keeps no artifact then"
            + (f": {_one_line(skipped)}" if skipped else ""),
            hint="one case is one graph: make lengths tensors, or set dynamic: true",
        )


def refuse_host_reads(case: CaseJob, codes: Iterable[CodeType]) -> None:
    """Raise BuildError if traced code of the model's calls `.item()`.

    Dynamo may fold such a read into the graph, so that nothing breaks here; on a device the eager step still waits for
    the value, and the next torch may break the graph where this one did not.
    """
    for code in codes:
        if any(folder in code.co_filename for folder in _RUNTIME_FOLDERS):
            continue
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            line = instruction.starts_line if type(instruction.starts_line) is int else line
            if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval == "item":
                raise BuildError(
                    f"{case.method} [{case.name}]: {os.path.basename(code.co_filename)}:{line} {code.co_name} calls "
                    ".item(), which reads a tensor back to the host",
                    hint="keep the value a tensor, or pass it to the method as an argument; see docs/model-rules.md",
                )


def saved_artifact(case: CaseJob, cache_dir: Path, skipped: str | None) -> Path:
    """Return the artifact that the runtime saved. Raises BuildError, with its own words, if it saved none."""
    saved = [path for path in cache_dir.rglob("compiled_module") if path.is_file() and path.stat().st_size]
    if skipped or len(saved) != 1:
        text = _one_line(skipped) if skipped else f"found {len(saved)} saved graphs, wanted 1"
        raise BuildError(
            f"{case.method} [{case.name}]: the runtime did not save the artifact: {text}",
            hint="what the graph captures must be serialisable: no module objects, no process-local handles",
        )
    return saved[0]


def refuse_changing_text(case: CaseJob, module: object) -> None:
    """Raise BuildError for a module whose text is another one each time: the runtime names its cache after it."""
    first, second = str(module).splitlines(), str(module).splitlines()
    if first == second:
        return
    line = next((line.strip() for line, other in zip(first, second, strict=False) if line != other), "")
    raise BuildError(
        f"{case.method} [{case.name}]: str(model) is another text each time, and the runtime names its cache by it: "
        f"{_one_line(line)[:200]}",
        hint="keep counters, times and addresses of new objects out of __repr__ and extra_repr",
    )


def refuse_uncacheable(case: CaseJob, data: bytes) -> ArtifactSummary:
    """Return what an artifact says of itself. Raises BuildError for one that can be read and must not be shared."""
    try:
        summary = inspect_artifact(data)
    except DocumentError as error:
        raise BuildError(
            f"{case.method} [{case.name}]: the artifact can't be read: {error.message}",
            hint="this torch_npu writes a form that this version of cachectl does not know",
        ) from error
    for finding in summary.findings:
        if finding.kind in _UNCACHEABLE:
            raise BuildError(
                f"{case.method} [{case.name}]: {_UNCACHEABLE[finding.kind].partition(':')[0]} ({finding.detail})",
                hint=_UNCACHEABLE[finding.kind].partition(": ")[2],
            )
    minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if minor not in summary.python_minors:
        # Bytecode of another minor crashes the process that calls it, and the toolchain part would say it is this one.
        raise BuildError(
            f"{case.method} [{case.name}]: the artifact holds bytecode of CPython "
            f"{'/'.join(summary.python_minors) or 'of no known version'}, this is {minor}",
            hint="build with an interpreter that cachectl knows, see docs/compatibility.md",
        )
    return summary


def refuse_other_key(case: CaseJob, parts: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise BuildError if a fresh process, with what it sees of itself in an entry's parts, has another key.

    Args:
        parts: the entry's.
        found: the parts as the fresh process finds them; those it can't find without tracing are the entry's.
    """
    if compute_key(dict(found)) == compute_key(dict(parts)):
        return
    different = [name for name in parts if digest_of(parts[name]) != digest_of(found[name])]
    first = next(iter(differences(parts[different[0]], found[different[0]])), None)
    text = ""
    if first is not None:
        one_only = first[1] is None and first[2] is None
        text = f": {first[0]} " + ("in one of them only" if one_only else f"was {first[1]!r} and is {first[2]!r}")
    raise BuildError(
        f"{case.method} [{case.name}]: a fresh process has another key: {', '.join(different)}{text}",
        hint="something differs from process to process: an order of a set, a random value, a variable read at times",
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1500]
