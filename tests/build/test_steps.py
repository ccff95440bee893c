"""The steps that gates compare: what each is called with, and what is kept of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl.build.state import Snapshot
from cachectl.build.steps import DEFAULT_STEPS, StepInputs, run_steps, step_name
from cachectl.schemas.recipe import GatesSpec


class Model(torch.nn.Module):
    """A model with a cache that a prefill fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4))
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.calls = 0

    def prefill(self) -> None:
        """Write the cache anew, eagerly."""
        self.cache.copy_(torch.arange(4.0))


def _plain(model: Model) -> dict[str, Any]:
    model.prefill()
    return {"x": torch.arange(3.0), "total": torch.zeros(3), "cache": model.cache, "flag": True}


def calls_of(
    make: Callable[[Model], Mapping[str, Any]], count: int = 4, *, alone: bool = True
) -> tuple[Model, StepInputs, Snapshot]:
    """Return a model, what its steps are called with, and the snapshot of both."""
    model = Model()
    inputs = make(model)
    snapshot = Snapshot(model, inputs)
    return model, StepInputs(inputs, snapshot, lambda: make(model), count, alone=alone), snapshot


def test_steps_have_other_values_at_other_addresses_and_the_models_own_tensor() -> None:
    """Given, reversed, rolled on, and made anew; the cache stays the model's."""
    model, calls, _ = calls_of(_plain)

    steps = [dict(calls.of(number)) for number in range(4)]

    assert [[0, 1, 2], [2, 1, 0], [2, 0, 1], [0, 1, 2]] == [step["x"].tolist() for step in steps]
    assert 4 == len({step["x"].data_ptr() for step in steps})
    assert all(step["cache"] is model.cache for step in steps)
    assert ["given", "turned", "turned", "again"] == [calls.made(number) for number in range(4)]


def test_written_argument_stays_until_the_last_step() -> None:
    """A cache that is passed in is the same one at each step; made anew it stands at another address."""
    _, calls, snapshot = calls_of(_plain)
    first = calls.of(0)
    first["total"].add_(1)
    calls.written = snapshot.written()

    steps = [calls.of(number) for number in (1, 2, 3)]

    assert [True, True, False] == [step["total"] is first["total"] for step in steps]
    assert [0.0, 0.0, 0.0] == steps[2]["total"].tolist()


def test_values_are_those_of_the_first_step_as_it_was_given() -> None:
    """Where a runtime writes into the first call's tensors, later calls have the values that eager had."""
    _, calls, _ = calls_of(_plain)
    eager = [calls.of(number)["x"].tolist() for number in range(4)]

    calls.of(0)["x"].fill_(9.0)

    assert eager[1:3] == [calls.of(number)["x"].tolist() for number in (1, 2)]


def test_function_is_called_equally_often_by_ranks_that_it_repeats_itself_on_and_others() -> None:
    """Once to see whether it does, and once in each run."""
    counted: dict[str, int] = {"repeats": 0, "does not": 0}

    def repeats(model: Model) -> dict[str, Any]:
        counted["repeats"] += 1
        return {"x": torch.arange(3.0)}

    def does_not(model: Model) -> dict[str, Any]:
        counted["does not"] += 1
        return {"x": torch.full((3,), float(counted["does not"]))}

    for make in (repeats, does_not):
        _, calls, _ = calls_of(make, alone=False)
        for number in range(4):
            calls.of(number)

    assert {"repeats": 3, "does not": 3} == counted


def test_prefill_runs_between_the_steps() -> None:
    """The last step finds the cache as the inputs function leaves it, not as the step before did."""
    model, calls, _ = calls_of(_plain)
    model.cache.fill_(9.0)

    calls.of(3)

    assert [0.0, 1.0, 2.0, 3.0] == model.cache.tolist()


def _counts(model: Model) -> dict[str, Any]:
    model.calls += 1
    return {"x": torch.arange(3.0)}


def _draws(model: Model) -> dict[str, Any]:
    return {"x": torch.rand(3)}


def _fills_at_random(model: Model) -> dict[str, Any]:
    model.cache.normal_()
    return {"x": torch.arange(3.0)}


def _binds_a_cache(model: Model) -> dict[str, Any]:
    model.cache = torch.zeros(4)
    return {"x": torch.arange(3.0)}


