"""Records what Dynamo looked for while it traced and did not find: an absence shapes a graph as a value does.

Owns the wrapping of Dynamo's lookups (a private API, found by its features). Dynamo sets a guard on what it finds and
on some of what it misses: an attribute that a class's `__getattr__` answers, a key whose KeyError is caught, a name
that is looked for in an instance's `__dict__` have none (torch 2.13: variables/user_defined.py `generic_getattr`,
variables/dicts.py `DunderDictVariable`), nor has an attribute that a module or a function lacks. Neither have set order
and `hash()` of text, which change from process to process; nor two objects that `is` told apart, what an abstract class
said of an object, and defaults and closure cells of a function that tracing came to by an object of its own making.
What the lookups mean for the guard sheet stands in cachectl/build/guard_absences.py. Rank processes only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType, FunctionType, TracebackType, UnionType
from typing import TYPE_CHECKING, Any, TypeAlias

from cachectl.build.kept_fault import KeptFault
from cachectl.errors import BuildError
from cachectl.identity.guard_classes import VENDORS

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Holder", "LookupRecorder", "Lookups", "constant_of"]

_MISSING = object()
_VARIABLES = "torch._dynamo.variables."
# What these of Dynamo's functions make of a set is the same in any order of the set, unless they go by a key.
_ORDERLESS = frozenset({"call_sorted", "call_frozenset", "_call_min_max"})
# Its own Python text for methods of sets.
_POLYFILLS = "torch/_dynamo/polyfills/__init__.py"


# A dict of the program's: the name of a source, and whether the instance dict of what it gives is meant.
Holder: TypeAlias = tuple[str, bool]


@dataclass
class Lookups:
    """What was looked for.

    Args:
        sources: Dynamo's sources by their names.
        attributes: names looked for as attributes of an object, by its source's name.
        keys: keys looked for in a dict and not found there.
        walked: dicts that were read as a whole.
        apart: pairs of sources whose objects were compared by identity.
        instances: for a source the classes with an `__instancecheck__` of their own that its object was held against.
        unplaced: functions that have no source, each with the class of its first argument.
        disorder: what differs from process to process, each in words, with the user's line.
        fault: what looking raised; then the rest can't be trusted.
    """

    sources: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, set[str]] = field(default_factory=dict)
    keys: dict[Holder, list[Any]] = field(default_factory=dict)
    walked: set[Holder] = field(default_factory=set)
    apart: set[tuple[str, str]] = field(default_factory=set)
    instances: dict[str, list[type]] = field(default_factory=dict)
    unplaced: dict[int, tuple[FunctionType, type | None]] = field(default_factory=dict)
    disorder: list[str] = field(default_factory=list)
    fault: KeptFault = field(default_factory=KeptFault)


class LookupRecorder:
    """While entered, records the lookups of whatever Dynamo traces.

    Raises:
        BuildError: on entering, this torch looks things up in another way than is known here.
    """

    def __init__(self) -> None:
        self.found = Lookups()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            # A torch that lacks the last of them gets the first back.
            self._undo = undo
            self._wrap_all()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _wrap_all(self) -> None:
        objects = importlib.import_module(f"{_VARIABLES}user_defined").UserDefinedObjectVariable
        dicts = importlib.import_module(f"{_VARIABLES}dicts")
        self._wrap(objects, "var_getattr", before=self._attribute)
        self._wrap(objects, "generic_getattr", before=self._attribute, optional=True)
        self._wrap(dicts.ConstDictVariable, "__contains__", missing=self._key)
        for name in ("getitem_const", "getitem_const_raise_exception_if_absent"):
            self._wrap(dicts.ConstDictVariable, name, missing=self._subscript, optional=True)
        own = getattr(dicts, "SideEffectsProxyDict", None)
        self._wrap(own, "__contains__", before=self._own_key, optional=True)
        self._wrap(own, "__getitem__", before=self._own_key, optional=True)
        self._wrap(own, "__iter__", before=self._walk, optional=True)
        self._wrap_others()
        self._wrap_disorder(dicts)

    def _wrap_others(self) -> None:
        functions = importlib.import_module(f"{_VARIABLES}functions").UserFunctionVariable
        modules = importlib.import_module(f"{_VARIABLES}misc").PythonModuleVariable
        for kind in (functions, modules):
            for name in ("call_obj_hasattr", "var_getattr"):
                self._wrap(kind, name, before=self._attribute, optional=True)
        self._wrap(functions, "bind_args", before=self._function)
        builtin = importlib.import_module(f"{_VARIABLES}builtin")
        # Dynamo keeps the methods that it found for a builtin: those of an earlier compile would tell nobody.
        kept = getattr(builtin.BuiltinVariable, "call_function_handler_cache", {})
        kept.clear()
        self._undo.callback(kept.clear)
        for name in ("call_isinstance", "call_issubclass"):
            self._wrap(builtin.BuiltinVariable, name, before=self._instance, optional=True)
        for module in (builtin, sys.modules.get(f"{_VARIABLES}object_protocol")):
            self._wrap(module, "vt_identity_compare", before=self._identity, optional=True)

    def _wrap_disorder(self, dicts: Any) -> None:
        sets: Any = dicts
        try:
            sets = importlib.import_module(f"{_VARIABLES}sets")
        except ImportError:
            pass  # An older torch has its sets beside its dicts.
        kind = getattr(sets, "SetVariable", None)
        for name in ("tp_iter_impl", "unpack_var_sequence"):
            self._wrap(kind, name, before=self._set_walk, optional=True)
        self._wrap(kind, "call_method", before=self._set_method, optional=True)
        lists = importlib.import_module(f"{_VARIABLES}lists")
        self._wrap(getattr(lists, "CommonListMethodsVariable", None), "call_method", before=self._extend, optional=True)
        builtin = importlib.import_module(f"{_VARIABLES}builtin").BuiltinVariable
        self._wrap(builtin, "call_hash", before=self._hashed, optional=True)

    def _wrap(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        missing: Callable[..., None] | None = None,
        optional: bool = False,
    ) -> None:
        """Put a method of Dynamo's under a wrapper.

        Args:
            before: gets the call's arguments first.
            missing: gets them where the method says False or raises.
            optional: some torch versions have no such method.
        """
        original = vars(owner).get(name) if owner is not None else None
        if not callable(original):
            if optional:
                return
            version = getattr(sys.modules.get("torch"), "__version__", "unknown")
            raise BuildError(
                f"torch {version} looks names up in another way: no {getattr(owner, '__name__', owner)}.{name}",
                hint="use the torch versions of the support matrix, see docs/compatibility.md",
            )

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self._look(before, *args)
            try:
                found = original(*args, **kwargs)
            except Exception:
                # A KeyError that the traced code may catch. Anything else ends the trace.
                if missing is not None:
                    self._look(missing, *args)
                raise
            if missing is not None and found is False:
                self._look(missing, *args)
            return found

        setattr(owner, name, wrapped)
        self._undo.callback(setattr, owner, name, original)

    def _look(self, look: Callable[..., None], *args: Any) -> None:
        with self.found.fault.kept():
            look(*args)

    # Only instance dictionaries of Dynamo's variables are read: its properties evaluate, or realise a lazy variable.

    def _attribute(self, variable: Any, tx: Any, name: Any) -> None:
        if (place := self._place(variable)) is not None and isinstance(name, str):
            self.found.attributes.setdefault(place, set()).add(name)

    def _key(self, variable: Any, key: Any) -> None:
        # The proxy of an instance's dict looks for itself.
        if type(vars(variable).get("items")) is not dict or (place := self._place(variable)) is None:
            return
        value = constant_of(key)
        if value is _MISSING:
            self.found.walked.add((place, False))
        else:
            self.found.keys.setdefault((place, False), []).append(value)

    def _subscript(self, variable: Any, tx: Any, key: Any) -> None:
        self._key(variable, key)

    def _own_key(self, proxy: Any, key: Any) -> None:
        name = key if isinstance(key, str) else constant_of(getattr(key, "vt", key))
        if (place := self._place(vars(proxy).get("item"))) is not None and name not in vars(proxy)["item_dict"]:
            self.found.keys.setdefault((place, True), []).append(name)

    def _walk(self, proxy: Any) -> None:
        if (place := self._place(vars(proxy).get("item"))) is not None:
            self.found.walked.add((place, True))

    def _function(self, variable: Any, parent: Any, args: Any, *_: Any) -> None:
        function = vars(variable).get("fn")
        if type(function) is not FunctionType or variable.get_source() is not None:
            return
        if function.__defaults__ or function.__kwdefaults__ or function.__closure__:
            first = vars(variable).get("obj", args[0] if args else None)
            self.found.unplaced.setdefault(id(function), (function, _class_of(first)))

    def _instance(self, builtin: Any, tx: Any, variable: Any, kinds: Any) -> None:
        if (place := self._place(variable)) is not None:
            self.found.instances.setdefault(place, []).extend(_with_checks_of_their_own(constant_of(kinds)))

    def _identity(self, left: Any, right: Any) -> None:
        if left is not right and (one := self._place(left)) is not None and (other := self._place(right)) is not None:
            self.found.apart.add((one, other))

    def _set_walk(self, variable: Any, tx: Any) -> None:
        held = _members(variable)
        if len(held) < 2 or all(map(_hashes_alike, held)) or _in_any_order(sys._getframe(3)):
            return
        code = tx.f_code
        if not (code.co_filename.endswith(_POLYFILLS) and code.co_name.startswith(("set_", "frozenset_"))):
            self._disorder("the order of a set", "use sorted(), or a list or tuple", tx)

    def _set_method(self, variable: Any, tx: Any, name: Any, *_: Any) -> None:
        if name == "pop":
            self._set_walk(variable, tx)

    def _extend(self, variable: Any, tx: Any, name: Any, args: Any, *_: Any) -> None:
        if name == "extend" and args and _members(args[0]):
            self._set_walk(args[0], tx)

    def _hashed(self, variable: Any, tx: Any, value: Any) -> None:
        # Within a `__hash__` it is for a dict or set to find a key, as a member of an enumeration. Where code asks for
        # an object's hash, that question comes before this one.
        if getattr(getattr(tx, "f_code", None), "co_name", "") != "__hash__" and not _hashes_alike(constant_of(value)):
            self._disorder("a hash() of something else than numbers", "use a digest of hashlib's", tx)

    def _disorder(self, what: str, instead: str, tx: Any) -> None:
        frame = tx.frame_summary() if hasattr(tx, "frame_summary") else None
        line = "" if frame is None else f" ({frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name})"
        text = f"{what}, which differs from process to process: {instead}{line}"
        if text not in self.found.disorder:
            self.found.disorder.append(text)

    def _place(self, variable: Any) -> str | None:
        source = getattr(variable, "__dict__", {}).get("source")
        if source is None:
            return None
        name = str(source.name() if callable(source.name) else source.name)
        self.found.sources.setdefault(name, source)
        return name


def constant_of(variable: Any) -> Any:
    """Return the constant that one of Dynamo's variables holds, as far as that is known without evaluating anything."""
    held = getattr(variable, "__dict__", {})
    lazy = held.get("_cache")
    if lazy is not None:
        inner = getattr(lazy, "__dict__", {})
        realized = inner.get("vt")
        return inner.get("value", _MISSING) if realized is None else constant_of(realized)
    if "value" in held:
        return held["value"]
    items = held.get("items")
    if isinstance(items, list) and type(variable).__name__ == "TupleVariable":
        members = tuple(map(constant_of, items))
        return _MISSING if any(member is _MISSING for member in members) else members
    return _MISSING


