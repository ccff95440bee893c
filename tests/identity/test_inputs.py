"""Input specs: a call fits its own spec, and each thing that differs is told."""

from __future__ import annotations

import enum
import inspect
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from cachectl.identity.inputs import InputError, bind_call, check_call, describe_call, with_dynamic
from cachectl.schemas.boot import Reason
from cachectl.schemas.canonical import canonical_bytes
from tests.identity.calls import (
    CALLS,
    DTYPES,
    SPARSE,
    TENSORS,
    Cache,
    Device,
    Nested,
    Pair,
    Tensor,
    contiguous,
    format_of,
)


def describe(**arguments: Any) -> dict[str, Any]:
    """Return the spec of a call."""
    return describe_call(arguments, Tensor, format_of)


def check(spec: dict[str, Any], **arguments: Any) -> list[Reason]:
    """Compare a call with a spec."""
    return check_call(spec, arguments, Tensor, format_of)


def stored(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec as it comes back from an entry manifest."""
    document: dict[str, Any] = json.loads(canonical_bytes(spec))
    return document


@given(CALLS)
def test_check_of_the_described_call_holds(call: dict[str, Any]) -> None:
    """Every call fits its own spec, also the spec that was stored and read back."""
    spec = describe(**call)

    assert [] == check(spec, **call)
    assert [] == check(stored(spec), **call)


@given(CALLS, CALLS)
def test_check_of_another_call_holds_only_if_the_specs_are_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Two calls fit each other's specs exactly when their specs have the same bytes."""
    first, second = describe(**left), describe(**right)

    assert (canonical_bytes(first) == canonical_bytes(second)) == ([] == check(first, **right))
    assert bool(check(first, **right)) == bool(check(second, **left))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"shape": (4, 4)}, "shape"),
        ({"shape": (2, 4, 1), "strides": (4, 1, 1)}, "shape"),
        ({"strides": (1, 2)}, "stride"),
        ({"dtype": DTYPES["bfloat16"]}, "dtype"),
        ({"device": Device("npu")}, "device"),
        ({"requires_grad": True}, "requires_grad"),
    ],
)
def test_check_each_property_of_a_tensor_is_one_reason(change: dict[str, Any], field: str) -> None:
    """Shape, stride, dtype, device, format and gradient each count alone (field report W16)."""
    tensor = contiguous(2, 4)

    (reason,) = check(describe(x=tensor), x=replace(tensor, **change))

    assert ("inputs", "L['x']") == (reason.part, reason.name)
    assert field in reason.stored
    assert field in reason.wanted
    assert "add a case" in reason.hint


def test_check_private_format_is_told() -> None:
    """An NZ tensor is not an ND tensor of the same shape (field report W16)."""
    tensor = contiguous(2, 4, device=Device("npu"))

    (reason,) = check(describe(x=tensor), x=replace(tensor, npu_format=29))

    assert ({"format": 2}, {"format": 29}) == (reason.stored, reason.wanted)


def test_check_transposed_tensor_is_told() -> None:
    """The same shape with other strides runs another graph (field report W16)."""
    assert check(describe(x=contiguous(4, 2)), x=Tensor((4, 2), (1, 4)))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 2),
        (1, True),
        (0, False),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        (None, 0),
        ("a", "b"),
        (float("inf"), float("-inf")),
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2, 3]),
        ([1, 2], [2, 1]),
        ((1, 2), Pair(1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        (Cache(1), Cache(1, 2)),
        (Cache(1), {"keys": 1, "length": 0}),
        (contiguous(2), [contiguous(2)]),
        (contiguous(2), None),
    ],
    ids=repr,
)
def test_check_values_that_python_may_call_equal_differ(left: Any, right: Any) -> None:
    """Types and signs count: what is equal to Python can be two graphs."""
    assert check(describe(x=left), x=right)
    assert check(stored(describe(x=left)), x=right)
    assert check(describe(x=right), x=left)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, 1e16, 10**40, "\ud800"])
def test_check_values_that_json_lacks_survive_a_manifest(value: Any) -> None:
    """An infinity as an argument, as masks are filled with, is found again."""
    assert [] == check(stored(describe(x=value, y=[value])), x=value, y=[value])


def test_check_missing_and_added_arguments_are_told() -> None:
    """An argument more or less is another call."""
    (less,) = check(describe(x=1, y=2), x=1)
    (more,) = check(describe(x=1), x=1, y=2)

    assert ("L['y']", {"value": 2}, None) == (less.name, less.stored, less.wanted)
    assert ("L['y']", None, {"value": 2}) == (more.name, more.stored, more.wanted)


def test_check_several_differences_are_all_told() -> None:
    """One reason a place, sorted by it."""
    reasons = check(describe(x=contiguous(2), y=[1, 2]), x=contiguous(3), y=[1, 3])

    assert ["L['x']", "L['y'][1]"] == [reason.name for reason in reasons]


