"""Records what Dynamo guards while a method is compiled.

Owns the wrapping of Dynamo's CheckFunctionManager (a private API, found by its features). How a guard is read stands in
cachectl/build/guard_reading.py. Runs in rank processes, where torch is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from contextlib import ExitStack
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from cachectl.build.guard_reading import RecordedGuards, location_of, read_guards
from cachectl.build.kept_fault import KeptFault
from cachectl.build.lookups import LookupRecorder
from cachectl.build.untraced import UntracedRecorder
from cachectl.errors import BuildError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GuardRecorder"]

_HINT = "use the torch versions of the support matrix, see docs/compatibility.md"


class GuardRecorder:
    """While entered, records the guards of each compilation of `code`.

    Wraps a method of Dynamo's CheckFunctionManager, so one recorder at a time and one compiling thread.

    Raises:
        BuildError: on entering, this torch builds its guards in another way than is known here.
    """

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.compilations = 0
        self._first: RecordedGuards | None = None
        self._fault = KeptFault()
        self._lookups = LookupRecorder()
        self._untraced = UntracedRecorder()
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        manager = _manager_class()
        original = manager.compile_check_fn

        @functools.wraps(original)
        def compile_check_fn(checker: Any, builder: Any, *args: Any, **kwargs: Any) -> Any:
            if builder.f_code is self.code:
                self.compilations += 1
                if self._first is None and not self._fault:
                    # Before the original: it clears what the builder holds.
                    with self._fault.kept():
                        self._first = read_guards(checker.output_graph, builder, self._lookups.found, self._untraced)
            return original(checker, builder, *args, **kwargs)

        with ExitStack() as entered:
            entered.enter_context(self._lookups)
            entered.enter_context(self._untraced)
            manager.compile_check_fn = compile_check_fn
            entered.callback(setattr, manager, "compile_check_fn", original)
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def recorded(self) -> RecordedGuards:
        """Return what the first compilation guarded; `compilations` says whether there were more.

        Raises:
            BuildError: the code was not compiled while the recorder was entered.
            Exception: what reading the guards raised.
        """
        self._fault.raise_kept()
        if self._first is None:
            raise BuildError(
                f"Dynamo compiled nothing for {location_of(self.code)}",
                hint="call the compiled method while its guards are recorded, after torch._dynamo.reset()",
            )
        return self._first


def _manager_class() -> Any:
    guards = importlib.import_module("torch._dynamo.guards")
    manager = getattr(guards, "CheckFunctionManager", None)
    compile_check_fn: Any = getattr(manager, "compile_check_fn", None)
    missing = [
        name
        for name, found in (
            ("CheckFunctionManager.compile_check_fn", compile_check_fn),
            ("GuardBuilder.get", getattr(getattr(guards, "GuardBuilder", None), "get", None)),
            ("Guard.create_fn_name", getattr(getattr(guards, "Guard", None), "create_fn_name", None)),
        )
        if not callable(found)
    ]
    if not missing:
        parameters = list(inspect.signature(compile_check_fn).parameters)[:3]
        if parameters == ["self", "builder", "guards_out"]:
            return manager
        missing = [f"CheckFunctionManager.compile_check_fn(self, builder, guards_out), it takes {parameters}"]
    torch = importlib.import_module("torch")
    raise BuildError(f"torch {torch.__version__} keeps its guards in another way: no {', '.join(missing)}", hint=_HINT)
