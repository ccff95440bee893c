"""A user's program as a recipe's model: its script runs in the rank process until its compiled methods are called.

`cachectl.programs:model` is a recipe's factory and `cachectl.programs:call` gives a case's inputs:

    model:
      factory: cachectl.programs:model
      config: {command: [python, infer.py, --config, config.yaml], methods: [main_decode, mtp_decode]}
    functions:
      - method: main_decode
        cases: [{name: call0, inputs: "cachectl.programs:call", args: {method: main_decode, number: 0}}]

The script runs as `__main__`, with its own arguments and working folder, and finds an eager stand-in in the place of
both runtimes' cache_compile and of a full-graph torch.compile with npugraph_ex. The first call of each kind of each
method is noted with its arguments; when all that the recipe wants were called, the script is unwound. Owns the holder
that comes out of it: the modules whose methods were compiled, and the calls. Rank processes only: imports torch.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cachectl.errors import CachectlError, ConfigError
from cachectl.identity.inputs import InputError, bind_call, describe_call
from cachectl.programs_calls import call_kind, kept_arguments, keyword_arguments, owner_name
from cachectl.programs_command import ScriptCommand, read_command
from cachectl.programs_ending import ScriptEnd
from cachectl.programs_imports import INFERENCE_MODULES, compile_stand_in, replaced_in_modules
from cachectl.programs_script import run_script, script_error
from cachectl.programs_world import ScriptWorld
from cachectl.schemas.boot import Reason

__all__ = ["ProgramModel", "call", "model", "set_recipe_folder"]

_folder = Path()


@dataclass
class _Compiled:
    """One method as the script compiles it, with the calls that were seen of it."""

    name: str
    owner: str
    method: types.MethodType
    dynamic: bool
    kinds: list[Any] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)


class _Part(torch.nn.Module):  # type: ignore[misc]
    """One module of the program; its methods stand here as the script compiled them, whatever it binds there itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.owners: dict[str, torch.nn.Module] = {}


class _Calls:
    """The keyword arguments of each kind of call, by the method as the recipe says it.

    No container, so that nobody who walks over the model's tensors takes a call's for the model's own.

    Attributes:
        of: the arguments by method.
        ended: how the script was ended. Its frames hold what the program still uses: an object that goes may take a
            process group or a device's memory with it.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[dict[str, Any]]] = {}
        self.ended: BaseException | None = None


class ProgramModel(torch.nn.Module):  # type: ignore[misc]
    """The modules of a program whose methods it compiles, as children; `getattr` gives a method of one by its name.

    Attributes:
        owners: the module that a method belongs to, by the method's name.
        calls: what the program called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, torch.nn.Module] = {}
        self.calls = _Calls()


def set_recipe_folder(folder: Path) -> None:
    """Say where the recipe lies, which a model's `folder` is relative to; a rank process does, before it builds."""
    # A factory gets its config and nothing else.
    global _folder
    _folder = folder


def model(
    command: Sequence[str],
    methods: Sequence[str],
    *,
    folder: str = ".",
    calls: Mapping[str, int] | None = None,
    ranks: Mapping[str, Sequence[int]] | None = None,
    launcher: Sequence[str] = (),
) -> ProgramModel:
    """Run a program until the methods were called; return what it compiled.

    Args:
        command: the program, `[python, script.py, ...]` or `[python, -m, module, ...]`; a launcher in front is left
            out.
        methods: the methods that are wanted: `main_decode`, or `Decoder.main_decode` where several modules have it.
        folder: the program's working folder, relative to the recipe's.
        calls: how many kinds of call are wanted of a method; 1 for those not named.
        ranks: the ranks that have a method; every one for those not named.
        launcher: the variables a launcher sets for the program; in a world of one they are set here.

    Raises:
        ConfigError: no Python program, or one that ended or raised before it had called the methods.
    """
    read = read_command(command)
    world = ScriptWorld()
    watch = _Watch(world, {name: (calls or {}).get(name, 1) for name in methods}, ranks or {})
    ended: BaseException | None = None
    with _watched(watch, world):
        try:
            with watch.end.running():
                run_script(read, _folder / folder, watch.end, tuple(launcher))
        except (CachectlError, KeyboardInterrupt):
            if not watch.end.asked:
                raise
        except BaseException as error:
            # What else the script raises while it is ended is its clean-up's, as of a file that is closed twice.
            if not watch.end.asked:
                raise script_error(error, read) from error
            ended = error
        watch.refuse_uncalled(read)
    holder = watch.holder()
    holder.calls.ended = ended
    return holder


