"""Values around a call: what a step returned, what it changed in place, and putting everything back.

Owns comparing outputs and the snapshot of everything a decode step may write: buffers, KV caches in plain attributes,
tensors among the inputs. Parameters are not copied, they are too large; a step that changes one is found by its version
counter. Rank processes only: imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cachectl.programs_calls import TensorCopies

__all__ = [
    "Change",
    "Comparison",
    "Snapshot",
    "State",
    "compare_values",
    "copied",
    "nested_tensors",
    "output_leaves",
    "varied_inputs",
]

_DEPTH_LIMIT = 8
# Integers of a tensor's element size: no device compares every dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Comparison:
    """How far two values are apart: `equal` under the tolerances, the largest absolute difference, and where."""

    equal: bool
    max_difference: float
    place: str

    def __str__(self) -> str:
        return f"{self.place}: largest difference {self.max_difference:.6g}"


@dataclass(frozen=True)
class Change:
    """How a tensor differs from what a snapshot kept of it.

    Args:
        kept: the number of the snapshot's copy; None where there is none, and `values` are the whole tensor.
        at: flat places of the elements that differ, in the host's memory.
        values: what they are now.
    """

    kept: int | None
    at: torch.Tensor | None
    values: torch.Tensor

    @property
    def is_none(self) -> bool:
        """Whether the tensor is as it was."""
        return self.at is not None and self.at.numel() == 0


@dataclass(frozen=True)
class State:
    """The model's tensors and those among the inputs, by place, as changes against one snapshot.

    A step writes a few slots of a large cache: whole copies would take its size again for each step.
    """

    model: dict[str, Change]
    inputs: dict[str, Change]


class Snapshot:
    """Everything a step may change: the contents of tensors, and what the model's attributes are bound to.

    `restore` puts all of it back in place.
    """

    def __init__(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model = model
        self._inputs = inputs
        parameters = list(model.named_parameters())
        self._parameters = [(name, parameter, _version(parameter)) for name, parameter in parameters]
        self._parameter_storages = {parameter.untyped_storage().data_ptr() for _, parameter in parameters}
        self.tensors = list(self._walk())
        # The model's own tensors, which an input may be too: they stay themselves in every call.
        self._owned = {id(tensor) for _, tensor in (*parameters, *_module_tensors(model))}
        self._bindings: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (f"{path}." if path else "", names, dict(names))
            for path, module in model.named_modules()
            for names in (vars(module), module._buffers)
        ]
        self._versions = [_version(tensor) for _, tensor in self.tensors]
        self._copies = [_dense(tensor.detach()).clone() for _, tensor in self.tensors]

    def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for place, tensor in (*_module_tensors(self.model), *_nested(self._inputs, "inputs", 0)):
            if tensor.untyped_storage().data_ptr() not in self._parameter_storages and id(tensor) not in seen:
                seen.add(id(tensor))
                yield place, tensor

    def restore(self) -> None:
        """Bind attributes to what they were bound to, and write the kept contents back; addresses stay as they are."""
        for _, names, kept in self._bindings:
            for name in names.keys() - kept.keys():
                del names[name]
            names.update(kept)
        for (_, tensor), copy in zip(self.tensors, self._copies, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                _dense(tensor.detach()).copy_(copy)
        # Putting back is a write, too.
        self._versions = [_version(tensor) for _, tensor in self.tensors]

    def state(self) -> State:
        """Return how the contents differ now from what was kept; a tensor bound since is there as a whole."""
        kept = {id(tensor): number for number, (_, tensor) in enumerate(self.tensors)}
        seen: set[int] = set()
        found: list[dict[str, Change]] = []
        for walked in (_module_tensors(self.model), _nested(self._inputs, "inputs", 0)):
            changes = {}
            for place, tensor in walked:
                if tensor.untyped_storage().data_ptr() not in self._parameter_storages and id(tensor) not in seen:
                    seen.add(id(tensor))
                    changes[place] = self._change(tensor, kept.get(id(tensor)))
            found.append(changes)
        return State(*found)

    def compare(self, expected: State, found: State, *, rtol: float, atol: float) -> Comparison:
        """Compare two states of the model; of the inputs those that change in `expected`."""
        if expected.model.keys() != found.model.keys():
            odd = sorted(expected.model.keys() ^ found.model.keys())
            return Comparison(False, float("inf"), f"tensors of the model: {odd[0]} in one of them only")
        worst = Comparison(True, 0.0, "state")
        written = {place: change for place, change in expected.inputs.items() if not change.is_none}
        pairs = [(place, change, found.model[place]) for place, change in expected.model.items()]
        pairs += [(place, change, found.inputs[place]) for place, change in written.items()]
        for place, one, other in pairs:
            if one.is_none and other.is_none:
                continue
            comparison = _compare_tensors(self._whole(one), self._whole(other), place, rtol=rtol, atol=atol)
            if not comparison.equal:
                return comparison
            if comparison.max_difference > worst.max_difference:
                worst = comparison
        return worst

    def _change(self, tensor: torch.Tensor, number: int | None) -> Change:
        now = _dense(tensor.detach())
        if number is not None and self._copies[number].shape == now.shape:
            differing = _differing(now, self._copies[number])
            if differing is not None:
                at = differing.nonzero().reshape(-1)
                return Change(number, at.cpu(), now.reshape(-1)[at].cpu())
        return Change(None, None, now.cpu().clone())

    def _whole(self, change: Change) -> torch.Tensor:
        if change.kept is None or change.at is None:
            return change.values
        copy = self._copies[change.kept]
        whole = copy.detach().cpu().clone(memory_format=torch.contiguous_format)
        with torch.inference_mode(whole.is_inference()), torch.no_grad():
            whole.reshape(-1)[change.at] = change.values
        return whole

    def written(self) -> set[int]:
        """Return the ids of the tensors that were written since the snapshot was made or restored, for the next step.

        A tensor of the inference mode counts no versions, so it may have been.
        """
        return {
            id(tensor)
            for (_, tensor), version in zip(self.tensors, self._versions, strict=True)
            if version is None or _version(tensor) != version
        }

    def rebound(self) -> list[str]:
        """Return the attributes of the model that are bound to something else than before, or gone, or new."""
        return sorted(
            path + name
            for path, names, kept in self._bindings
            for name in names.keys() | kept.keys()
            if name not in names or name not in kept or names[name] is not kept[name]
        )

    def changed_parameters(self) -> list[str]:
        """Return the names of parameters that were written since the snapshot."""
        return [name for name, parameter, version in self._parameters if _version(parameter) != version]

    def forget_parameter_writes(self) -> None:
        """Count parameters that were written up to now as not changed."""
        self._parameters = [(name, parameter, _version(parameter)) for name, parameter, _ in self._parameters]

    def varied(self, inputs: Mapping[str, Any], written: set[int], turn: int = 1) -> dict[str, Any]:
        """Return other inputs for a later step; what a step writes and what is the model's stays itself."""
        return varied_inputs(inputs, written | self._owned, turn)

    def owns(self, tensor: Any) -> bool:
        """Say whether a tensor is the model's own, as it was when the snapshot was made."""
        return id(tensor) in self._owned


