"""Python kernels of operators: which functions others than torch have registered, and which of them ran in a compile.

Owns the log of registrations. torch keeps a kernel in C++, where nothing gives the function back: `torch.library`'s
own `Library.impl` is wrapped instead, as early in a rank process as torch is there. A kernel that Dynamo and what lies
behind it run while they compile (CompositeImplicitAutograd, Autograd, Meta) is part of the graph; one that runs with
the graph (CPU, NPU) is not. Facts: torch 2.13 library.py (`Library.impl`, `_impls`), _ops.py (`py_impl`,
`py_functionalize_impl`). Rank processes only.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from cachectl.identity.guard_classes import is_known, own_members

__all__ = ["Kernel", "KernelLog", "foreign_functions", "kernels_of", "unknown_kernels", "watch_kernels"]

# Keys whose kernels run with real tensors only, as often as the graph does.
_LIVE = frozenset({"CPU", "CUDA", "NPU", "PrivateUse1", "XPU", "MPS", "CompositeExplicitAutograd", "BackendSelect"})
_REGISTERED = re.compile(r"^(\w+)(?:\[alias\])?: registered at (.+?):\d+ ::", re.MULTILINE)
_CLOSURE_LIMIT = 4


class Kernel:
    """A registered function; calls it, and tells the log when that happens in a compile."""

    def __init__(self, function: Any, operator: str, key: str) -> None:
        self.function = function
        self.operator = operator
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compiling():
            _LOG.ran[id(self)] = self
        return self.function(*args, **kwargs)


class KernelLog:
    """The kernels of one process: all that were registered since `watch_kernels`, and those that ran in a compile."""

    def __init__(self) -> None:
        self.watching = False
        self.known: set[tuple[str, str]] = set()
        self.ran: dict[int, Kernel] = {}


_LOG = KernelLog()


def watch_kernels() -> KernelLog:
    """Note from now on which Python kernels are registered and run; once per process, torch is imported for it."""
    if _LOG.watching:
        return _LOG
    library = importlib.import_module("torch.library").Library
    original = library.impl

    @functools.wraps(original)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", *args: Any, **kwargs: Any) -> Any:
        if any(True for _ in foreign_functions(fn)):
            key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
            operator = f"{self.ns}::{str(getattr(op_name, '_qualified_op_name', op_name)).rpartition('::')[2]}"
            _LOG.known.add((operator.partition(".")[0], key))
            fn = Kernel(fn, operator, key)
        return original(self, op_name, fn, dispatch_key, *args, **kwargs)

    library.impl = impl
    _LOG.watching = True
    return _LOG


def foreign_functions(value: Any, depth: int = _CLOSURE_LIMIT) -> Iterator[types.FunctionType | types.MethodType]:
    """Yield the functions of others than torch that a callable is, holds in its closure, or is bound to."""
    if depth == 0:
        return
    kind = type(value)
    if kind is types.MethodType:
        if not is_known(str(value.__func__.__globals__.get("__name__"))):
            yield value
    elif kind is types.FunctionType:
        if not is_known(str(value.__globals__.get("__name__"))):
            yield value
            return
        for cell in value.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                continue
            yield from foreign_functions(held, depth - 1)
    elif kind is functools.partial:
        yield from foreign_functions(value.func, depth - 1)
    elif kind is Kernel:
        yield from foreign_functions(value.function, depth - 1)
    elif kind.__module__.startswith("torch._higher_order_ops"):
        # A function on its way into a graph: nonstrict_trace (torch 2.13: `_LeafCallable`).
        for held in own_members(value).values():
            yield from foreign_functions(held, depth - 1)
    elif callable(value) and not isinstance(value, type) and not is_known(kind.__module__):
        called = getattr(value, "__call__", None)  # noqa: B004 -- the bound method itself is wanted
        if type(called) is types.MethodType:
            yield called


def kernels_of(operator: Any) -> Iterator[Any]:
    """Yield what Python code has put into the tables of an operator's overloads: `py_impl` and its like."""
    names = operator.overloads() if hasattr(operator, "overloads") else ()
    for overload in [getattr(operator, name) for name in names] or [operator]:
        yield from getattr(overload, "py_kernels", {}).values()


def unknown_kernels(operators: Iterable[Any]) -> list[str]:
    """Return a line for each Python kernel of these operators that was registered before `watch_kernels`."""
    torch = importlib.import_module("torch")
    found = set()
    registered = {tuple(key.split("/", 2)) for key in torch.library._impls}
    names = {str(getattr(operator, "_qualified_op_name", "")) or str(operator) for operator in operators}
    for name in sorted(names):
        space, _, base = name.partition("::")
        for owner, full, key in sorted(registered):
            operator = f"{owner}::{full}"
            if owner != space or full.partition(".")[0] != base or key in _LIVE:
                continue
            if (operator.partition(".")[0], key or "CompositeImplicitAutograd") in _LOG.known:
                continue
            if key == "Meta" and _has_fake(operator):
                continue  # The options part holds it.
            places = dict(_REGISTERED.findall(torch._C._dispatch_dump(operator)))
            file = places.get(key or "CompositeImplicitAutograd", "")
            if file.endswith(".py") and not _is_vendor_file(file):
                what = f"a Python kernel for {key or 'CompositeImplicitAutograd'}"
                found.add(f"{operator} has {what} that was registered before recording began: its body is in the graph")
    return sorted(found)


def _compiling() -> bool:
    guards = importlib.import_module("torch._guards")
    return guards.CompileContext.current_compile_id() is not None


def _has_fake(operator: str) -> bool:
    """Say whether an operator's Meta kernel is the one that torch makes of a fake implementation."""
    registry = getattr(sys.modules.get("torch._library.simple_registry"), "singleton", None)
    entry = registry.find(operator.partition(".")[0]) if registry is not None else None
    return getattr(getattr(entry, "fake_impl", None), "kernel", None) is not None


def _is_vendor_file(file: str) -> bool:
    return any(f"/{name}/" in file for name in ("torch", "torch_npu", "torchgen", "functorch"))