def test_check_of_an_unknown_stored_field_differs() -> None:
    """A field that a newer recorder wrote is not passed over (field report W19)."""
    spec = describe(x=contiguous(2))
    spec["L['x']"]["tensor"]["layout"] = "strided"

    assert 1 == len(check(spec, x=contiguous(2)))


class Unsaid:
    pass


class MyList(list[int]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Unsaid(),
        MyList([1]),
        {1: 2},
        {"a", "b"},
        lambda: 0,
        b"bytes",
        1j,
        Nested(),
        contiguous(2, layout=SPARSE),
        Cache,
        DTYPES["float32"],
    ],
    ids=lambda value: type(value).__name__,
)
def test_describe_unsayable_value_refused_with_its_place(value: Any) -> None:
    """What can't be compared in another process fails the build, and is cold at a call, never a crash."""
    with pytest.raises(InputError) as raised:
        describe(x=[1, value])
    assert raised.value.place.startswith("L['x'][1]")

    (reason,) = check(describe(x=[1, 2]), x=[1, value])
    assert ("inputs", "L['x'][1]") == (reason.part, reason.name)


def test_describe_dataclass_without_a_field_refused() -> None:
    """An object whose field was deleted is no AttributeError in the program's call."""
    cache = Cache(1)
    del cache.keys

    with pytest.raises(InputError, match="without its field keys"):
        describe(x=cache)


def test_describe_endless_container_refused() -> None:
    """A list that holds itself ends."""
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(InputError, match="nested too deeply"):
        describe(x=loop)


def test_describe_names_places_as_dynamo_does() -> None:
    """The places are Dynamo's source names."""
    spec = describe(x=[contiguous(2), {"k": (1,)}], y=Pair(1, Cache(2)))

    assert {
        "L['x']",
        "L['x'][0]",
        "L['x'][1]",
        "L['x'][1]['k']",
        "L['x'][1]['k'][0]",
        "L['y']",
        "L['y'].first",
        "L['y'].second",
        "L['y'].second.keys",
        "L['y'].second.length",
    } == spec.keys()


def test_describe_key_that_looks_like_a_place_is_no_other_place() -> None:
    """A dictionary's odd keys can't make two calls look alike."""
    assert check(describe(x={"a": {"b": 1}}), x={"a']['b": 1, "a": {}})


# Dynamic shapes


@pytest.mark.parametrize(
    ("bounds", "fits", "differs"),
    [([2, 8], [2, 5, 8], [1, 9]), ([2, None], [2, 10**6], [0, 1]), ([None, 8], [0, 8], [9])],
)
def test_with_dynamic_dimension_is_a_range(bounds: list[int | None], fits: list[int], differs: list[int]) -> None:
    """A symbolic dimension fits within its bounds, both included; the other dimension still counts."""
    spec = stored(with_dynamic(describe(x=contiguous(4, 16)), {"L['x'].size()[0]": bounds}))

    assert [[]] * len(fits) == [check(spec, x=contiguous(size, 16)) for size in fits]
    assert all(check(spec, x=contiguous(size, 16)) for size in differs)
    assert check(spec, x=contiguous(4, 15))
    assert check(spec, x=contiguous(4, 16, 1))


def test_with_dynamic_contiguity_is_what_stays_of_the_strides() -> None:
    """Strides follow the sizes where the tensor was contiguous; a transposed or sliced one is another graph."""
    spec = with_dynamic(describe(x=contiguous(4, 16)), {"L['x'].size()[1]": [2, 64]})

    assert [] == check(spec, x=contiguous(4, 32))
    assert check(spec, x=Tensor((4, 32), (1, 4)))
    assert check(spec, x=Tensor((4, 32), (64, 1)))


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 3)])
def test_with_dynamic_tensor_without_elements_is_contiguous(shape: tuple[int, ...]) -> None:
    """torch calls each of them contiguous, whatever its strides, and so does a generated check."""
    spec = with_dynamic(describe(x=contiguous(*shape)), {"L['x'].size()[0]": [0, 8]})

    assert "contiguous" == spec["L['x']"]["tensor"]["stride"]
    assert [] == check(spec, x=Tensor(shape, (9,) * len(shape)))


def test_with_dynamic_other_strides_stay_as_recorded() -> None:
    """Where the tensor was not contiguous only the recorded strides are known to fit."""
    spec = with_dynamic(describe(x=Tensor((4, 8), (64, 1))), {"L['x'].size()[0]": [2, 64]})

    assert [] == check(spec, x=Tensor((9, 8), (64, 1)))
    assert check(spec, x=Tensor((9, 8), (32, 1)))


