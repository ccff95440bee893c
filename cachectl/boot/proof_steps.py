"""The steps of a guard sheet's tree: from a live value to what lies below it.

Each takes the live value and what the step's text names. Beyond attribute and item access none of a stranger's code
runs: containers are read through their base classes. Standard library only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable, members_of, same

__all__ = ["access_of"]

_MISSING = object()


def _attribute(reader: GuardReader, value: Any, name: Any) -> Any:
    return getattr(value, name)


def _plain_attribute(reader: GuardReader, value: Any, name: Any) -> Any:
    return object.__getattribute__(value, name)


def _item(reader: GuardReader, value: Any, key: Any) -> Any:
    if isinstance(value, dict):
        # Past __missing__: a defaultdict would make the item.
        found = dict.get(value, key, _MISSING)
        if found is _MISSING:
            raise LookupError("no such key")
        return found
    if isinstance(value, list):
        return list.__getitem__(value, key)
    if isinstance(value, tuple):
        return tuple.__getitem__(value, key)
    return value[key]


def _constant_item(reader: GuardReader, value: Any, key: Any) -> Any:
    for candidate in members_of(value):
        if same(key, reader.member(candidate)):
            return dict.__getitem__(value, candidate)
    raise LookupError("no such key")


def _nth(reader: GuardReader, value: Any, place: Any) -> Any:
    found = next(itertools.islice(members_of(value), place, None), _MISSING)
    if found is _MISSING:
        raise LookupError("fewer members")
    return found


def _nth_value(reader: GuardReader, value: Any, place: Any) -> Any:
    return dict.__getitem__(value, _nth(reader, value, place))


def _nth_left(reader: GuardReader, value: Any, place: Any) -> Any:
    if type(value) is not type(iter(())):
        raise Unsayable(f"a {type(value).__name__} where a tuple's iterator was")
    state = value.__reduce__()
    return state[1][0][(state[2] if len(state) > 2 else 0) + place]


def _type(reader: GuardReader, value: Any, _: Any) -> Any:
    return type(value)


def _class_dict(reader: GuardReader, value: Any, _: Any) -> Any:
    return type.__getattribute__(value, "__dict__")


def _subclasses(reader: GuardReader, value: Any, _: Any) -> Any:
    return type.__subclasses__(value)


def _size(reader: GuardReader, value: Any, place: Any) -> Any:
    return int(value.shape[place])


def _stride(reader: GuardReader, value: Any, place: Any) -> Any:
    return int(value.stride()[place])


def _offset(reader: GuardReader, value: Any, _: Any) -> Any:
    return int(value.storage_offset())


def _referent(reader: GuardReader, value: Any, _: Any) -> Any:
    if not isinstance(value, weakref.ref):
        raise Unsayable(f"a {type(value).__name__} where a weak reference was")
    return weakref.ref.__call__(value)


def _fields(reader: GuardReader, value: Any, _: Any) -> Any:
    return value._fields


def _dataclass_fields(reader: GuardReader, value: Any, _: Any) -> Any:
    return dataclasses.fields(value)


def _numpy(reader: GuardReader, value: Any, _: Any) -> Any:
    if not reader.class_name(type(value)).startswith("numpy."):
        raise Unsayable(f"a {type(value).__name__} where a numpy array was")
    return reader.torch.as_tensor(value)


def _scalar_tensor(reader: GuardReader, value: Any, _: Any) -> Any:
    if type(value) not in (int, float):
        raise Unsayable(f"a {type(value).__name__} where a number was")
    return reader.torch.tensor(value, dtype=reader.torch.float64 if type(value) is float else reader.torch.int64)


def _tensor_item(reader: GuardReader, value: Any, _: Any) -> Any:
    if not isinstance(value, reader.torch.Tensor):
        raise Unsayable(f"a {type(value).__name__} where a tensor was")
    return value.item()


def _integer(reader: GuardReader, value: Any, _: Any) -> Any:
    if type(value) is not int:
        raise Unsayable(f"a {type(value).__name__} where an integer was")
    return value


Access: TypeAlias = Callable[[GuardReader, Any, Any], Any]
_CALLS: dict[str, Access] = {
    "type": _type,
    "classdict": _class_dict,
    "subclasses": _subclasses,
    "key": _nth,
    "value": _nth_value,
    "member": _nth,
    "next": _nth_left,
    "size": _size,
    "stride": _stride,
    "offset": _offset,
    "weakref": _referent,
    "fields": _fields,
    "dataclass_fields": _dataclass_fields,
    "numpy": _numpy,
    "scalar_tensor": _scalar_tensor,
    "item": _tensor_item,
    "int": _integer,
}


def access_of(step: str) -> tuple[Access, Any]:
    """Return what a step's text stands for: how to take it, and what it takes."""
    kind, text = step[:1], step[1:]
    if kind == ".":
        return _attribute, text
    if kind == ":":
        return _item, text
    if kind == "#":
        return _item, int(text)
    if kind == "!":
        return _plain_attribute, text
    if kind == "=":
        key = json.loads(text)
        return (_item, key) if key is None or type(key) is bool else (_constant_item, key)
    name, _, argument = text.partition(":")
    if kind == "@" and name in _CALLS:
        return _CALLS[name], int(argument) if argument else None
    raise ValueError(f"a step that this program doesn't know: {step!r}")
