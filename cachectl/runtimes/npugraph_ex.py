"""The npugraph_ex runtime: compile, expected path and load, through its own code.

Owns every name of torch_npu's private cache code that cachectl relies on. Facts: torch_npu 2.13.0,
dynamo/npugraph_ex/inference/_cache_compiler.py (`CompiledModel.get_cache_bin`, `.load`, `.rebase`) and
configs/compiler_config.py (`_process_kwargs_options`). Loading goes past `LazyCompiledModel`, whose answer to any
exception is to delete the artifact and compile anew without a word.

torch and torch_npu are looked up when a function runs, never at import.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cachectl.boot.cases import REPLACED
from cachectl.errors import ConfigError, EnvironmentFault
from cachectl.identity.callables import Undigestible
from cachectl.identity.device import canonical_soc
from cachectl.identity.options import DYNAMO_NOISE, HANDLES, found_reasons, known_options, unknown_name
from cachectl.identity.request import differences
from cachectl.identity.toolchain import CANN_PACKAGES, process_toolchain, read_driver
from cachectl.runtimes.artifact import ArtifactSummary
from cachectl.runtimes.captures import Captures, GraphKeys, captures, predicted_keys
from cachectl.runtimes.kept_config import KeptConfig
from cachectl.runtimes.placing import placed, placed_reasons
from cachectl.runtimes.registrations import digest_or_text, registered_operators, registrations
from cachectl.runtimes.rendezvous import rendezvous_store
from cachectl.runtimes.simulated import loaded_is_simulated
from cachectl.runtimes.stance import stance
from cachectl.schemas.boot import Reason

__all__ = ["NpuGraphEx"]


class NpuGraphEx:
    """The adapter for `torch.npu.npugraph_ex.inference.cache_compile`."""

    name = "npugraph_ex"

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")
        try:
            self.torch_npu = importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            raise EnvironmentFault(
                f"torch_npu can't be imported: {error}",
                hint="source CANN's set_env.sh, or run under: cachectl simulate --",
            ) from error
        if not hasattr(self.torch.npu, "npugraph_ex"):
            raise EnvironmentFault(
                f"torch_npu {self.torch_npu.__version__} has no npugraph_ex",
                hint="install torch_npu 2.10.0 or newer, or compile in mode ge_graph",
            )

    @property
    def tensor_type(self) -> type:
        kind: type = self.torch.Tensor
        return kind

    @property
    def plain_tensor_types(self) -> tuple[type, ...]:
        """The classes of tensors without behaviour of their own."""
        return (self.torch.Tensor, self.torch.nn.Parameter)

    def format_of(self, tensor: Any) -> int | None:
        """Return a tensor's private NPU format; None off the device, where there is none."""
        return int(self.torch_npu.get_npu_format(tensor)) if tensor.device.type == "npu" else None

    def call_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the grad mode in which the runtime compiles (ModelCacheSaver.__call__), and so proves and loads.

        Builds run outside of inference mode, inside of which the same tensors dispatch otherwise: it is left for the
        call. What an inference tensor is stays one.
        """
        context: contextlib.AbstractContextManager[Any] = self.torch.no_grad()
        return self._outside_inference_mode() if self.torch.is_inference_mode_enabled() else context

    @contextlib.contextmanager
    def _outside_inference_mode(self) -> Iterator[None]:
        with self.torch.inference_mode(False), self.torch.no_grad():
            yield

    def effective_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return every option with the value the runtime will use, defaults of this wheel filled in, handles left out.

        Two option dicts that mean the same give equal results, whatever they leave out and in whatever order.

        Raises:
            ConfigError: an option this wheel does not have, or a value it refuses, in the runtime's words.
        """
        config = self._config(options)
        effective = {}
        for name in config._fixed_attrs:
            if name not in HANDLES:
                value = getattr(config, name)
                effective[name] = value.value if hasattr(value, "value") else value
        return effective

    def code_options(self) -> tuple[str, ...]:
        """Return the options whose value is a function: custom passes."""
        config = self._config({})
        # The wheel lists some of them twice.
        names = dict.fromkeys(config._fixed_attrs)
        return tuple(name for name in names if type(getattr(config, name)).__name__ == "CallableValue")

    def found(self, options: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
        """Return what of the options no recipe says: code of custom passes, and what is registered in this process.

        Args:
            options: as for `compile`, functions in them.
            strict: raise for code that can't be digested; else its description equals no digest.

        Raises:
            ConfigError: only if strict; with what can't be digested, and where.
        """
        with _digested("a custom pass, pattern or decomposition"):
            digest = digest_or_text(strict)
            passes = {name: digest(options[name]) for name in self.code_options() if callable(options.get(name))}
            found = registrations(strict=strict)
        return {group: values for group, values in {**found, "passes": passes}.items() if values}

    def operators(self, names: Iterable[str], *, strict: bool) -> dict[str, Any]:
        """Return what stands for those of a graph's operators that others than torch define; see `found`."""
        with _digested("an operator's kernel"):
            return registered_operators(names, strict=strict)

    def process_group(self) -> tuple[int, int] | None:
        """Return this process's (rank, world size) in torch.distributed's default group; None without one."""
        distributed = self.torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        return int(distributed.get_rank()), int(distributed.get_world_size())

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        return int(self.torch.npu.device_count())

    def rendezvous_store(self) -> Any:
        """Return the store through which the default group's ranks can agree; None without one."""
        return rendezvous_store(self.torch)

    def placed(self, artifact: Path, read: Iterable[str], environ: Mapping[str, str]) -> dict[str, Any]:
        """Return what a saved artifact holds of its place: groups, device index; see cachectl.runtimes.placing.

        Args:
            artifact: the saved file.
            read: environment variables that model code read.
            environ: where they were read.
        """
        return placed(self.torch, artifact.read_bytes(), read=read, environ=environ)

    def placed_reasons(self, topology: Mapping[str, Any], environ: Mapping[str, str]) -> list[Reason]:
        """Compare what building found of an entry's place, in its topology part, with this process."""
        return placed_reasons(self.torch, topology.get("found") or {}, environ)

    def found_reasons(self, part: Mapping[str, Any], options: Mapping[str, Any]) -> list[Reason]:
        """Compare what building an entry found of its options with what this process has.

        Args:
            part: the entry's options part.
            options: the program's.
        """
        stored = part.get("found") or {}
        operators = self.operators(stored.get("operators") or (), strict=False)
        return found_reasons(stored, {**self.found(options, strict=False), "operators": operators})

    def process_reasons(self, request: Mapping[str, Any], options: Mapping[str, Any], dynamic: bool) -> list[Reason]:
        """Compare a request with what this process runs: interpreter, wheels, formats, CANN, driver, SoC, options."""
        toolchain, simulated = request["toolchain"], loaded_is_simulated()
        seen = {
            "arch": platform.machine(),
            # An init container sees no driver, a program on a device does.
            "driver": None if simulated else read_driver(),
            "formats.npugraph_ex": str(self._cache_compiler().CompiledModel.VERSION),
        }
        reasons = [*process_toolchain(toolchain, self.torch, self.torch_npu), *self._cann_reasons(toolchain["cann"])]
        for name, version in seen.items():
            stored = (toolchain.get("formats") or {}).get("npugraph_ex") if "." in name else toolchain.get(name)
            if stored != version:
                reasons.append(Reason("toolchain", name, stored, version, hint="run: cachectl build"))
        device = {"simulated": simulated, "soc": canonical_soc(self.torch.npu.get_device_name())}
        for name, stored, wanted in differences(request["device"], device):
            reasons.append(Reason("device", name, stored, wanted, hint="run: cachectl build on this device"))
        return [*reasons, *self._option_reasons(request["options"], options, dynamic)]

    def _option_reasons(self, stored: Mapping[str, Any], options: Mapping[str, Any], dynamic: bool) -> list[Reason]:
        reasons = []
        if bool(stored.get("dynamic")) != dynamic:
            reasons.append(
                Reason("options", "dynamic", bool(stored.get("dynamic")), dynamic, hint="pass the recipe's value")
            )
        for name, what in HANDLES.items():
            if options.get(name) is not None:
                hint = f"{name} is {what}, which no artifact can hold: leave it out"
                reasons.append(Reason("options", name, None, _sayable(options[name]), hint=hint))
        # Custom passes are compared by their code, see `found_reasons`.
        code = self.code_options()
        wanted = {name: value for name, value in self.effective_options(options).items() if name not in code}
        known = known_options(stored.get("options") or {}, wanted | self.effective_options({}))
        known = {name: value for name, value in known.items() if name not in code}
        for name, before, now in differences(known, wanted):
            reasons.append(Reason("options", name, before, _sayable(now), hint="pass the recipe's options"))
        dynamo = importlib.import_module("torch._dynamo").config
        for name, before in sorted((stored.get("dynamo") or {}).items()):
            now = getattr(dynamo, name, None)
            if name not in DYNAMO_NOISE and now != before:
                reasons.append(
                    Reason("options", f"dynamo.{name}", before, _sayable(now), hint="set it before compiling")
                )
        return reasons

    def _cann_reasons(self, stored: Mapping[str, Any]) -> list[Reason]:
        reasons = []
        for module in CANN_PACKAGES:
            version, seen = stored.get(module), self._cann_version(module).strip()
            if module == "CANN" and not (seen and version):
                # Two empty versions are equal to each other and say nothing.
                hint = "torch_npu can't read CANN's version: source CANN's set_env.sh before the program starts"
                reasons.append(Reason("toolchain", f"cann.{module}", version, seen or None, "absent", hint))
            elif (version or "") != seen:
                # A package that the toolkit does not have was recorded as None; torch_npu says "" for it.
                reasons.append(Reason("toolchain", f"cann.{module}", version, seen or None, hint="run: cachectl build"))
        return reasons

    def expected_folder(
        self, method: types.MethodType, *, dynamic: bool, options: Mapping[str, Any], cache_dir: Path
    ) -> Path:
        """Return the folder in which the runtime looks for this method's artifact; asks the runtime itself."""
        compiled_model = self._cache_compiler().CompiledModel
        path = compiled_model.get_cache_bin(
            method, config=self._config(options), dynamic=dynamic, cache_dir=str(cache_dir)
        )
        return Path(path).parent

    def compile(
        self, method: types.MethodType, *, dynamic: bool, options: Mapping[str, Any], cache_dir: Path, **named: Any
    ) -> Callable[..., Any]:
        """Return the runtime's own cached method; it traces at the first call and saves below `cache_dir`.

        What `torch.npu.npugraph_ex.inference.cache_compile` does, past whatever exec put in its place.
        """
        found = importlib.import_module("npugraph_ex.inference").cache_compile
        compiled: Callable[..., Any] = getattr(found, REPLACED, found)(
            method, config=self._config(options), dynamic=dynamic, cache_dir=str(cache_dir), **named
        )
        return KeptConfig(compiled)

    def load(self, method: types.MethodType, folder: Path) -> Callable[..., Any]:
        """Load an artifact that was checked and proved; deletes nothing, whatever happens.

        The method's own globals stand under the compiled code, as they do when the runtime traces it.

        Raises:
            Exception: what the runtime raises; the caller starts cold and says so.
        """
        compiled_model = self._cache_compiler().CompiledModel.load(str(folder / "compiled_module"))
        loaded: Callable[..., Any] = compiled_model.rebase(
            method.__self__, method.__func__.__globals__, func=method, cache_dir=os.path.realpath(folder)
        )
        _give_defaults(loaded, compiled_model.compiled_fn, method.__func__)
        return loaded

    def options_of(self, config: Any) -> dict[str, Any]:
        """Return the options that a CompilerConfig of this runtime has set to other values than the default ones.

        Raises:
            ConfigError: another runtime's config.
        """
        default = self._config({})
        if not isinstance(config, type(default)):
            raise ConfigError(f"config is a {type(config).__module__}.{type(config).__qualname__}, not npugraph_ex's")
        options = {}
        for name in default._fixed_attrs:
            value, usual = _as_set(getattr(config, name)), _as_set(getattr(default, name))
            if value is not usual and value != usual:
                options[name] = value
        return options

    def ambient_watch(self) -> Callable[[], bool]:
        """Return a function that says, in less than a microsecond, whether the state around calls is as it is now.

        Autocast, default dtype, determinism, function modes, thread count: what Dynamo guards at each call and the
        runtime does not. Where this torch has no such guard it always says no, and every call is proved in full.
        """
        guard_class = getattr(getattr(self.torch._C._dynamo, "guards", None), "GlobalStateGuard", None)
        depth_of = getattr(self.torch._C, "_len_torch_function_stack", None)
        if guard_class is None or depth_of is None:
            return lambda: False
        check, depth = guard_class().check, depth_of()
        return lambda: check() and depth_of() == depth

    def stance(self) -> str:
        """Return what `torch.compiler.set_stance` says, "" for the default; see cachectl.runtimes.stance."""
        return stance()

    def captures(self) -> Captures | None:
        """Return what this process's graph captures came to; see cachectl.runtimes.captures."""
        return captures()

    def graph_keys(self, summary: ArtifactSummary, inputs: Mapping[str, Any]) -> GraphKeys:
        """Return how many graphs a process captures for an artifact, as far as its text tells."""
        return predicted_keys(summary, inputs)

    def was_loaded(self, compiled: Callable[..., Any]) -> bool:
        """Say whether a callable made by `compile` loaded an artifact instead of tracing, after its first call."""
        saver = self._cache_compiler().ModelCacheSaver
        inner = getattr(compiled, "_compiled_model", None)
        return inner is not None and not isinstance(inner, saver)

    def _cann_version(self, module: str) -> str:
        # torch_npu asks the toolkit of every module it knows; an unknown one is an empty string, with a warning.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(self.torch_npu.npu.utils.get_cann_version(module=module) or "")

    def _cache_compiler(self) -> Any:
        return importlib.import_module("npugraph_ex.inference._cache_compiler")

    def _config(self, options: Mapping[str, Any]) -> Any:
        module = importlib.import_module("npugraph_ex.configs.compiler_config")
        config = module.CompilerConfig()
        config.mode = "npugraph_ex"
        for name in options:
            if name not in config._fixed_attrs:
                raise unknown_name("compile.options", "this torch_npu has no option", name, config._fixed_attrs)
        try:
            module._process_kwargs_options(config, {"options": dict(options)})
        except (ValueError, TypeError, OSError) as error:
            text = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"compile.options: {text}", hint="see the runtime's options for this torch_npu"
            ) from error
        return config


def _give_defaults(loaded: Callable[..., Any], code: types.CodeType, function: Any) -> None:
    """Give the loaded code the method's defaults: the runtime makes a bare function of it, which has none.

    Raises:
        RuntimeError: this wheel keeps the function elsewhere.
    """
    if not function.__defaults__ and not function.__kwdefaults__:
        return
    for cell in getattr(loaded, "__closure__", None) or ():
        inner = cell.cell_contents
        if isinstance(inner, types.FunctionType) and inner.__code__ is code:
            inner.__defaults__, inner.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
            return
    raise RuntimeError("the loaded method's function is not where this version of cachectl looks for it")


@contextlib.contextmanager
def _digested(what: str) -> Iterator[None]:
    try:
        yield
    except Undigestible as error:
        raise ConfigError(
            f"compile: the code of {what} can't be told from other code: {error}",
            hint="bind plain values only: numbers, strings, tuples, functions",
        ) from error


def _sayable(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str, list, dict)) else repr(type(value))


def _as_set(option: Any) -> Any:
    # `value` says numbers as text, which the option itself then refuses.
    return getattr(option, "_value", option)
