"""Reads a runtime's saved `compiled_module` without running it and without torch.

Owns what can be said of an artifact from its bytes alone: who wrote it, for which CPython, graph inputs, compile
options, operators, and what in it is tied to a place or a process. Standard library only. It never unpickles, never
calls `marshal.loads`, and compiles none of the code it finds; reading an artifact is therefore safe for bytes nobody
has verified yet, and says nothing about whether running it would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from cachectl.runtimes.artifact.findings import FINDING_KINDS, Finding, find_dangers, group_names
from cachectl.runtimes.artifact.generated import GeneratedCode, read_generated
from cachectl.runtimes.artifact.marshalled import CodeSummary, read_code
from cachectl.runtimes.artifact.pickles import PICKLE_SIZE_LIMIT_BYTES, PickledArtifact, read_pickle
from cachectl.runtimes.artifact.signature import InputSpec, Signature, read_signature

__all__ = [
    "FINDING_KINDS",
    "PICKLE_SIZE_LIMIT_BYTES",
    "ArtifactSummary",
    "CodeSummary",
    "Finding",
    "InputSpec",
    "PickledArtifact",
    "Signature",
    "inspect_artifact",
    "read_code",
    "read_pickle",
    "read_signature",
]


@dataclass(frozen=True)
class ArtifactSummary:
    """What a `compiled_module` says of itself.

    `runtime` is npugraph_ex or torchair. `name` is the compiled method with its parameters. `created_at` is UTC, ISO
    8601 with Z; None where the runtime's date can't be read. `python_minors` are all CPython minors the bytecode fits,
    `python_minor` the one, where there is one. `imports` are the modules loading imports. `settings` are what the
    generated code sets, more than `options`, the text the runtime's own cache name is made of. `ops` counts operators
    before the runtime's passes. `group_names` are texts by which collectives may name their process groups.
    `graph_key_inputs` and `written_inputs` are what makes the runtime capture once more, see GeneratedCode. Texts are
    as found: whoever prints them escapes control characters.
    """

    runtime: str
    format_version: str
    name: str
    created_at: str | None
    python_minor: str | None
    python_minors: tuple[str, ...]
    co_filename: str
    first_line: int
    imports: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    parameters: tuple[tuple[str, bool], ...]
    options: Mapping[str, str]
    settings: Mapping[str, str]
    ops: Mapping[str, int]
    findings: tuple[Finding, ...]
    group_names: tuple[str, ...]
    size_bytes: int
    graph_key_inputs: tuple[tuple[int, bool], ...] | None = None
    written_inputs: tuple[str, ...] = ()


def inspect_artifact(data: bytes) -> ArtifactSummary:
    """Read an artifact's bytes.

    Idempotent and free of side effects; time and memory are linear in `len(data)`, which is limited to
    PICKLE_SIZE_LIMIT_BYTES. The format version is reported, not judged.

    Raises:
        DocumentError: the bytes are no artifact of either runtime (verify's finding unreadable-artifact).
    """
    pickled = read_pickle(data)
    code = read_code(pickled.compiled_fn)
    signature = read_signature(pickled.signature)
    generated = read_generated(pickled.py_code)
    return ArtifactSummary(
        runtime=pickled.runtime,
        format_version=pickled.version,
        name=pickled.name,
        created_at=_utc(pickled.date),
        python_minor=code.python_minor,
        python_minors=code.minors,
        co_filename=code.filename,
        first_line=code.first_line,
        imports=code.imports,
        inputs=tuple(_with_code_facts(spec, generated) for spec in signature.inputs),
        parameters=pickled.input_parameters,
        options=signature.options,
        settings=generated.settings,
        ops=signature.ops,
        findings=find_dangers(code, signature, pickled.signature, generated),
        group_names=group_names(generated),
        size_bytes=len(data),
        graph_key_inputs=generated.graph_key_inputs,
        written_inputs=generated.written_inputs,
    )


def _with_code_facts(spec: InputSpec, generated: GeneratedCode) -> InputSpec:
    if spec.shape is None:
        return spec
    example = generated.examples.get(spec.name)
    stride = generated.strides.get(spec.index)
    if example is None:
        return replace(spec, stride=stride, static_address=_static_address(spec, generated))
    return replace(
        spec,
        # The example names its dtype always; the signature leaves out what was the default while compiling.
        dtype=spec.dtype or example.dtype,
        device=spec.device or example.device,
        stride=example.stride if stride is None else stride,
        static_address=_static_address(spec, generated),
    )


def _static_address(spec: InputSpec, generated: GeneratedCode) -> bool | None:
    return None if generated.static_inputs is None else spec.index in generated.static_inputs


def _utc(date: str) -> str | None:
    try:
        moment = datetime.fromisoformat(date)
        if moment.tzinfo is not None:
            moment = moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
    return f"{moment.replace(tzinfo=None).isoformat(timespec='seconds')}Z"
