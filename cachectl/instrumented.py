"""What a program under exec calls as its runtime's cache_compile.

Owns the replacement: which calls cachectl can prove, and what happens to the others. The program's own cache directory
is never read or written: what is not handed out is compiled by the runtime's own function in a private folder. Nothing
of ours is raised into the program. Standard library only; the runtime adapter brings torch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cachectl.boot.cases import REPLACED
from cachectl.boot.report import say
from cachectl.errors import CachectlError
from cachectl.program import WarmStart, add_method, cold_folder, process_start
from cachectl.schemas.boot import Reason

__all__ = ["install"]

# What the runtime's own function takes (facts: torch_npu 2.13.0, npugraph_ex/inference). `options` comes from
# torch.npu's function, which has put them into `config` before; the ranks only shape the runtime's path.
_KNOWN = frozenset({"config", "dynamic", "cache_dir", "global_rank", "tp_rank", "pp_rank", "options"})
_KEPT = ("global_rank", "tp_rank", "pp_rank")


def install(module: types.ModuleType, import_seconds: float | None = None) -> None:
    """Replace `cache_compile` in a runtime's inference module, once.

    Raises:
        DocumentError: what exec left can't be read.
        AttributeError: the module has no cache_compile.
    """
    start = process_start()
    original = module.cache_compile
    if start is None or hasattr(original, REPLACED):
        return
    start.import_seconds = import_seconds
    covered = "npugraph_ex" in module.__name__

    @functools.wraps(original)
    def cache_compile(*args: Any, **kwargs: Any) -> Any:
        try:
            found = _covered(start, original, args, kwargs) if covered else _uncovered_runtime(module.__name__)
            if not isinstance(found, Reason):
                return found
            start.uncovered.append(found)
            start.note_down()
        except Exception as error:  # noqa: BLE001 - boot's broad handler; what is ours must not end the program
            say(f"cache_compile is left to the runtime: {type(error).__name__}: {error}")
            found = Reason("policy", "cache_compile", f"{type(error).__name__}: {error}", kind="corrupt")
            start.uncovered.append(found)
        return _elsewhere(start, original, args, kwargs)

    setattr(cache_compile, REPLACED, original)
    module.__dict__["cache_compile"] = cache_compile


def _uncovered_runtime(name: str) -> Reason:
    return Reason(
        "policy",
        f"{name}.cache_compile",
        kind="policy",
        hint="this version keeps artifacts of npugraph_ex only: compile with torch.npu.npugraph_ex to start warm",
    )


def _covered(
    start: WarmStart, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | Reason:
    """Return the cached method for a call that can be proved; else the reason why it can't."""
    from cachectl.runtimes.npugraph_ex import NpuGraphEx

    hint = "this call is left to the runtime, which compiles it anew at each start"
    strange = sorted(name for name in set(kwargs) - _KNOWN if kwargs[name] is not None)
    if strange:
        return Reason("options", strange[0], None, f"given as {strange[0]}=", "policy", hint)
    if len(args) != 1:
        return Reason("policy", "cache_compile", 1, len(args), "policy", hint)
    runtime = NpuGraphEx()
    method = args[0]
    if not isinstance(method, types.MethodType) or not isinstance(method.__self__, runtime.torch.nn.Module):
        return Reason("model", "method", None, f"{type(method).__name__} object", "policy", hint)
    config = kwargs.get("config")
    try:
        options = runtime.options_of(config) if config is not None else {}
        runtime.effective_options(options)
    except CachectlError as error:
        return Reason("options", "config", None, error.message, "policy", hint)
    as_called = {name: kwargs[name] for name in _KEPT if name in kwargs}

    class AsCalled(NpuGraphEx):
        """The adapter, compiling with what the program passed, in another folder."""

        def compile(self, method: types.MethodType, *, dynamic: bool, cache_dir: Path, **_: Any) -> Callable[..., Any]:
            compiled: Callable[..., Any] = original(
                method, config=config, dynamic=dynamic, cache_dir=str(cache_dir), **as_called
            )
            return compiled

    return add_method(start, method, AsCalled(), dynamic=bool(kwargs.get("dynamic", True)), options=options)


def _elsewhere(
    start: WarmStart, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Call the runtime's own function with a private folder in place of the program's."""
    try:
        kwargs = {**kwargs, "cache_dir": str(cold_folder(start.warm_dir))}
    except OSError as error:
        say(f"no private folder to compile in ({error.strerror}): the program's own cache directory is used")
    compiled: Callable[..., Any] = original(*args, **kwargs)
    return compiled
