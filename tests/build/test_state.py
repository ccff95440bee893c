"""Values around a step: what is put back, what a second step varies, and when two outputs are equal.

Needs torch alone; each test is small, the whole module costs its import.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl.build.state import Snapshot, State, compare_values, copied, varied_inputs

NAN, INF = float("nan"), float("inf")


class Pair(NamedTuple):
    """What a method may take."""

    one: torch.Tensor
    other: int


@dataclasses.dataclass
class Result:
    """What a step may return."""

    logits: torch.Tensor
    count: int = 1


class Model(torch.nn.Module):
    """A model whose state is in all the places where models keep some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.zeros(3))
        self.block = torch.zeros(2, 3)
        self.caches = [self.block[0], self.block[1]]
        self.by_name = {"k": torch.zeros(3)}
        self.object = Result(torch.zeros(3))
        self.tied = self.weight[:1].detach()
        self.count = 0
        self.last: torch.Tensor | None = None


def _equal(expected: Any, found: Any, rtol: float = 1e-3, atol: float = 1e-3) -> bool:
    return compare_values(expected, found, rtol=rtol, atol=atol).equal


# A change a step may make, to what of the model has to be as before after `restore`.
WRITES: dict[str, tuple[Callable[[Model], Any], Callable[[Model], Any]]] = {
    "buffer": (lambda m: m.buffer.add_(1), lambda m: m.buffer),
    "list": (lambda m: m.caches[1].add_(1), lambda m: m.block),
    "dict": (lambda m: m.by_name["k"].add_(1), lambda m: m.by_name["k"]),
    "dataclass": (lambda m: m.object.logits.add_(1), lambda m: m.object.logits),
    "through-the-block": (lambda m: m.block.add_(1), lambda m: m.caches[0]),
    "attribute-bound": (lambda m: setattr(m, "count", 5), lambda m: m.count),
    "attribute-new": (lambda m: setattr(m, "fresh", 5), lambda m: hasattr(m, "fresh")),
    "attribute-gone": (lambda m: delattr(m, "count"), lambda m: m.count),
    "tensor-bound": (lambda m: setattr(m, "block", torch.ones(2, 3)), lambda m: m.block),
    "buffer-bound": (lambda m: setattr(m, "buffer", torch.ones(3)), lambda m: m.buffer),
}


@pytest.mark.parametrize("name", WRITES)
def test_restore_after_a_write_gives_the_old_value_at_the_old_address(name: str) -> None:
    """Whatever a step wrote or bound, the next one starts where it did."""
    write, read = WRITES[name]
    model = Model()
    before = copied(read(model))
    addresses = [tensor.data_ptr() for tensor in (model.buffer, model.block, model.by_name["k"])]
    snapshot = Snapshot(model, {})

    write(model)
    snapshot.restore()

    assert _equal(before, read(model), 0, 0)
    assert addresses == [tensor.data_ptr() for tensor in (model.buffer, model.block, model.by_name["k"])]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(3).expand(2, 3), id="expanded"),
        pytest.param(lambda: torch.arange(8.0).reshape(2, 4)[:, ::2], id="strided"),
        pytest.param(lambda: torch.tensor(2.0), id="0-dim"),
        pytest.param(lambda: torch.zeros(0, 3), id="empty"),
        pytest.param(lambda: torch.arange(6).reshape(2, 3).t(), id="transposed"),
        pytest.param(lambda: torch.ones(2, 3, dtype=torch.bfloat16), id="bf16"),
        pytest.param(lambda: torch.ones(2, 3).requires_grad_(), id="requires-grad"),
        pytest.param(torch.inference_mode()(lambda: torch.arange(6.0)), id="inference"),
    ],
)
def test_input_of_any_kind_is_varied_alike_and_put_back(make: Callable[[], torch.Tensor]) -> None:
    """Another address, the same shape, strides, dtype and flags; and writing the original is undone."""
    value = make()
    before = value.detach().clone()
    snapshot = Snapshot(torch.nn.Module(), {"x": value})

    fresh = snapshot.varied({"x": value}, set())["x"]

    for name in ("shape", "dtype", "requires_grad"):
        assert getattr(value, name) == getattr(fresh, name)
    assert (value.stride(), value.is_inference()) == (fresh.stride(), fresh.is_inference())
    assert fresh is not value
    assert _equal(sorted(before.flatten().tolist()), sorted(fresh.detach().flatten().tolist()), 0, 0)
    if value.dim() and value.stride()[0]:
        assert _equal(before.flip(0), fresh, 0, 0)
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        value.as_strided((1,), (1,)).zero_() if value.numel() else None
    snapshot.restore()
    assert _equal(before, value, 0, 0)


