"""Relations that no generated check says, and places in a call that only the slow comparison reads."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cachectl.identity.call_check import call_check
from cachectl.identity.inputs import describe_call
from cachectl.identity.relations import check_relations, relation_term
from tests.identity.calls import TORCH, Tensor


def _method(x: Any, y: Any) -> None: ...


SIGNATURE = inspect.signature(_method)
TEXT_RELATION = ["==", ["at", "L:x", "@stride:0"], 4]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["@stride:0"], Tensor(strides=(4, 1))),
        (["#1"], [0, 4]),
        ([":width"], {"width": 4}),
        ([".requires_grad"], Tensor(requires_grad=True)),
    ],
)
def test_check_relations_reads_every_place_of_a_call(path: list[str], value: Any) -> None:
    """Strides, items and attributes are compared, and a call without them does not fit."""
    relation = [">=", ["at", "L:x", *path], 1]

    assert [] == check_relations([relation], {"x": value})
    (reason,) = check_relations([relation], {"x": None})
    assert "inputs" == reason.part


@pytest.mark.parametrize("tree", [TEXT_RELATION, ["==", ["at", "L:x", ".shape"], 1], ["inf"]])
def test_relation_term_of_what_no_text_says_is_none(tree: list[Any]) -> None:
    """A stride, an attribute or an operator without operands is left to the slow comparison."""
    assert relation_term(tree, SIGNATURE.parameters) is None


def test_relation_term_of_an_item_indexes_it() -> None:
    """A member of a list is read by its place."""
    assert "(x[1] < 4)" == relation_term(["<", ["at", "L:x", "#1"], 4], SIGNATURE.parameters)


def test_call_check_of_what_it_cannot_say_is_none() -> None:
    """One tensor at two places, and a relation without a text, are left to the slow comparison."""
    one = Tensor()

    def generated(arguments: dict[str, Any], relations: list[Any]) -> Any:
        spec = describe_call(arguments, Tensor, lambda _: None)
        return call_check(spec, SIGNATURE, TORCH.__getitem__, relations)

    assert generated({"x": one, "y": Tensor()}, []) is not None
    assert generated({"x": [one, Tensor()], "y": 1}, []) is not None
    assert generated({"x": one, "y": one}, []) is None
    assert generated({"x": [one, one], "y": 1}, []) is None
    assert generated({"x": one, "y": Tensor()}, [TEXT_RELATION]) is None
