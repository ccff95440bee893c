"""What `cachectl record` sees of a program: which methods it compiles, with which options, and how it calls them.

Owns what stands in the place of both runtimes' cache_compile and of torch.compile in a program's process, and the notes
that are left of it. The program's own compile runs as ever, with what the program gave it; nothing of ours is raised
into the program, and no value of its tensors is kept. Imports torch through the runtime adapter only; it is the
program's own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

from cachectl.boot.cases import REPLACED
from cachectl.build.watching_notes import ProcessNotes, process_notes
from cachectl.errors import CachectlError
from cachectl.identity.call_check import call_check
from cachectl.identity.inputs import InputError, bind_call, describe_call
from cachectl.programs_calls import call_kind, keyword_arguments
from cachectl.programs_imports import compile_stand_in
from cachectl.runtimes.simulated import loaded_is_simulated
from cachectl.schemas.boot import Reason

__all__ = ["MAX_KINDS", "install", "install_torch"]

# So many kinds of call of one method are told apart; a program that makes more compiles at each of them.
MAX_KINDS = 16
# So many calls of a dynamic graph are looked at.
_LOOKED = 1000
_RUNTIMES = frozenset({"torch", "torch_npu", "npugraph_ex", "torchair"})
_RANKS = ("global_rank", "tp_rank", "pp_rank")


def install(module: types.ModuleType) -> None:
    """Watch `cache_compile` of a runtime's inference module, once.

    Raises:
        AttributeError: the module has none.
    """
    own_notes = process_notes()
    original = module.cache_compile
    if own_notes is None or getattr(original, "_cachectl_watched", False):
        return
    runtime = "npugraph_ex" if "npugraph_ex" in module.__name__ else "torchair"

    @functools.wraps(original)
    def cache_compile(*args: Any, **kwargs: Any) -> Any:
        compiled = original(*args, **kwargs)
        # A forked process has notes of its own.
        notes = process_notes() or own_notes
        try:
            return _watched_cache_compile(notes, runtime, compiled, args, kwargs)
        except Exception as error:  # noqa: BLE001 - what is ours must not end the program
            notes.leave(_name_of(args), f"{type(error).__name__}: {error}")
            return compiled

    setattr(cache_compile, REPLACED, getattr(original, REPLACED, original))
    cache_compile._cachectl_watched = True  # type: ignore[attr-defined]
    vars(module)["cache_compile"] = cache_compile


def install_torch(torch: types.ModuleType) -> None:
    """Watch `torch.compile`, once."""
    own_notes = process_notes()
    original = torch.compile
    if own_notes is None or getattr(original, "_cachectl_watched", False):
        return

    def see_to(model: Any, kwargs: Mapping[str, Any]) -> Any:
        # What called the function that called this one.
        if _is_runtimes(sys._getframe(2)):
            return original(model, **kwargs)
        notes = process_notes() or own_notes
        # Before, since torch takes some of its options out of the program's dict.
        found = _lifted(torch, notes, model, kwargs)
        compiled = original(model, **kwargs)
        if found is None:
            return compiled
        dynamic, options = found
        try:
            how = {"how": "torch.compile", "runtime": "npugraph_ex", "dynamic": dynamic, "options": options}
            watched = _Watched(notes, model, compiled, how)
        except Exception as error:  # noqa: BLE001 - what is ours must not end the program
            notes.leave(model.__name__, f"{type(error).__name__}: {error}")
            return compiled

        # With torch's own attributes: compiled code that calls this is traced through what torch would have traced.
        @functools.wraps(compiled)
        def called(*args: Any, **kwargs: Any) -> Any:
            return watched(*args, **kwargs)

        return called

    stand_in = compile_stand_in(original, see_to)
    stand_in._cachectl_watched = True  # type: ignore[attr-defined]
    vars(torch)["compile"] = stand_in


def _is_runtimes(frame: types.FrameType) -> bool:
    """Say whether a runtime compiles for itself, as cache_compile does."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _RUNTIMES


def _lifted(
    torch: Any, notes: ProcessNotes, model: Any, kwargs: Mapping[str, Any]
) -> tuple[bool, dict[str, Any]] | None:
    """Return `dynamic` and options of a compile that exec can make a cached call of; else note why it can't."""
    from cachectl.runtimes.backends import read_compile

    name = str(getattr(model, "__name__", type(model).__name__))
    try:
        found = read_compile(torch, model, kwargs)
    except Exception as error:  # noqa: BLE001 - what is ours must not end the program
        notes.leave(name, f"{type(error).__name__}: {error}")
        return None
    if isinstance(found, Reason):
        foreign = found.name == "backend"
        why = f"with backend {found.wanted}" if foreign else f"({found})"
        notes.leave(name, f"torch.compile {why}; {found.hint}", foreign=foreign)
        return None
    return found


