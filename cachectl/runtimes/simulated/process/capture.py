"""What a graph capture records and how a replay runs it again, operator by operator, on CPU tensors.

A device executes nothing while it captures and the same kernels on the same addresses at each replay. Here:

- Capture runs functional operators, to know the shapes of their results, but leaves every tensor that existed before it
  as it was: an operator that only writes into its arguments isn't run when one of those is older than the capture, any
  other writer is undone.
- Replay runs the recorded operators in order. Views are not recorded, they alias; a functional result is copied into
  the tensor that capture returned, so an output that a caller holds changes at the next replay, as on a device.
- A task group is a stretch of the recording that an update replaces. A group behind an external event stops the replay
  until its update has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Uninitialised memory is not a result: nothing to redo at a replay.
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})

# What hands a tensor's value to the host. A device refuses these during capture, because the value would be frozen.
_HOST_READS = frozenset({"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"})

_COLLECTIVES = frozenset({"_c10d_functional", "npu_define"})

# Arguments that npu operators write without their schema saying so (vendor documents call them updated in place).
_UNDECLARED_WRITES = {
    "npu::npu_apply_rotary_pos_emb": ("query", "key"),
    "npu::npu_kv_rmsnorm_rope_cache": ("k_cache", "ckv_cache"),
    "npu::npu_mla_prolog": ("kv_cache", "kr_cache"),
    "npu::npu_mla_prolog_v2": ("kv_cache", "kr_cache"),
}


class GraphCaptureError(RuntimeError):
    """A program did during capture or replay what a device can't do either."""


@dataclass(frozen=True)
class _Traits:
    """What an operator's schema says, worked out once per operator.

    `written` holds the position and name of each argument written to; `returned`, for each value returned, which of
    these it is and, where that argument is a list, which element; None is a new value.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    returned: tuple[tuple[int, int] | None, ...]
    views: bool
    allocates: bool
    reads_to_host: bool
    collective: bool

    @property
    def returns_only_written(self) -> bool:
        return all(place is not None for place in self.returned)


@cache
def _traits(func: Any) -> _Traits:
    schema = func._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    written: list[tuple[int, str]] = []
    sets: dict[str, int] = {}
    for index, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        declared = alias is not None and alias.is_write
        # `.out` overloads of npu operators take a plain list named out.
        if not declared and argument.name not in undeclared and not (argument.name == "out" and argument.kwarg_only):
            continue
        for name in alias.before_set if alias is not None else ():
            sets[name] = len(written)
        written.append((index, argument.name))
    returned: list[tuple[int, int] | None] = []
    out = next((place for place, (_, name) in enumerate(written) if name == "out"), None)
    for position, value in enumerate(schema.returns):
        alias = value.alias_info
        found = [sets[name] for name in alias.before_set if name in sets] if alias is not None else []
        if not found and out is not None:
            returned.append((out, position))
        else:
            returned.append((found[0], position) if found else None)
    base = schema.name.partition("::")[2]
    return _Traits(
        name=str(func),
        written=tuple(written),
        returned=tuple(returned),
        views=not written and bool(schema.returns) and all(value.alias_info is not None for value in schema.returns),
        allocates=func.namespace == "aten" and base in _ALLOCATIONS,
        reads_to_host=func.namespace == "aten" and base in _HOST_READS,
        collective=func.namespace in _COLLECTIVES,
    )


# An operator's arguments and results are values, or lists and tuples of them: walking these by hand is several times
# faster than pytree, and capture walks every call.
def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    found = []
    for leaf in tree:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, (list, tuple, dict)):
            found.extend(_tensors(leaf))
    return found


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _map_tensors(function, leaf) for name, leaf in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_map_tensors(function, leaf) for leaf in tree])
    return tree


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _written(traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [args[index] if index < len(args) else kwargs.get(name) for index, name in traits.written]


def _returned(traits: _Traits, written: list[Any]) -> Any:
    values = []
    for place in traits.returned:
        value = None if place is None else written[place[0]]
        values.append(value[place[1]] if place is not None and isinstance(value, (list, tuple)) else value)
    return values[0] if len(values) == 1 else tuple(values) or None


def _alias(tree: Any) -> Any:
    """Replace tensors by aliases: the address is what a graph keeps, not the caller's object or its autograd graph."""
    return _map_tensors(torch.Tensor.detach, tree)


