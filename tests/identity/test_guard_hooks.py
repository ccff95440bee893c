"""Forward hooks by order and kind, on objects that only look like modules; torch's own are in tests/build."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from typing import Any

import pytest

from cachectl.identity.guard_hooks import HOOK_DICTS, hooks_of

NAME = "_forward_hooks"
TORCH_MODULE = "torch.nn.modules.module"


def holder(numbers: list[int], **beside: Any) -> types.SimpleNamespace:
    """Return an object with hooks under these numbers."""
    named = {f"{NAME}_{name}": value for name, value in beside.items()}
    return types.SimpleNamespace(**{NAME: OrderedDict(dict.fromkeys(numbers)), **named})


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hooks of all modules, whatever this process has imported."""
    monkeypatch.setitem(sys.modules, TORCH_MODULE, None)


def test_hooks_are_told_by_position_whatever_their_numbers() -> None:
    """Order and the dicts beside count, the numbers do not."""
    said = [[0, 1], [1], [0, 1]]

    assert said == hooks_of(holder([3, 8], with_kwargs={8: True}, always_called={8: True, 3: True}), NAME)
    assert said == hooks_of(holder([5, 6], with_kwargs={6: True}, always_called={5: True, 6: True}), NAME)
    assert said != hooks_of(holder([5, 6], with_kwargs={5: True}, always_called={5: True, 6: True}), NAME)


def test_hooks_of_an_older_torch_have_no_dicts_beside() -> None:
    """What is not there is empty."""
    assert [[0], [], []] == hooks_of(holder([3]), NAME)


def test_hook_that_was_moved_to_the_front_runs_first() -> None:
    """An OrderedDict iterates in its own order; positions are those of the dict below."""
    moved = holder([3, 8])
    moved._forward_hooks.move_to_end(8, last=False)

    assert [[1, 0], [], []] == hooks_of(moved, NAME)


@pytest.mark.parametrize(
    "value",
    [
        types.SimpleNamespace(),
        types.SimpleNamespace(_forward_hooks=[1]),
        holder([3], with_kwargs={4: True}),
        holder([3], with_kwargs=[3]),
        7,
    ],
    ids=str,
)
def test_hooks_that_only_numbers_tell_are_none(value: Any) -> None:
    """No dict of hooks, or a number beside that no hook has."""
    assert hooks_of(value, NAME) is None


def test_number_that_a_hook_of_all_modules_has_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module from a pickle keeps its numbers, which may be others' here; those of all modules are told apart."""
    torch_module = types.ModuleType(TORCH_MODULE)
    vars(torch_module).update(_global_forward_hooks={3: None}, _global_forward_pre_hooks={9: None})
    monkeypatch.setitem(sys.modules, TORCH_MODULE, torch_module)

    assert hooks_of(holder([3]), NAME) is None
    assert hooks_of(holder([9]), NAME) is None
    assert [[0], [], []] == hooks_of(holder([4]), NAME)
    assert [[0], [], []] == hooks_of(torch_module, "_global_forward_hooks")
    assert [[0]] == hooks_of(torch_module, "_global_forward_pre_hooks")


def test_every_dict_with_numbers_has_its_hooks() -> None:
    """The dicts beside are those of torch's hooks."""
    assert {name for name in HOOK_DICTS if HOOK_DICTS[name] == name} == set(HOOK_DICTS.values())
    assert "_forward_pre_hooks" == HOOK_DICTS["_forward_pre_hooks_with_kwargs"]
