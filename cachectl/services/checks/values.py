"""What a reader of source text knows of a value: tensor, number, module, function, and where it came from.

Owns the kinds of values and how two of them are joined where paths meet. Nothing of the user's is imported or run; what
is not known is Unknown, and no rule speaks of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

__all__ = [
    "HOST",
    "NONE",
    "TENSOR",
    "UNKNOWN",
    "Bound",
    "Class",
    "Const",
    "Dim",
    "Ext",
    "ExtObj",
    "Func",
    "Host",
    "Map",
    "ModuleRef",
    "Obj",
    "Seq",
    "Shape",
    "Tensor",
    "Union",
    "Unknown",
    "Value",
    "alternatives",
    "element_of",
    "has_tensor",
    "is_cache_name",
    "is_deep",
    "is_host",
    "is_tensor",
    "join",
    "named",
    "present",
    "signature",
    "words",
]


@dataclass(frozen=True)
class Unknown:
    """Anything; `name` is how the source calls it."""

    name: str = ""


@dataclass(frozen=True)
class Host:
    """A Python value that is no tensor: a number, a text, None, a device."""

    name: str = ""


@dataclass(frozen=True)
class Const:
    """A known plain value; `given` when a caller or a configuration passed it, and not the code itself."""

    value: Any
    given: bool = False


@dataclass(frozen=True)
class Dim:
    """A number read from a tensor's shape: of which tensor, which dimension, and at which node."""

    owner: str
    index: int
    node: ast.AST = field(compare=False)
    target: str = ""


@dataclass(frozen=True)
class Shape:
    """A tensor's whole shape."""

    owner: str
    node: ast.AST = field(compare=False)


@dataclass(frozen=True)
class Tensor:
    """A tensor.

    `home` is the attribute that holds it (`cache` of self.cache), `kind` whether that is a buffer, a parameter or a
    plain attribute; `name` how the source calls it. `sliced` says how it was cut where that leaves gaps in memory.
    `ramp`: made from arange; `angles`: positions times frequencies; `argument`: it came in as one.
    """

    home: str = ""
    kind: str = ""
    name: str = ""
    sliced: str = ""
    ramp: bool = False
    angles: bool = False
    argument: bool = False
    boolean: bool = False


@dataclass(frozen=True)
class Seq:
    """A list, tuple or set; `items` where they are known one by one, else what each of them is."""

    kind: str
    items: tuple[Any, ...] | None
    element: Any = None
    name: str = ""


@dataclass(eq=False)
class Map:
    """A dict: what is known by key, and what the other values are."""

    known: dict[Any, Any]
    rest: Any = None


@dataclass(eq=False)
class Class:
    """A class that the reader has the source of."""

    node: ast.ClassDef
    module: Any
    scope: Any = None

    @property
    def name(self) -> str:
        return self.node.name


@dataclass(eq=False)
class Func:
    """A function or lambda that the reader has the source of; `owner` is the class it stands in."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: Any
    scope: Any = None
    owner: Class | None = None

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "lambda")

    @property
    def decorators(self) -> list[ast.expr]:
        return getattr(self.node, "decorator_list", [])


@dataclass(eq=False)
class Obj:
    """An instance of a known class, with what is known of its attributes."""

    cls: Class
    attrs: dict[str, Any] = field(default_factory=dict)
    name: str = ""


@dataclass(eq=False)
class Bound:
    """A method of a known function with its receiver."""

    func: Func
    receiver: Any


@dataclass(frozen=True)
class Ext:
    """Something of another package, by its dotted name: torch.nn.functional.silu."""

    path: str


@dataclass(eq=False)
class ExtObj:
    """What a call of another package's class returned: torch.nn.Linear, torch.npu.Stream, logging.Logger."""

    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class ModuleRef:
    """A Python module that the reader has the source of."""

    module: Any


@dataclass(frozen=True)
class Union:
    """One of several kinds of value."""

    members: tuple[Any, ...]


Value: TypeAlias = Any

UNKNOWN, HOST, NONE, TENSOR = Unknown(), Host(), Const(None), Tensor()
_MOST_MEMBERS = 4
_MOST_LEVELS = 4

_CACHE_WORDS = {"past", "cache", "caches", "kvcache", "kvcaches", "history"}


def words(text: str) -> frozenset[str]:
    """Return the words of a table that is written as text."""
    return frozenset(text.split())


