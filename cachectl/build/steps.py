"""The steps that a build's gates compare, the same ones eager, compiled and loaded.

Owns which inputs each step has, and what is kept of a run: outputs, what became of outputs and inputs that were held,
and the state between. Judges nothing. Rank processes only: imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cachectl.build.golden import described
from cachectl.build.state import Snapshot, State, compare_values, copied, nested_tensors, output_leaves

__all__ = ["DEFAULT_STEPS", "Ran", "StepInputs", "run_steps", "step_name"]

DEFAULT_STEPS = 4
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
# How the inputs of a step are made, as entries say it and as messages do.
_MADE = {"given": "", "turned": ", other values", "again": ", inputs made anew", "moved": ", inputs moved"}


class StepInputs:
    """The inputs of each of a case's steps.

    The first step has what the recipe's function returned. Those after it have the same shapes at new addresses with
    other values; what the step writes stays where it is. Before the last one the function is called once more, as a
    program prefills again between decode steps, and everything it returns is new; where it does not return what it
    returned before, or binds the model's attributes anew, the last step has copies of the first one's inputs, those
    that are written among them.

    Making one calls the function once, and puts back what that changed. All ranks of a world call it equally often: it
    may hold collectives.

    Args:
        inputs: what the function returned first.
        snapshot: of the model and these.
        make: calls the function.
        count: how many steps, 3 or more.
        alone: whether this is a world's only rank.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        snapshot: Snapshot,
        make: Callable[[], Mapping[str, Any]],
        count: int,
        *,
        alone: bool = True,
    ) -> None:
        self.count = count
        # Ids of tensors that the step writes; known after the first eager one.
        self.written: set[int] = set()
        self._inputs = inputs
        self._snapshot = snapshot
        self._make = make
        self._alone = alone
        self._pristine: Mapping[str, Any] | None = None
        self.repeats = self._is_repeated()

    def of(self, number: int) -> Mapping[str, Any]:
        """Return the arguments of a step, to be called once a step in their order."""
        made = self.made(number)
        if made == "given":
            return self._inputs
        if made == "again":
            return self._make()
        if self._pristine is None:
            # What a step doesn't write eager leaves alone, and runs first. A runtime may write into the first call's
            # tensors at later calls.
            self._pristine = self._snapshot.varied(self._inputs, self.written, 0)
        if made == "turned":
            return self._snapshot.varied(self._pristine, self.written, number)
        if not self._alone:
            before = Snapshot(self._snapshot.model, self._inputs)
            self._try()
            before.restore()
            self._snapshot.forget_parameter_writes()
        try:
            return self._snapshot.varied(self._pristine, set(), 0)
        except torch.OutOfMemoryError:
            # A cache among the arguments may be as large as the device lets it be: it stays where it is.
            return self._snapshot.varied(self._pristine, self.written, 0)

    def made(self, number: int) -> str:
        """Return how a step's inputs are made: given, turned, again or moved."""
        if number == 0:
            return "given"
        if number < self.count - 1:
            return "turned"
        return "again" if self.repeats else "moved"

    def _is_repeated(self) -> bool:
        """Call the function, put everything back, and say whether it gave the same in fresh tensors."""
        before = _without_owned(self._inputs, self._snapshot)
        other = self._try()
        repeated = (
            other is not None
            and not self._snapshot.rebound()
            and not self._snapshot.changed_parameters()
            and all(change.is_none for change in self._snapshot.state().model.values())
            and compare_values(before, _without_owned(other, self._snapshot), rtol=0.0, atol=0.0).equal
            and self._is_alike(other)
        )
        self._snapshot.restore()
        # What the function does to weights is no step's doing.
        self._snapshot.forget_parameter_writes()
        return repeated

    def _try(self) -> Mapping[str, Any] | None:
        try:
            return self._make()
        except Exception:  # noqa: BLE001 - the user's function: called once it works, and that is all it has to do
            return None

    def _is_alike(self, other: Mapping[str, Any]) -> bool:
        """Say whether exactly those tensors are the model's own, and no other is an old one."""
        leaves = zip(pytree.tree_leaves(dict(self._inputs)), pytree.tree_leaves(dict(other)), strict=True)
        return all((one is two) == self._snapshot.owns(one) for one, two in leaves if isinstance(one, torch.Tensor))


