"""The calls that a program makes of its compiled methods: kinds, and the arguments of the first call of each kind.

Owns which calls are of one kind, copies of tensors that share memory as their originals do, and keeping a call's
arguments as they were when it was made. What belongs to the model stays itself, since a graph is made for one tensor at
two places; what the program owns is copied where the program goes on. torch must be imported; nothing here imports it
before a call is looked at.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cachectl.errors import ConfigError

__all__ = ["TensorCopies", "call_kind", "kept_arguments", "keyword_arguments", "owner_name"]

_DEPTH_LIMIT = 8
# What an object of another kind than a container may hold: attributes of a dataclass or a plain class.
_OPAQUE = (str, bytes, int, float, complex, bool, type(None), type)


def keyword_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by keyword, as a recipe's inputs give them; defaults stay out.

    Raises:
        TypeError: the arguments don't fit the signature.
        ConfigError: arguments that have no name.
    """
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise ConfigError(f"the argument {name} is given by place only", hint="pass it by keyword")
        else:
            found[name] = value
    return found


def call_kind(spec: Mapping[str, Any], *, dynamic: bool) -> Any:
    """Return what calls of one graph have in common: the input spec; without sizes and integers where they may change.

    Args:
        spec: as `cachectl.identity.inputs.describe_call` gives it.
        dynamic: as compiled.
    """
    if not dynamic:
        return dict(spec)
    kind: dict[str, Any] = {}
    for place, leaf in spec.items():
        if "tensor" in leaf:
            tensor = {name: value for name, value in leaf["tensor"].items() if name not in ("shape", "stride")}
            kind[place] = {"tensor": tensor, "dimensions": len(leaf["tensor"]["shape"])}
        elif type(leaf.get("value")) is int:
            kind[place] = "integer"
        else:
            kind[place] = leaf
    return kind


def kept_arguments(arguments: Mapping[str, Any], owners: list[Any]) -> dict[str, Any]:
    """Return arguments as they are now, whatever the program writes afterwards.

    Tensors that share memory with a tensor of the owners stay themselves, and which tensors are one or share memory
    stays so. Objects that can't be copied stay themselves, too.

    Args:
        arguments: by parameter name.
        owners: the modules whose tensors stay.
    """
    torch: Any = sys.modules["torch"]
    staying = {tensor.untyped_storage().data_ptr() for owner in owners for tensor in module_tensors(torch, owner)}
    copies = TensorCopies(torch)
    memo: dict[int, Any] = {}
    alive: list[Any] = []
    for value in arguments.values():
        for tensor in _tensors(torch, value, 0):
            alive.append(tensor)
            if _stays(tensor, staying):
                memo[id(tensor)] = tensor
            elif type(tensor) is torch.Tensor:
                memo[id(tensor)] = copies.of(tensor)
            # A subclass or a parameter has its own way of being copied, and shares memory with none.
        for module in _modules(torch, value, 0):
            memo[id(module)] = module
    kept = {}
    for name, value in arguments.items():
        try:
            kept[name] = copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001 - a class of the program's may refuse in any way; it is passed as it is
            kept[name] = value
    return kept


class TensorCopies:
    """Copies of plain tensors: which are one, share memory, or are views of one tensor stays so.

    Dynamo guards the sizes of what a view is one of, where they are dynamic; and AOTAutograd takes two inputs of one
    storage, of which a graph writes one, only if their `_base` is one tensor (torch 2.13,
    _functorch/_aot_autograd/runtime_wrappers.py, `merge_view_inputs`).
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._storages: dict[tuple[Any, int], Any] = {}
        # With the tensors themselves, since an id is only theirs as long as they live.
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, tensor: Any) -> Any:
        """Return a tensor's copy, at the same place of a copy of its whole storage."""
        if id(tensor) not in self._made:
            with self._torch.inference_mode(tensor.is_inference()), self._torch.no_grad():
                fresh = self._copy(tensor)
            self._made[id(tensor)] = tensor, fresh.requires_grad_(True) if tensor.requires_grad else fresh
        return self._made[id(tensor)][1]

    def _copy(self, tensor: Any) -> Any:
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        base = None if tensor.is_inference() else tensor._base
        # A view with another dtype than its base's is at no place of it.
        if base is not None and type(base) is self._torch.Tensor and base.dtype == tensor.dtype:
            return self.of(base).as_strided(*place)
        storage = tensor.untyped_storage()
        # All empty storages of a device have one address.
        at = (storage.device, storage.data_ptr())
        if at not in self._storages:
            self._storages[at] = storage.clone()
        shape, stride, offset = place
        return self._torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            self._storages[at], offset, shape, stride
        )


def owner_name(module: Any, taken: Mapping[str, Any]) -> str:
    """Return a name for a program's module among the modules that it compiled methods of before.

    Args:
        module: the module.
        taken: the modules by the names they have; the module itself may be among them.
    """
    for name, known in taken.items():
        if known is module:
            return name
    base = type(module).__name__
    # A class that was made at run time may be called anything.
    base = base if base.isidentifier() else "Module"
    number, name = 2, base
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def module_tensors(torch: Any, module: Any) -> Iterator[Any]:
    """Yield the tensors that a module holds: parameters, buffers, and those in plain attributes of it and below."""
    yield from module.parameters()
    yield from module.buffers()
    for below in module.modules():
        for name, value in vars(below).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(torch, value, 0)


def _stays(tensor: Any, staying: set[int]) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() in staying
    except (RuntimeError, AttributeError):
        return True  # A tensor without one storage, as a nested one: no spec can say it either.


def _tensors(torch: Any, value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for member in _members(torch, value, depth):
            yield from _tensors(torch, member, depth + 1)


def _modules(torch: Any, value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.nn.Module):
        yield value
    else:
        for member in _members(torch, value, depth):
            yield from _modules(torch, member, depth + 1)


def _members(torch: Any, value: Any, depth: int) -> Iterator[Any]:
    if depth >= _DEPTH_LIMIT or isinstance(value, (*_OPAQUE, torch.Tensor, torch.nn.Module)):
        return
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield from vars(value).values()
    elif hasattr(value, "__slots__"):
        yield from (getattr(value, name) for name in value.__slots__ if hasattr(value, name))
