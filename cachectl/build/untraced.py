"""Records the functions that run while a graph is made and that Dynamo does not trace.

Owns finding them. What they return becomes part of the graph, and Dynamo guards nothing of what they read: functions
under `assume_constant_result`, whose result is a constant of the graph; functions under `allow_in_graph` and
`nonstrict_trace`, and Python kernels of operators (cachectl.build.kernels), whose bodies the compiler behind Dynamo
goes through. Those of enumerations and classes that Python runs by itself are found in cachectl/build/native_runs.py.
What they read becomes facts in cachectl/build/untraced_reads.py, their code a part of `sources`. Wraps functions of
Dynamo's (a private API, found by its features). Rank processes only.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FunctionType, MethodType, TracebackType
from typing import TYPE_CHECKING, Any

from cachectl.build.kernels import KernelLog, foreign_functions, kernels_of, unknown_kernels, watch_kernels
from cachectl.build.native_runs import NativeRuns
from cachectl.errors import BuildError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Untraced", "UntracedRecorder"]

_MODULES = ("torch._dynamo.variables.functions", "torch._dynamo.variables.nn_module")
_INVOKE = "invoke_and_store_as_constant"


@dataclass(frozen=True)
class Untraced:
    """A function that ran untraced.

    Args:
        function: itself; a bound method with its receiver.
        why: in words, for messages.
        registered: whether a statement other than its own decorators may have put it where it ran.
    """

    function: FunctionType | MethodType
    why: str
    registered: bool = False

    def plain(self) -> FunctionType:
        """Return the function without its receiver."""
        inner: Any = getattr(self.function, "__func__", self.function)
        plain: FunctionType = inner
        return plain


@dataclass
class UntracedRecorder:
    """While entered, records what runs untraced in each compile.

    Raises:
        BuildError: on entering, this torch's Dynamo compiles in another way than is known here.
    """

    unknown: list[str] = field(default_factory=list)
    _found: dict[int, Untraced] = field(default_factory=dict)
    _undo: ExitStack = field(default_factory=ExitStack)
    _log: KernelLog = field(default_factory=KernelLog)
    _native: NativeRuns = field(default_factory=NativeRuns)

    def __enter__(self) -> Self:
        graphs = importlib.import_module("torch._dynamo.output_graph")
        compiler = vars(getattr(graphs, "OutputGraph", object)).get("call_user_compiler")
        constants = [sys.modules[name] for name in _MODULES if hasattr(importlib.import_module(name), _INVOKE)]
        if not callable(compiler) or not constants:
            version = getattr(sys.modules.get("torch"), "__version__", "unknown")
            missing = "OutputGraph.call_user_compiler" if not callable(compiler) else _INVOKE
            raise BuildError(
                f"Dynamo of torch {version} has no {missing}: what runs untraced can't be recorded",
                hint="use the torch versions of the support matrix, see docs/compatibility.md",
            )
        self._log = watch_kernels()
        self._log.ran.clear()

        def call_user_compiler(graph: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            self._scan(module)
            return compiler(graph, module, *args, **kwargs)

        with ExitStack() as undo:
            # A torch that lacks the last of them gets the first back.
            self._undo = undo
            self._put(graphs.OutputGraph, "call_user_compiler", call_user_compiler)
            for module in constants:
                self._watch_constants(module)
            self._native.watch(self._put)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def functions(self) -> list[Untraced]:
        """Return what ran untraced so far, by name."""
        found = dict(self._found)
        for kernel in self._log.ran.values():
            for function in foreign_functions(kernel.function):
                found[id(function)] = Untraced(function, f"a kernel of {kernel.operator} for {kernel.key}", True)
        self._native.fault.raise_kept()
        for bound, why in self._native.functions.values():
            found[id(bound)] = Untraced(bound, why)
        return sorted(
            found.values(), key=lambda item: (item.plain().__module__ or "", item.plain().__qualname__, item.why)
        )

    def enumerations(self) -> dict[type, set[str]]:
        """Return the enumerations that were looked through, each with what its members were asked for."""
        self._native.fault.raise_kept()
        return self._native.enumerations

    def _watch_constants(self, module: Any) -> None:
        original = getattr(module, _INVOKE)

        def invoke(tx: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
            for function in foreign_functions(fn):
                self._add(function, "assume_constant_result")
            return original(tx, fn, *args, **kwargs)

        self._put(module, _INVOKE, invoke)

    def _scan(self, module: Any) -> None:
        """Look through the graph that Dynamo hands on, and the graphs in it."""
        operators = []
        for graph in module.modules():
            for node in getattr(getattr(graph, "graph", None), "nodes", ()):
                target = node.target
                if node.op == "get_attr":
                    # A function that a node takes as an argument: nonstrict_trace.
                    target = getattr(graph, str(target), None)
                elif node.op != "call_function":
                    continue
                if hasattr(target, "overloads") or hasattr(target, "_schema"):
                    operators.append(target)
                for held in (target, *kernels_of(target)):
                    for function in foreign_functions(held):
                        own = held is target
                        self._add(function, "allow_in_graph" if own else f"a kernel of {target}", registered=not own)
        self.unknown += [line for line in unknown_kernels(operators) if line not in self.unknown]

    def _add(self, function: Any, why: str, *, registered: bool = False) -> None:
        self._found.setdefault(id(function), Untraced(function, why, registered))

    def _put(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.callback(setattr, owner, name, original)
