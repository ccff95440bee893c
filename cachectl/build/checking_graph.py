"""What one traced graph does: its operators under fake tensors, and the rules that they break.

Owns running a Dynamo graph again on the fakes it was traced with, with each operator put down to its node. Nothing is
computed. Rank processes only: imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GraphReading", "Operation", "read_graph", "storage_of"]


@dataclass(frozen=True)
class Operation:
    """One operator that the graph calls: its arguments by the schema's names, its results, and the node it is of."""

    overload: Any
    arguments: Mapping[str, Any]
    results: Sequence[torch.Tensor]
    node: fx.Node

    @property
    def namespace(self) -> str:
        return str(self.overload.namespace)

    @property
    def name(self) -> str:
        """The operator without namespace and overload."""
        return str(self.overload._schema.name).partition("::")[2]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors among the arguments, by argument name."""
        for name, value in self.arguments.items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    yield name, leaf

    def written(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the operator writes, as its schema says."""
        writes = {
            argument.name
            for argument in self.overload._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        for name, tensor in self.tensors():
            if name in writes:
                yield tensor


@dataclass
class GraphReading:
    """One graph as it was read.

    `owners` maps a storage to the index of the graph input it belongs to, `tensors` the inputs' own ids; `outputs` are
    the storages that leave the graph. `fault` says why the operators could not be read to the end, None if they were.
    """

    module: fx.GraphModule
    inputs: list[fx.Node]
    operations: list[Operation] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, int] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    fault: BaseException | None = None

    def owner(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the graph input that a tensor is, or is a view of; None if it is made in the graph."""
        index = self.tensors.get(id(tensor))
        return self.owners.get(storage_of(tensor)) if index is None else index

    def is_wrapped_number(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is a Python number of the user's: Dynamo passes one as a tensor where it may change."""
        index = self.owner(tensor)
        grapharg = self.inputs[index].meta.get("grapharg") if index is not None else None
        return bool(getattr(grapharg, "pass_arg_as_tensor", False))


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's memory from others', for as long as both live."""
    return int(tensor.untyped_storage()._cdata)


def read_graph(module: fx.GraphModule) -> GraphReading:
    """Run a graph that Dynamo hands to its backend on the fakes it was traced with, and return what it called."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    reading = GraphReading(module, placeholders)
    values = [node.meta.get("example_value") for node in placeholders]
    # Dynamo's current mode is another one by now, made for the backend.
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            reading.owners.setdefault(storage_of(value), index)
            reading.tensors[id(value)] = index
    recorder = _Recorder(reading)
    try:
        with torch.no_grad(), mode if mode is not None else contextlib.nullcontext(), recorder:
            result = _Interpreter(module, recorder, mode).run(*values)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        reading.outputs = {storage_of(leaf) for leaf in leaves}
    except Exception as error:  # noqa: BLE001 - operators may raise anything, and one that can't run twice hides what comes after it, no more
        reading.fault = error
    return reading


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes each operator that reaches the dispatcher below autograd, so composite ones are seen as their parts."""

    def __init__(self, reading: GraphReading) -> None:
        super().__init__()
        self.node: Any = None
        # Results live until the reading is done: storages are told apart by address.
        self._reading = reading

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names = (argument.name for argument in func._schema.arguments)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._reading.operations.append(Operation(func, named, results, self.node))
        return result


class _Interpreter(fx.Interpreter):  # type: ignore[misc]
    def __init__(self, module: fx.GraphModule, recorder: _Recorder, mode: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._recorder = recorder
        self._mode = mode

    def run_node(self, n: fx.Node) -> Any:
        self._recorder.node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(value) if isinstance(value, torch.Tensor) and self._mode is not None else value
