"""The rules that a traced graph's operators can break.

Owns reading one graph against the rules, and the severities. What happens around a graph (breaks, recompiles, state) is
told by checking_trace.py. Rank processes only: imports torch.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cachectl.build.checking_attention import attention_in_parts, repeated_lookups
from cachectl.build.checking_graph import GraphReading, Operation, storage_of
from cachectl.build.checking_places import Findings, Place, Places
from cachectl.schemas.check import STRIDED_OPERATORS

__all__ = ["Owner", "Rules", "collectives_of"]

# What a graph builds of constants at each step beyond this is worth a buffer.
_LARGE_BYTES = 1 << 20
_ATTENTION = re.compile(r"(fused_infer|incre_flash|prompt_flash)_attention|fused_infer_attention_score")
_LENGTHS = re.compile(r"^actual_.*len")
_PROBABILITIES = {"dropout_p": 0.0, "p": 0.0, "keep_prob": 1.0}
# npu operators that draw, and carry no tag.
_DRAWS = re.compile(r"dropout|bernoulli|multinomial|randperm|random|philox")
_TRIGONOMETRY = ("cos", "sin")
_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d", "_dtensor")
_CACHE_NAME = re.compile(r"past|cache|(^|[._\[])(kv|keys?|values?|k|v)([._\]0-9]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Owner:
    """What a graph input is in the model: `kind` is parameter, state (buffer, tensor attribute) or argument."""

    kind: str
    name: str


@dataclass(frozen=True)
class Rules:
    """Reads graphs of one method.

    Args:
        owner_of: says what a graph input is, by its index; None for what is no tensor of the model's or the call's.
        simulated: whether the recipe's device is simulated.
        listed: whether the call has a list of integers among its arguments.
        marked: whether every tensor of the call went through torch._dynamo.mark_static.
    """

    places: Places
    findings: Findings
    method: str
    mode: str
    dynamic: bool
    simulated: bool
    listed: bool
    marked: bool
    owner_of: Callable[[int], Owner | None]

    def read(self, reading: GraphReading, *, whole: bool) -> None:
        """Add what a graph breaks. `whole`: it is the method's one graph, not a piece between breaks."""
        for node in reading.module.graph.nodes:
            self._node(node)
        for operation in reading.operations:
            self._random(operation)
            if not any(reading.is_wrapped_number(tensor) for _, tensor in operation.tensors()):
                self._host(operation)
            self._writes(operation, reading)
            self._contiguous(operation)
            self._attention(operation)
            self._simulated(operation)
            self._rotary(operation)
            if operation.name in ("cat", "concat"):
                self._grown(operation, reading, whole=whole)
        self._layers(reading)
        self._constants(reading)
        self._shared(reading)

    def _say(self, rule: str, severity: Any, what: str, node: fx.Node, rewrite: str | None = None) -> None:
        self.findings.add(rule, severity, what, place=self._place(node), method=self.method, rewrite=rewrite)

    def _place(self, node: fx.Node) -> Place | None:
        while node.stack_trace is None and node.next.op != "root":
            node = node.next  # What switches a mode has no stack of its own.
        return self.places.of_text(node.stack_trace)

    def _node(self, node: fx.Node) -> None:
        """Read what the operators below no longer show: names as the user wrote them."""
        name = _target_name(node)
        if name.startswith("triton_kernel_wrapper"):
            self._say("triton-kernel", "error", "a Triton kernel is part of the graph", node)
        elif name in ("arange", "range") and node.op == "call_function":
            size = _said_size(node)
            self._say("computed-positions", "warning", f"torch.arange{size} is worked out at every step", node)
        elif name == "_set_grad_enabled" and node.args and node.args[0] is True:
            self._say("backward", "warning", "gradients are switched on inside of the method", node)
        elif "synchronize" in name:
            self._say("stream-sync", "error", f"{name} waits for the device inside of the graph", node)
        elif "numpy" in type(node.target).__name__:
            self._say("host-sync", "error", f"numpy's {name.removeprefix('wrapped_')} works on the host", node)
        elif node.op == "call_method" and name in ("cpu", "numpy"):
            self._say("host-sync", "error", f".{name}() copies a tensor to the host", node)

    def _random(self, operation: Operation) -> None:
        tagged = torch.Tag.nondeterministic_seeded in operation.overload.tags
        if not tagged and not (operation.namespace == "npu" and _DRAWS.search(operation.name)):
            return
        off = [operation.arguments.get(name) == value for name, value in _PROBABILITIES.items()]
        if any(off) or operation.arguments.get("train") is False:
            return
        if "attention" in operation.name and not any(name in operation.arguments for name in _PROBABILITIES):
            return  # Its dropout is left at the default, which is none.
        said = f"{operation.namespace}.{operation.name}"
        self._say("random-numbers", "error", f"{said} draws random numbers, which a capture refuses", operation.node)

    def _host(self, operation: Operation) -> None:
        tags, said = operation.overload.tags, f"{operation.namespace}.{operation.name}"
        if torch.Tag.dynamic_output_shape in tags and any(map(free_unbacked_symbols, operation.results)):
            what = f"{said} gives a tensor whose size depends on values"
            self._say("data-dependent-shape", "error", what, operation.node)
        elif torch.Tag.data_dependent_output in tags or operation.name in ("_local_scalar_dense", "is_nonzero"):
            self._say("host-sync", "error", f"{said} reads a tensor's value on the host", operation.node)
        elif operation.name in ("_to_copy", "copy_", "to") and self._leaves_device(operation):
            self._say("host-sync", "error", f"{said} copies a tensor from the NPU to the host", operation.node)

    @staticmethod
    def _leaves_device(operation: Operation) -> bool:
        sources = [tensor for name, tensor in operation.tensors() if not (operation.name == "copy_" and name == "self")]
        return any(source.device.type == "npu" for source in sources) and any(
            result.device.type == "cpu" for result in operation.results
        )

    def _writes(self, operation: Operation, reading: GraphReading) -> None:
        for tensor in operation.written():
            index = reading.owner(tensor)
            owner = self.owner_of(index) if index is not None else None
            if owner is not None and owner.kind == "parameter":
                self._say("parameter-written", "error", f"the step writes the parameter {owner.name}", operation.node)

    def _contiguous(self, operation: Operation) -> None:
        if operation.namespace not in ("npu", "air") or operation.name in STRIDED_OPERATORS:
            return
        for name, tensor in operation.tensors():
            if not _is_contiguous(tensor):
                what = f"npu::{operation.name} gets {name} as a view with strides {_sizes(tensor.stride())}"
                self._say("non-contiguous", "warning", f"{what} of shape {_sizes(tensor.shape)}", operation.node)

    def _attention(self, operation: Operation) -> None:
        if operation.namespace not in ("npu", "air") or not _ATTENTION.search(operation.name):
            return
        said, lengths = f"{operation.namespace}::{operation.name}", _lengths_of(operation)
        if operation.namespace == "air" and self.mode == "npugraph_ex":
            what = f"{said} is torchair's own, which the GE mode alone can run"
            rewrite = f"call torch_npu.{operation.name}, with list[int] lengths and dynamic: true"
            self._say("fia-lengths", "error", what, operation.node, rewrite)
            return
        lists = [name for name, kind in lengths.items() if kind == "list"]
        tensors = [name for name, kind in lengths.items() if kind == "tensor"]
        if lists and self.listed and not self.dynamic:
            what = f"{said} takes {lists[0]} as list[int] and dynamic is false: each length is a graph of its own"
            self._say("fia-lengths", "error", what, operation.node)
        elif lists and self.mode == "ge_graph" and not self.marked:
            what = f"{said} takes {lists[0]} as list[int] in the GE mode"
            rewrite = (
                "torchair.ops.npu_fused_infer_attention_score with lengths as a Tensor and dynamic: false; else "
                "torch._dynamo.mark_static(tensor) for every other input"
            )
            self._say("fia-lengths", "warning", what, operation.node, rewrite)
        elif tensors and not lists and self.dynamic:
            what = f"{said} takes {tensors[0]} as a Tensor and dynamic is true"
            self._say("fia-lengths", "warning", what, operation.node, "set compile.dynamic: false")

    def _simulated(self, operation: Operation) -> None:
        if self.simulated and operation.namespace == "npu" and not _has_reference(operation.overload):
            what = f"the simulation has no npu::{operation.name}: the build's eager step ends there"
            self._say("simulated-operator", "error", what, operation.node)

    def _rotary(self, operation: Operation) -> None:
        if operation.namespace == "aten" and operation.name in _TRIGONOMETRY:
            self._say("computed-rotary", "warning", f"{operation.name} is computed at every step", operation.node)

    def _layers(self, reading: GraphReading) -> None:
        """Advise on what each layer does that is done once, or that one operator does."""
        for lookup in repeated_lookups(reading, self._table):
            what = f"{lookup.table} is looked up {lookup.times} times at the same positions"
            rewrite = "look it up once before the first layer, and hand cos and sin to each"
            self._say("computed-rotary", "advice", what, lookup.node, rewrite)
        # The simulation has no fast path to be missed.
        if (parts := attention_in_parts(reading)) and not self.simulated:
            times = f" in {len(parts)} places" if len(parts) > 1 else ""
            what = f"attention is a product, a softmax and a product{times}"
            self._say("fused-attention", "advice", what, parts[0])

    def _table(self, index: int) -> str | None:
        owner = self.owner_of(index)
        return owner.name if owner is not None and owner.kind == "state" else None

    def _grown(self, operation: Operation, reading: GraphReading, *, whole: bool) -> None:
        parts = [tensor for _, tensor in operation.tensors()]
        if len({storage_of(part) for part in parts}) < 2:
            return
        leaves = whole and any(storage_of(result) in reading.outputs for result in operation.results)
        for part in parts:
            index = reading.owner(part)
            owner = self.owner_of(index) if index is not None else None
            if owner is None or owner.kind == "parameter":
                continue
            if (owner.kind == "state" and leaves) or _CACHE_NAME.search(owner.name):
                sizes = f"{_sizes(part.shape)} becomes {_sizes(operation.results[0].shape)}"
                what = f"{owner.name} grows by torch.cat: {sizes}, another graph at each step"
                self._say("grown-cache", "error", what, operation.node)

    def _shared(self, reading: GraphReading) -> None:
        """Find arguments that share memory with one that is written: what torch puts around that isn't saved."""
        arguments: dict[int, dict[int, str]] = defaultdict(dict)
        for index, node in enumerate(reading.inputs):
            value, owner = node.meta.get("example_value"), self.owner_of(index)
            if isinstance(value, torch.Tensor) and owner is not None and owner.kind == "argument":
                arguments[storage_of(value)][index] = owner.name
        for operation in reading.operations:
            for tensor in operation.written():
                shared = arguments.get(storage_of(tensor), {})
                if len(shared) > 1:
                    first, second = sorted(shared.values())[:2]
                    what = f"the step writes memory that the arguments {first} and {second} share"
                    self._say("shared-input", "error", what, operation.node)

    def _constants(self, reading: GraphReading) -> None:
        """Find what is built of no input's values: the largest tensors of it that others read."""
        constant: set[fx.Node] = set()
        for node in reading.module.graph.nodes:
            made = node.op in ("call_function", "call_method") and all(
                argument in constant or not _is_tensor(argument) for argument in node.all_input_nodes
            )
            if made and _is_tensor(node):
                constant.add(node)
        for node in constant:
            if all(user in constant for user in node.users):
                continue
            whole = _whole(node, constant)
            size = _bytes(whole.meta["example_value"])
            if size is not None and size >= _LARGE_BYTES and _target_name(whole) not in ("empty", "empty_strided"):
                shape = _sizes(whole.meta["example_value"].shape)
                what = f"a constant of {shape}, {size / (1 << 20):.1f} MiB, is built at every step"
                self._say("large-mask", "warning", what, whole)