def _name_of(args: tuple[Any, ...]) -> str:
    return str(getattr(args[0], "__name__", type(args[0]).__name__)) if args else "cache_compile"


def _watched_cache_compile(
    notes: ProcessNotes, runtime: str, compiled: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the compiled method with its calls watched; as it is where it is none that a recipe can say."""
    from cachectl.runtimes.npugraph_ex import NpuGraphEx

    name = _name_of(args)
    if runtime != "npugraph_ex":
        notes.leave(name, "compiled by torchair's cache_compile: this version builds npugraph_ex only")
        return compiled
    adapter = NpuGraphEx()
    method = args[0] if len(args) == 1 else None
    if not isinstance(method, types.MethodType) or not isinstance(method.__self__, adapter.torch.nn.Module):
        notes.leave(name, "cache_compile of something else than one bound method of a torch.nn.Module")
        return compiled
    config = kwargs.get("config")
    try:
        options = adapter.options_of(config) if config is not None else {}
    except CachectlError as error:
        notes.leave(name, error.message)
        return compiled
    how = {
        "how": "cache_compile",
        "runtime": runtime,
        "dynamic": bool(kwargs.get("dynamic", True)),
        "options": options,
        **{rank: kwargs[rank] for rank in _RANKS if type(kwargs.get(rank)) is int},
    }
    return _Watched(notes, method, compiled, how)


def _device(torch: Any) -> int | None:
    """Return the number of the process's device; None where it isn't known, or asking would be the first use of one."""
    try:
        npu = torch.npu
        return int(npu.current_device()) if npu.is_initialized() or loaded_is_simulated() else None
    except (AttributeError, RuntimeError):
        return None  # A recipe can do without it.


class _Watched:
    """A compiled method whose kinds of call are noted; whatever else is asked of it, the runtime's object answers."""

    def __init__(self, notes: ProcessNotes, method: types.MethodType, compiled: Any, how: Mapping[str, Any]) -> None:
        from cachectl.runtimes.npugraph_ex import NpuGraphEx

        self._compiled = compiled
        self._runtime = NpuGraphEx()
        self._is_compiling = self._runtime.torch.compiler.is_compiling
        self._signature = inspect.signature(method)
        self._dynamic = bool(how["dynamic"])
        self._notes = notes
        self._method_notes = notes.method(method, how)
        self._kinds: list[Any] = []
        self._known: list[Callable[..., bool]] = []
        self._lock = threading.Lock()
        self._looked = 0
        self._over = False
        self.__name__ = method.__name__
        self.__doc__ = method.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._over and not self._is_compiling():
            self._see(args, kwargs)
        return self._compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_compiled":
            raise AttributeError(name)  # While it is copied, there is none yet.
        return getattr(self._compiled, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the runtime's object: what a copied model compiles is not the program's first model's."""
        return copy.deepcopy(self._compiled, memo)

    def _see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the call if it is of a kind that is not known; costs microseconds if it is."""
        for fits in self._known:
            try:
                if fits(*args, **kwargs):
                    return
            except (TypeError, AttributeError, RuntimeError):
                continue  # Arguments of another kind.
        with self._lock:
            try:
                self._see_new(args, kwargs)
            except InputError as error:
                self._give_up(str(error))
            except CachectlError as error:
                self._give_up(error.message)
            except Exception as error:  # noqa: BLE001 - what is ours must not end the program
                self._give_up(f"{type(error).__name__}: {error}")

    def _see_new(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        torch = self._runtime.torch
        self._looked += 1
        # Sizes may change at each call of a dynamic graph, and looking costs more than for a static one.
        self._over = self._dynamic and self._looked >= _LOOKED
        try:
            arguments = bind_call(self._signature, args, kwargs)
        except TypeError:
            return  # The method's own complaint of its arguments, which the call itself makes.
        spec = describe_call(arguments, self._runtime.tensor_type, self._runtime.format_of)
        keyword_arguments(self._signature, args, kwargs)
        kind = call_kind(spec, dynamic=self._dynamic)
        if kind in self._kinds:
            return
        if len(self._kinds) >= MAX_KINDS:
            self._method_notes["more"] = True
            self._over = True
            self._notes.write()
            return
        self._kinds.append(kind)
        if not self._dynamic:
            fits = call_check(
                spec,
                self._signature,
                lambda name: getattr(torch, name),
                tensor_types=self._runtime.plain_tensor_types,
            )
            if fits is not None:
                self._known.append(fits)
        call = {"spec": spec, "at": time.time(), "grad": torch.is_grad_enabled(), "device": _device(torch)}
        self._notes.called(self._method_notes, call, self._runtime.process_group())

    def _give_up(self, why: str) -> None:
        self._over = True
        self._notes.leave(self.__name__, why)
