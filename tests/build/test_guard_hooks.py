"""Forward hooks are compared by order, kind and function; the numbers of their handles count all hooks of a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from cachectl.boot.proof import prove
from cachectl.build.guard_hooks import HookNumbers
from cachectl.build.guards import GuardRecorder
from cachectl.schemas.canonical import canonical_bytes

pytestmark = [pytest.mark.real, pytest.mark.slow]


def double(module: Any, args: Any, output: Any) -> Any:
    return output * 2


def add_one(module: Any, args: Any, output: Any) -> Any:
    return output + 1


def halve(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    return output / 2


def shift(module: Any, args: Any) -> Any:
    return (args[0] + 3,)


def usual(layer: Any) -> None:
    layer.register_forward_hook(double)
    layer.register_forward_hook(add_one)
    layer.register_forward_hook(halve, with_kwargs=True)
    layer.register_forward_pre_hook(shift)


class Model(nn.Module):
    def __init__(self, hooks: Callable[[Any], Any], before: int = 0) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        for _ in range(before):
            self.other.register_forward_hook(double).remove()
        hooks(self.layer)

    def decode(self, x: Any) -> Any:
        return self.layer(x)


class Numbered(Model):
    def decode(self, x: Any) -> Any:
        for number in self.layer._forward_hooks:
            x = x + number
        return self.layer(x)


X = torch.ones(1, 2)


def recorded(model: Any) -> dict[str, Any]:
    """Compile a model's method and return its guard sheet as it is read back."""
    torch._dynamo.reset()
    torch._dynamo.utils.orig_code_map.clear()
    with torch.no_grad(), GuardRecorder(type(model).decode.__code__) as recorder:
        torch.compile(model.decode, backend="eager", fullgraph=True)(X)
    found = recorder.recorded()
    assert [] == found.unrepresented
    sheet: dict[str, Any] = json.loads(canonical_bytes(found.sheet))
    return sheet


def failed(sheet: dict[str, Any], model: Any) -> list[str]:
    """Return the places that the proof of a call of this model finds changed."""
    with torch.no_grad():
        proof = prove(sheet, arguments={"self": model, "x": X}, function=model.decode, torch=torch)
    return [reason.name for reason in proof.failed]


@pytest.fixture(scope="module")
def sheet() -> dict[str, Any]:
    """The sheet of a model with the usual hooks."""
    return recorded(Model(usual))


