"""Relations of dynamic graphs: what has to hold between the sizes of one call, at every call."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cachectl.identity.call_check import call_check
from cachectl.identity.inputs import check_call, describe_call
from cachectl.identity.relations import check_relations, relation_term, relations_of
from tests.identity.calls import TORCH, Tensor, contiguous, format_of

X0, Y0 = ["at", "L:x", "@size:0"], ["at", "L:y", "@size:0"]
SAME_BATCH = ["==", Y0, X0]


def _method(x: Any, y: Any, n: int = 1) -> None: ...


SIGNATURE = inspect.signature(_method)


def test_relations_of_a_sheet_are_those_over_arguments_only() -> None:
    """An expression that reads the model, or nothing at all, is the proof's; the others hold at every call."""
    model = ["==", ["at", "L:self", ".scale"], 0.25]
    mixed = ["<=", X0, ["at", "L:self", ".limit"]]

    assert [SAME_BATCH] == relations_of({"expressions": [model, SAME_BATCH, mixed, True]}, SIGNATURE.parameters)


@pytest.mark.parametrize(
    ("tree", "sizes", "holds"),
    [
        (SAME_BATCH, (4, 4), True),
        (SAME_BATCH, (4, 5), False),
        (["<=", ["*", 2, X0], Y0], (2, 4), True),
        (["<=", ["*", 2, X0], Y0], (3, 4), False),
        (["and", ["<=", 2, X0], ["not", ["==", X0, 3]]], (3, 1), False),
        (["==", ["//", 8, X0], Y0], (0, 1), False),
        (["==", ["at", "L:missing", "@size:0"], 1], (1, 1), False),
        (["==", ["at", "L:x", "@unknown"], 1], (1, 1), False),
    ],
)
def test_check_relations_says_whether_each_holds(tree: Any, sizes: tuple[int, int], holds: bool) -> None:
    """What holds gives no reason, what does not gives one, and what can't be worked out does not hold."""
    arguments = {"x": Tensor(shape=(sizes[0],)), "y": Tensor(shape=(sizes[1],))}

    reasons = check_relations([tree], arguments)

    assert holds == (not reasons)
    assert all(("inputs", True) == (reason.part, bool(reason.hint)) for reason in reasons)


def test_relation_term_is_the_relation_in_python() -> None:
    """A term reads the parameters' own names, and means what the tree means."""
    term = relation_term(["and", SAME_BATCH, ["<", ["at", "L:n"], 3]], SIGNATURE.parameters)

    assert "((y.shape[0] == x.shape[0]) and (n < 3))" == term


@pytest.mark.parametrize(
    "tree", [["sqrt", X0], ["at", "L:self", ".scale"], ["at", "L:x", "@stride:0"], [], 1.5, ["**", X0, 2]]
)
def test_relation_term_leaves_the_rest_to_the_slow_check(tree: Any) -> None:
    """What has no plain Python form gives no term, never a wrong one."""
    assert relation_term(tree, SIGNATURE.parameters) is None


def test_call_check_holds_relations_and_tells_one_tensor_from_two() -> None:
    """The generated check refuses unequal batches, and one tensor at two places where there were two."""
    size = {"range": [2, None]}
    tensor = {"shape": [size], "stride": [1], "dtype": "float32", "device": "cpu", "format": None}
    spec = {
        "L['x']": {"tensor": {**tensor, "requires_grad": False}},
        "L['y']": {"tensor": {**tensor, "requires_grad": False}},
        "L['n']": {"value": 1},
    }
    check = call_check(spec, SIGNATURE, TORCH.__getitem__, [SAME_BATCH])
    four, other, five = contiguous(4), contiguous(4), contiguous(5)

    assert check is not None
    assert (True, False, False) == (check(four, other), check(four, five), check(four, four))


def test_call_check_leaves_tensor_subclasses_to_the_slow_check() -> None:
    """A subclass has all of a tensor's properties and dispatches in its own way: the fast check says no to it."""
    check = call_check(describe_call({"x": Tensor(), "y": Tensor(), "n": 1}, Tensor, format_of), SIGNATURE,
                       TORCH.__getitem__, (), (Tensor,))  # fmt: skip

    assert check is not None
    assert (True, False) == (check(Tensor(), Tensor()), check(Tensor(), Subclass()))


def test_spec_of_a_tensor_subclass_names_its_class() -> None:
    """Plain tensors say nothing of their class; a subclass is another input than a tensor, both ways."""
    plain, other = ({"x": tensor} for tensor in (Tensor(), Subclass()))

    assert "class" not in describe_call(plain, Tensor, format_of)["L['x']"]["tensor"]
    assert 1 == len(check_call(describe_call(plain, Tensor, format_of), other, Tensor, format_of))
    assert 1 == len(check_call(describe_call(other, Tensor, format_of), plain, Tensor, format_of))


def test_spec_of_a_dict_keeps_its_order() -> None:
    """A method that walks its dict computes in that order: the same items in another order are another call."""
    one, other = Tensor(), Tensor()
    spec = describe_call({"x": {"a": one, "b": other}}, Tensor, format_of)

    assert [] == check_call(spec, {"x": {"a": other, "b": one}}, Tensor, format_of)
    assert ["L['x']"] == [r.name for r in check_call(spec, {"x": {"b": one, "a": other}}, Tensor, format_of)]


class Subclass(Tensor):
    """A tensor with behaviour of its own."""
