"""What is true of every cache of the runtime: what its key leaves out, and what a change around it does.

Owns the list of both, and looks in the artifacts of one directory for where each shows. Facts: `get_cache_bin` makes
the key of `str(module)`, the option text and, in newer wheels, the deterministic level; read in the wheels 2.6.0 to
2.14.0, and measured with torch_npu 2.13.0 on the CPU. What an NPU does with a model of another CANN is not shown here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from cachectl.runtimes.artifact import ArtifactSummary
from cachectl.runtimes.cache_tree import MethodFolder
from cachectl.schemas.audit import AuditChange, AuditGap
from cachectl.services.audit_start import recorded_cann

__all__ = ["Read", "changes", "gaps"]

Read = tuple[MethodFolder, ArtifactSummary]

# Which wheels of torch_npu read which format.
_WHEELS: Final = {
    ("torchair", "1.0.3"): "2.6.0, 2.7.1, 2.8.0 and 2.9.0",
    ("torchair", "1.0.5"): "2.7.1.post11, 2.9.0.post9, 2.10.0, 2.10.0.post7, 2.12.0.post3, 2.13.0 and 2.14.0",
    ("npugraph_ex", "1.0.5"): "2.10.0",
    ("npugraph_ex", "1.0.6"): "2.7.1.post11, 2.9.0.post9, 2.10.0.post7, 2.12.0.post3, 2.13.0 and 2.14.0",
}
# Options that shape what is compiled or run, and are not in the option text.
_UNKEYED_OPTIONS: Final = (
    "remove_cat_ops",
    "inplace_pass",
    "input_inplace_pass",
    "use_graph_pool",
    "record_statistics_debug_info",
)
# md5 of "" and of "custom_pass": what the runtime makes of a callable object, a partial or a builtin.
_BLIND_DIGESTS: Final = ("d41d8cd98f00b204e9800998ecf8427e", "149490ed96f202968f9abc32b7133c45")
_PASSES: Final = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
_SHOWN: Final = 8


def gaps(read: Iterable[Read]) -> tuple[AuditGap, ...]:
    """Return what the runtime's key leaves out, each with where it shows in these artifacts."""
    read = list(read)
    found = {kind: _found(read, kind) for kind in ("device-index", "process-group", "tensor-constant", "closure")}
    formats = sorted({f"{summary.runtime} {summary.format_version}" for _, summary in read})
    minors = sorted({f"CPython {minor}" for _, summary in read for minor in summary.python_minors})
    methods = sorted({f"{folder.graph.kind}.{folder.method}" for folder, _ in read})
    table = (
        ("sources", "the code of the method and of all it calls; only str(module) is in the key", methods),
        ("attributes", "numbers, flags and lists of the module that its repr doesn't show", ()),
        ("inputs", "shapes, strides, dtypes and formats of inputs, parameters and KV caches", _inputs(read)),
        ("guards", "all that Dynamo guards; a load skips them, and nothing checks a second call", ()),
        ("closures", "free variables of the method, filled from the live function", found["closure"]),
        ("constants", "values of tensors that became part of the artifact", found["tensor-constant"]),
        ("options", ", ".join(_UNKEYED_OPTIONS), _unkeyed(read)),
        ("custom passes", "a callable object or a partial as pass: all of them have one digest", _blind(read)),
        ("registrations", "decompositions, patterns and converters; torch._dynamo.config", ()),
        ("environment", "environment variables that the model or the runtime reads", ()),
        ("ranks", "local rank, ranks of groups, names of groups", (*found["device-index"], *found["process-group"])),
        ("toolchain", "torch, torch_npu below the format version, CANN, driver, CPython", (*formats, *minors)),
        ("device", "the SoC", ()),
        ("bytes", "the file has no digest: a changed byte that still loads is not seen, nor by this command", ()),
    )
    return tuple(AuditGap(name=name, detail=detail, here=_cut(here)) for name, detail, here in table)


def changes(read: Iterable[Read]) -> tuple[AuditChange, ...]:
    """Return what becomes of these artifacts when something around them changes."""
    return tuple(_changes(list(read)))