def collectives_of(reading: GraphReading) -> list[Operation]:
    """Return the collective operations of a graph."""
    return [
        operation
        for operation in reading.operations
        if operation.namespace in _COLLECTIVES and "wait" not in operation.name
    ]


def _lengths_of(operation: Operation) -> dict[str, str]:
    """Return how an attention operator is told its lengths: argument name to `list` or `tensor`."""
    found = {}
    for name, value in operation.arguments.items():
        if _LENGTHS.search(name) and value is not None:
            found[name] = "tensor" if isinstance(value, torch.Tensor) else "list"
    return found


def _whole(node: fx.Node, constant: set[fx.Node]) -> fx.Node:
    """Return the node of whose memory a constant is a view."""
    storage = storage_of(node.meta["example_value"])
    for base in node.all_input_nodes:
        if base in constant and storage_of(base.meta["example_value"]) == storage:
            return _whole(base, constant)
    return node


def _target_name(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.is_contiguous())
    except RuntimeError:
        return True  # Strides that depend on values: nobody can say.


def _bytes(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage().nbytes())
    except RuntimeError:
        return None  # A size that depends on values.


def _sizes(values: Any) -> str:
    return f"[{', '.join(str(value) for value in values)}]"


def _said_size(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    return f" of {_sizes(value.shape)}" if isinstance(value, torch.Tensor) else ""


def _has_reference(overload: Any) -> bool:
    supported = importlib.import_module("cachectl.runtimes.simulated.process.operators").SUPPORTED
    schema = overload._schema
    name = schema.name.partition("::")[2] + (f".{schema.overload_name}" if schema.overload_name else "")
    if name in supported:
        return True
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
        for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "BackendSelect")
    )
