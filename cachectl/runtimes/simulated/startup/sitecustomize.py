"""Start-up module of a simulated process: arranges for torch_npu to be patched when it is imported, imports nothing.

It is first on PYTHONPATH, so Python runs it instead of the user's sitecustomize, which it then runs itself. Loads the
patches by file path: cachectl need not be importable here. Costs microseconds in a process that never imports torch.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # what type checkers take for true: importing typing would cost every process a millisecond
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PROCESS = os.path.join(os.path.dirname(_HERE), "process")

# Module name -> function of the process package that is called with the module just imported. npugraph_ex and torchair
# live inside torch_npu and are importable by two names each, one object per name.
_AFTER = {
    "torch_npu": "on_torch_npu",
    "npugraph_ex._acl_concrete_graph.acl_graph": "on_acl_graph",
    "torch_npu.dynamo.npugraph_ex._acl_concrete_graph.acl_graph": "on_acl_graph",
    "torchair._acl_concrete_graph.acl_graph": "on_acl_graph",
    "torch_npu.dynamo.torchair._acl_concrete_graph.acl_graph": "on_acl_graph",
}


class _AfterImport:
    """Meta path finder that calls a function of the process package when a module of `_AFTER` has been executed."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        function = _AFTER.get(name)
        if function is None:
            return None
        for finder in sys.meta_path:
            if finder is cls or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    cls._extend(spec.loader, function)
                return spec
        return None

    @staticmethod
    def _extend(loader: Any, function: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            getattr(_process(), function)(module)

        loader.exec_module = exec_module


def _process() -> Any:
    """Import the process package by its path, once."""
    name = "_cachectl_simulated_process"
    if name not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(
            name, os.path.join(_PROCESS, "__init__.py"), submodule_search_locations=[_PROCESS]
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _run_next() -> None:
    """Run the sitecustomize that Python would have run without this one, under its own name."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    # Only what stands behind this folder: exec's start-up module may stand on either side. And none of ours twice.
    ran: set[str] = vars(sys).setdefault("_cachectl_startup", set())
    ran.add(_HERE)
    places = [os.path.abspath(part) for part in sys.path]
    start = places.index(_HERE) + 1 if _HERE in places else 0
    behind = [sys.path[index] for index in range(start, len(places)) if places[index] not in ran]
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    # What it raises goes to site, which reports it as it would have without us and goes on.
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


if os.environ.get("CACHECTL_SIMULATED") == "1":
    sys.meta_path.insert(0, _AfterImport)
_run_next()
