"""The steps that triage runs again and again: a first call on fresh state, then decode steps with other values.

Owns what one call is given, what is put back between two runs, and what a run left. The first call stands for a
prefill: it finds empty caches and writes them. Rank processes only: imports torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cachectl.build.job import CaseJob
from cachectl.build.program import RankProgram
from cachectl.build.state import Comparison, Snapshot, State, compare_values, copied
from cachectl.build.steps import StepInputs

__all__ = ["Difference", "Run", "Steps"]

_DEPTH_LIMIT = 4
# A step's number is passed to inputs functions that take it by this name.
_STEP = "step"


@dataclass
class Run:
    """What a run left: each step's outputs, the state after the last one, and the error that ended it, if one did."""

    outputs: list[Any] = field(default_factory=list)
    state: State | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Difference:
    """Where two runs differ: `place` as people read it, and the largest absolute difference."""

    place: str
    comparison: Comparison

    def __str__(self) -> str:
        return f"{self.place}: {self.comparison}"


class Steps:
    """The steps of one case on the live model. Every run starts from the same state and gets the same values.

    Args:
        count: how many calls, at least 3.
        on_cpu: move what the inputs give to the CPU, where the model was moved to.
    """

    def __init__(self, program: RankProgram, case: CaseJob, count: int, *, on_cpu: bool = False) -> None:
        self._program, self._case, self.count, self._on_cpu = program, case, count, on_cpu
        self.method = program.method(case)
        self.inputs = self._made(case)
        self.takes_step = _STEP not in (case.case.get("args") or {}) and _takes_step(str(case.case["inputs"]))
        # Arguments with lists of lengths, whose numbers grow by one a step as they do in serving.
        self.growing = () if self.takes_step else tuple(name for name in self.inputs if _is_lengths(name, self.inputs))
        self.snapshot = Snapshot(program.model, self.inputs)
        self._containers = _Containers(program.model)
        self._calls = StepInputs(self.inputs, self.snapshot, lambda: self._made(case), count)
        self._is_first = True
        self.rebound: list[str] = []
        self.restore()

    def run(self, step: Callable[..., Any]) -> Run:
        """Call `step` so many times, and put everything back; what it raises is kept."""
        run = Run()
        try:
            with torch.no_grad():
                for number in range(self.count):
                    # A replay writes its outputs where the last one did.
                    run.outputs.append(copied(step(**self._given(number))))
                    if self._is_first:
                        self._is_first = False
                        self._calls.written, self.rebound = self.snapshot.written(), self.snapshot.rebound()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code, or a compiler over it, may raise anything
            run.error = error
        else:
            run.state = self.snapshot.state()
        self.restore()
        return run

    def restore(self) -> None:
        """Put the model's state back to what it was before the first run."""
        self._containers.restore()
        self.snapshot.restore()

    def stop_growing(self) -> None:
        """Give every step the lengths of the first one."""
        self.growing = ()

    def difference(self, expected: Run, found: Run) -> Difference | None:
        """Return the first place where two runs differ beyond the recipe's tolerances; None where they are equal."""
        tolerances = {"rtol": self._program.rtol, "atol": self._program.atol}
        for number, (one, other) in enumerate(zip(expected.outputs, found.outputs, strict=False), start=1):
            comparison = compare_values(one, other, **tolerances)
            if not comparison.equal:
                return Difference(f"step {number}", comparison)
        if expected.state is not None and found.state is not None:
            comparison = self.snapshot.compare(expected.state, found.state, **tolerances)
            if not comparison.equal:
                return Difference("the state after the last step", comparison)
        return None

    def _given(self, number: int) -> Mapping[str, Any]:
        """Return the arguments of a step, to be called once a step in their order."""
        if number and self.takes_step:
            arguments = {**(self._case.case.get("args") or {}), _STEP: number}
            return self._made(replace(self._case, case={**self._case.case, "args": arguments}))
        given = self._calls.of(number)
        return {name: _grown(value, number) if name in self.growing else value for name, value in given.items()}

    def _made(self, case: CaseJob) -> dict[str, Any]:
        made = self._program.inputs(case)
        if not self._on_cpu:
            return made
        moved: dict[str, Any] = pytree.tree_map(
            lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, made
        )
        return moved


class _Containers:
    """Lists, dicts and sets in a model's attributes, put back as they were: a snapshot knows what they are bound to."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}
        for module in model.modules():
            for name, value in vars(module).items():
                if not name.startswith("_") or type(value) is list:
                    self._keep(value, 0)

    def _keep(self, value: Any, depth: int) -> None:
        if type(value) not in (list, dict, set) or id(value) in self._kept or depth > _DEPTH_LIMIT:
            return
        self._kept[id(value)] = (value, type(value)(value))
        for member in value.values() if isinstance(value, dict) else value:
            self._keep(member, depth + 1)

    def restore(self) -> None:
        for value, kept in self._kept.values():
            if isinstance(value, list):
                value[:] = kept
            else:
                value.clear()
                value.update(kept)


def _takes_step(reference: str) -> bool:
    module_name, _, name = reference.partition(":")
    function: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    try:
        parameter = inspect.signature(function).parameters.get(_STEP)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def _is_lengths(name: str, inputs: Mapping[str, Any]) -> bool:
    value = inputs[name]
    return "len" in name and type(value) in (list, tuple) and bool(value) and all(type(item) is int for item in value)


def _grown(value: Any, number: int) -> Any:
    return type(value)(item + number for item in value)
