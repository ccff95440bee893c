"""Functions that tracing came to without a source: where they lie, and what they bring along.

Owns the facts about defaults and closure cells of functions that Dynamo reached by an object of its own making, as the
`__init__` and the methods of an object that the traced code makes. Dynamo takes their values as constants and guards
none (torch 2.13: variables/functions.py `bind_args` with no source). Their code is in `sources`; a default or a
decorator's argument that was computed at import is not. Rank processes only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, TypeAlias

from cachectl.identity.guard_classes import found_by_name, is_known
from cachectl.identity.guard_paths import Path, item_step, secret_name
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable, in_order
from cachectl.schemas.keying import is_secret_name

__all__ = ["brought_along", "home_of"]

# How deep decorators are looked through.
_DEPTH_LIMIT = 8
_Fact: TypeAlias = "tuple[Path, tuple[Any, ...]]"


def brought_along(
    function: FunctionType, kind: type | None, homes: Mapping[type, Path], reader: GuardReader
) -> Iterator[_Fact | str]:
    """Yield the facts of one function with their paths, and a line for each that no sheet can hold.

    Args:
        function: itself.
        kind: the class of the object that it was called with first.
        homes: where the traced code found classes.
        reader: reads live values.
    """
    if is_known(str(function.__globals__.get("__name__"))):
        return
    held = list(_held(function))
    if not held:
        return
    path = next(_places(function, kind, homes), None)
    code = function.__code__
    name = f"{function.__qualname__} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"
    if path is None:
        yield f"what {name} brings along: no other process finds this function: make it a module-level name"
        return
    for called, steps, value in held:
        try:
            if type(value) is str and is_secret_name(called):
                raise Unsayable(f"a string under the name {called}, which may be a secret")
            yield from _said((*path, *steps), value, reader)
        except Unsayable as error:
            yield f"what {name} brings along: {error}"


def _held(function: FunctionType) -> Iterator[tuple[str, Path, Any]]:
    """Yield the defaults and the cells of a function by name and place, but for the class that `super()` needs."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for place, (name, value) in enumerate(zip(names, defaults, strict=True)):
        yield name, (".__defaults__", f"#{place}"), value
    for name, value in sorted((function.__kwdefaults__ or {}).items()):
        yield name, (".__kwdefaults__", f":{name}"), value
    for place, (name, cell) in enumerate(zip(code.co_freevars, function.__closure__ or (), strict=True)):
        if name != "__class__":
            try:
                yield name, (".__closure__", f"#{place}", ".cell_contents"), cell.cell_contents
            except ValueError:
                continue  # Not filled: what reads it raises.


def _said(path: Path, value: Any, reader: GuardReader) -> Iterator[_Fact]:
    if isinstance(value, dict):
        yield path, ("ordered", list(map(reader.member, in_order(value))))
        for key, item in value.items():
            yield from _said((*path, item_step(reader.member(key))), item, reader)
        return
    try:
        said = reader.value(value)
    except Unsayable:
        if is_known(type(value).__module__) and not callable(value):
            # A mark of the standard library's, as dataclasses have one for a field with a factory.
            yield path, reader.type_fact(type(value))
        else:
            yield path, ("is", reader.identity(value))
        return
    if type(value) is str and (name := secret_name(path)) is not None:
        raise Unsayable(f"a string under the name {name}, which may be a secret")
    yield path, ("equals", said)


def _places(function: FunctionType, kind: type | None, homes: Mapping[type, Path]) -> Iterator[Path]:
    """Yield where a function lies: in the class it was called by, or one that this inherits, or in its module."""
    known = None if kind is None else homes.get(kind) or home_of(kind)
    for place, base in enumerate(type.__getattribute__(kind, "__mro__") if kind is not None else ()):
        home = home_of(base) or (None if known is None else (*known, ".__mro__", f"#{place}"))
        if home is not None:
            for name, member in vars(base).items():
                yield from _within(member, function, (*home, "@classdict", f":{name}"), _DEPTH_LIMIT)
    module = str(function.__globals__.get("__name__"))
    for name, member in list(getattr(sys.modules.get(module), "__dict__", {}).items()):
        yield from _within(member, function, (f"I:{module}", f".{name}"), _DEPTH_LIMIT)


def home_of(kind: type) -> Path | None:
    """Return where a class lies by its name; None where another or nothing lies there."""
    module, name = kind.__module__, kind.__qualname__
    return (f"I:{module}", *(f".{step}" for step in name.split("."))) if found_by_name(module, name) is kind else None


def _within(member: Any, function: FunctionType, path: Path, depth: int) -> Iterator[Path]:
    """Yield the path to a function in what a name is bound to, through decorators."""
    if member is function:
        yield path
    elif depth:
        for step, inner in _parts(member):
            yield from _within(inner, function, (*path, *step), depth - 1)


def _parts(member: Any) -> Iterator[tuple[Path, Any]]:
    kind = type(member)
    if kind is FunctionType:
        yield from ((steps, value) for _, steps, value in _held(member) if steps[0] == ".__closure__")
    elif kind in (staticmethod, classmethod):
        yield (".__func__",), member.__func__
    elif kind is property:
        yield from (((f".{name}",), getattr(member, name)) for name in ("fget", "fset", "fdel"))
    elif kind in (functools.partial, functools.partialmethod, functools.cached_property):
        yield (".func",), member.func
    elif kind is functools._lru_cache_wrapper:
        yield (".__wrapped__",), member.__wrapped__
