"""Functions of enumerations and classes that Python runs by itself while Dynamo traces.

Owns finding them. Dynamo has Python look a member up (`Color(value)`, `Color[name]`), subscript a class and format a
member, and takes what comes out for a constant: it traces no `_missing_`, no `__class_getitem__` and no metaclass's
`__getitem__`, and guards nothing that they read (torch 2.13: variables/user_defined.py
`UserDefinedClassVariable.call_function`, variables/builtin.py `constant_fold_handler`). A profile function sees which
of a class's own functions run in such a call; what they call is followed as with any other untraced function. Neither
does Dynamo guard which members an enumeration has, nor the attributes of a member that was looked up so. Rank processes
only.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType
from typing import Any

from cachectl.build.kept_fault import KeptFault
from cachectl.build.lookups import constant_of
from cachectl.errors import BuildError
from cachectl.identity.guard_classes import class_members, functions_in, is_known

__all__ = ["NativeRuns"]

_VARIABLES = "torch._dynamo.variables."
# What asks a class nothing of its members.
_UNCOUNTING = (getattr, hasattr, isinstance, issubclass, type, id, super)


@dataclass
class NativeRuns:
    """What ran, and which enumerations were looked through.

    Args:
        functions: what ran, each with its first argument where that is a class or a member, and why, in words.
        enumerations: looked-through enumerations, each with the attributes that were taken from its members.
        fault: what looking raised; then the rest can't be trusted.
    """

    functions: dict[tuple[int, int], tuple[FunctionType | MethodType, str]] = field(default_factory=dict)
    enumerations: dict[type, set[str]] = field(default_factory=dict)
    fault: KeptFault = field(default_factory=KeptFault)
    _codes: dict[type, dict[int, FunctionType]] = field(default_factory=dict)

    def watch(self, put: Callable[[Any, str, Any], None]) -> None:
        """Put wrappers around what Dynamo runs Python by.

        Args:
            put: sets an attribute of a class, until the recording ends.

        Raises:
            BuildError: this torch's Dynamo runs it in another way than is known here.
        """
        builtins = importlib.import_module(f"{_VARIABLES}builtin").BuiltinVariable
        classes = importlib.import_module(f"{_VARIABLES}user_defined").UserDefinedClassVariable
        for owner, look in ((builtins, self._of_builtin), (classes, self._of_class)):
            original = vars(owner).get("call_function")
            if not callable(original):
                version = getattr(sys.modules.get("torch"), "__version__", "unknown")
                raise BuildError(
                    f"Dynamo of torch {version} has no {owner.__name__}.call_function: what Python runs by itself "
                    "can't be recorded",
                    hint="use the torch versions of the support matrix, see docs/compatibility.md",
                )
            put(owner, "call_function", self._wrapped(original, look))
        # Some torch versions have no such methods, and take another way to what is watched above.
        objects = importlib.import_module(f"{_VARIABLES}user_defined").UserDefinedObjectVariable
        for owner, name, look in (
            (classes, "unpack_var_sequence", self._of_class),
            (objects, "var_getattr", self._of_member),
        ):
            original = vars(owner).get(name)
            if callable(original):
                put(owner, name, self._wrapped(original, look))

    def _wrapped(self, original: Callable[..., Any], look: Callable[..., list[type]]) -> Callable[..., Any]:
        def wrapped(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            kinds: list[type] = []
            with self.fault.kept():
                kinds = look(variable, *args)
            if not kinds:
                return original(variable, tx, *args, **kwargs)
            outer = sys.getprofile()
            sys.setprofile(self._profile(kinds, outer))
            try:
                return original(variable, tx, *args, **kwargs)
            finally:
                sys.setprofile(outer)

        return wrapped

    # What a call is about. Only instance dictionaries of Dynamo's variables are read.

    def _of_builtin(self, variable: Any, args: Any = (), *_: Any) -> list[type]:
        function = vars(variable).get("fn")
        held = [constant_of(argument) for argument in args]
        kinds = [value if isinstance(value, type) else type(value) for value in held if _is_watched(value)]
        if not kinds:
            return []
        if function in (isinstance, issubclass) and getattr(args[0], "source", None) is not None:
            return []  # What they say of it is a fact of the sheet.
        for value in filter(_is_watched, held):
            if isinstance(value, enum.EnumMeta) and not any(function is other for other in _UNCOUNTING):
                self.enumerations.setdefault(value, set())
        return kinds

    def _of_class(self, variable: Any, *_: Any) -> list[type]:
        kind = vars(variable).get("value")
        if not isinstance(kind, enum.EnumMeta) or not _is_watched(kind):
            return []
        self.enumerations.setdefault(kind, set())
        # A flag keeps what its `_missing_` made: in this call it may not run any more.
        for base in kind.__mro__:
            for function in functions_in(vars(base).get("_missing_")):
                if not is_known(str(function.__globals__.get("__name__"))):
                    self._add(function, kind, kind)
        return [kind]

    def _of_member(self, variable: Any, name: Any = None, *_: Any) -> list[type]:
        value = vars(variable).get("value")
        if not issubclass(type(value), enum.Enum) or vars(variable).get("source") is not None or not _is_watched(value):
            return []
        self.enumerations.setdefault(type(value), set()).add(str(name))
        return [type(value)]

    # What ran.

    def _profile(self, kinds: list[type], outer: Any) -> Callable[[FrameType, str, Any], None]:
        known = [(kind, self._codes_of(kind)) for kind in kinds]

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                for kind, codes in known:
                    if (function := codes.get(id(frame.f_code))) is not None:
                        with self.fault.kept():
                            self._add(function, _first(frame), kind)
            if inspect.isroutine(outer):
                outer(frame, event, argument)

        return profile

    def _add(self, function: FunctionType, first: Any, kind: type) -> None:
        bound = MethodType(function, first) if issubclass(type(first), (type, enum.Enum)) else function
        key = (id(function), id(first) if bound is not function else 0)
        self.functions.setdefault(key, (bound, f"by Python itself, for {kind.__qualname__}"))

    def _codes_of(self, kind: type) -> dict[int, FunctionType]:
        if kind not in self._codes:
            self._codes[kind] = {id(function.__code__): function for function in _own_functions(kind)}
        return self._codes[kind]


def _own_functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions of others than torch and the standard library that a class and its metaclass are made of."""
    for owner in (kind, type(kind)):
        for base in type.__getattribute__(owner, "__mro__"):
            for member in type.__getattribute__(base, "__dict__").values():
                # A descriptor of a class of its own: Python runs its `__get__`.
                getter = None if is_known(type(member).__module__) else class_members(type(member)).get("__get__")
                for function in (*functions_in(member), *functions_in(getter)):
                    generated = function.__code__.co_filename.startswith("<")  # A dataclass's: its fields say it all.
                    if not generated and not is_known(str(function.__globals__.get("__name__"))):
                        yield function


def _first(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _is_watched(value: Any) -> bool:
    """Say whether a value is a class or a member of an enumeration that others than torch and Python define."""
    # By its type: a proxy's `__class__` is code of others.
    if not issubclass(type(value), (type, enum.Enum)):
        return False
    kind = value if isinstance(value, type) else type(value)
    owners = (*type.__getattribute__(kind, "__mro__"), *type.__getattribute__(type(kind), "__mro__"))
    return any(not is_known(str(type.__getattribute__(owner, "__module__"))) for owner in owners)