def is_cache_name(name: str) -> bool:
    """Say whether a name is one that KV caches have: key_cache, past_key_values, kv_cache, past; not cos_cached."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    parts = {part.lower() for part in found}
    return bool(parts & _CACHE_WORDS) and not parts & {"cos", "sin", "rope", "rotary", "emb"}


def join(*values: Value) -> Value:
    """Return what is known where the values' paths meet."""
    found: list[Any] = []
    for value in values:
        for member in alternatives(value):
            if isinstance(member, Unknown):
                return member
            if not any(_same(member, other) for other in found):
                found.append(member)
    tensors = [member for member in found if isinstance(member, Tensor)]
    if len(tensors) > 1:
        found = [member for member in found if not isinstance(member, Tensor)] + [_join_tensors(tensors)]
    if len(plain := [member for member in found if isinstance(member, (Const, Host, Dim)) and member != NONE]) > 1:
        # Several numbers: one of them, which one is not known.
        found = [member for member in found if member not in plain] + [HOST]
    if not found:
        return UNKNOWN
    if len(found) == 1:
        return found[0]
    return Union(tuple(found)) if len(found) <= _MOST_MEMBERS else UNKNOWN


def _same(one: Value, other: Value) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other) and signature(one) == signature(other))


def _join_tensors(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    return Tensor(
        home=first.home if all(item.home == first.home for item in tensors) else "",
        kind=first.kind if all(item.kind == first.kind for item in tensors) else "",
        name=first.name if all(item.name == first.name for item in tensors) else "",
        sliced=first.sliced if all(item.sliced for item in tensors) else "",
        ramp=all(item.ramp for item in tensors),
        angles=any(item.angles for item in tensors),
        argument=all(item.argument for item in tensors),
        boolean=all(item.boolean for item in tensors),
    )


def alternatives(value: Value) -> tuple[Value, ...]:
    """Return the kinds that a value may have."""
    return value.members if isinstance(value, Union) else (value,)


def present(value: Value) -> tuple[Value, ...]:
    """Return the kinds that a value may have where it is used, which None could not be."""
    found = alternatives(value)
    return tuple(member for member in found if member != NONE) or found


def is_tensor(value: Value) -> bool:
    """Say whether a value is a tensor for sure, but for None."""
    found = [member for member in alternatives(value) if member != NONE]
    return bool(found) and all(isinstance(member, Tensor) for member in found)


def has_tensor(value: Value) -> bool:
    """Say whether a value may be a tensor, or a container that is known to hold one."""
    for member in alternatives(value):
        if isinstance(member, Tensor):
            return True
        if isinstance(member, Seq) and any(map(has_tensor, member.items or (member.element,))):
            return True
    return False


def is_host(value: Value) -> bool:
    """Say whether a value is no tensor for sure."""
    return all(isinstance(member, (Host, Const, Dim, Shape)) for member in alternatives(value))


def element_of(value: Value) -> Value:
    """Return what iterating over a value yields."""
    found = []
    for member in alternatives(value):
        if isinstance(member, Seq):
            found += list(member.items) if member.items else [UNKNOWN if member.element is None else member.element]
        elif isinstance(member, Map):
            found.append(HOST)
        elif isinstance(member, Tensor):
            found.append(replace(member, home="", kind="", name=""))
        elif isinstance(member, (Host, Const, Shape)):
            found.append(HOST)
        else:
            found.append(UNKNOWN)
    return join(*found)


def named(value: Value, name: str) -> Value:
    """Return the value under the name that the source gives it, where it has none yet."""
    if isinstance(value, Tensor) and not value.name:
        return replace(value, name=name)
    if isinstance(value, (Host, Unknown, Seq)) and not value.name:
        return replace(value, name=name)
    if isinstance(value, Dim):
        return replace(value, target=name)
    if isinstance(value, Union):
        return Union(tuple(named(member, name) for member in value.members))
    return value


def is_deep(value: Value, levels: int = _MOST_LEVELS) -> bool:
    """Say whether containers stand within each other deeper than is worth following."""
    if not isinstance(value, Seq) or not levels:
        return isinstance(value, Seq)
    return any(is_deep(item, levels - 1) for item in value.items or (value.element,))


def signature(value: Value) -> Any:
    """Return what tells calls of a function apart: hashable, and equal for values that are alike."""
    if isinstance(value, Const):
        return (type(value.value).__name__, repr(value.value), value.given)
    if isinstance(value, Seq):
        items = value.items if value.items is not None else (value.element,)
        return (value.kind, value.items is None, tuple(map(signature, items)))
    if isinstance(value, Union):
        return frozenset(map(signature, value.members))
    if isinstance(value, (Host, Unknown, Tensor, Dim, Shape, Ext)):
        return value
    return id(value)


def first_known(values: Iterable[Value]) -> Value:
    """Return the first value that is known, Unknown if none is."""
    return next((value for value in values if not isinstance(value, Unknown)), UNKNOWN)