@dataclass(slots=True)
class Operation:
    """One recorded operator: its call, and where its new results go (position among all tensors returned, tensor)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def run(self) -> None:
        """Run it and copy each new result to where capture put it."""
        value = self.func(*self.args, **self.kwargs)
        traits = _traits(self.func)
        if self.func.namespace == "_c10d_functional":
            for tensor in _tensors(value):
                torch.ops._c10d_functional.wait_tensor(tensor)
        elif self.func.namespace == "c10d":
            _wait(value)
        if not self.results:
            return
        made = _tensors(value)
        for position, tensor in self.results:
            if made[position].shape != tensor.shape:
                raise GraphCaptureError(
                    f"{traits.name} gave shape {tuple(tensor.shape)} when captured and {tuple(made[position].shape)} "
                    "at a replay: a shape that depends on values can't be captured"
                )
            tensor.copy_(made[position])


def _wait(value: Any) -> None:
    for leaf in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "wait"):
            leaf.wait()


@dataclass(eq=False)
class TaskGroup:
    """A stretch of a recording that can be updated; `waits` says whether the graph stops here for the update."""

    recording: Recording
    waits: bool
    operations: list[Operation] = field(default_factory=list)
    updated: bool = False

    def update(self, operations: list[Operation]) -> None:
        """Put new operations in place, and let a replay that waits here go on.

        Raises:
            GraphCaptureError: an update of another number of operators than were captured.
        """
        if len(operations) != len(self.operations):
            raise GraphCaptureError(
                f"a task group of {len(self.operations)} operators was updated with {len(operations)}"
            )
        self.operations = operations
        self.updated = True
        self.recording.resume(self)


class Recording:
    """The operators of one captured graph, in order, with its task groups."""

    def __init__(self) -> None:
        self.steps: list[Operation | TaskGroup] = []
        self.mode = _CaptureMode(self)
        self._group: TaskGroup | None = None
        self._external_wait = False
        self._waiting: tuple[int, TaskGroup] | None = None
        # Storages made in this capture, by address; kept so that an address means one storage while capturing.
        self._own: dict[int, Any] = {}

    def begin_group(self) -> None:
        """Start a task group; operators until end_group belong to it."""
        self._group = TaskGroup(self, self._external_wait)
        self._external_wait = False

    def end_group(self) -> TaskGroup:
        """Close the open task group and return it.

        Raises:
            GraphCaptureError: no group is open.
        """
        group, self._group = self._group, None
        if group is None:
            raise GraphCaptureError("a task group ended that was not begun")
        self.steps.append(group)
        return group

    def note_external_wait(self) -> None:
        """Remember that the next task group stands behind an external event."""
        self._external_wait = True

    def close(self) -> None:
        """End the capture: what served it only is let go."""
        self._own.clear()

    def capture(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operator and return what its caller sees during capture.

        Raises:
            GraphCaptureError: the operator hands a value to the host.
        """
        traits = _traits(func)
        if traits.views:
            value = func(*args, **kwargs)
            given = {_storage(tensor) for tensor in _tensors(args)}
            # Aliases have nothing to redo. In inference mode reshape and its like arrive whole, and may have copied.
            if all(_storage(tensor) in given for tensor in _tensors(value)):
                return value
        if traits.reads_to_host:
            raise GraphCaptureError(
                f"{traits.name} reads a tensor's value on the host while a graph is captured: a device refuses that too"
            )
        if traits.collective and func.namespace == "_c10d_functional" and traits.name.endswith("wait_tensor.default"):
            return args[0]  # the collective itself waits at each replay
        if traits.allocates:
            value = func(*args, **kwargs)
            self._keep(value)
            return value
        operation = Operation(func, _alias(args), _alias(kwargs))
        if func.namespace == "c10d":
            self._append(operation)
            return _process_group_result(func, args, kwargs)
        if traits.written:
            value = self._capture_writer(traits, operation, args, kwargs)
        elif traits.collective:
            value = _shaped_like_result(func, args, kwargs)
        else:
            value = func(*args, **kwargs)
        made = _tensors(value)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        fresh = [(position, tensor) for position, tensor in enumerate(made) if _storage(tensor) not in given]
        for _, tensor in fresh:
            self._keep(tensor)
        operation.results = [(position, tensor.detach()) for position, tensor in fresh]
        # An operator that returns nothing is run for what it does; one that returns views only has nothing to redo.
        if operation.results or traits.written or not func._schema.returns:
            self._append(operation)
        return value

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._own[storage._cdata] = storage

    def _append(self, operation: Operation) -> None:
        (self._group.operations if self._group else self.steps).append(operation)

    def _capture_writer(
        self, traits: _Traits, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        written = _written(traits, args, kwargs)
        older = [tensor for tensor in _tensors(written) if _storage(tensor) not in self._own]
        if traits.returns_only_written and (older or traits.collective):
            return _returned(traits, written)
        kept = [tensor.clone() for tensor in older]
        value = operation.func(*args, **kwargs)
        for tensor, before in zip(older, kept, strict=True):
            tensor.copy_(before)
        return value

    def replay(self) -> None:
        """Run the recording from its start, up to its end or to the first group that waits for an update.

        Raises:
            GraphCaptureError: the replay before this one still waits for an update.
        """
        if self._waiting is not None:
            raise GraphCaptureError("a graph was replayed while one of its task groups waits for its update")
        self._run_from(0)

    def resume(self, group: TaskGroup) -> None:
        """Go on with a replay that waits at `group`; nothing happens when none does."""
        if self._waiting is not None and self._waiting[1] is group:
            position, self._waiting = self._waiting[0], None
            self._run_from(position)

    def _run_from(self, position: int) -> None:
        # Inference mode: a replay must neither record gradients nor mind that captured tensors were inference tensors.
        # Casts of autocast were recorded as operators of their own and must not be made again.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False), _disable_current_modes():
            for index in range(position, len(self.steps)):
                step = self.steps[index]
                if isinstance(step, Operation):
                    step.run()
                    continue
                if step.waits and not step.updated:
                    self._waiting = (index, step)
                    return
                step.updated = False
                for operation in step.operations:
                    operation.run()


def _shaped_like_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return zeros of the shape that a collective would give, without the other ranks taking part."""
    device = next((tensor.device for tensor in _tensors((args, kwargs))), torch.device("cpu"))
    on_meta = _map_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
    value = func(*on_meta[0], **on_meta[1])
    return _map_tensors(lambda tensor: torch.zeros_like(tensor, device=device), value)


def _process_group_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a c10d collective returns, its first argument and a finished work, without it taking place."""
    from torch._C._distributed_c10d import FakeWork

    values = tuple(
        FakeWork().boxed() if str(value.type).endswith("Work") else args[0] for value in func._schema.returns
    )
    return values[0] if len(values) == 1 else values or None


class _CaptureMode(TorchDispatchMode):  # type: ignore[misc]
    """Sends every operator that a thread runs while it captures to the recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._recording.capture(func, args, kwargs or {})


class UpdateMode(TorchDispatchMode):  # type: ignore[misc]
    """Collects the operators of a task group's update instead of running them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = _traits(func)
        if not traits.written:
            return func(*args, **kwargs)  # a helper of the call, such as a view: what is updated writes into its output
        self.operations.append(Operation(func, _alias(args), _alias(kwargs)))
        return _returned(traits, _written(traits, args, kwargs))
