"""The generated comparison: whenever it says yes the slow one has no reason, and for plain calls it does say yes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachectl.identity.call_check import call_check
from cachectl.identity.inputs import bind_call, check_call, describe_call, with_dynamic
from cachectl.schemas.canonical import canonical_bytes
from tests.identity.calls import DTYPES, LEAVES, SPARSE, TENSORS, TORCH, VALUES, Device, Tensor, contiguous, format_of


def method(x: Any, y: Any = 2, *, lengths: Any = None) -> None: ...


SIGNATURE = inspect.signature(method)


def spec_of(*args: Any, dynamic: dict[str, list[int | None]] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return the spec of a call of `method`, as a manifest gives it back."""
    spec = describe_call(bind_call(SIGNATURE, args, kwargs), Tensor, format_of)
    document: dict[str, Any] = json.loads(canonical_bytes(with_dynamic(spec, dynamic or {})))
    return document


def generated(spec: dict[str, Any], signature: inspect.Signature = SIGNATURE) -> Callable[..., bool] | None:
    """Return the generated check."""
    return call_check(spec, signature, TORCH.__getitem__)


def says_yes(check: Callable[..., bool] | None, /, *args: Any, **kwargs: Any) -> bool:
    """Ask as the cached method does: an error of these kinds is a no."""
    if check is None:
        return False
    try:
        return bool(check(*args, **kwargs))
    except (TypeError, AttributeError):
        return False


