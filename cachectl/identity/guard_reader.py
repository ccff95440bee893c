"""The reader of live values: constants by value, objects by names and code.

Owns how a value of any type is written in a guard sheet (see cachectl.identity.guard_values for the form). Beyond what
a type's own C code does, nothing of a stranger's runs. Standard library only: torch is passed in, and torch's types are
told by their names.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import itertools
import math
import sys
import types
from operator import length_hint
from typing import Any

from cachectl.identity.guard_classes import class_name
from cachectl.identity.guard_tensors import TensorReader
from cachectl.identity.guard_values import VIEWS, Unsayable, members_of, said_text
from cachectl.identity.source_digest import code_digest
from cachectl.schemas.canonical import canonical_bytes

__all__ = ["GuardReader", "named_constant"]

_DEPTH_LIMIT = 32
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
# Types of torch whose text is their whole value, and the few values of which are torch's own.
_CONSTANT_TYPES = frozenset({"torch.dtype", "torch.layout", "torch.memory_format", "torch.qscheme"})
_TEXT_TYPES = _CONSTANT_TYPES | {"torch.finfo", "torch.iinfo"}


class GuardReader(TensorReader):
    """Reads values, identities, tensors and ambient state of one process.

    Args:
        torch: the imported module; None where no tensor, device or ambient state will be read.
    """

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return a constant as JSON.

        Raises:
            Unsayable: no constant that another process could compare, or a string that we don't keep.
        """
        kind = type(value)
        if value is None or kind is bool or kind is int:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is str:
            return said_text(value)
        if depth > _DEPTH_LIMIT:
            raise Unsayable("a container nested too deeply")
        return self._tagged(value, kind, depth + 1)

    def identity(self, value: Any, depth: int = 0) -> Any:
        """Return which object this is, by names and code, for guards that compare objects by address.

        Raises:
            Unsayable: an object that nothing but its address tells from others.
        """
        if depth > _DEPTH_LIMIT:
            raise Unsayable("a callable nested too deeply")
        deeper = depth + 1
        kind = type(value)
        if isinstance(value, types.ModuleType):
            return ["module", str(types.ModuleType.__getattribute__(value, "__name__"))]
        if isinstance(value, type):
            return self._class(value)
        if kind is types.FunctionType:
            return ["function", value.__module__, value.__qualname__, code_digest(value.__code__)]
        if kind is types.CodeType:
            return ["code", code_digest(value)]
        if kind is types.MethodType:
            return ["method", self.identity(value.__func__, deeper), self.class_name(type(value.__self__))]
        if isinstance(value, _BUILTINS):
            return self._builtin(value)
        if kind in (staticmethod, classmethod):
            return [kind.__name__, self.identity(value.__func__, deeper)]
        if kind is property:
            return [
                "property",
                *(None if item is None else self.identity(item, deeper) for item in (value.fget, value.fset)),
            ]
        if kind is functools.partial:
            keywords = {str(name): self._part(item, deeper) for name, item in value.keywords.items()}
            function = self.identity(value.func, deeper)
            return ["partial", function, [self._part(item, deeper) for item in value.args], keywords]
        if kind is functools._lru_cache_wrapper:
            return ["cached", self.identity(value.__wrapped__, deeper)]
        if kind is object:
            return ["sentinel"]
        if kind.__name__ == "ProcessGroup":
            return self._process_group(value)
        return self._foreign_identity(value, kind, depth)

    def member(self, value: Any) -> Any:
        """Return a key or member of a container: by value, or as `{"$is": identity}`.

        Raises:
            Unsayable: neither can be said.
        """
        if type(value) is str:
            return said_text(value)
        try:
            return self.value(value)
        except Unsayable:
            return {"$is": self.identity(value)}

    def registered(self, value: Any) -> list[Any]:
        """Return the keys of a registry that neither torch nor the standard library put there.

        Those two's come and go with what of them is imported, and the toolchain part names their versions.
        """
        said = [self.member(key) for key in members_of(value) if not _is_toolchain(key)]
        return sorted(said, key=canonical_bytes)

    def iterator(self, value: Any) -> list[Any]:
        """Return what an iterator over a range, a tuple or itertools.count still has to give.

        Raises:
            Unsayable: another iterator.
        """
        kind = type(value)
        if kind is type(iter(())):
            return ["tuple_iterator", length_hint(value)]
        if kind is type(iter(range(0))):
            state = value.__reduce__()
            left, steps = state[1][0], state[2] if len(state) > 2 else 0
            # From CPython 3.12 on the range itself moves and the number of steps is None.
            return ["range_iterator", left.start + (steps or 0) * left.step, left.stop, left.step]
        if kind is itertools.count:
            # Its __reduce__ is deprecated from CPython 3.12 on; its text says the same.
            try:
                arguments = ast.literal_eval(f"{repr(value).removeprefix('count')[:-1]},)")
            except (ValueError, SyntaxError) as error:
                raise Unsayable("an itertools.count of something else than numbers") from error
            return ["count_iterator", *(self.value(item) for item in (*arguments, 1)[:2])]
        raise Unsayable(f"an iterator of type {self.class_name(kind)}")

    def _tagged(self, value: Any, kind: type, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return {"$enum": self._enum(value, depth)}
        if isinstance(value, type):
            inherited = self.lineage(value)
            return {"$class": [self.class_name(value), inherited] if inherited else self.class_name(value)}
        if kind in (tuple, list):
            return {f"${kind.__name__}": [self.value(member, depth) for member in value]}
        if kind in (set, frozenset):
            return {f"${kind.__name__}": sorted((self.value(member, depth) for member in value), key=canonical_bytes)}
        if kind is bytes:
            return {"$bytes": value.hex()}
        if kind is complex:
            return {"$complex": [self.value(value.real), self.value(value.imag)]}
        if kind in (range, slice):
            return {f"${kind.__name__}": [self.value(item, depth) for item in (value.start, value.stop, value.step)]}
        if kind is VIEWS[0]:
            return {"$keys": sorted((self.value(member, depth) for member in value), key=canonical_bytes)}
        if value is Ellipsis or value is NotImplemented:
            return {"$singleton": repr(value)}
        if kind is types.CodeType:
            return {"$code": code_digest(value)}
        return self._foreign_value(value, kind, depth)

    def _foreign_value(self, value: Any, kind: type, depth: int) -> Any:
        name = self.class_name(kind)
        if name in _TEXT_TYPES:
            return {f"${name}": str(value)}
        if name == "torch.device":
            return {"$torch.device": self.device(value)}
        if name == "torch.Size":
            return {"$torch.Size": [int(size) for size in value]}
        if name == "torch.DispatchKeySet" or name == "torch._C.DispatchKeySet":
            return {"$dispatch_keys": self.dispatch_keys(int(value.raw_repr()))}
        if _is_enumeration(kind):
            return {"$enumeration": [name, str(value.name), int(value)]}
        if name.startswith("numpy.") and hasattr(kind, "item") and getattr(value, "shape", None) == ():
            return {"$numpy": [str(value.dtype), self.value(value.item(), depth)]}
        if isinstance(value, tuple):
            return {"$tuple": [self.value(member, depth) for member in tuple.__iter__(value)], "$class": name}
        if dataclasses.is_dataclass(value):
            fields = {item.name: self.value(getattr(value, item.name), depth) for item in dataclasses.fields(value)}
            return {"$dataclass": name, "$fields": fields}
        raise Unsayable(f"a value of type {name}")

    def _class(self, value: type) -> list[Any]:
        inherited = self.lineage(value)
        return ["class", self.class_name(value), *([inherited] if inherited else [])]

    def _enum(self, value: enum.Enum, depth: int) -> list[Any]:
        # A combination of flags may have no name, and a value may be an object that nothing else knows.
        name: str | None = getattr(value, "_name_", None)
        said: list[Any] = [self.class_name(type(value)), name]
        try:
            said.append(self.value(value._value_, depth))
        except Unsayable:
            if name is None:
                raise
        return said

    def _process_group(self, value: Any) -> list[Any]:
        """Return which process group this is: the name that graphs call it by, and its global ranks."""
        distributed = getattr(self.torch, "distributed", None)
        if distributed is None or not isinstance(value, distributed.ProcessGroup):
            raise Unsayable(f"a {class_name(type(value))}")
        try:
            return ["process_group", str(value.group_name), sorted(distributed.get_process_group_ranks(value))]
        except (KeyError, ValueError, RuntimeError) as error:
            raise Unsayable("a process group that was destroyed") from error

    def _builtin(self, value: Any) -> list[Any]:
        owner = getattr(value, "__self__", None)
        if owner is None:
            owner = getattr(value, "__objclass__", None)
        if isinstance(owner, types.ModuleType):
            place = str(types.ModuleType.__getattribute__(owner, "__name__"))
        elif isinstance(owner, type):
            place = self.class_name(owner)
        elif owner is None:
            place = str(getattr(value, "__module__", None))
        else:
            place = f"a {self.class_name(type(owner))}"
        return ["builtin", place, str(getattr(value, "__qualname__", value.__name__))]

    def _part(self, value: Any, depth: int) -> Any:
        try:
            return ["value", self.value(value, depth)]
        except Unsayable:
            return self.identity(value, depth)

    def _foreign_identity(self, value: Any, kind: type, depth: int) -> Any:
        name = self.class_name(kind)
        if any(
            type.__getattribute__(base, "__module__") == "torch._ops" for base in type.__getattribute__(kind, "__mro__")
        ):
            return ["operator", name, str(value)]
        if name == "torch._library.custom_ops.CustomOpDef":
            return ["operator", name, str(value._qualname)]
        if kind.__name__ == "JITFunction" and type(getattr(value, "fn", None)) is types.FunctionType:
            return ["kernel", name, self.identity(value.fn, depth + 1)]
        try:
            return ["value", self.value(value, depth)]
        except Unsayable as error:
            raise Unsayable(f"which {name} it is") from error


def named_constant(value: Any) -> Any:
    """Return what says an enumeration's member or one of torch's constants; None for every other value."""
    kind = type(value)
    if not (isinstance(value, enum.Enum) or _is_enumeration(kind) or class_name(kind) in _CONSTANT_TYPES):
        return None
    try:
        return GuardReader(None).value(value)
    except Unsayable:
        return None


def _is_enumeration(kind: type) -> bool:
    """Say whether a type is an enumeration of C++: pybind11 gives it its members by name."""
    metaclass = type.__getattribute__(type(kind), "__module__")
    return metaclass == "pybind11_builtins" and "__members__" in type.__getattribute__(kind, "__dict__")


def _is_toolchain(key: Any) -> bool:
    module = str(getattr(key if isinstance(key, type) else type(key), "__module__", ""))
    return module.partition(".")[0] in ("torch", "torch_npu", *sys.stdlib_module_names)