@pytest.mark.parametrize(("value", "fits"), [(3, True), (99, True), (1, False), (True, False), (3.0, False)])
def test_with_dynamic_integer_is_a_range_of_integers(value: Any, fits: bool) -> None:
    """The value of a dynamic int is no identity; its type is."""
    spec = with_dynamic(describe(lengths=[3, 4]), {"L['lengths'][0]": [2, None]})

    assert fits == ([] == check(spec, lengths=[value, 4]))
    assert check(spec, lengths=[3, 5])


def test_with_dynamic_leaves_everything_else() -> None:
    """Places that are not dynamic are as they were, and a bool is never a range."""
    spec = describe(x=contiguous(2, 2), y=True, z=1.5)

    assert spec == with_dynamic(spec, {"L['y']": [0, 1], "L['z']": [0, 2], "L['other']": [0, 1]})


@given(TENSORS)
def test_with_dynamic_recorded_call_still_fits(tensor: Tensor) -> None:
    """A range around the recorded sizes holds for the recorded call."""
    dynamic = {f"L['x'].size()[{index}]": [0, None] for index in range(len(tensor.shape))}

    assert [] == check(stored(with_dynamic(describe(x=tensor), dynamic)), x=tensor)


# Binding


def test_bind_call_positional_keyword_and_default_are_equal() -> None:
    """However a call is written, its arguments are the same."""

    def method(x: int, y: int = 2, *rest: int, z: int = 3, **more: int) -> None: ...

    signature = inspect.signature(method)

    wanted = {"x": 1, "y": 2, "rest": (), "z": 3, "more": {}}
    assert wanted == bind_call(signature, (1,), {}) == bind_call(signature, (), {"z": 3, "x": 1, "y": 2})


def test_bind_call_wrong_arguments_in_pythons_words() -> None:
    """A wrong call is the program's error, as without us."""
    signature = inspect.signature(lambda x: None)

    for args, kwargs in [((), {}), ((1, 2), {}), ((1,), {"x": 2}), ((), {"y": 1})]:
        with pytest.raises(TypeError):
            bind_call(signature, args, kwargs)


# With torch


@pytest.mark.real
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded", "scalar", "empty"])
def test_describe_torch_tensors(layout: str) -> None:
    """Real tensors of each layout are described, compared, and told from one of another dtype."""
    import torch

    base = torch.arange(32, dtype=torch.float32).reshape(4, 8)
    tensor = {
        "contiguous": base,
        "transposed": base.T,
        "sliced": base[:, ::2],
        "expanded": base[:1].expand(4, 8),
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(3, 0),
    }[layout]
    spec = stored(describe_call({"x": tensor}, torch.Tensor, lambda _: None))
    ranges = with_dynamic(spec, {f"L['x'].size()[{index}]": [0, None] for index in range(tensor.dim())})
    other = torch.zeros(tensor.shape, dtype=torch.float16)

    for known in (spec, ranges):
        assert [] == check_call(known, {"x": tensor}, torch.Tensor, lambda _: None)
        assert 1 == len(check_call(known, {"x": other}, torch.Tensor, lambda _: None))
        assert check_call(known, {"x": tensor[None]}, torch.Tensor, lambda _: None)
    assert "float32" == spec["L['x']"]["tensor"]["dtype"]
    if tensor.is_contiguous() and tensor.dim():
        assert "contiguous" == ranges["L['x']"]["tensor"]["stride"]


@pytest.mark.real
def test_describe_torch_sparse_tensor_refused() -> None:
    """A sparse tensor answers for strides as a dense one does, and is none."""
    import torch

    with pytest.raises(InputError, match="sparse_coo"):
        describe_call({"x": torch.eye(4).to_sparse()}, torch.Tensor, lambda _: None)


def test_check_one_tensor_at_two_places_is_told() -> None:
    """Two tensors at build and one tensor twice at the call are two graphs to Dynamo; so are they here, both ways."""
    one, other = Tensor(), Tensor()

    told = check(describe(x=one, y=other), x=one, y=one)
    told_back = check(describe(x=one, y=one), x=one, y=other)

    assert (["L['y']"], ["L['y']"]) == ([reason.name for reason in told], [reason.name for reason in told_back])
    assert [] == check(describe(x=one, y=one), x=other, y=other)


class Kind(enum.Enum):
    ADD = 1
    MUL = 2


class Nameless(enum.Enum):
    THING = object()


def test_enumerations_are_inputs_by_class_and_name() -> None:
    """A member of an enumeration is compared as a plain value is: another member, class or plain value is another."""
    spec = describe(kind=Kind.ADD, thing=Nameless.THING)
    place = "L['kind']"

    assert {"constant": {"$enum": [f"{__name__}.Kind", "ADD", 1]}} == spec[place]
    assert [] == check(stored(spec), kind=Kind.ADD, thing=Nameless.THING)
    for other in (Kind.MUL, Nameless.THING, 1):
        assert [place] == [reason.name for reason in check(stored(spec), kind=other, thing=Nameless.THING)]