def reasons(spec: dict[str, Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Return what the slow comparison says."""
    return check_call(spec, bind_call(SIGNATURE, args, kwargs), Tensor, format_of)


ARGUMENTS = LEAVES | st.lists(LEAVES, max_size=3) | st.lists(LEAVES, max_size=2).map(tuple) | VALUES
DYNAMIC = st.dictionaries(
    st.sampled_from(["L['x'].size()[0]", "L['x'].size()[1]", "L['y']", "L['lengths'][0]", "L['lengths'][1]"]),
    st.tuples(st.none() | st.integers(0, 2), st.none() | st.integers(2, 5)).map(list),
)


@settings(max_examples=400)
@given(ARGUMENTS, ARGUMENTS, ARGUMENTS, DYNAMIC, ARGUMENTS, ARGUMENTS, ARGUMENTS)
def test_call_check_yes_only_where_the_slow_one_has_no_reason(
    x: Any, y: Any, lengths: Any, dynamic: dict[str, list[int | None]], x2: Any, y2: Any, lengths2: Any
) -> None:
    """For any spec and any call, mixed from the recorded one and another, yes means that nothing differs."""
    spec = spec_of(x, y, lengths=lengths, dynamic=dynamic)
    check = generated(spec)

    for call in [(x, y, lengths), (x2, y, lengths), (x, y2, lengths), (x, y, lengths2), (x2, y2, lengths2)]:
        if says_yes(check, call[0], call[1], lengths=call[2]):
            assert [] == reasons(spec, call[0], call[1], lengths=call[2])


@given(TENSORS, TENSORS, DYNAMIC)
def test_call_check_of_tensors_agrees_both_ways(
    left: Tensor, right: Tensor, dynamic: dict[str, list[int | None]]
) -> None:
    """For tensors off the device the fast answer is the slow one."""
    spec = spec_of(left, dynamic=dynamic)
    check = generated(spec)

    assert (check is None) == (left.device.type == "npu")
    if check is not None:
        for tensor in (left, right):
            assert ([] == reasons(spec, tensor)) == says_yes(check, tensor)


def test_call_check_decode_call_is_fast_and_told() -> None:
    """The usual decode call says yes; each change of it says no."""
    call = {"x": contiguous(4, 1), "y": contiguous(4, 8, dtype=DTYPES["int64"]), "lengths": [3, 5]}
    check = generated(spec_of(call["x"], call["y"], lengths=call["lengths"]))
    changes: list[dict[str, Any]] = [
        {"x": contiguous(5, 1)},
        {"x": contiguous(4, 1, dtype=DTYPES["float16"])},
        {"x": contiguous(4, 1, device=Device("npu"))},
        {"x": contiguous(4, 1, requires_grad=True)},
        {"y": Tensor((4, 8), (1, 4), DTYPES["int64"])},
        {"x": contiguous(4, 1, layout=SPARSE)},
        {"y": None},
        {"lengths": [3, 6]},
        {"lengths": [3]},
        {"lengths": (3, 5)},
        {"lengths": [True, 5]},
        {"lengths": [3.0, 5]},
        {"lengths": None},
    ]

    assert says_yes(check, **call)
    assert says_yes(check, call["x"], call["y"], lengths=[3, 5])
    assert [False] * len(changes) == [says_yes(check, **{**call, **change}) for change in changes]


def test_call_check_defaults_count() -> None:
    """A default is compared like a value that was passed."""
    check = generated(spec_of(contiguous(2)))

    assert says_yes(check, contiguous(2))
    assert says_yes(check, contiguous(2), 2, lengths=None)
    assert not says_yes(check, contiguous(2), 3)


def test_call_check_wrong_arity_is_no() -> None:
    """A call that doesn't fit the signature is the slow comparison's to refuse, in Python's words."""
    check = generated(spec_of(contiguous(2)))

    assert not says_yes(check)
    assert not says_yes(check, contiguous(2), 2, 3)
    assert not says_yes(check, contiguous(2), other=1)


@pytest.mark.parametrize("name", ["type", "len", "int", "list", "tuple", "is_not", "check", "self"])
def test_call_check_parameter_with_a_builtins_name(name: str) -> None:
    """A parameter may be called as a builtin is, and the check still is right."""
    signature = inspect.signature(eval(f"lambda {name}, other: None"))
    call = {name: [1, 2], "other": [3]}
    spec = describe_call(call, Tensor, format_of)
    check = generated(spec, signature)

    assert says_yes(check, **call)
    assert not says_yes(check, **{**call, "other": [4]})
    assert not says_yes(check, **{name: lambda value: int, "other": [3]})


@pytest.mark.parametrize(
    "function",
    [lambda *x: None, lambda **x: None, lambda x, /: None, lambda _constant_0: None],
    ids=["variadic", "keywords", "positional only", "our own name"],
)
def test_call_check_signature_it_does_not_do_is_none(function: Callable[..., None]) -> None:
    """What is not generated for is left to the slow comparison."""
    (name,) = inspect.signature(function).parameters

    assert generated(describe_call({name: 1}, Tensor, format_of), inspect.signature(function)) is None


def test_call_check_spec_of_another_signature_is_none() -> None:
    """A spec that has more or fewer places than the method has parameters is never said to fit."""
    spec = spec_of(contiguous(2))

    assert generated({**spec, "L['more']": {"value": 1}}) is None
    assert generated({place: leaf for place, leaf in spec.items() if place != "L['y']"}) is None


@pytest.mark.parametrize(
    "value",
    [float("inf"), 0.0, -0.0, {"a": 1}, contiguous(2, npu_format=29, device=Device("npu"))],
    ids=["infinity", "zero", "minus zero", "dictionary", "private format"],
)
def test_call_check_leaf_it_does_not_do_is_none(value: Any) -> None:
    """Leaves that take more than a comparison are left to the slow one, which finds them equal."""
    spec = spec_of(value)

    assert generated(spec) is None
    assert [] == reasons(spec, value)


def test_call_check_leaf_of_an_unknown_kind_or_field_is_none() -> None:
    """What a newer recorder wrote is never passed over."""
    spec = spec_of(contiguous(2))
    newer = json.loads(json.dumps(spec))
    newer["L['x']"]["tensor"]["layout"] = "strided"

    assert generated(newer) is None
    assert generated({**spec, "L['x']": {"newer": 1}}) is None


def test_call_check_text_in_a_spec_is_never_code() -> None:
    """A range from a strange manifest can't run anything, nor end the program's call."""
    spec = spec_of(3, dynamic={"L['x']": [0, 5]})
    for bounds in (["__import__('os').abort()", 5], [0], 7, [0, {}]):
        spec["L['x']"]["integer"]["range"] = bounds

        assert generated(spec) is None


@pytest.mark.real
def test_call_check_with_torch_tensors() -> None:
    """Real tensors, dtypes and shapes give the same answers."""
    import torch

    def describe(x: Any) -> dict[str, Any]:
        return describe_call({"x": x}, torch.Tensor, lambda _: None)

    signature = inspect.signature(lambda x: None)
    base = torch.zeros(4, 8)
    tensors = [
        base,
        base.T,
        base[:2],
        base[:, ::2],
        base.half(),
        torch.empty(3, 0),
        torch.zeros(4, 8, requires_grad=True),
    ]
    for recorded in tensors:
        for dynamic in ({}, {"L['x'].size()[0]": [2, None]}):
            spec = with_dynamic(describe(recorded), dynamic)
            check = call_check(spec, signature, lambda name: getattr(torch, name))
            assert check is not None
            for tensor in [*tensors, base.to_sparse()]:
                slow = [] == check_call(spec, {"x": tensor}, torch.Tensor, lambda _: None)
                assert slow == check(tensor)
