"""Where programs find what compiles: the runtimes' inference modules, torch.compile, and a function in their place.

Owns the names by which the modules are imported, seeing to one that is imported later, and the two ways in which a
program calls torch.compile. Standard library only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from cachectl.boot.cases import REPLACED

__all__ = ["INFERENCE_MODULES", "compile_stand_in", "replaced_in_modules"]

# Both runtimes live inside torch_npu and are importable by two names each, one object per name.
INFERENCE_MODULES = (
    "npugraph_ex.inference",
    "torch_npu.dynamo.npugraph_ex.inference",
    "torchair.inference",
    "torch_npu.dynamo.torchair.inference",
)


def compile_stand_in(
    original: Callable[..., Any], see_to: Callable[[Any, Mapping[str, Any]], Any]
) -> Callable[..., Any]:
    """Return a function for torch.compile's place, called with what to compile or, as a decorator, without it.

    Args:
        original: torch's own.
        see_to: gets what is compiled and the keyword arguments; returns what the program gets.
    """

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:  # noqa: A001 - torch's name
        if model is None:
            decorate = original(None, **kwargs)
            # torch's own complaint of a None.
            return lambda given=None: decorate(given) if given is None else compile(given, **kwargs)
        return see_to(model, kwargs)

    return compile


@contextmanager
def replaced_in_modules(
    name: str, make: Callable[[ModuleType, Callable[..., Any]], Callable[..., Any]], modules: Sequence[str]
) -> Iterator[None]:
    """Have another function in the place of `name` in modules, for the block; also in those imported meanwhile.

    Args:
        name: the function's name in each of the modules.
        make: gives the function for a module and the module's own.
        modules: full names.
    """
    done: list[tuple[ModuleType, Any]] = []

    def replace(module: ModuleType) -> None:
        original = vars(module).get(name)
        if original is None or any(module is other for other, _ in done):
            return
        stand_in = make(module, original)
        setattr(stand_in, REPLACED, getattr(original, REPLACED, original))
        done.append((module, original))
        vars(module)[name] = stand_in

    finder = _Later(frozenset(modules), replace)
    for full_name in modules:
        if full_name in sys.modules:
            replace(sys.modules[full_name])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module, original in done:
            vars(module)[name] = original


class _Later:
    """Meta path finder that sees to modules when they have been executed; whoever finds them loads them."""

    def __init__(self, names: frozenset[str], see_to: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._see_to = see_to
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names or name in self._finding:
            return None
        # Another such finder asks every finder too, this one among them.
        self._finding.add(name)
        try:
            for finder in list(sys.meta_path):
                found = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if found is not None and finder is not self:
                    self._extend(found.loader)
                    return found
            return None
        finally:
            self._finding.discard(name)

    def _extend(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._see_to(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # A loader that can't be extended: its module keeps its own function.
