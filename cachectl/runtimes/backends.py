"""What a program's `torch.compile` says: which backend, with which options, and whether a cached call can stand for it.

Owns telling npugraph_ex's from others, by name and by object, the options that an object carries, and what else of a
compile has to be so.

Facts: torch_npu 2.13 dynamo/__init__.py (`_exec`, `_npugraph_ex_backend_entrypoint`, registered as npugraph_ex),
dynamo/npugraph_ex/npu_fx_compiler.py (`get_npu_backend` makes a partial of `_npu_backend` with compiler_config and
decompositions; options of torch.compile are put into the config). torchair has a partial of the same name.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Mapping
from typing import Any

from cachectl.errors import CachectlError
from cachectl.runtimes.npugraph_ex import NpuGraphEx
from cachectl.schemas.boot import Reason

__all__ = ["read_backend", "read_compile"]

_NAME = "npugraph_ex"
_REGISTERED = frozenset({"_exec", "_npugraph_ex_backend_entrypoint"})
# What a lifted compile may say; anything else is given for a reason of the program's.
_READ = frozenset({"backend", "fullgraph", "dynamic", "options", "mode"})
_LEFT = "this compile is left to torch, which makes it anew at each start"
_HINT = "this version keeps artifacts of npugraph_ex only: torch.compile(..., backend='npugraph_ex')"


def read_backend(runtime: NpuGraphEx, backend: Any) -> dict[str, Any] | Reason:
    """Return the options that a backend was made with; a reason where it is not npugraph_ex as the runtime makes it.

    Raises:
        ConfigError: it carries another runtime's config.
    """
    if backend == _NAME:
        return {}
    if isinstance(backend, functools.partial):
        return _of_partial(runtime, backend)
    home = getattr(backend, "__module__", None)
    if home == "torch_npu.dynamo" and getattr(backend, "__name__", None) in _REGISTERED:
        return {}
    return Reason("options", "backend", _NAME, _said(backend), "policy", _HINT)


def read_compile(torch: Any, model: Any, kwargs: Mapping[str, Any]) -> tuple[bool, dict[str, Any]] | Reason:
    """Return `dynamic` and options of a compile that can be proved; else the reason why it can't.

    A foreign backend is told first, and by the name `backend`, which decides what it counts for.
    """
    backend = kwargs.get("backend")
    if backend is None or (isinstance(backend, str) and backend != "npugraph_ex"):
        # torch_npu need not even be there.
        hint = "with --lift, torch.compile(..., backend='npugraph_ex', fullgraph=True) of a bound method starts warm"
        return Reason("options", "backend", "npugraph_ex", backend or "inductor", "policy", hint)
    runtime = NpuGraphEx()
    try:
        made_with = read_backend(runtime, backend)
        if isinstance(made_with, Reason):
            return made_with
        if (against := _against(torch, model, kwargs)) is not None:
            return against
        options = {**made_with, **(kwargs.get("options") or {})}
        runtime.effective_options(options)
    except CachectlError as error:
        return Reason("options", "torch.compile", None, error.message, "policy", _LEFT)
    return kwargs.get("dynamic") is True, options


def _against(torch: Any, model: Any, kwargs: Mapping[str, Any]) -> Reason | None:
    if isinstance(model, torch.nn.Module) or getattr(model, "__name__", None) == "_call_impl":
        hint = "compile a bound method of it instead, as model.forward: a whole module is left to torch"
        return Reason("model", "torch.compile", None, "a whole module", "policy", hint)
    if not isinstance(model, types.MethodType) or not isinstance(model.__self__, torch.nn.Module):
        said = getattr(model, "__qualname__", type(model).__qualname__)
        hint = "compile a bound method of a torch.nn.Module, as model.main_decode: a function is left to torch"
        return Reason("model", "torch.compile", None, f"{said}, which is no bound method", "policy", hint)
    if kwargs.get("fullgraph") is not True:
        hint = "pass fullgraph=True: an artifact is one graph"
        return Reason("options", "fullgraph", True, bool(kwargs.get("fullgraph")), "policy", hint)
    if kwargs.get("mode") not in (None, "default"):
        return Reason("options", "mode", None, str(kwargs["mode"]), "policy", f"give options= in its place: {_LEFT}")
    for name in sorted(set(kwargs) - _READ):
        if kwargs[name] is not None and kwargs[name] is not False:
            return Reason("options", name, None, f"given as {name}=", "policy", _LEFT)
    return None


def _of_partial(runtime: NpuGraphEx, backend: functools.partial[Any]) -> dict[str, Any] | Reason:
    home = getattr(backend.func, "__module__", "")
    if backend.args or not home.endswith("npugraph_ex.npu_fx_compiler") or backend.func.__name__ != "_npu_backend":
        return Reason("options", "backend", _NAME, _said(backend), "policy", _HINT)
    given = dict(backend.keywords)
    config = given.pop("compiler_config", None)
    utils = importlib.import_module("npugraph_ex._utils")
    if dict(given.pop("decompositions", {})) != utils.get_npu_default_decompositions():
        hint = "decompositions of the program's are in no key: register them in compile.setup of the recipe"
        return Reason("options", "custom_decompositions", None, "given to get_npu_backend", "policy", hint)
    if given:
        return Reason("options", min(given), None, "given to the backend", "policy", _HINT)
    return runtime.options_of(config) if config is not None else {}


def _said(backend: Any) -> str:
    if isinstance(backend, str):
        return backend
    named = backend.func if isinstance(backend, functools.partial) else backend
    home, name = getattr(named, "__module__", None), getattr(named, "__qualname__", type(named).__qualname__)
    return f"{home}.{name}"