@dataclass
class Ran:
    """What was kept of the steps of one run.

    Attributes:
        outputs: of each step, copied before the next one.
        kept: before the last step, whose values may be the first one's, and after it: for each step before, the places
            at which what it returned is still the same.
        inputs: digest of the first step's inputs; only if asked for, as the next one.
        golden: each step's outputs as an entry says them.
        after_first: the state after the first step.
        before_last: the state before the last step's inputs were made.
        after_last: the state after the last step.
        last_inputs: the last step's own tensors after it.
        seconds: of each step.
        returned_inputs: places of inputs that share memory with an output.
        input_outputs: places of outputs that share memory with an input.
    """

    outputs: list[Any] = field(default_factory=list)
    kept: list[list[set[str]]] = field(default_factory=list)
    inputs: str | None = None
    golden: list[dict[str, Any]] = field(default_factory=list)
    after_first: State | None = None
    before_last: State | None = None
    after_last: State | None = None
    last_inputs: Any = None
    seconds: list[float] = field(default_factory=list)
    returned_inputs: set[str] = field(default_factory=set)
    input_outputs: set[str] = field(default_factory=set)


def run_steps(
    step: Callable[..., Any],
    calls: StepInputs,
    snapshot: Snapshot,
    *,
    golden: bool = False,
    after_first: Callable[[], None] = lambda: None,
) -> Ran:
    """Run all steps and keep what the gates compare; the state is left as the last one made it.

    Args:
        step: called with keyword arguments.
        golden: whether inputs and outputs are to be said for an entry, too.
        after_first: called when the first step has returned.
    """
    ran = Ran()
    returned: list[Any] = []
    for number in range(calls.count):
        if number == calls.count - 1:
            ran.before_last = snapshot.state()
            ran.kept.append(_kept(ran.outputs, returned))
        arguments = calls.of(number)
        if number == 0 and golden:
            ran.inputs = described(_without_owned(arguments, snapshot))["digest"]
        started = time.perf_counter()
        output = step(**arguments)
        ran.seconds.append(time.perf_counter() - started)
        returned.append(output)
        # A replay writes its outputs where the last one did, so what is to be compared is copied before the next call.
        ran.outputs.append(copied(output))
        if golden:
            ran.golden.append({"step": number, "inputs": calls.made(number), **described(ran.outputs[-1])})
        if number == 0:
            after_first()
            ran.after_first = snapshot.state()
            ran.returned_inputs, ran.input_outputs = _shared_places(arguments, output)
    ran.after_last = snapshot.state()
    ran.last_inputs = _without_owned(arguments, snapshot)
    ran.kept.append(_kept(ran.outputs, returned))
    return ran


def _kept(copies: list[Any], returned: list[Any]) -> list[set[str]]:
    """Return the places at which each of what was returned is as it was copied then; a container may have lost some."""
    found = []
    for copy, held in zip(copies, returned, strict=True):
        later = dict(output_leaves(held))
        found.append(
            {
                place
                for place, leaf in output_leaves(copy)
                if place in later and compare_values(leaf, later[place], rtol=0.0, atol=0.0).equal
            }
        )
    return found


def _shared_places(arguments: Any, output: Any) -> tuple[set[str], set[str]]:
    """Return the places of inputs that share memory with an output, and of outputs that do with an input."""
    taken = list(nested_tensors(arguments, "inputs"))
    leaves = [(place, leaf) for place, leaf in output_leaves(output) if isinstance(leaf, torch.Tensor)]
    found = []
    for ours, others in ((taken, leaves), (leaves, taken)):
        storages = {tensor.untyped_storage()._cdata for _, tensor in others}
        found.append({place for place, tensor in ours if tensor.untyped_storage()._cdata in storages})
    return found[0], found[1]


def _without_owned(arguments: Mapping[str, Any], snapshot: Snapshot) -> Any:
    """Return copies of arguments without the model's own tensors, which may be large and are part of the state."""
    return copied(pytree.tree_map(lambda leaf: None if snapshot.owns(leaf) else leaf, dict(arguments)))


def step_name(number: int, made: str) -> str:
    """Return a step's name in messages, with how its inputs were made."""
    ordinal = f"{_ORDINALS[number]} step" if number < len(_ORDINALS) else f"step {number + 1}"
    return ordinal + _MADE[made]
