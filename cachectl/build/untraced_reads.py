"""What a function that ran untraced reads, as facts of a guard sheet.

Owns the walk from a function's bytecode over the module-level names, closure cells and attributes that it and the
functions it calls read. A value that can be said is compared at boot as a guarded one is; one that can't be, as a
tensor or an object with state of another library, is named, and fails the build: what was computed from it is in the
graph. What has no bearing on a value (loggers, locks, operator libraries) is passed over, and so is what packages read
of themselves, whose version is in `sources`. Rank processes only.
"""

from __future__ import annotations

import builtins
import dis
import enum
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from cachectl.build.untraced import Untraced
from cachectl.identity.guard_classes import class_members, found_by_name, function_of, is_known, own_members
from cachectl.identity.guard_paths import Path, item_step, secret_name
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable, in_order

__all__ = ["UntracedReads"]

Put: TypeAlias = Callable[[Path, tuple[Any, ...]], None]

_DEPTH_LIMIT = 6
_FACT_LIMIT = 2000
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_CELLS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_LOCALS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_WITHOUT_BEARING: tuple[Any, ...] = (
    logging.Logger,
    logging.LoggerAdapter,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.local,
)


class UntracedReads:
    """Collects the facts of functions that ran untraced.

    Args:
        reader: reads live values.
        put: takes a fact and where it holds.
        path_of: gives the path of an object that the traced code knows, None for one that it doesn't.
    """

    def __init__(self, reader: GuardReader, put: Put, path_of: Callable[[Any], Path | None]) -> None:
        self.reader = reader
        self.refused: list[str] = []
        self._put = put
        self._path_of = path_of
        self._seen: set[tuple[int, Path | None]] = set()
        self._values: set[tuple[Path, bool]] = set()
        self._facts = 0
        self._reason = ""

    def add(self, item: Untraced) -> None:
        """Add what one function reads; what can't be kept goes to `refused`, one line each."""
        function: Any = item.function
        code = item.plain().__code__
        self._reason = f"{item.plain().__qualname__} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"
        self._reason += f" ran while the graph was made ({item.why}) and reads"
        receiver = self._path_of(function.__self__) if isinstance(function, types.MethodType) else None
        if isinstance(function, types.MethodType):
            self._function(item.plain(), _home(item.plain()), (function.__self__, receiver))
        else:
            self._function(item.plain(), _home(item.plain()), None)

    def add_enumeration(self, kind: type, attributes: Iterable[str]) -> None:
        """Add which members an enumeration has that was looked through, and these attributes of theirs."""
        self._reason = f"{kind.__qualname__} was looked through while the graph was made:"
        path = self._path_of(kind)
        if path is None:
            self._refuse("the class", "which no other process finds again: make it a module-level name")
        else:
            self._members(path, kind, attributes)

    def _function(
        self, function: types.FunctionType, path: Path | None, receiver: tuple[Any, Path | None] | None
    ) -> None:
        if (id(function), path) in self._seen or _is_pinned(function):
            return
        self._seen.add((id(function), path))
        module = str(function.__globals__.get("__name__"))
        base: Path | None = (f"I:{module}",)
        if vars(sys.modules.get(module, types)) is not function.__globals__:
            base = None
        first = function.__code__.co_varnames[0] if function.__code__.co_argcount else None
        for kind, name, chain in _reads(function.__code__):
            text = ".".join((name, *chain))
            if kind == "global":
                if name in function.__globals__:
                    self._value(base and (*base, f".{name}"), function.__globals__[name], chain, text)
            elif kind == "cell" and function.__closure__ and name in function.__code__.co_freevars:
                if name == "__class__" and not chain:
                    continue  # What super() needs: what it finds ran and is added itself.
                place = function.__code__.co_freevars.index(name)
                cell = path and (*path, ".__closure__", f"#{place}", ".cell_contents")
                try:
                    held = function.__closure__[place].cell_contents
                except ValueError:
                    continue
                self._value(cell, held, chain, text)
            elif kind == "local" and receiver is not None and name == first:
                self._value(receiver[1], receiver[0], chain, text)
        for attribute in ("__defaults__", "__kwdefaults__"):
            if (held := getattr(function, attribute)) is not None:
                self._value(path and (*path, f".{attribute}"), held, (), f"its {attribute}")

    def _value(self, path: Path | None, value: Any, chain: tuple[str, ...], text: str) -> None:
        """Follow a chain of attributes from a value, and keep what is at its end."""
        for place, name in enumerate(chain):
            rest = chain[place + 1 :]
            if isinstance(value, types.ModuleType):
                if is_known(value.__name__) or _is_pinned(value):
                    return
                if name not in vars(value):
                    break
                # By its own name: whoever imports it imports that.
                path = (f"I:{value.__name__}",)
                held = vars(value)[name]
            elif isinstance(value, type):
                held = {**class_members(value), **_members_of(value)}.get(name, inspect.Parameter.empty)
                if held is inspect.Parameter.empty:
                    break
                held = held.__func__ if isinstance(held, staticmethod) else held
            elif name in own_members(value):
                held = own_members(value)[name]
            else:
                self._member(path, value, class_members(type(value)).get(name), text)
                return
            path = path and (*path, f".{name}")
            value, chain = held, rest
            if type(value) is classmethod:
                value = value.__func__
        self._whole(path, value, text, 0)

    def _member(self, path: Path | None, value: Any, member: Any, text: str) -> None:
        """Keep what a method, property or slot of an object stands on: its code, and what it reads of the object."""
        function = function_of(member)
        if isinstance(value, _WITHOUT_BEARING):
            return
        if function is not None and not is_known(str(function.__globals__.get("__name__"))):
            self._function(function, None, (value, path))
            return
        # A method of a container, or an attribute that only the object itself can tell.
        self._whole(path, value, text, 0)

    def _whole(self, path: Path | None, value: Any, text: str, depth: int) -> None:
        if isinstance(value, (*_WITHOUT_BEARING, types.ModuleType)) or _is_library(value):
            return
        if isinstance(value, (types.FunctionType, types.MethodType)) and _runs_elsewhere(value):
            return
        if path is None:
            self._refuse(text, "which no other process finds again: make it a module-level name")
            return
        if (path, True) in self._values:
            return
        self._values.add((path, True))
        self._facts += 1
        if depth > _DEPTH_LIMIT or self._facts > _FACT_LIMIT:
            self._refuse(text, "which holds more than is compared")
            return
        try:
            self._say(path, value, text, depth)
        except Unsayable as error:
            self._refuse(text, str(error))

    def _say(self, path: Path, value: Any, text: str, depth: int) -> None:
        kind = type(value)
        if kind is types.FunctionType:
            self._put(path, ("is", self.reader.identity(value)))
            self._function(value, path, None)
        elif isinstance(value, (type, types.BuiltinFunctionType, types.MethodType)):
            self._put(path, ("is", self.reader.identity(value)))
            if isinstance(value, type) and not is_known(value.__module__):
                for name in ("__init__", "__new__", "__call__", "__post_init__"):
                    if (function := function_of(vars(value).get(name))) is not None:
                        self._function(function, (*path, f".{name}"), None)
                self._members(path, value)
        elif kind in (dict, list, tuple):
            self._container(path, value, text, depth)
        elif isinstance(value, self.reader.torch.Tensor):
            raise Unsayable("a tensor, whose values would be in the graph: pass it as an argument")
        else:
            self._object(path, value, text, depth)

    def _members(self, path: Path, kind: type, attributes: Iterable[str] = ()) -> None:
        members = _members_of(kind)
        if not members:
            return
        self._put((*path, "._member_map_"), ("ordered", list(members)))
        for name, member in members.items():
            place, text = (*path, "._member_map_", item_step(name)), f"{kind.__qualname__}.{name}"
            self._whole(place, member, text, 0)
            for attribute in sorted(own_members(member).keys() & set(attributes)):
                self._whole((*place, f".{attribute}"), own_members(member)[attribute], f"{text}.{attribute}", 0)

    def _container(self, path: Path, value: Any, text: str, depth: int) -> None:
        self._put(path, ("type", self.reader.class_name(type(value))))
        if isinstance(value, dict):
            self._put(path, ("ordered", list(map(self.reader.member, in_order(value)))))
            items = [(self.reader.member(key), item) for key, item in value.items()]
        else:
            self._put(path, ("length", len(value)))
            items = list(enumerate(value))
        for key, item in items:
            self._whole((*path, item_step(key)), item, f"{text}[{key!r}]", depth + 1)

    def _object(self, path: Path, value: Any, text: str, depth: int) -> None:
        try:
            said = self.reader.value(value)
        except Unsayable:
            said = None
        if said is not None or value is None:
            if type(value) is str and secret_name(path) is not None:
                raise Unsayable("a string that may be a secret")
            self._put(path, ("equals", said))
            return
        own = own_members(value)
        if is_known(type(value).__module__) or not own:
            self._put(path, ("is", self.reader.identity(value)))
            return
        self._put(path, self.reader.type_fact(type(value)))
        self._put((*path, ".__dict__"), ("keys", sorted(own)))
        for name, item in own.items():
            self._whole((*path, f".{name}"), item, f"{text}.{name}", depth + 1)

    def _refuse(self, text: str, why: str) -> None:
        line = f"{self._reason} {text}: {why}"
        if line not in self.refused:
            self.refused.append(line)


