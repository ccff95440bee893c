"""Live values as plain JSON: what is said of any value, and how two such documents are compared.

Owns one reading of values for both sides: the recorder reads the values that Dynamo guarded, the proof reads the live
ones, and what comes out is compared. Nothing in it is an address, an absolute path or a process-dependent id: classes,
functions and modules are named, code is a digest, a device index is relative to the current one. What can't be said so
is an `Unsayable`, never a repr. The reader itself is in cachectl.identity.guard_reader.

A value of one type is written as JSON writes it where that is unambiguous (None, bool, int, finite float, str); every
other one is an object with one key that starts with `$`. `same` compares two such documents and keeps 1, 1.0 and True
apart, and 0.0 and -0.0.

Strings that may be secrets are not ours to keep: the recorder refuses a string under a name with KEY, TOKEN, SECRET or
PASSWORD, and URL credentials and absolute paths are refused here.

Standard library only.
"""

from __future__ import annotations

import math
import re
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from cachectl.identity.guard_classes import class_name

__all__ = [
    "Unsayable",
    "VIEWS",
    "in_order",
    "length_of",
    "members_of",
    "plain_value",
    "said_text",
    "same",
]

_URL_CREDENTIALS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#\s]*@")
# The types of a dict's views: keys, values, items.
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_PLAIN = frozenset({dict, list, tuple, OrderedDict})
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, str, bytes, range, deque, *VIEWS)


class Unsayable(ValueError):
    """A value that can't be compared in another process; the message says what it is."""


def same(stored: Any, live: Any) -> bool:
    """Say whether two JSON documents are equal in value and type; 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if type(stored) is not type(live):
        return False
    if isinstance(stored, list):
        return len(stored) == len(live) and all(map(same, stored, live))
    if isinstance(stored, dict):
        return stored.keys() == live.keys() and all(same(value, live[key]) for key, value in stored.items())
    if isinstance(stored, float):
        return stored == live and math.copysign(1.0, stored) == math.copysign(1.0, live)
    return bool(stored == live)


def length_of(value: Any) -> int:
    """Return a container's length as its base class counts it, whatever a subclass makes of `len`.

    Raises:
        Unsayable: no container of the standard library.
    """
    if type(value) in _PLAIN:
        return len(value)
    for base in _CONTAINERS:
        if isinstance(value, base):
            return int(base.__len__(value))
    raise Unsayable(f"the length of a {class_name(type(value))}")


def in_order(value: Any) -> Iterable[Any]:
    """Return what `members_of` does, an OrderedDict's keys in the order that it iterates in.

    Its `move_to_end` leaves the dict below it as it was, which is all that torch's own guards see.
    """
    return OrderedDict.__iter__(value) if isinstance(value, OrderedDict) else members_of(value)


def members_of(value: Any) -> Iterable[Any]:
    """Return a dict's keys or a set's members in their order, read through the base class.

    Raises:
        Unsayable: another container.
    """
    if isinstance(value, dict):
        return dict.keys(value)
    if isinstance(value, set):
        return set.__iter__(value)
    if isinstance(value, frozenset):
        return frozenset.__iter__(value)
    if type(value) is types.MappingProxyType or type(value) is VIEWS[0]:
        members: Iterable[Any] = iter(value)
        return members
    raise Unsayable(f"the members of a {class_name(type(value))}")


def plain_value(value: Any) -> Any:
    """Return the constant that an instance of a subclass of int, float, str and the like holds; runs none of its code.

    Raises:
        Unsayable: an instance of none of these.
    """
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes.join(b"", (value,))
    if isinstance(value, complex):
        return complex.__add__(value, 0)
    raise Unsayable(f"the value of a {class_name(type(value))}")


def said_text(value: str) -> str:
    """Return a string that a sheet may hold.

    Raises:
        Unsayable: a URL with credentials, or an absolute path.
    """
    if _URL_CREDENTIALS.search(value):
        raise Unsayable("a URL with credentials, which is neither stored nor hashed")
    if value.startswith("/") and len(value) > 1 and not value.isspace() and "/" in value[1:]:
        raise Unsayable("an absolute path, which no other machine shares")
    return value