def test_varied_inputs_keep_who_is_who() -> None:
    """The same tensor twice stays one, views of one block still share it, what is written stays itself."""
    x, block, written = torch.arange(4.0), torch.arange(6.0), torch.zeros(2)
    inputs = {"x": x, "again": [x], "left": block[:4], "right": block[2:], "cache": written, "pair": Pair(x, 3)}

    fresh = varied_inputs(inputs, {id(written)})

    assert fresh["x"] is fresh["again"][0] is fresh["pair"].one
    assert (3, [3.0, 2.0, 1.0, 0.0]) == (fresh["pair"].other, fresh["x"].tolist())
    assert fresh["left"].data_ptr() + 2 * 4 == fresh["right"].data_ptr()
    assert fresh["left"].data_ptr() != block.data_ptr()
    assert sorted(block.tolist()) == sorted(fresh["left"].tolist() + fresh["right"][2:].tolist())
    assert fresh["cache"] is written


def test_varied_inputs_view_of_another_dtype_keeps_its_own() -> None:
    """A slot of a byte buffer that is read as another dtype is at no place of the buffer's own elements."""
    block = torch.arange(16, dtype=torch.uint8)
    view = block.view(torch.int32)[2:]

    fresh = varied_inputs({"block": block, "view": view}, set())

    assert (torch.int32, view.shape, view.stride()) == (
        fresh["view"].dtype,
        fresh["view"].shape,
        fresh["view"].stride(),
    )
    assert fresh["block"].data_ptr() + 8 == fresh["view"].data_ptr()


def test_varied_inputs_leave_what_shares_memory_with_a_written_tensor() -> None:
    """A view of a cache is the cache: varying it would tear the two apart."""
    cache = torch.zeros(2, 3)
    view = cache[0]

    assert varied_inputs({"cache": cache, "view": view}, {id(cache)})["view"] is view


def test_varied_inputs_leave_the_models_own_tensors_and_objects() -> None:
    """A cache or parameter of the model that is passed in, and what is inside an unknown object, stay themselves."""
    model, inside = Model(), torch.arange(3.0)
    inputs = {"weight": model.weight, "kv": model.caches[0], "meta": Result(inside), "x": inside}

    fresh = Snapshot(model, inputs).varied(inputs, set())

    assert all(fresh[name] is inputs[name] for name in inputs)


def test_written_names_views_of_what_was_written_and_nothing_else() -> None:
    """Version counters are shared by views, so a cache written through its block is known as written."""
    model = Model()
    x = torch.zeros(3)
    snapshot = Snapshot(model, {"x": x})

    model.caches[0].add_(1)

    assert {id(model.block), *map(id, model.caches)} == snapshot.written()
    assert [] == snapshot.changed_parameters()


def test_changed_parameters_names_what_a_step_writes() -> None:
    """Parameters are too large to copy: one that changed is told by its version."""
    model = Model()
    snapshot = Snapshot(model, {})

    with torch.no_grad():
        model.weight.mul_(2)

    assert ["weight"] == snapshot.changed_parameters()


def test_snapshot_copies_no_parameter_nor_a_view_of_one() -> None:
    """Weights and what shares their memory are left out."""
    assert not {"weight", "tied"} & {place for place, _ in Snapshot(Model(), {}).tensors}


