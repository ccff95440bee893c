"""Start-up module of a program under exec or record: sees to the runtimes' cache_compile, imports nothing.

It is first on PYTHONPATH, under exec or record or in the environment that a hook handed out, so Python runs it instead
of the user's sitecustomize, which it then runs itself. cachectl is loaded when a runtime's inference module is
imported, by this file's own place: it need not be importable here, and sys.path stays the program's. Costs microseconds
in a process that never imports torch, and says nothing there. Standard library only, of any Python 3.7 or newer: all of
a container's Python programs run it.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # what type checkers take for true: importing typing would cost every process a millisecond
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))

# Whose import is timed, and whose cache_compile is replaced. Both runtimes live inside torch_npu and are importable by
# two names each, one object per name.
_TIMED = frozenset({"torch", "torch_npu"})
_REPLACED = frozenset(
    {
        "npugraph_ex.inference",
        "torch_npu.dynamo.npugraph_ex.inference",
        "torchair.inference",
        "torch_npu.dynamo.torchair.inference",
    }
)
# Files that may say which model is made, and how many of them are kept.
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf")
_OPENED = 512


class _AfterImport:
    """Meta path finder that sees to the modules above when they have been executed; whoever finds them loads them."""

    def __init__(self) -> None:
        self.import_seconds = 0.0
        # Another such finder asks every finder too, this one among them.
        self._finding: set[str] = set()
        self._timing = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (name not in _TIMED and name not in _REPLACED) or name in self._finding:
            return None
        self._finding.add(name)
        try:
            for finder in list(sys.meta_path):
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._extend(spec.loader, name)
                    return spec
            return None
        finally:
            self._finding.discard(name)

    def _extend(self, loader: Any, name: str) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            started, outermost = time.perf_counter(), not self._timing
            self._timing = True
            try:
                execute(module)
            finally:
                if outermost:
                    self._timing = False
                    self.import_seconds += time.perf_counter() - started
            if name == "torch":
                _mark("torch")
                _lift(module)
            if name in _REPLACED:
                _mark("runtime")
                _replace(module, self.import_seconds)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # A loader that can't be extended loads as it would have without us.


def _replace(module: ModuleType, import_seconds: float) -> None:
    """Put ours in the module's place of cache_compile; whatever goes wrong, the program goes on with the runtime's."""
    try:
        _cachectl()
        from importlib import import_module

        if os.environ.get("CACHECTL_EXEC") or os.environ.get("CACHECTL_HANDOUT"):
            import_module("cachectl.instrumented").install(module, import_seconds)
        if os.environ.get("CACHECTL_RECORD"):
            import_module("cachectl.build.watching").install(module)
    except Exception as error:  # noqa: BLE001 - a program must not end because it was to start faster
        message = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(f"cachectl: {module.__name__} stays as it is: {message}\n")


def _lift(torch: ModuleType) -> None:
    """Put ours in the place of torch.compile where exec was asked to, and under record; as above."""
    folder, recorded = os.environ.get("CACHECTL_EXEC"), os.environ.get("CACHECTL_RECORD")
    lifted = folder and os.path.exists(os.path.join(folder, "lift"))
    if not lifted and not recorded:
        return
    try:
        _cachectl()
        from importlib import import_module

        if lifted:
            import_module("cachectl.lifting").install(torch)
        if recorded:
            import_module("cachectl.build.watching").install_torch(torch)
    except Exception as error:  # noqa: BLE001 - as above
        message = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(f"cachectl: torch.compile stays as it is: {message}\n")


def _mark(stage: str) -> None:
    """Leave in exec's or record's folder how far a process came; see cachectl.boot.reach."""
    for folder in filter(None, (os.environ.get("CACHECTL_EXEC"), os.environ.get("CACHECTL_RECORD"))):
        try:
            os.close(os.open(os.path.join(folder, "seen." + stage), os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError:
            pass  # Who reads it has ended, or is another user.


def _cachectl() -> None:
    """Import cachectl from where this file lies, unless the program has one already."""
    if "cachectl" in sys.modules:
        return
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(
        "cachectl", os.path.join(_PACKAGE, "__init__.py"), submodule_search_locations=[_PACKAGE]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["cachectl"] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["cachectl"]
        raise


def _note_files() -> None:
    """Keep which configuration files this process reads, for record: what of them counts is said when it compiles."""
    opened: dict[str, None] = {}
    sys._cachectl_opened = opened  # type: ignore[attr-defined]

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or len(opened) >= _OPENED:
            return
        path, mode = arguments[0], arguments[1]
        if isinstance(path, str) and path.endswith(_CONFIGURATIONS) and (mode is None or mode[:1] == "r"):
            opened[os.path.abspath(path)] = None

    sys.addaudithook(heard)


def _run_next() -> None:
    """Run the sitecustomize that Python would have run without this one, under its own name."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    # Only what stands behind this folder: another start-up module of ours may stand on either side. And none of ours
    # twice: a hook's lines may have been evaluated by two shells of which one started the other.
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


if os.environ.get("CACHECTL_DISABLE") != "1" and (
    os.environ.get("CACHECTL_EXEC") or os.environ.get("CACHECTL_HANDOUT") or os.environ.get("CACHECTL_RECORD")
):
    sys.meta_path.insert(0, _AfterImport())
    _mark("python")
    if os.environ.get("CACHECTL_RECORD") and hasattr(sys, "addaudithook"):
        _note_files()
_run_next()