def _works_once(model: Model) -> dict[str, Any]:
    if hasattr(model, "once"):
        raise KeyError("attribute 'once' already exists")
    model.once = True
    return {"x": torch.arange(3.0)}


def _sets_weights(model: Model) -> dict[str, Any]:
    with torch.no_grad():
        model.weight.fill_(1.0)
    return {"x": torch.arange(3.0)}


KEPT = torch.arange(3.0)


def _keeps_its_input(model: Model) -> dict[str, Any]:
    return {"x": KEPT}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    "make", [_counts, _draws, _fills_at_random, _binds_a_cache, _works_once, _sets_weights, _keeps_its_input]
)
def test_function_that_does_not_repeat_itself_changes_nothing_between_steps(
    make: Callable[[Model], Mapping[str, Any]], alone: bool
) -> None:
    """Its effects are put back, and the last step has the first one's inputs at other addresses.

    With other ranks it is called all the same: they may wait for it in a collective.
    """
    torch.manual_seed(0)
    model, calls, snapshot = calls_of(make, alone=alone)
    given = calls.of(0)
    before = (model.calls, model.cache.clone(), model.cache.data_ptr())

    last = calls.of(3)

    assert "moved" == calls.made(3)
    assert given["x"].tolist() == last["x"].tolist()
    assert given["x"].data_ptr() != last["x"].data_ptr()
    assert (before[0], before[2]) == (model.calls, model.cache.data_ptr())
    assert before[1].tolist() == model.cache.tolist()
    assert not snapshot.rebound()
    assert not snapshot.changed_parameters()


def test_moved_step_has_written_arguments_as_they_are_now() -> None:
    """What earlier steps summed up goes on at the new address."""

    def make(model: Model) -> dict[str, Any]:
        model.calls += 1
        return {"x": torch.arange(3.0), "total": torch.zeros(3)}

    _, calls, snapshot = calls_of(make)
    first = calls.of(0)
    first["total"].add_(1)
    calls.written = snapshot.written()

    last = calls.of(3)

    assert ([1.0, 1.0, 1.0], [0.0, 1.0, 2.0]) == (last["total"].tolist(), last["x"].tolist())
    assert first["total"].data_ptr() != last["total"].data_ptr()


def test_run_steps_keeps_outputs_as_returned_and_as_they_are_later() -> None:
    """Outputs that share one place are overwritten; the copies are not."""
    _, calls, snapshot = calls_of(lambda model: {"x": torch.arange(3.0)})
    place = torch.zeros(3)

    ran = run_steps(lambda **inputs: place.copy_(inputs["x"]), calls, snapshot, golden=True)

    assert [[0, 1, 2], [2, 1, 0], [2, 0, 1], [0, 1, 2]] == [output.tolist() for output in ran.outputs]
    # Before the last step the third one's values stand there; after it the last one's, which are the first one's too.
    assert [[set(), set(), {"output"}], [{"output"}, set(), set(), {"output"}]] == ran.kept
    assert [(0, "given"), (1, "turned"), (2, "turned"), (3, "again")] == [
        (step["step"], step["inputs"]) for step in ran.golden
    ]
    assert (ran.golden[0]["digest"] == ran.golden[3]["digest"], 4) == (True, len(ran.seconds))


def test_output_that_a_later_step_takes_away_is_not_kept() -> None:
    """A list of the model's own that each step clears has fewer places than when it was returned."""
    _, calls, snapshot = calls_of(lambda model: {"x": torch.arange(3.0)})
    own: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        own[:] = [x] if own else [x, x + 1]
        return own

    ran = run_steps(step, calls, snapshot)

    assert [2, 1, 1, 1] == [len(output) for output in ran.outputs]
    assert [[set(), set(), {"output[0]"}], [{"output[0]"}, set(), set(), {"output[0]"}]] == ran.kept


def test_step_names_say_which_and_with_what() -> None:
    """As messages and entries have them."""
    named = [step_name(0, "given"), step_name(1, "turned"), step_name(3, "again"), step_name(9, "moved")]

    expected = ["first step", "second step, other values", "fourth step, inputs made anew", "step 10, inputs moved"]
    assert expected == named


def test_default_number_of_steps_is_the_recipes() -> None:
    """A recipe's document leaves the default out; a rank fills in the same."""
    assert GatesSpec().steps == DEFAULT_STEPS