def test_varied_inputs_of_each_turn_are_in_another_order() -> None:
    """As it is, reversed, rolled on, rolled and reversed; where the first dimension is one, along the next."""
    x, row = torch.arange(3.0), torch.arange(3.0).reshape(1, 3)

    turned = [varied_inputs({"x": x, "row": row}, set(), turn) for turn in range(4)]

    expected = [[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [2.0, 0.0, 1.0], [1.0, 0.0, 2.0]]
    assert expected == [inputs["x"].tolist() for inputs in turned]
    assert expected == [inputs["row"][0].tolist() for inputs in turned]


def test_written_after_restore_names_only_what_is_written_since() -> None:
    """Putting everything back is a write too, and no step's."""
    model = Model()
    snapshot = Snapshot(model, {})
    model.buffer.add_(1)
    snapshot.restore()

    model.block.add_(1)

    assert {id(model.block), *map(id, model.caches)} == snapshot.written()


def _changed(write: Callable[[Model], Any], inputs: dict[str, Any] | None = None) -> tuple[Snapshot, State, State]:
    model = Model()
    snapshot = Snapshot(model, inputs or {})
    before = snapshot.state()
    write(model)
    return snapshot, before, snapshot.state()


def _set_nan(model: Model) -> None:
    model.buffer[1] = NAN


@pytest.mark.parametrize(
    ("write", "place"),
    [
        (lambda m: m.buffer.add_(1), "buffer"),
        (lambda m: m.caches[1].mul_(0).add_(2), "block"),
        (lambda m: setattr(m, "last", torch.ones(2)), "tensors of the model: last in one of them only"),
        (lambda m: setattr(m, "buffer", torch.ones(3)), "buffer"),
        (lambda m: setattr(m, "buffer", torch.ones(4)), "buffer: torch.float32 (3,) against"),
        (_set_nan, "buffer"),
    ],
)
def test_states_that_differ_say_where(write: Callable[[Model], Any], place: str) -> None:
    """Written in place, through another tensor of the block, bound anew, new, of another shape, not a number."""
    snapshot, before, after = _changed(write)

    there = snapshot.compare(before, after, rtol=1e-3, atol=1e-3)
    back = snapshot.compare(after, before, rtol=1e-3, atol=1e-3)

    assert (False, False) == (there.equal, back.equal)
    assert there.place.startswith(place)


def test_states_equal_within_the_tolerance_are_equal() -> None:
    """Two runs may differ in the last bits of what they write."""
    model = Model()
    snapshot = Snapshot(model, {})
    model.buffer.add_(1)
    one = snapshot.state()
    model.buffer.add_(1e-5)

    comparison = snapshot.compare(one, snapshot.state(), rtol=1e-3, atol=1e-3)

    assert (True, 1) == (comparison.equal, round(comparison.max_difference * 1e5))


def test_state_keeps_changed_elements_only() -> None:
    """A decode step writes a few slots of a large cache."""
    model = Model()
    model.register_buffer("cache", torch.zeros(1000, 8))
    snapshot = Snapshot(model, {})

    model.cache[7, 3] = 5.0
    change = snapshot.state().model["cache"]

    assert ([59], [5.0], False) == (
        change.at.tolist() if change.at is not None else None,
        change.values.tolist(),
        change.is_none,
    )


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(3).expand(2, 3).clone(), id="clone"),
        pytest.param(lambda: torch.arange(8.0).reshape(2, 4)[:, ::2], id="strided"),
        pytest.param(lambda: torch.tensor(2.0), id="0-dim"),
        pytest.param(lambda: torch.ones(2, 3, dtype=torch.bfloat16), id="bf16"),
        pytest.param(lambda: torch.ones(2, dtype=torch.float8_e4m3fn), id="float8"),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex64), id="complex"),
        pytest.param(lambda: torch.ones(2, dtype=torch.complex128), id="complex128"),
        pytest.param(lambda: torch.ones(2, dtype=torch.bool), id="bool"),
        pytest.param(torch.inference_mode()(lambda: torch.arange(6.0)), id="inference"),
    ],
)
def test_state_of_an_input_of_any_kind_tells_whether_it_was_written(make: Callable[[], torch.Tensor]) -> None:
    """Untouched it is as it was; with other contents it is not, and equals itself."""
    value = make()
    snapshot = Snapshot(torch.nn.Module(), {"x": value})
    before = snapshot.state()

    with torch.inference_mode(value.is_inference()), torch.no_grad():
        value.copy_(torch.zeros_like(value, dtype=torch.float32).to(value.dtype))
    after = snapshot.state()

    assert (True, False) == (before.inputs["inputs['x']"].is_none, after.inputs["inputs['x']"].is_none)
    assert snapshot.compare(after, after, rtol=0, atol=0).equal
    assert not snapshot.compare(after, before, rtol=1e-3, atol=1e-3).equal


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (None, None),
        (NAN, NAN),
        ((1, "a", None), (1, "a", None)),
        (torch.tensor([NAN, INF, -INF, 1.0]), torch.tensor([NAN, INF, -INF, 1.0005])),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2.0001j])),
        (torch.tensor([True]), torch.tensor([True])),
        (Result(torch.ones(2)), Result(torch.ones(2))),
        ({"a": [Result(torch.ones(2))]}, {"a": [Result(torch.ones(2))]}),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn)),
    ],
)
def test_compare_equal_values_are_equal(expected: Any, found: Any) -> None:
    """NaN at the same place, infinities, empty tensors, dataclasses: equal."""
    comparison = compare_values(expected, found, rtol=1e-3, atol=1e-3)

    assert comparison.equal
    assert comparison.max_difference < 1e-3


@pytest.mark.parametrize(
    ("expected", "found", "text"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "output: largest difference 0.5"),
        (torch.tensor([1]), torch.tensor([2]), "output: largest difference 1"),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), "output"),
        (torch.tensor([True]), torch.tensor([False]), "output: largest difference 1"),
        (torch.tensor([NAN]), torch.tensor([1.0]), "output"),
        (torch.tensor([INF]), torch.tensor([-INF]), "output: largest difference inf"),
        (torch.tensor([1j]), torch.tensor([2j]), "output: largest difference 1"),
        ({"a": [1, torch.ones(1)]}, {"a": [1, torch.zeros(1)]}, "output['a'][1]: largest difference 1"),
        (Result(torch.ones(1)), Result(torch.zeros(1)), "output[1]['logits']: largest difference 1"),
        (Result(torch.ones(1), 2), Result(torch.ones(1), 3), "2 against 3"),
        ((torch.ones(1),), [torch.ones(1)], "structure"),
        ((1, 2), (1,), "structure"),
        (torch.ones(1), None, "Tensor against NoneType"),
        (torch.ones(1), 1.0, "Tensor against float"),
        (1, True, "int against bool"),
        (torch.ones(1), torch.ones(1, dtype=torch.bfloat16), "torch.float32 (1,) against torch.bfloat16 (1,)"),
        (torch.ones(1, 2), torch.ones(2, 1), "(1, 2) against"),
    ],
)
def test_compare_other_values_say_where_and_how_far(expected: Any, found: Any, text: str) -> None:
    """Place, numbers, or what kind of thing stands against what."""
    comparison = compare_values(expected, found, rtol=1e-3, atol=1e-3)

    assert not comparison.equal
    assert text in str(comparison)
