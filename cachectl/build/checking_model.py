"""The recipe's model for a check: made under fake tensors, so that no device memory is taken and no kernel runs.

Owns the fake mode, what a factory needs beside it, and the fake process group that stands for the other ranks. A
factory that reads values can't run on fakes: the model is made for real then, and its tensors are replaced by fakes.
Rank processes only: imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cachectl.build.job import CaseJob, EventLog, Job
from cachectl.build.program import PROGRAM_FACTORY, RankProgram
from cachectl.errors import CachectlError, ConfigError, EnvironmentFault

__all__ = ["FakedProgram"]

_DEPTH_LIMIT = 8
# Where new_group takes its backend: after ranks and timeout.
_BACKEND_ARGUMENT = 2


class FakedProgram(RankProgram):
    """A recipe's model whose tensors are fakes of one mode. Its `start` meets nobody and compares no toolchain.

    Args:
        real: make model and inputs for real, and fake them afterwards.
        again: called where the user's code can't run on fakes: has all of it done once more, with `real`, in a process
            that the attempt has left no trace in. It does not return.
    """

    def __init__(self, job: Job, rank: int, events: EventLog, *, real: bool, again: Callable[[], NoReturn]) -> None:
        super().__init__(job, rank, events)
        self.real = real
        # Why there is no model, where that is no fault of the recipe's.
        self.unmade: str | None = None
        self._again = again
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._kept: list[torch.Tensor] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def start(self, phase: str) -> None:
        """Import the runtime and the recipe's code, and make the model. Raises CachectlError."""
        self._events.phase(None, "import")
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError) as error:
            raise EnvironmentFault(
                f"torch_npu can't be imported: {error}",
                hint="source CANN's set_env.sh, or run under: cachectl simulate --",
            ) from error
        compile_section = self.recipe["compile"]
        self._configure_dynamo(compile_section["dynamo"])
        for name in reversed([name for name in self.roots if name.startswith("path:")]):
            sys.path.insert(0, str(self.roots[name]))
        if self.recipe["model"]["factory"] == PROGRAM_FACTORY:
            if self.recipe["device"] == "npu":
                self.unmade = "a program that compiles by itself would run on the NPU"
                return
            importlib.import_module("cachectl.programs").set_recipe_folder(self.job.recipe_folder)
            self.real = True
        if self.job.world_size > 1:
            _join_fake_world(self.rank, self.job.world_size)
        # Modules are imported outside of the fake mode: the tensors of their globals are everybody's.
        for what, reference in self._references():
            self._resolve(what, reference)
        self._events.phase(None, "model")
        if compile_section["setup"]:
            self._call("compile.setup", compile_section["setup"])
        with self._faking():
            try:
                self.model = self._build_model()
            except Exception as error:
                # The user's factory may raise anything where the collectives it stands on meet nobody.
                if not self.real or self.job.world_size == 1 or isinstance(error, CachectlError):
                    raise
                self.doing = None
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                self.unmade = f"the model can't be made without the other ranks: {text}"
                return
        if self.real:
            # All calls come before the first fake: an input function may run the model.
            self._calls = {case.index: self.inputs(case) for case in self.job.cases if self.can_be_called(case)}
        # Under fakes too: what a factory reads from a file may be there for real.
        self._fake_model()

    def leave(self) -> None:
        """Leave nobody: no other rank is there."""

    def can_be_called(self, case: CaseJob) -> bool:
        """Say whether a case names a method that Dynamo can be given."""
        try:
            self.method(case)
        except ConfigError:
            return False
        return True

    def call_of(self, case: CaseJob) -> dict[str, Any]:
        """Return the keyword arguments of a case, as fakes. Raises CachectlError."""
        if self.real:
            return {name: self._faked(value, 0) for name, value in self._calls[case.index].items()}
        inputs: dict[str, Any] = {}
        with self._faking():
            inputs = self.inputs(case)
        return {name: self._faked(value, 0) for name, value in inputs.items()}

    @contextlib.contextmanager
    def _faking(self) -> Iterator[None]:
        """Run the user's code under the fake mode; what it raises there may be the fakes' fault."""
        if self.real:
            yield
            return
        try:
            with self.fakes, _swapping_fakes():
                yield
        except CachectlError:
            raise
        except Exception:  # noqa: BLE001 - the user's code may raise anything, and fakes make it raise more
            traceback.print_exc()
            self._again()

    def _references(self) -> Iterator[tuple[str, str]]:
        if self.recipe["compile"]["setup"]:
            yield "compile.setup", self.recipe["compile"]["setup"]
        yield "model.factory", self.recipe["model"]["factory"]
        for case in self.job.cases:
            yield f"inputs of case {case.name}", case.case["inputs"]

    def _fake_model(self) -> None:
        for module in self.model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = self._faked(tensor, 0)
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    vars(module)[name] = self._faked(value, 0)

    def _faked(self, value: Any, depth: int) -> Any:
        """Return a value with fakes for its tensors; lists, dicts and dataclasses stay the objects they are."""
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                return value
            # The mode's own memo keeps one tensor one, and views on their base.
            self._kept.append(value)
            return self.fakes.from_tensor(value, static_shapes=True)
        if depth >= _DEPTH_LIMIT:
            return value
        if type(value) is list:
            value[:] = [self._faked(member, depth + 1) for member in value]
        elif isinstance(value, dict):
            for key, member in value.items():
                value[key] = self._faked(member, depth + 1)
        elif isinstance(value, tuple):
            members = [self._faked(member, depth + 1) for member in value]
            if any(new is not old for new, old in zip(members, value, strict=True)):
                return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for item in dataclasses.fields(value):
                # Also where it is frozen.
                object.__setattr__(value, item.name, self._faked(getattr(value, item.name), depth + 1))
        return value


@contextlib.contextmanager
def _swapping_fakes() -> Iterator[None]:
    """Let `module.to(...)` work on fakes: torch swaps fake parameters, and refuses since the mode holds them weakly."""
    original = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        if not (isinstance(one, FakeTensor) and isinstance(other, FakeTensor)):
            original(one, other)
            return
        with torch.no_grad():
            one.data = other.data
        one.fake_device = other.fake_device

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


def _join_fake_world(rank: int, world_size: int) -> None:
    """Be a rank of a world in which no other rank runs: collectives return at once, with values that mean nothing."""
    distributed: Any = importlib.import_module("torch.distributed")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    backend = distributed.Backend
    plugin = backend._plugins.get("HCCL")
    if plugin is not None:
        backend._plugins["HCCL"] = type(plugin)(fake._create_fake_pg, True)
        backend.backend_capability["hccl"] = ["npu", "cpu"]
    name = "hccl" if plugin is not None else "fake"
    distributed.init_process_group(name, store=fake.FakeStore(), rank=rank, world_size=world_size)
    new_group = distributed.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        # A group of another backend would wait for peers.
        if len(args) < _BACKEND_ARGUMENT + 1:
            kwargs["backend"] = None
        else:
            args = (*args[:_BACKEND_ARGUMENT], None, *args[_BACKEND_ARGUMENT + 1 :])
        return new_group(*args, **kwargs)

    distributed.new_group = distributed.distributed_c10d.new_group = new_fake_group
