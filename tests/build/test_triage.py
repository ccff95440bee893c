"""Parts of a stage that need no runtime: the model on the CPU, and what makes a cache inert."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch import nn

from cachectl.build import triage


class Holder(nn.Module):
    """A module with tensors in plain attributes, as KV caches are held."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, device=device))
        self.caches = [(torch.zeros(2, device=device), torch.zeros(2, device=device))]
        self.name = "holder"


def identity(module: str, **passes: str) -> dict[str, Any]:
    """Return what a process says of the runtime's key."""
    return {"module": module, "passes": passes}


def test_what_differs_names_the_line_of_the_module() -> None:
    """An address in one layer of many."""
    before, now = "Model(\n  (a): X(<o at 0x1>)\n  (b): Y()\n)", "Model(\n  (a): X(<o at 0x2>)\n  (b): Y()\n)"

    text = triage._what_differs(identity(before), identity(now))

    assert "(a): X(<o at 0x1>) | (a): X(<o at 0x2>)" in text
    assert "(b)" not in text


def test_what_differs_names_the_pass_before_the_module() -> None:
    """A custom pass with a function inside reads otherwise in each process."""
    text = triage._what_differs(identity("A", own="1"), identity("B", own="2"))

    assert "the code of option own reads otherwise in each process" == text


def test_what_differs_that_is_neither_says_so() -> None:
    """Then the determinism level or the world does."""
    assert "determinism level" in triage._what_differs(identity("A"), identity("A"))


def test_tensors_are_seen_wherever_a_call_has_them() -> None:
    """Parameters and what the inputs hold decide whether the stage has to move anything."""
    held = Holder("cpu")

    assert 3 == len(triage._tensors(held, {"x": [torch.zeros(1), (torch.zeros(1), 3)]}))


def test_model_that_has_no_data_can_not_be_moved() -> None:
    """The stage is skipped with this error's words."""
    with pytest.raises(NotImplementedError, match="meta tensor"):
        triage._to_cpu(Holder("meta"))


def test_model_is_moved_with_its_plain_attributes() -> None:
    """Tuples in a list stay tuples in a list, and other attributes themselves."""
    held = Holder("cpu")
    before = held.caches

    triage._to_cpu(held)

    assert ["cpu", "cpu"] == [tensor.device.type for tensor in held.caches[0]]
    assert (list, tuple, "holder") == (type(held.caches), type(held.caches[0]), held.name)
    assert before[0][0].shape == held.caches[0][0].shape
