"""Classes as guards tell them from one another: by name, by what they inherit, and by what was patched into torch's.

Owns the reading of a class without running any code of it or of its metaclass. A class's own methods are compared where
they were traced (the fact `methods`) and in the sources part; here stands what can change while its name and its source
stay the same: bases that are assigned at run time, and methods that somebody put into a class of torch's. Classes of
torch and of the standard library are otherwise known by the toolchain. Standard library only.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from cachectl.identity.source_digest import code_digest

__all__ = [
    "IMPLICIT_METHODS",
    "VENDORS",
    "class_members",
    "class_name",
    "found_by_name",
    "function_of",
    "functions_in",
    "is_known",
    "lineage",
    "own_members",
    "patched_members",
    "unset_slot",
]

# Whose classes and functions the toolchain stands for; cachectl's own are those of the simulated CANN.
VENDORS = frozenset({"torch", "torch_npu", "torchgen", "functorch", "torchair", "npugraph_ex", "cachectl"})
# Methods that Python looks for by itself and does without: a class that comes to have one acts otherwise.
IMPLICIT_METHODS = frozenset(
    {"__bool__", "__contains__", "__eq__", "__getattribute__", "__hash__", "__iter__", "__len__", "__ne__"}
)
# How deep decorators are looked through.
_WRAPPED_LIMIT = 8


def class_name(kind: type) -> str:
    """Return a class's name with its module; runs no code of the class or its metaclass."""
    module = type.__getattribute__(kind, "__module__")
    return f"{module}.{type.__getattribute__(kind, '__qualname__')}"


def class_members(kind: type) -> dict[str, Any]:
    """Return what a class's instances find on it by name, as it lies in the class bodies: nothing is bound or run."""
    found: dict[str, Any] = {}
    for base in reversed(type.__getattribute__(kind, "__mro__")):
        found.update(type.__getattribute__(base, "__dict__"))
    return found


def found_by_name(module: str, qualname: str) -> Any:
    """Return what lies under a qualified name in a module that is loaded, as it lies there; None where nothing does."""
    held: Any = sys.modules.get(module)
    for name in qualname.split("."):
        held = getattr(held, "__dict__", {}).get(name)
    return held


def function_of(member: Any) -> types.FunctionType | None:
    """Return the Python function behind a member of a class: itself, or what a method or property is made of."""
    if type(member) in (staticmethod, classmethod):
        member = member.__func__
    elif type(member) is property:
        member = member.fget
    return member if type(member) is types.FunctionType else None


def own_members(value: Any) -> dict[str, Any]:
    """Return an instance's own dict, empty for one without; runs none of its class's code."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def unset_slot(value: Any, member: Any) -> bool:
    """Say whether a member of a value's class is a slot that this value has left empty."""
    if type(member) is not types.MemberDescriptorType:
        return False
    try:
        member.__get__(value)
    except AttributeError:
        return True
    return False


def lineage(kind: type) -> list[str]:
    """Return what a class inherits and its name does not say; empty where the toolchain says it.

    The names of its bases in the order in which they are searched, `object` left out, and `<class>.<name>=<function>`
    for each method that was patched into one of torch's classes among them.
    """
    bases = type.__getattribute__(kind, "__mro__")
    patched = [item for base in bases for item in patched_members(base)]
    if not patched and all(is_known(str(type.__getattribute__(base, "__module__"))) for base in bases):
        return []
    return [*(class_name(base) for base in bases[1:] if base is not object), *patched]


# Classes of torch's that were found as torch made them, with their members as they were then. Names don't matter: none
# of these members is a patch, by whatever name. The list keeps them alive, so no later object has one's id.
_unpatched: dict[type, list[Any]] = {}


def patched_members(kind: type) -> list[str]:
    """Return the functions in a class of torch's that others than torch put there; empty for every other class."""
    if str(type.__getattribute__(kind, "__module__")).partition(".")[0] not in VENDORS:
        return []
    members = type.__getattribute__(kind, "__dict__")
    # Before they are looked at: what another thread patches meanwhile is found the next time.
    now, held = list(members.values()), _unpatched.get(kind)
    # Looked at anew where a member is another object: hundreds of members, at each call of a lifted method.
    if held is not None and list(map(id, held)) == list(map(id, now)):
        return []
    patched = []
    for name, member in members.items():
        for function in functions_in(member):
            # By its globals: functools.wraps gives a patch the name and module of what it wraps.
            if not is_known(str(function.__globals__.get("__name__"))):
                patched.append(f"{class_name(kind)}.{name}={function.__qualname__}:{code_digest(function.__code__)}")
                break
    if not patched:
        _unpatched[kind] = now
    return sorted(patched)


def functions_in(member: Any, depth: int = _WRAPPED_LIMIT) -> Iterator[types.FunctionType]:
    """Yield the Python functions that a class's member is made of, through decorators that say what they wrap."""
    kind = type(member)
    if depth == 0:
        return
    if kind is types.FunctionType:
        yield member
        inner = [member.__dict__.get("__wrapped__")]
    elif kind in (staticmethod, classmethod):
        inner = [member.__func__]
    elif kind is property:
        inner = [member.fget, member.fset, member.fdel]
    elif kind in (functools.partial, functools.partialmethod, functools.cached_property):
        inner = [member.func]
    elif kind is functools._lru_cache_wrapper:
        inner = [member.__wrapped__]
    else:
        return
    for part in inner:
        if part is not None:
            yield from functions_in(part, depth - 1)


def is_known(module: str) -> bool:
    """Say whether the toolchain stands for a module: torch's, torch_npu's, the standard library's."""
    top = module.partition(".")[0]
    return top in VENDORS or top in sys.stdlib_module_names
