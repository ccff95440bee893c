"""The model of a recipe in a rank process: path, factory, setup, methods and inputs, with errors a user can act on.

Owns turning the names in a recipe into live objects. Rank processes only: imports torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cachectl.build.environ import EnvironmentWatch
from cachectl.build.job import CaseJob, EventLog, Job
from cachectl.build.kernels import watch_kernels
from cachectl.build.recorder import extra_files, own_functions
from cachectl.build.state import Snapshot
from cachectl.build.steps import DEFAULT_STEPS, StepInputs
from cachectl.build.world import is_of_peer, join_world, leave_world
from cachectl.errors import ConfigError, EnvironmentFault
from cachectl.identity.environment import starting_environment
from cachectl.identity.options import unknown_name
from cachectl.identity.request import source_roots
from cachectl.runtimes.npugraph_ex import NpuGraphEx

__all__ = ["PROGRAM_FACTORY", "Doing", "RankProgram"]

# A program that compiles by itself; see cachectl/programs.py.
PROGRAM_FACTORY = "cachectl.programs:model"


@dataclass(frozen=True)
class Doing:
    """Which code of the user's is running now, and what to look at when it raises."""

    what: str
    hint: str


class RankProgram:
    """A recipe's model. Making one touches nothing; `start` imports the runtime and builds the model here."""

    def __init__(self, job: Job, rank: int, events: EventLog) -> None:
        self.job = job
        self.rank = rank
        self.recipe = job.recipe
        self.environ: Mapping[str, str] = os.environ
        self.started: Mapping[str, str] = starting_environment(os.environ)
        self.environment = EnvironmentWatch()
        compile_section = self.recipe["compile"]
        self.dynamic = bool(compile_section["dynamic"])
        self.options: dict[str, Any] = dict(compile_section["options"])
        self.rtol = float(self.recipe["gates"]["rtol"])
        self.atol = float(self.recipe["gates"]["atol"])
        self.steps = int(self.recipe["gates"].get("steps", DEFAULT_STEPS))
        self.roots = source_roots(job.recipe_folder, job.roots)
        self.doing: Doing | None = None
        self._events = events

    def start(self, phase: str) -> None:
        """Import the runtime, check that it is the planned one, meet the other ranks, and build the model.

        Args:
            phase: `record` or `reload`, a meeting of its own.

        Raises:
            CachectlError: torch, device, peers, or the recipe's code.
        """
        compile_section = self.recipe["compile"]
        self._events.phase(None, "import")
        self.runtime = NpuGraphEx()
        watch_kernels()
        self._configure_dynamo(compile_section["dynamo"])
        self._refuse_other_toolchain()
        for name in reversed([name for name in self.roots if name.startswith("path:")]):
            sys.path.insert(0, str(self.roots[name]))
        if self.job.world_size > 1:
            self._events.phase(None, "meet")
            join_world(f"{self.job.meeting}/{phase}", self.environ)
        self._events.phase(None, "model")
        if self.recipe["model"]["factory"] == PROGRAM_FACTORY:
            importlib.import_module("cachectl.programs").set_recipe_folder(self.job.recipe_folder)
        with self.environment.watching():
            for name in self._code_options():
                self.options[name] = self._resolve(f"compile.options.{name}", self.options[name])
            if compile_section["setup"]:
                self._call("compile.setup", compile_section["setup"])
            self.model = self._build_model()

    @property
    def ran_script(self) -> bool:
        """Whether a program ran in here, whose threads and exit handlers are not the rank's."""
        return bool(self.recipe["model"]["factory"] == PROGRAM_FACTORY)

    def leave(self) -> None:
        """Leave the other ranks, when all of them are done."""
        leave_world()

    def is_of_peer(self, error: BaseException) -> bool:
        """Say whether an error tells no more than that another rank is gone."""
        return self.job.world_size > 1 and is_of_peer(error)

    def absence(self, case: CaseJob) -> ConfigError | None:
        """Return the error that this rank's model has no method for a case; None if it has.

        In a world of several ranks that is no fault until all of them lack it: a draft model may stand on some.
        """
        receiver, path = self._receiver(case)
        if receiver is not None and getattr(receiver, path[-1], None) is not None:
            return None
        if receiver is None:
            modules = [name for name, _ in self.model.named_children()]
            return ConfigError(
                f"functions: {type(self.model).__name__} has no module {'.'.join(path[:-1])!r}",
                hint=f"it has: {', '.join(modules) or 'none'}",
            )
        names = sorted(
            name for name, member in inspect.getmembers(type(receiver), inspect.isfunction)
            if not name.startswith("_") and name not in vars(torch.nn.Module)
        )  # fmt: skip
        return ConfigError(
            f"functions: {type(receiver).__name__} has no method {path[-1]!r}",
            hint=f"it has: {', '.join(names) or 'none of its own'}",
        )

    def method(self, case: CaseJob) -> types.MethodType:
        """Return the bound method that a case compiles. Raises ConfigError."""
        if (error := self.absence(case)) is not None:
            raise error
        receiver, path = self._receiver(case)
        method = getattr(receiver, path[-1])
        # What a program compiles belongs to a module of its own, below the one that the factory made.
        owner = getattr(receiver, "owners", {}).get(path[-1], receiver) if self.ran_script else receiver
        if not isinstance(method, types.MethodType) or method.__self__ is not owner:
            raise ConfigError(
                f"functions: {case.method!r} of {type(self.model).__name__} is a {type(method).__name__}, no method",
                hint="the runtime caches undecorated methods of a torch.nn.Module only",
            )
        if hasattr(method.__func__, "__wrapped__"):
            raise ConfigError(
                f"functions: {case.method!r} of {type(self.model).__name__} is decorated",
                hint="the runtime caches undecorated methods only: move what the decorator does into the caller",
            )
        return method

    def _receiver(self, case: CaseJob) -> tuple[torch.nn.Module | None, list[str]]:
        """Return the module that a case's method belongs to, None if it isn't there, and the method's path."""
        path = case.method.split(".")
        receiver: Any = self.model
        for step in path[:-1]:
            receiver = getattr(receiver, step, None)
            if not isinstance(receiver, torch.nn.Module):
                return None, path
        return receiver, path

    def signature(self, method: types.MethodType) -> inspect.Signature:
        return inspect.signature(method)

    def inputs(self, case: CaseJob) -> dict[str, Any]:
        """Return fresh keyword arguments for a case, fitted to the method's signature. Raises ConfigError."""
        reference = case.case["inputs"]
        found = self._call(
            f"inputs of case {case.name}", reference, self.model, self.rank, **(case.case.get("args") or {})
        )
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise ConfigError(
                f"inputs {reference} of case {case.name} returned a {type(found).__name__}",
                hint="return a dict of keyword arguments for the method",
            )
        try:
            inspect.signature(self.method(case)).bind(**found)
        except TypeError as error:
            raise ConfigError(
                f"inputs {reference} of case {case.name} do not fit {case.method}: {error}",
                hint=f"{case.method}{inspect.signature(self.method(case))}",
            ) from error
        return found

    def step_inputs(self, case: CaseJob, inputs: Mapping[str, Any], snapshot: Snapshot) -> StepInputs:
        """Return what a case's steps are called with; calls the inputs function once more."""

        def make() -> Mapping[str, Any]:
            try:
                return self.inputs(case)
            finally:
                self.doing = None

        return StepInputs(inputs, snapshot, make, self.steps, alone=self.job.world_size == 1)

    def own_functions(self, case: CaseJob) -> list[str]:
        """Return the functions the recipe itself names for a case: factory, inputs, setup, custom passes."""
        return own_functions(self.recipe, case.case["inputs"], self._code_options())

    def extra_files(self) -> list[Path]:
        """Return the files that the recipe's `model.sources` globs name. Raises ConfigError for one that names none."""
        return extra_files(self.recipe, self.job.recipe_folder)

    def _build_model(self) -> torch.nn.Module:
        reference = self.recipe["model"]["factory"]
        model = self._call("model.factory", reference, **self.recipe["model"]["config"])
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"model.factory {reference} returned a {type(model).__name__}", hint="return a torch.nn.Module"
            )
        return model

    def _call(self, what: str, reference: str, *args: Any, **kwargs: Any) -> Any:
        """Import `pkg.mod:fn` and call it. What the user's code raises passes through; `doing` says where it was."""
        function = self._resolve(what, reference)
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{what} {reference}: {error}", hint=f"{reference.partition(':')[2]}{inspect.signature(function)}"
            ) from error
        except ValueError:
            pass  # A builtin without a signature: calling it will tell.
        self.doing = Doing(f"{what} {reference}", "see the rank's log for its traceback")
        result = function(*args, **kwargs)
        self.doing = None
        return result

    def _resolve(self, what: str, reference: str) -> Callable[..., Any]:
        module_name, _, name = reference.partition(":")
        searched = ", ".join(str(root) for root in self.roots.values())
        self.doing = Doing(
            f"{what} {reference}: importing {module_name}",
            f"looked in {searched}; set model.path to the folder that holds it",
        )
        module = importlib.import_module(module_name)
        self.doing = None
        function: Any = module
        for step in name.split("."):
            function = getattr(function, step, None)
        if not callable(function):
            near = ", ".join(sorted(item for item in vars(module) if not item.startswith("_"))[:12])
            raise ConfigError(f"{what} {reference}: {module_name} has no function {name!r}", hint=f"it has: {near}")
        resolved: Callable[..., Any] = function
        return resolved

    def _code_options(self) -> list[str]:
        """Return the options of the recipe that name a function."""
        options = self.recipe["compile"]["options"]
        return [name for name in self.runtime.code_options() if options.get(name) is not None]

    def _refuse_other_toolchain(self) -> None:
        code = self._code_options()
        options = {name: value for name, value in self.options.items() if name not in code}
        reasons = self.runtime.process_reasons(self.job.request, options, self.dynamic)
        if reasons:
            raise EnvironmentFault(
                f"this process is not what was planned: {reasons[0]}",
                hint="files and imported modules disagree: check the installation of torch, torch_npu and CANN",
            )

    @staticmethod
    def _configure_dynamo(fields: Mapping[str, Any]) -> None:
        config = importlib.import_module("torch._dynamo").config
        for name, value in fields.items():
            if not hasattr(config, name):
                raise unknown_name("compile.dynamo", "torch._dynamo.config has no field", name, dir(config))
            setattr(config, name, value)