def call(model: ProgramModel, rank: int, method: str, number: int = 0) -> dict[str, Any]:
    """Return the keyword arguments that the program's call had.

    Args:
        model: from the factory `cachectl.programs:model`.
        rank: this rank.
        method: as the recipe says it.
        number: which kind of call, in the order in which they came.

    Raises:
        ConfigError: not so many kinds of call are known.
    """
    known = model.calls.of.get(method, [])
    if not 0 <= number < len(known):
        raise ConfigError(
            f"{method} of the program has no call {number} on rank {rank}: {len(known)} were seen",
            hint=f"write calls: {{{method}: {number + 1}}} in model.config",
        )
    return dict(known[number])


class _Watch:
    """What one run of a script has compiled and called so far."""

    def __init__(self, world: ScriptWorld, wanted: Mapping[str, int], ranks: Mapping[str, Sequence[int]]) -> None:
        self._world = world
        self._wanted = dict(wanted)
        self._ranks = ranks
        self._modules: dict[str, torch.nn.Module] = {}
        self._compiled: list[_Compiled] = []
        self._lock = threading.RLock()
        self.end = ScriptEnd()
        self._default_dtype: torch.dtype | None = None
        self._autocast: dict[str, torch.dtype] = {}

    def compiled(self, method: types.MethodType, *, dynamic: bool) -> Callable[..., Any]:
        """Return the eager stand-in of a compiled method; one that is compiled twice has its calls in one list."""
        with self._lock:
            owner = owner_name(method.__self__, self._modules)
            self._modules[owner] = method.__self__
            known = (item for item in self._compiled if (item.owner, item.name) == (owner, method.__name__))
            item = next(known, None)
            if item is None:
                item = _Compiled(method.__name__, owner, method, dynamic)
                self._compiled.append(item)
        signature = inspect.signature(method)

        @functools.wraps(method.__func__)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # Called by code that another compiler compiles: that is no call of a graph of its own.
                return method(*args, **kwargs)
            # What the runtime makes runs without gradients, too.
            with torch.no_grad():
                self._called(item, signature, args, kwargs)
                return method(*args, **kwargs)

        # The method's own signature, and nothing to unwrap: the runtime has neither, the program may ask for both.
        del stand_in.__wrapped__
        return stand_in

    def refuse_uncalled(self, command: ScriptCommand) -> None:
        """Raise ConfigError for a method of this rank that was not called as often as wanted."""
        seen = ", ".join(dict.fromkeys(item.name for item in self._compiled)) or "none"
        for name, count in self._here().items():
            found = self._of(name)
            known = len(found.arguments) if found is not None else 0
            if found is None and self._world.size > 1:
                continue  # Other ranks may have it: whoever compares the ranks says so.
            if known < count:
                what = "was not called" if not known else f"was called with {known} kinds of input, not {count}"
                raise ConfigError(
                    f"{command.target} ended, and {name} {what}",
                    hint=f"it compiled: {seen}; name the methods that it gives to cache_compile or torch.compile",
                )

    def holder(self) -> ProgramModel:
        """Return the modules and calls; the state around the calls stays as the program had it."""
        if self._default_dtype is not None:
            torch.set_default_dtype(self._default_dtype)
        for device, dtype in self._autocast.items():
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, dtype)
        holder = ProgramModel()
        for name in self._wanted:
            found = self._of(name)
            if found is None:
                continue
            if found.owner not in holder._modules:
                holder.add_module(found.owner, _Part(self._modules[found.owner]))
            target: Any = holder if "." not in name else holder._modules[found.owner]
            vars(target)[found.name] = found.method
            target.owners[found.name] = self._modules[found.owner]
            holder.calls.of[name] = found.arguments
        return holder

    def _here(self) -> dict[str, int]:
        rank = self._world.rank
        return {name: count for name, count in self._wanted.items() if rank in self._ranks.get(name, (rank,))}

    def _of(self, wanted: str) -> _Compiled | None:
        """Return what a recipe's method is: the first that was compiled, if there are several of the name."""
        owner, _, name = wanted.rpartition(".")
        return next((item for item in self._compiled if item.name == name and owner in ("", item.owner)), None)

    def _called(
        self, item: _Compiled, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Note a call of a new kind; unwind the script when all ranks have seen all that is wanted."""
        with self._lock:
            self.end.again()
            wanted = next((name for name in self._here() if self._of(name) is item), None)
            if wanted is None:
                return
            last = self._note(item, wanted, signature, args, kwargs)
            if self._is_common(wanted) and self._world.all_agree(self._all_seen()):
                self._keep_ambient()
                self._world.unwinding = True
                self.end.now()
            if last is not None:
                item.arguments[last] = kept_arguments(item.arguments[last], list(self._modules.values()))

    def _note(
        self,
        item: _Compiled,
        wanted: str,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> int | None:
        """Note a call if its kind is new and wanted; return its number, None if it is not."""
        if len(item.arguments) >= self._wanted[wanted]:
            return None
        try:
            spec = describe_call(bind_call(signature, args, kwargs), torch.Tensor, _format_of)
        except InputError as error:
            raise ConfigError(
                f"{wanted}: {error}", hint="pass tensors, numbers, strings or containers of them"
            ) from error
        kind = call_kind(spec, dynamic=item.dynamic)
        if kind in item.kinds:
            return None
        item.kinds.append(kind)
        item.arguments.append(keyword_arguments(signature, args, kwargs))
        return len(item.arguments) - 1

    def _all_seen(self) -> bool:
        found = ((self._of(name), count) for name, count in self._here().items())
        return all(item is not None and len(item.arguments) >= count for item, count in found)

    def _is_common(self, wanted: str) -> bool:
        """Say whether every rank calls a method: only there can they agree without one waiting for another."""
        return len(set(self._ranks.get(wanted, range(self._world.size)))) >= self._world.size

    def _keep_ambient(self) -> None:
        self._default_dtype = torch.get_default_dtype()
        for device in ("cpu", torch._C._get_privateuse1_backend_name()):
            if torch.is_autocast_enabled(device):
                self._autocast[device] = torch.get_autocast_dtype(device)


def _format_of(tensor: torch.Tensor) -> int | None:
    from cachectl.runtimes.npugraph_ex import NpuGraphEx

    return NpuGraphEx().format_of(tensor) if tensor.device.type == "npu" else None


@contextmanager
def _watched(watch: _Watch, world: ScriptWorld) -> Iterator[None]:
    """Have the stand-ins in place for a script."""

    def make(_: types.ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cache_compile(*args: Any, **kwargs: Any) -> Any:
            method = args[0] if args else kwargs.get("func")
            if not isinstance(method, types.MethodType) or not isinstance(method.__self__, torch.nn.Module):
                return original(*args, **kwargs)
            return watch.compiled(method, dynamic=bool(kwargs.get("dynamic", True)))

        return cache_compile

    with ExitStack() as entered:
        entered.enter_context(world)
        entered.enter_context(replaced_in_modules("cache_compile", make, INFERENCE_MODULES))
        entered.enter_context(_torch_compile(watch))
        yield


@contextmanager
def _torch_compile(watch: _Watch) -> Iterator[None]:
    """Have an eager stand-in for what `exec --lift` would make a cached call of; torch's own for all else."""
    from cachectl.runtimes.backends import read_compile

    original = torch.compile

    def see_to(model: Any, kwargs: Mapping[str, Any]) -> Any:
        found = read_compile(torch, model, kwargs)
        if isinstance(found, Reason):
            return original(model, **kwargs)
        return watch.compiled(model, dynamic=found[0])

    vars(torch)["compile"] = compile_stand_in(original, see_to)
    try:
        yield
    finally:
        vars(torch)["compile"] = original
