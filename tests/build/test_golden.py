"""Values as a manifest says them: exact by digest, with a few numbers, small whatever they are."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl.build import golden
from cachectl.build.golden import described

BIG = torch.arange(1001.0)


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "numbers"),
    [
        (BIG, "float32", [1001], [0.0, 333.0, 666.0, 1000.0]),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), "int8", [2, 2], [1, 2, 3, 4]),
        (torch.tensor(2.5), "float32", [], [2.5]),
        (torch.zeros(0, 3), "float32", [0, 3], []),
        (torch.tensor([True, False]), "bool", [2], [1, 0]),
        (torch.tensor([float("nan"), float("inf"), -float("inf")]), "float32", [3], ["nan", "inf", "-inf"]),
        (torch.tensor([1 + 2j]), "complex64", [1], [[1.0, 2.0]]),
        (torch.ones(2, dtype=torch.bfloat16), "bfloat16", [2], [1.0, 1.0]),
        (torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn", [2], [1.0, 1.0]),
        (torch.arange(6).reshape(2, 3).t(), "int64", [3, 2], [0, 3, 4, 5]),
    ],
)
def test_tensor_is_said_by_dtype_shape_digest_and_numbers(
    value: torch.Tensor, dtype: str, shape: list[int], numbers: list[Any]
) -> None:
    """Of every dtype, strided or not, finite or not; and it stays JSON."""
    (leaf,) = described(value)["values"]

    assert (dtype, shape) == (leaf["dtype"], leaf["shape"])
    assert numbers == leaf["numbers"]
    assert json.dumps(leaf, allow_nan=False)


def test_equal_contents_have_equal_digests_whatever_the_layout() -> None:
    """A transposed copy holds the same values; another dtype or value does not."""
    whole = torch.arange(6.0).reshape(2, 3)
    same = whole.t().contiguous().t()

    assert described(whole) == described(same)
    others = [whole.double(), whole + 1e-6, whole.reshape(3, 2), [whole], {"a": whole}]
    assert 6 == len({described(value)["digest"] for value in (whole, *others)})


def test_containers_are_said_leaf_by_leaf_with_plain_values() -> None:
    """Places as comparisons name them."""
    said = described((torch.ones(1), {"n": 3, "text": "a", "none": None}))["values"]

    assert ["output[0]", "output[1]['n']", "output[1]['text']"] == [leaf["place"] for leaf in said][:3]
    assert [3, "a"] == [leaf["value"] for leaf in said if "value" in leaf][:2]


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (True, True),
        (2**70, 2**70),
        ("a", "a"),
        (1.5, 1.5),
        (float("inf"), "inf"),
        (1j, [0.0, 1.0]),
        (object(), "builtins.object"),
    ],
)
def test_other_leaves_are_said_the_same_in_every_process(leaf: Any, value: Any) -> None:
    """Plain values as they are; of an object only what it is, since its text may hold an address."""
    (said,) = described([leaf])["values"]

    assert {"place": "output[0]", "value": value} == said
    assert json.dumps(said, allow_nan=False)


def test_many_leaves_are_cut_and_still_tell_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest is read at every boot; a leaf too large to hash is told by its numbers."""
    many = [torch.full((1,), float(number)) for number in range(20)]

    said, other = described(many), described([*many[:-1], torch.zeros(1)])

    assert (8, True) == (len(said["values"]), said["digest"] != other["digest"])
    monkeypatch.setattr(golden, "_HASHED_BYTES", 3)
    assert [None] == [leaf["digest"] for leaf in described(BIG)["values"]]