def _reads(code: types.CodeType) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield what code and the code nested in it read: where a name is taken from, the name, the attributes after it."""
    kinds = {**dict.fromkeys(_GLOBALS, "global"), **dict.fromkeys(_CELLS, "cell"), **dict.fromkeys(_LOCALS, "local")}
    open_read: tuple[str, str, tuple[str, ...]] | None = None
    for step in dis.get_instructions(code):
        if open_read is not None and step.opname in _ATTRIBUTES:
            open_read = (open_read[0], open_read[1], (*open_read[2], str(step.argval)))
            continue
        if step.opname in ("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP"):
            continue
        if open_read is not None:
            yield open_read
        kind = kinds.get(step.opname)
        open_read = None if kind is None else (kind, str(step.argval), ())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from (read for read in _reads(constant) if read[0] != "local")


def _members_of(kind: type) -> dict[str, Any]:
    """Return the members of an enumeration by name, empty for every other class."""
    return type.__getattribute__(kind, "__dict__").get("_member_map_", {}) if isinstance(kind, enum.EnumMeta) else {}


def _home(function: types.FunctionType) -> Path | None:
    """Return where a function lies by its name, None where another or nothing lies there."""
    module = str(function.__globals__.get("__name__"))
    held = found_by_name(module, function.__qualname__)
    held = held.__func__ if isinstance(held, (staticmethod, classmethod)) else held
    return (f"I:{module}", *(f".{step}" for step in function.__qualname__.split("."))) if held is function else None


def _runs_elsewhere(value: Any) -> bool:
    function = value.__func__ if isinstance(value, types.MethodType) else value
    return is_known(str(getattr(function, "__globals__", {}).get("__name__"))) or _is_pinned(function)


def _is_pinned(value: Any) -> bool:
    """Say whether a function or module comes from an installed package, whose version is in `sources`."""
    file = getattr(getattr(value, "__code__", None), "co_filename", None) or getattr(value, "__file__", None) or ""
    return "/site-packages/" in file or "/dist-packages/" in file


def _is_library(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "torch.library" or value is builtins
