"""What this process spent on graph captures, and what makes the runtime capture once more.

Owns counting them, in npugraph_ex's own class, and the prediction of an artifact's graph keys. A hit skips tracing and
not capture: each process captures again. Facts: torch_npu 2.13.0 npugraph_ex/_acl_concrete_graph/acl_graph.py. The
graph key is made of sizes and integers that stayed symbolic and don't only go to operators whose arguments a replay
updates (`get_unupdated_sym_input_index`), and of the parameters' addresses where they are not frozen
(`get_unupdated_input_fn`). A known key is captured again where an input that the graph writes has moved
(`is_need_to_recapture`). When a graph has `capture_limit` keys, the next capture of either kind makes it eager for good
(`AclGraph.compile`).

torch is looked up when a function runs, never at import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cachectl.runtimes.artifact import ArtifactSummary

__all__ = ["Captures", "GraphKeys", "captures", "predicted_keys"]

_TALLY = "_cachectl_captures"
_CLASS = "_acl_concrete_graph.acl_graph"


@dataclass
class Captures:
    """What graph captures came to since counting began.

    Attributes:
        captured: captures, of new keys and of known ones.
        recaptured: those of a known key, since an address moved.
        fell_back: graphs that reached capture_limit and are eager since.
        seconds: in captures.
        warm_up_seconds: before a graph's first capture: warm-up runs, static kernels.
        fallen: ids of the graphs that fell back.
        graphs: ids of the graphs that captured.
    """

    captured: int = 0
    recaptured: int = 0
    fell_back: int = 0
    seconds: float = 0.0
    warm_up_seconds: float = 0.0
    fallen: set[int] = field(default_factory=set)
    graphs: set[int] = field(default_factory=set)

    def since(self, before: Captures) -> Captures:
        """Return what came to these since an earlier count."""
        return Captures(
            self.captured - before.captured,
            self.recaptured - before.recaptured,
            self.fell_back - before.fell_back,
            self.seconds - before.seconds,
            self.warm_up_seconds - before.warm_up_seconds,
            self.fallen - before.fallen,
            self.graphs - before.graphs,
        )


@dataclass(frozen=True)
class GraphKeys:
    """How many graphs a process captures for one entry, as far as the artifact tells.

    Attributes:
        limit: capture_limit; None where the artifact does not say.
        keys: the graph keys of calls that the entry serves; 0 where nothing is captured, None where each new value of
            `sizes` or `values` is another one.
        sizes: inputs whose sizes are in the key, as `x.size(0)`; a program of one batch size has one value of them.
        values: integers among the inputs that are in the key. A length or a position has another value at each step.
        written: inputs that the graph writes: captured again where they have moved.
    """

    limit: int | None
    keys: int | None
    sizes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """What to expect of it that is worth a warning; None for nothing."""
        if self.keys == 0 or self.limit is None:
            return None
        if self.values and (self.keys is None or self.keys > self.limit):
            return (
                f"each new value of {', '.join(self.values[:3])} is another graph key: after {self.limit} of them the "
                "runtime runs this method eagerly for good; make it a tensor, or a length of a fused operator"
            )
        if self.keys is not None and self.keys > self.limit:
            return f"{self.keys} graph keys are more than capture_limit {self.limit}: the runtime falls back to eager"
        return None


def captures() -> Captures | None:
    """Return a copy of the count, which begins at the first time; None where this wheel's class is another one or none.

    Costs nothing but at a capture.
    """
    # The package imports it at the first compile or load; it is there by two names, one object per name.
    with contextlib.suppress(ImportError):
        importlib.import_module(f"npugraph_ex.{_CLASS}")
    found: list[Captures] = []
    for package in ("npugraph_ex", "torch_npu.dynamo.npugraph_ex"):
        graph = getattr(sys.modules.get(f"{package}.{_CLASS}"), "AclGraph", None)
        if hasattr(graph, "compile_for_graph_key"):
            tally = _counted(graph)
            if not any(tally is one for one in found):
                found.append(tally)
    if not found:
        return None
    return Captures(
        sum(one.captured for one in found),
        sum(one.recaptured for one in found),
        sum(one.fell_back for one in found),
        sum(one.seconds for one in found),
        sum(one.warm_up_seconds for one in found),
        set().union(*(one.fallen for one in found)),
        set().union(*(one.graphs for one in found)),
    )


def predicted_keys(summary: ArtifactSummary, inputs: Mapping[str, Any]) -> GraphKeys:
    """Return what an artifact's text says of its graph keys.

    Args:
        summary: of the artifact.
        inputs: the entry's part, which names the integers that stayed symbolic and their ranges.
    """
    text = summary.settings.get("capture_limit", "")
    limit = int(text) if text.isdecimal() else None
    written = summary.written_inputs
    if summary.settings.get("force_eager") == "True":
        return GraphKeys(limit, 0, written=written)
    if summary.graph_key_inputs is None:
        return GraphKeys(limit, None, written=written)
    by_index = {spec.index: spec for spec in summary.inputs}
    in_shapes = {size for spec in summary.inputs for size in spec.shape or () if isinstance(size, str)}
    sizes: list[str] = []
    values: list[str] = []
    for index, is_integer in summary.graph_key_inputs:
        spec = by_index.get(index)
        name, symbol = (spec.name, spec.value) if spec is not None else (f"input {index}", None)
        # Dynamo hands a symbolic size over as an integer of its own.
        (values if is_integer and symbol not in in_shapes else sizes).append(name)
    ranges = {place: leaf["integer"]["range"] for place, leaf in inputs.items() if "integer" in leaf}
    keys: int | None = None if sizes else 1
    for low, high in ranges.values() if values else ():
        bounded = keys is not None and len(ranges) == len(values) and low is not None and high is not None
        keys = keys * (high - low + 1) if bounded and keys is not None else None
    if values and not ranges:
        keys = None
    # Which integer is which symbol the artifact does not say.
    return GraphKeys(limit, keys, tuple(sizes), tuple(sorted(ranges)) or tuple(values) if values else (), written)


def _counted(graph: Any) -> Captures:
    """Return the count kept with a class of AclGraph; the first call begins it."""
    tally: Captures | None = graph.__dict__.get(_TALLY)
    if tally is not None:
        return tally
    tally = Captures()
    setattr(graph, _TALLY, tally)
    capture, compile_, reset = graph.compile_for_graph_key, graph.compile, getattr(graph, "reset_captured_graph", None)

    @functools.wraps(capture)
    def compile_for_graph_key(self: Any, graph_key: Any, *args: Any, **kwargs: Any) -> Any:
        tally.captured += 1
        tally.recaptured += graph_key in self.graphs_meta
        tally.graphs.add(id(self))
        started = time.perf_counter()
        try:
            return capture(self, graph_key, *args, **kwargs)
        finally:
            tally.seconds += time.perf_counter() - started

    @functools.wraps(compile_)
    def compile_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_captured", True):
            return compile_(self, *args, **kwargs)
        started, captured = time.perf_counter(), tally.seconds
        try:
            return compile_(self, *args, **kwargs)
        finally:
            tally.warm_up_seconds += time.perf_counter() - started - (tally.seconds - captured)

    graph.compile_for_graph_key, graph.compile = compile_for_graph_key, compile_graph
    if reset is not None:
        # Nothing else resets all of a graph's captures (AclGraph.compile, at capture_limit).
        @functools.wraps(reset)
        def reset_captured_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
            tally.fell_back += 1
            tally.fallen.add(id(self))
            return reset(self, *args, **kwargs)

        graph.reset_captured_graph = reset_captured_graph
    return tally