def _class_of(variable: Any) -> type | None:
    """Return the class of the object that one of Dynamo's variables stands for, the class itself for a class."""
    held = getattr(variable, "__dict__", {})
    value = held.get("value", _MISSING)
    if value is _MISSING:
        value = getattr(held.get("_cache"), "__dict__", {}).get("value", _MISSING)
    if value is _MISSING:
        return None
    return value if isinstance(value, type) else type(value)


def _with_checks_of_their_own(kinds: Any) -> list[type]:
    """Return the classes among what `isinstance` takes that decide themselves what an instance is, but for torch's."""
    if isinstance(kinds, (tuple, UnionType)):
        held = kinds if isinstance(kinds, tuple) else kinds.__args__
        return [kind for member in held for kind in _with_checks_of_their_own(member)]
    if not isinstance(kinds, type) or type(kinds) is type or kinds.__module__.partition(".")[0] in VENDORS:
        return []
    checks = {type(kinds).__instancecheck__, type(kinds).__subclasscheck__}
    return [] if checks == {type.__instancecheck__, type.__subclasscheck__} else [kinds]


def _members(variable: Any) -> list[Any]:
    """Return the members of a set that one of Dynamo's variables holds; empty for every other variable."""
    held = getattr(variable, "__dict__", {})
    lazy = getattr(held.get("_cache"), "__dict__", None)
    if lazy is not None:
        value, realized = lazy.get("value"), lazy.get("vt")
        if realized is not None:
            return _members(realized)
        return list(value) if isinstance(value, (set, frozenset)) else []
    # An ordered set, or one of a dict's keys, has an order of its own.
    if type(variable).__name__ not in ("SetVariable", "FrozensetVariable"):
        return []
    return [constant_of(getattr(item, "vt", item)) for item in held.get("items") or ()]


def _hashes_alike(value: Any) -> bool:
    """Say whether a value hashes alike in every process: numbers do, text, None and objects don't."""
    if isinstance(value, tuple):
        return all(map(_hashes_alike, value))
    return type(value) in (bool, int, float, complex)


def _in_any_order(frame: FrameType | None) -> bool:
    """Say whether the function of Dynamo's that walks a set makes the same of it in any order."""
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name in _ORDERLESS:
            return not frame.f_locals.get("kwargs")
        frame = frame.f_back
    return False