def copied(value: Any) -> Any:
    """Return a value with every tensor copied, so that later calls can't change it, and dataclasses as their fields.

    Copies are in the host's memory: the device's may be taken up by the model.
    """
    return pytree.tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, _opened(value, 0)
    )


def varied_inputs(inputs: Mapping[str, Any], kept: set[int], turn: int = 1) -> dict[str, Any]:
    """Return inputs of the same shapes at new addresses with other values: the batch in another order.

    Plain values stay themselves, and which tensors are one or share memory stays so. A replay that only repeats its
    first call's values is told by it.

    Args:
        kept: ids of tensors that have to stay themselves, as those that the step writes; what shares memory with them
            stays too.
        turn: which order: 0 as it is, 1 reversed, others rolled on, odd ones reversed too.
    """
    staying: set[int] = set()
    for value in inputs.values():
        for leaf in pytree.tree_leaves(value):
            # In an object that pytree does not open, tensors stay; so does what isn't a plain tensor.
            for _, tensor in _nested(leaf, "", 0):
                if tensor is not leaf or id(tensor) in kept or type(tensor) is not torch.Tensor:
                    staying.add(tensor.untyped_storage().data_ptr())
    copies = TensorCopies(torch)
    turned: dict[int, torch.Tensor] = {}

    def vary(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().data_ptr() in staying:
            return leaf
        if id(leaf) not in turned:
            fresh = copies.of(leaf)
            with torch.inference_mode(leaf.is_inference()), torch.no_grad():
                # Turned where they lie: the values of the whole block stay the same ones, so an index stays valid.
                values = _dense(fresh).clone()
                _dense(fresh).copy_(_turned(values, turn))
            turned[id(leaf)] = fresh
        return turned[id(leaf)]

    return {name: pytree.tree_map(vary, value) for name, value in inputs.items()}


def output_leaves(value: Any) -> list[tuple[str, Any]]:
    """Return what a value holds, dataclasses opened, with the places that comparisons name."""
    leaves, _ = pytree.tree_flatten_with_path(_opened(value, 0))
    return [(f"output{pytree.keystr(path)}", leaf) for path, leaf in leaves]


def compare_values(expected: Any, found: Any, *, rtol: float, atol: float) -> Comparison:
    """Compare two outputs leaf by leaf; structure, shapes and dtypes have to be the same.

    NaN equals NaN at the same place. Integers and booleans have to be equal to the last bit.
    """
    left, left_spec = pytree.tree_flatten_with_path(_opened(expected, 0))
    right, right_spec = pytree.tree_flatten_with_path(_opened(found, 0))
    if left_spec != right_spec:
        return Comparison(False, float("inf"), f"structure {left_spec} against {right_spec}")
    worst = Comparison(True, 0.0, "outputs")
    for (path, one), (_, other) in zip(left, right, strict=True):
        place = f"output{pytree.keystr(path)}"
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            comparison = _compare_tensors(one, other, place, rtol=rtol, atol=atol)
            if not comparison.equal:
                return comparison
            if comparison.max_difference > worst.max_difference:
                worst = comparison
        elif type(one) is not type(other):
            return Comparison(False, float("inf"), f"{place}: {type(one).__name__} against {type(other).__name__}")
        elif one is not other and repr(one) != repr(other) and one != other:
            return Comparison(False, float("inf"), f"{place}: {one!r} against {other!r}")
    return worst


def _compare_tensors(one: torch.Tensor, other: torch.Tensor, place: str, *, rtol: float, atol: float) -> Comparison:
    if one.shape != other.shape or one.dtype != other.dtype:
        text = f"{place}: {one.dtype} {tuple(one.shape)} against {other.dtype} {tuple(other.shape)}"
        return Comparison(False, float("inf"), text)
    if one.numel() == 0:
        return Comparison(True, 0.0, place)
    inexact = one.is_floating_point() or one.is_complex()
    # On the host and wide: no device has every dtype's operators, and float8 has none anywhere.
    wide = torch.complex128 if one.is_complex() else torch.float64
    left, right = one.detach().cpu().to(wide), other.detach().cpu().to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    gap = (left - right).abs()
    difference = float(torch.where(same, torch.zeros_like(gap), gap).max())
    close = (
        torch.allclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
        if inexact
        else torch.equal(one.detach().cpu(), other.detach().cpu())
    )
    return Comparison(close, difference, place)


def _turned(values: torch.Tensor, turn: int) -> torch.Tensor:
    """Return the values in another order along the first dimension that has several."""
    dim = next((number for number, size in enumerate(values.shape) if size > 1), None)
    if dim is None or not turn:
        return values
    rolled = values.roll(turn // 2, dim)
    return rolled.flip(dim) if turn % 2 else rolled


def _differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Return which elements differ to the last bit, flat; None for tensors without such a view, as nested ones."""
    try:
        flat = [tensor.contiguous().reshape(-1) for tensor in (one, other)]
        if one.is_complex():
            parts = [torch.view_as_real(tensor).view(_BITS[tensor.element_size() // 2]) for tensor in flat]
            return (parts[0] != parts[1]).any(-1)
        left, right = (tensor.view(_BITS[tensor.element_size()]) for tensor in flat)
        return left != right
    except (KeyError, RuntimeError):  # the whole tensor is kept instead
        return None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that holds each element once: an expanded dimension repeats one."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _opened(value: Any, depth: int) -> Any:
    """Return a value with dataclasses, which pytree takes for leaves, as their class and fields."""

    def open_leaf(leaf: Any) -> Any:
        if depth < _DEPTH_LIMIT and is_dataclass(leaf) and not isinstance(leaf, type):
            members = {item.name: _opened(getattr(leaf, item.name), depth + 1) for item in fields(leaf)}
            return (type(leaf).__qualname__, members)
        return leaf

    return pytree.tree_map(open_leaf, value)


def _module_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            yield from _nested(value, f"{path}.{name}" if path else name, 0)


def nested_tensors(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value, with their places; a snapshot's state names inputs the same way."""
    yield from _nested(value, place, 0)


def _nested(value: Any, place: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif depth < _DEPTH_LIMIT and isinstance(value, Mapping):
        for key, member in value.items():
            yield from _nested(member, f"{place}[{key!r}]", depth + 1)
    elif depth < _DEPTH_LIMIT and isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield from _nested(member, f"{place}[{index}]", depth + 1)
    elif depth < _DEPTH_LIMIT and hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _nested(getattr(value, name), f"{place}.{name}", depth + 1)
