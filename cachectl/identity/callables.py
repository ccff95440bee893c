"""What stands for a live function in a key: its code, its constants and what is bound to it.

Owns the description of functions that are no text of the recipe's: custom passes, patterns and their replacements,
decompositions, converters. Never the disassembly, which holds the addresses of nested code, and never a repr. Two
functions with equal descriptions do the same as far as code, nested code, defaults, closures, bound arguments and the
plain module-level constants tell; what else they read is followed in the sources part where the recipe's own modules
hold it. Standard library only: torch's types are known by their names.
"""

from __future__ import annotations

import builtins
import enum
import functools
import types
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from cachectl.identity.source_digest import code_digest
from cachectl.schemas.canonical import canonical_bytes, digest_of

__all__ = ["Undigestible", "callable_digest", "describe_callable", "home_module"]

# Values that torch prints the same in every process.
_BY_TEXT = frozenset({"torch.dtype", "torch.device", "torch.layout", "torch.memory_format", "torch._ops.OpOverload"})
_BY_TEXT_PACKETS = frozenset({"torch._ops.OpOverloadPacket"})
_PLAIN = (type(None), bool, int, float, str)


class Undigestible(ValueError):
    """A function that holds something no other process can be compared by; the message says where and what."""


def callable_digest(function: Any) -> str:
    """Return the digest of a function's description. Raises Undigestible."""
    return digest_of(describe_callable(function))


def describe_callable(function: Any) -> Any:
    """Return a document that stands for a callable: equal for equal code and bound values, in every process.

    Functions of a module's level that it calls are described, too, as long as they are of its own package.

    Raises:
        Undigestible: a closure, default, bound argument or attribute has no form that another process could compare.
    """
    return _Description().of(function, _name(function))


def home_module(function: Any) -> str:
    """Return the name of the module that a callable's code comes from; empty where nothing tells."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    return str(getattr(function, "__module__", None) or type(function).__module__)


class _Description:
    def __init__(self) -> None:
        self._open: list[int] = []
        self._in_globals = False

    def of(self, value: Any, place: str) -> Any:
        """Return what stands for a value; strict: what is bound to a function shapes what it does."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if id(value) in self._open:
            return {"again": len(self._open) - self._open.index(id(value))}
        self._open.append(id(value))
        try:
            return self._of_object(value, place)
        finally:
            self._open.pop()

    def _of_object(self, value: Any, place: str) -> Any:
        kind = type(value)
        if isinstance(value, enum.Enum):
            return {"enum": [kind.__module__, kind.__qualname__, value.name]}
        if isinstance(value, Mapping):
            pairs = [[self.of(key, f"{place} key"), self.of(item, f"{place}[{key!r}]")] for key, item in value.items()]
            return {"mapping": sorted(pairs, key=canonical_bytes)}
        if isinstance(value, AbstractSet):
            return {"set": sorted((self.of(item, f"{place} member") for item in value), key=canonical_bytes)}
        if isinstance(value, (list, tuple)):
            return {
                "kind": kind.__name__,
                "members": [self.of(item, f"{place}[{index}]") for index, item in enumerate(value)],
            }
        if isinstance(value, functools.partial):
            return {
                "partial": self.of(value.func, f"{place}.func"),
                "arguments": self.of(list(value.args), f"{place}.args"),
                "keywords": self.of(dict(value.keywords), f"{place}.keywords"),
            }
        if isinstance(value, types.MethodType):
            return {
                "method": self.of(value.__func__, f"{place}.__func__"),
                "receiver": self.of(value.__self__, f"{place}.__self__"),
            }
        if isinstance(value, types.FunctionType):
            return self._of_function(value, place)
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, (types.ModuleType, type(None))):
            return {"builtin": [value.__module__, value.__qualname__]}
        if isinstance(value, (types.WrapperDescriptorType, types.MethodDescriptorType)):
            return {"builtin": [value.__objclass__.__module__, value.__qualname__]}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, types.CodeType):
            return {"code": code_digest(value)}
        if isinstance(value, type):
            return self._of_class(value, place)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _BY_TEXT | _BY_TEXT_PACKETS:
            return {name: str(value)}
        if callable(value) or hasattr(value, "__dict__"):
            return self._of_instance(value, place)
        raise Undigestible(f"{place} is a {name}")

    def _of_function(self, function: types.FunctionType, place: str) -> Any:
        document: dict[str, Any] = {"code": code_digest(function.__code__)}
        if function.__defaults__:
            document["defaults"] = self.of(list(function.__defaults__), f"{place} default")
        if function.__kwdefaults__:
            document["keyword_defaults"] = self.of(dict(function.__kwdefaults__), f"{place} default")
        cells = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # Not bound yet, as in a function that refers to itself while it is made.
            cells[name] = self.of(content, f"{place} closure {name!r}")
        if cells:
            document["closure"] = cells
        if found := dict(self._globals(function, place)):
            document["globals"] = found
        return document

    def _globals(self, function: types.FunctionType, place: str) -> Iterator[tuple[str, Any]]:
        """Yield what stands for the module-level names of a function's code and of the code nested in it.

        Lenient: a logger or a registry is known by its type. What is in it comes with the sources part.
        """
        home = function.__module__ or ""
        for name in sorted(_names(function.__code__)):
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            outer, self._in_globals = self._in_globals, True
            own = isinstance(value, types.FunctionType) and (
                (value.__module__ or "").partition(".")[0] == home.partition(".")[0]
            )
            try:
                if own or not isinstance(value, (types.FunctionType, type)):
                    yield name, self.of(value, f"{place} global {name!r}")
                else:
                    yield name, {"name": [value.__module__, value.__qualname__]}
            except Undigestible:
                yield name, {"type": [type(value).__module__, type(value).__qualname__]}
            finally:
                self._in_globals = outer

    def _of_class(self, value: type, place: str) -> Any:
        document: dict[str, Any] = {"class": [value.__module__, value.__qualname__]}
        if value.__module__.partition(".")[0] in ("builtins", "torch", "torch_npu", "npugraph_ex"):
            return document
        members = {
            name: member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            for name, member in vars(value).items()
        }
        document["methods"] = {
            name: self.of(member, f"{place}.{name}")
            for name, member in sorted(members.items())
            if isinstance(member, types.FunctionType)
        }
        document["attributes"] = {
            name: member
            for name, member in sorted(members.items())
            if isinstance(member, _PLAIN) and not name.startswith("__")
        }
        document["bases"] = [self.of(base, f"{place} base") for base in value.__bases__ if base is not object]
        return document

    def _of_instance(self, value: Any, place: str) -> Any:
        kind = type(value)
        if self._in_globals or kind.__module__.partition(".")[0] in ("torch", "torch_npu", "numpy"):
            # A tensor, a module, a stream: what it holds lives in this process. A logger: it leads to all the others.
            raise Undigestible(f"{place} is a {kind.__module__}.{kind.__qualname__}")
        slots = {name: getattr(value, name) for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)}
        state = {**slots, **getattr(value, "__dict__", {})}
        return {
            "instance": self.of(kind, f"{place} class"),
            "state": {name: self.of(item, f"{place}.{name}") for name, item in sorted(state.items())},
        }


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    found = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _names(code: types.CodeType) -> set[str]:
    names = {name for name in code.co_names if not hasattr(builtins, name)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _name(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    kind = type(function)
    return str(getattr(inner, "__qualname__", None) or f"{kind.__module__}.{kind.__qualname__}")
