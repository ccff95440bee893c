"""The tensors and attributes of a model around a traced call: what each is called, and what the call bound anew.

Owns naming the inputs of a graph, and putting bindings back; contents are fakes and have none. Rank processes only:
imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cachectl.build.checking_rules import Owner

__all__ = ["Bound", "State"]

_DEPTH_LIMIT = 8
# Where a module keeps what has names of its own.
_TABLES = ("_parameters", "_buffers", "_modules")
Bound = tuple[str, Any, Any]


class State:
    """The model's and the call's tensors by identity, and what the model's attributes were bound to."""

    def __init__(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
        self.owners: dict[int, Owner] = {}
        # Kept, so that an address means one tensor.
        self._tensors: list[torch.Tensor] = []
        for name, parameter in model.named_parameters():
            self._add(parameter, Owner("parameter", name))
        for path, module in model.named_modules():
            start = f"{path}." if path else ""
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._add(buffer, Owner("state", start + name))
            for name, value in vars(module).items():
                if name not in _TABLES:
                    for place, tensor in _nested(value, start + name, 0):
                        self._add(tensor, Owner("state", place))
        for name, value in inputs.items():
            for place, tensor in _nested(value, name, 0):
                self._add(tensor, Owner("argument", place))
        self._bindings: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (f"{path}." if path else "", names, dict(names))
            for path, module in model.named_modules()
            for names in (vars(module), module._buffers, module._parameters)
        ]
        self._containers: list[tuple[str, Any, Any]] = [
            (place, value, value.copy())
            for path, module in model.named_modules()
            for name, member in vars(module).items()
            if name not in _TABLES
            for place, value in _containers(member, f"{path}.{name}" if path else name, 0)
        ]

    def owner(self, tensor: Any) -> Owner | None:
        return self.owners.get(id(tensor))

    def tensors(self) -> Iterator[tuple[torch.Tensor, Owner]]:
        """Yield every tensor with what it is."""
        for tensor in self._tensors:
            yield tensor, self.owners[id(tensor)]

    def bound_anew(self) -> list[Bound]:
        """Return the attributes that are bound to something else: name, what it was, what it is (None if gone)."""
        attributes = [
            (path + name, kept[name], names.get(name))
            for path, names, kept in self._bindings
            for name in kept
            if name not in _TABLES and names.get(name) is not kept[name]
        ]
        members = [
            (f"{place}[{key!r}]", before, now.get(key))
            for place, value, kept in self._containers
            for now in [_members(value)]
            for key, before in _members(kept).items()
            if now.get(key) is not before
        ]
        return attributes + members

    def restore(self) -> None:
        """Bind every attribute to what it was bound to."""
        for _, names, kept in self._bindings:
            for name in names.keys() - kept.keys():
                del names[name]
            names.update(kept)
        for _, value, kept in self._containers:
            value.clear()
            value.update(kept) if isinstance(value, dict) else value.extend(kept)

    def _add(self, tensor: torch.Tensor, owner: Owner) -> None:
        if id(tensor) not in self.owners:
            self.owners[id(tensor)] = owner
            self._tensors.append(tensor)


def _nested(value: Any, place: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif depth >= _DEPTH_LIMIT:
        return
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _nested(member, f"{place}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield from _nested(member, f"{place}[{index}]", depth + 1)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _nested(getattr(value, name), f"{place}.{name}", depth + 1)


def _containers(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the lists and dicts that hold tensors, at any depth."""
    if depth >= _DEPTH_LIMIT:
        return
    if type(value) in (list, dict) and any(isinstance(member, torch.Tensor) for member in _members(value).values()):
        yield place, value
    if isinstance(value, (list, tuple, dict)):
        for key, member in _members(value).items():
            yield from _containers(member, f"{place}[{key!r}]", depth + 1)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _containers(getattr(value, name), f"{place}.{name}", depth + 1)


def _members(value: Any) -> dict[Any, Any]:
    return dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