def _changes(read: list[Read]) -> Iterator[AuditChange]:
    count = len(read)
    if not count:
        return
    for (runtime, version), artifacts in sorted(Counter((s.runtime, s.format_version) for _, s in read).items()):
        wheels = _WHEELS.get((runtime, version), "no wheel that this version of cachectl knows")
        what = f"torch_npu (format {version} of {runtime})"
        yield _change(what, artifacts, "deleted", f"read by {wheels}; every other wheel removes it at the first call")
        if ", " in wheels:
            detail = "from one of those wheels to another, torch too: the old artifact is loaded without a word"
            yield _change(what, artifacts, "unnoticed", detail)
    for minors, artifacts in sorted(Counter("/".join(summary.python_minors) for _, summary in read).items()):
        detail = (
            f"bytecode of {minors or 'no known CPython'}: another minor crashes when it is called, or never returns"
        )
        yield _change("CPython", artifacts, "crash", detail)
    kernels = [cann for _, summary in read if (cann := recorded_cann(summary)) is not None]
    if kernels:
        detail = f"static kernels of CANN {', '.join(sorted(set(kernels)))} are left out, with a warning in the log"
        yield _change("CANN", len(kernels), "slow", detail)
    yield _change(
        "CANN", count, "unnoticed", "graph and models are loaded as they are, whatever CANN compiled them for"
    )
    yield _change("SoC", count, "unnoticed", "neither path nor artifact is compared with the device")
    if ranked := sum(folder.rank.world_size is not None for folder, _ in read):
        worlds = ", ".join(sorted({str(folder.rank.world_size) for folder, _ in read if folder.rank.world_size}))
        yield _change("world size", ranked, "cold", f"folders are named after world {worlds}; another finds nothing")
    # A rank folder exists only where there are several ranks; a single process has its one device.
    if bound := sum(folder.rank.world_size is not None and _has(s, "device-index") for folder, s in read):
        detail = "device numbers are in the code: the same rank on another local rank loads them unnoticed"
        yield _change("ranks per node", bound, "unnoticed", detail)


def _change(change: str, artifacts: int, effect: str, detail: str) -> AuditChange:
    return AuditChange.model_validate({"change": change, "artifacts": artifacts, "effect": effect, "detail": detail})


def _has(summary: ArtifactSummary, kind: str) -> bool:
    return any(found.kind == kind for found in summary.findings)


def _found(read: list[Read], kind: str) -> tuple[str, ...]:
    return tuple(
        sorted(
            {
                f"{folder.rank.name or folder.method}: {found.detail}"
                for folder, summary in read
                for found in summary.findings
                if found.kind == kind
            }
        )
    )


def _inputs(read: list[Read]) -> tuple[str, ...]:
    shapes: dict[str, None] = {}
    for folder, summary in read:
        for spec in summary.inputs:
            # Parameters are many; they are lifted among the inputs, and known by their fixed address.
            if spec.shape is not None and spec.kind == "user" and not spec.static_address:
                size = ", ".join(map(str, spec.shape))
                shapes[f"{folder.method}: {spec.name} {spec.dtype or '?'} ({size})"] = None
    return tuple(shapes)


def _unkeyed(read: list[Read]) -> tuple[str, ...]:
    return tuple(
        sorted(
            {
                f"{folder.method}: {name}={summary.settings[name]}"
                for folder, summary in read
                for name in _UNKEYED_OPTIONS
                if name in summary.settings
            }
        )
    )


def _blind(read: list[Read]) -> tuple[str, ...]:
    return tuple(
        sorted(
            {
                f"{folder.method}: {name}"
                for folder, summary in read
                for name in _PASSES
                if summary.options.get(name) in _BLIND_DIGESTS
            }
        )
    )


def _cut(here: Iterable[str]) -> tuple[str, ...]:
    every = tuple(here)
    return every if len(every) <= _SHOWN else (*every[:_SHOWN], f"and {len(every) - _SHOWN} more")