@pytest.mark.parametrize("before", [0, 1, 7])
def test_hooks_that_others_registered_before_are_no_difference(sheet: dict[str, Any], before: int) -> None:
    """The same hooks under other numbers hold, and the sheet is the same, so that keys are."""
    model = Model(usual, before)

    assert [] == failed(sheet, model)
    assert canonical_bytes(sheet) == canonical_bytes(recorded(model))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another hook": lambda layer: (
        layer.register_forward_hook(double),
        layer.register_forward_hook(double),
        layer.register_forward_hook(halve, with_kwargs=True),
        layer.register_forward_pre_hook(shift),
    ),
    "another order": lambda layer: (
        layer.register_forward_hook(add_one),
        layer.register_forward_hook(double),
        layer.register_forward_hook(halve, with_kwargs=True),
        layer.register_forward_pre_hook(shift),
    ),
    "another order by prepending": lambda layer: (
        layer.register_forward_hook(double),
        layer.register_forward_hook(add_one, prepend=True),
        layer.register_forward_hook(halve, with_kwargs=True),
        layer.register_forward_pre_hook(shift),
    ),
    "another order by moving": lambda layer: (
        usual(layer),
        layer._forward_hooks.move_to_end(min(layer._forward_hooks)),
    ),
    "one more": lambda layer: (usual(layer), layer.register_forward_hook(add_one)),
    "one more before the call": lambda layer: (usual(layer), layer.register_forward_pre_hook(shift)),
    "one less": lambda layer: (
        layer.register_forward_hook(double),
        layer.register_forward_hook(add_one),
        layer.register_forward_pre_hook(shift),
    ),
    "one removed": lambda layer: (usual(layer), layer._forward_hooks.popitem()),
    "none before the call": lambda layer: (usual(layer), layer._forward_pre_hooks.clear()),
    "another with keywords": lambda layer: (
        usual(layer),
        layer._forward_hooks_with_kwargs.clear(),
        layer._forward_hooks_with_kwargs.update({min(layer._forward_hooks): True}),
    ),
    "one with keywords before the call": lambda layer: (
        usual(layer),
        layer._forward_pre_hooks_with_kwargs.update(dict.fromkeys(layer._forward_pre_hooks, True)),
    ),
    "one that is always called": lambda layer: (
        usual(layer),
        layer._forward_hooks_always_called.update({min(layer._forward_hooks): True}),
    ),
    "a number that no hook has": lambda layer: (usual(layer), layer._forward_hooks_with_kwargs.update({-1: True})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_hooks_are_a_difference(sheet: dict[str, Any], name: str) -> None:
    """Another hook, order or kind, one more and one less fail the proof, and name the module's hooks."""
    found = failed(sheet, Model(CHANGES[name], 2))

    assert found
    assert all("self.layer" in place for place in found)


def test_hooks_of_all_modules_are_compared_in_the_same_way() -> None:
    """torch's global hooks: other numbers hold, another order and one less do not."""

    def registering(*hooks: Any) -> list[Any]:
        return [torch_module.register_module_forward_hook(hook) for hook in hooks]

    handles = registering(double, add_one)
    try:
        sheet = recorded(Model(usual))
        assert [] == failed(sheet, Model(usual, 3))
        for handle in handles:
            handle.remove()
        assert failed(sheet, Model(usual))
        handles = registering(double, add_one)
        assert [] == failed(sheet, Model(usual, 2))
        for handle in handles:
            handle.remove()
        handles = registering(add_one, double)
        assert failed(sheet, Model(usual))
    finally:
        for handle in handles:
            handle.remove()
    assert failed(sheet, Model(usual))


def test_number_that_is_shared_is_kept() -> None:
    """Where a number of a module's hook is also one of torch's global ones, as after unpickling, numbers count."""
    handle = torch_module.register_module_forward_hook(double)
    try:
        model = Model(lambda layer: layer._forward_hooks.update({handle.id: double}))
        sheet = recorded(model)
        assert [] == failed(sheet, model)
        assert failed(sheet, Model(usual))
    finally:
        handle.remove()


def test_numbers_that_traced_code_reads_are_kept() -> None:
    """A model that computes with the numbers themselves has them in its graph: others are a difference."""
    model = Numbered(lambda layer: layer.register_forward_hook(double))
    sheet = recorded(model)

    assert [] == failed(sheet, model)
    assert failed(sheet, Numbered(lambda layer: layer.register_forward_hook(double)))


LAYER = ("L:self", "._modules", ":layer")
HOOKS = ("hooks", "_forward_hooks", [[0, 1, 2], [2], []])


def numbers(value: Any, *, traced: Any = ()) -> HookNumbers:
    """Return what takes the numbers out where each path leads to this value."""
    return HookNumbers(torch, traced, lambda path: value)


def test_numbers_in_keys_and_items_become_positions() -> None:
    """A guard on a key says what the order says, an item lies at its position, and what is no number stays."""
    layer = Model(usual).layer
    first = min(layer._forward_hooks)
    there = (*LAYER, "._forward_hooks")
    taken = numbers(layer)

    assert (LAYER, HOOKS) == taken.fact((*there, "@key:1"), ("equals", first + 1))
    assert (LAYER, HOOKS) == taken.fact(there, ("contains", first, True))
    assert (there, ("contains", "name", False)) == taken.fact(there, ("contains", "name", False))
    assert (there, ("length", 3)) == taken.fact(there, ("length", 3))
    assert (*there, "@value:2", ".scale") == taken.path((*there, f"#{first + 2}", ".scale"))
    assert (*there, "#-1") == taken.path((*there, "#-1"))


def gone(path: Any) -> Any:
    raise LookupError("no such place")


@pytest.mark.parametrize(
    "taken",
    [
        numbers(object()),
        numbers(nn.Linear(1, 1), traced=None),
        numbers(nn.Linear(1, 1), traced=[Numbered.decode.__code__]),
        HookNumbers(torch, (), gone),
    ],
    ids=["no module", "torch that does not tell", "read by a model", "no such place"],
)
def test_numbers_that_may_count_stay(taken: HookNumbers) -> None:
    """What is no module's, or may be read by others than torch, is compared as it is."""
    there = (*LAYER, "._forward_hooks")

    assert (there, ("ordered", [3])) == taken.fact(there, ("ordered", [3]))
    assert ((*there, "@key:0"), ("equals", 3)) == taken.fact((*there, "@key:0"), ("equals", 3))
    assert (*there, "#3") == taken.path((*there, "#3"))
