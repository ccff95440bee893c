"""The proof at its edges: ambient state, tensors and the memory they share, places that a call does not have."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest

from cachectl.boot.proof import Proof, prove
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guards import SheetBuilder
from cachectl.schemas.canonical import canonical_bytes


class Memory:
    """A tensor as far as its memory goes: `size` bytes from `start` on."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.shape = (size,)

    def data_ptr(self) -> int:
        return self.start

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def element_size(self) -> int:
        return 1


class SlyList(list):  # type: ignore[type-arg]
    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("ran")


class SlyTuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("ran")


class Layer:
    def run(self, x: int) -> int:
        return x


class Patched(Layer):
    def run(self, x: int) -> int:
        return -x


def step(self: Any, x: Any = None, y: Any = None) -> None: ...


def held(builder: SheetBuilder, torch: Any = None, **call: Any) -> Proof:
    """Prove a sheet as it is stored against a call."""
    sheet = json.loads(canonical_bytes(builder.sheet()))
    return prove(sheet, arguments={"self": None, **call}, function=step, torch=torch)


def one(path: Sequence[str], *facts: list[Any], torch: Any = None, **call: Any) -> Proof:
    """Prove facts about one place."""
    builder = SheetBuilder()
    for fact in facts:
        builder.add(tuple(path), fact)
    return held(builder, torch, **call)


def test_prove_leaves_a_stopped_collector_stopped() -> None:
    """A program that runs without garbage collection goes on so."""
    gc.disable()
    try:
        assert one(["L:x"], ["equals", 1], x=1).holds
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert one(["L:x"], ["equals", 1], x=1).holds
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("place", "message"), [("G:GONE", "no such global"), ("Z:x", "unknown place 'Z:x'"), ("L:gone", "no such argument")]
)
def test_prove_place_that_the_call_does_not_have_is_a_reason(place: str, message: str) -> None:
    """A global that is gone, and a sheet of a newer program, fail with what was looked for."""
    (reason,) = one([place], ["present"]).failed

    assert ("present", message) == (reason.stored, reason.wanted)


def test_prove_long_text_is_shown_by_its_length() -> None:
    """A prompt in a reason would fill the report."""
    (reason,) = one(["L:x"], ["equals", "a"], x="b" * 5000).failed

    assert "a str of 5000 characters" == reason.wanted


def test_prove_item_with_a_constant_key_is_found_by_value() -> None:
    """A tuple as a key is compared member by member; another one is no such key."""
    path = ["L:x", '={"$tuple":[1,2]}']

    assert one(path, ["equals", 5], x={(1, 2): 5}).holds
    assert ["no such key"] == [reason.wanted for reason in one(path, ["equals", 5], x={(1, 3): 5}).failed]


@pytest.mark.parametrize("kind", [SlyList, SlyTuple])
def test_prove_item_of_a_subclass_is_read_past_its_own_access(kind: type) -> None:
    """Lists and tuples are read through their base class: none of a stranger's code runs."""
    assert one(["L:x", "#1"], ["equals", 5], x=kind([4, 5])).holds


def test_prove_integer_step_takes_integers_only() -> None:
    """What Dynamo converted with int() has to be one already."""
    assert one(["L:x", "@int"], ["equals", 4], x=4).holds
    (reason,) = one(["L:x", "@int"], ["equals", 4], x=4.0).failed
    assert "a float where an integer was" == reason.wanted


def test_prove_methods_of_many_objects_of_a_class_are_compared_once_a_class() -> None:
    """A patched subclass among equal layers fails, each at its own place."""
    builder = SheetBuilder()
    for place in range(4):
        builder.add(("L:x", f"#{place}"), ["methods", {"run": GuardReader(None).identity(Layer.run)}])

    assert held(builder, x=[Layer() for _ in range(4)]).holds
    failed = held(builder, x=[Layer(), Patched(), Layer(), Patched()]).failed
    assert ["x[1]", "x[3]"] == [reason.name for reason in failed]


# Which tensors share memory.


def shared(memory: Sequence[int | None], x: Any, y: Any) -> list[tuple[Any, Any, Any]]:
    """Prove two tensors that were in these memories at build time; return what failed."""
    builder = SheetBuilder()
    for name, number in zip("xy", memory, strict=True):
        builder.add((f"L:{name}",), ["apart"])
        if number is not None:
            builder.add((f"L:{name}",), ["memory", number])
    return [(reason.name, reason.stored, reason.wanted) for reason in held(builder, x=x, y=y).failed]


def test_prove_memory_holds_as_at_build_time() -> None:
    """Tensors side by side stay apart, views of one buffer stay together, one without memory is nowhere."""
    assert [] == shared([None, None], Memory(64, 8), Memory(72, 8))
    assert [] == shared([None, None], Memory(0, 8), Memory(0, 8))
    assert [] == shared([0, 0], Memory(64, 8), Memory(68, 8))


def test_prove_memory_shared_since_is_a_reason() -> None:
    """Two tensors that reach into one another would be written through each other."""
    expected = [("x and y", "memory of their own", "shared memory")]

    assert expected == shared([None, None], Memory(64, 8), Memory(71, 8))
    assert expected == shared([0, 1], Memory(64, 8), Memory(64, 9))


def test_prove_memory_shared_no_longer_is_a_reason() -> None:
    """A view that became a copy no longer sees what is written."""
    assert [("y", "shared memory", "memory of its own")] == shared([0, 0], Memory(64, 8), Memory(96, 8))


def test_prove_one_tensor_at_two_places_is_a_reason() -> None:
    """What were two tensors at build time are two now, unless they were one."""
    tensor = Memory(64, 8)

    assert [("y", "another tensor than x", "the same tensor")] == shared([None, None], tensor, tensor)
    builder = SheetBuilder()
    builder.add_groups("group", [[("L:x",), ("L:y",)]])
    for name in "xy":
        builder.add((f"L:{name}",), ["apart"])
    assert held(builder, x=tensor, y=tensor).holds
    assert not held(builder, x=tensor, y=Memory(96, 8)).holds


# Against torch.


@pytest.mark.real
def test_prove_ambient_state_of_torch_holds_and_names_what_changed() -> None:
    """The modes around the call are compared one by one; a name that this torch doesn't have is one that differs."""
    import torch

    builder = SheetBuilder()
    builder.add_ambient(GuardReader(torch).ambient())

    assert held(builder, torch).holds
    with torch.no_grad():
        (reason,) = held(builder, torch).failed
    assert ("grad_mode", True, False) == (reason.name, reason.stored, reason.wanted)
    builder.add_ambient({"mode_of_another_torch": 1})
    assert ["mode_of_another_torch"] == [reason.name for reason in held(builder, torch).failed]


@pytest.mark.real
def test_prove_tensor_facts_name_the_fields_that_differ() -> None:
    """Equal tensors hold; a size, a stride, a dtype or a mark that was not there is told alone."""
    import torch

    fact = GuardReader(torch).tensor(torch.zeros(2, 3))
    builder = SheetBuilder()
    for place in range(2):
        builder.add(("L:x", f"#{place}"), ["tensor", fact])

    def differing(other: Any) -> Any:
        # The first tensor is equal: what was learnt from it must not excuse the second.
        return [reason.wanted for reason in held(builder, torch, x=[torch.zeros(2, 3), other]).failed]

    marked = torch.zeros(2, 3)
    torch._dynamo.mark_static(marked, 0)
    assert [] == differing(torch.ones(2, 3))
    assert [{"shape": [4, 3]}] == differing(torch.zeros(4, 3))
    assert [{"stride": [1, 2]}] == differing(torch.zeros(3, 2).T)
    assert [{"dtype": "float16"}] == differing(torch.zeros(2, 3).half())
    assert [{"marks": {"_dynamo_static_indices": [0]}}] == differing(marked)
    assert [5] == differing(5)


@pytest.mark.real
def test_prove_tensor_of_symbolic_size_takes_any() -> None:
    """A dimension that stayed symbolic, and the strides that follow from it, are not compared; the rank is."""
    import torch

    fact = {**GuardReader(torch).tensor(torch.zeros(2, 3)), "shape": [None, 3], "stride": [None, 1]}

    assert one(["L:x"], ["tensor", fact], torch=torch, x=torch.zeros(7, 3)).holds
    assert not one(["L:x"], ["tensor", fact], torch=torch, x=torch.zeros(7, 4)).holds
    assert not one(["L:x"], ["tensor", fact], torch=torch, x=torch.zeros(7)).holds


@pytest.mark.real
def test_prove_steps_through_numpy_and_scalars() -> None:
    """What Dynamo made a tensor of is made one again, and a tensor's number is read; other kinds are refused."""
    import torch

    numpy = pytest.importorskip("numpy")
    array = numpy.zeros((2, 3), dtype=numpy.float32)

    assert one(["L:x", "@numpy", "@size:1"], ["equals", 3], torch=torch, x=array).holds
    assert one(["L:x", "@item"], ["equals", 2], torch=torch, x=torch.tensor(2)).holds
    (reason,) = one(["L:x", "@item"], ["equals", 2], torch=torch, x=2).failed
    assert "a int where a tensor was" == reason.wanted


class Empty:
    pass


class Slotted:
    __slots__ = ("filled", "left")

    def __init__(self) -> None:
        self.filled = 1


class Heir(Layer):
    pass


def test_prove_names_that_have_to_be_lacking() -> None:
    """Neither instance nor class has them, nor a filled slot; each of many places of one class is looked at."""
    lacking = ["lacks", ["left", "right"]]
    assert one(["L:x"], lacking, x=Empty()).holds
    assert one(["L:x"], lacking, x=Slotted()).holds
    assert one(["L:x"], lacking, x=7).holds
    for value in (Slotted(), Empty()):
        value.left = 1  # type: ignore[union-attr]
        (reason,) = one(["L:x"], lacking, x=value).failed
        assert ("x", "no left", "left is set") == (reason.name, reason.stored, reason.wanted)
    builder = SheetBuilder()
    for name in "xy":
        builder.add((f"L:{name}",), ["lacks", ["run"]])

    assert ["x", "y"] == [reason.name for reason in held(builder, x=Layer(), y=Heir()).failed]
    assert held(builder, x=Empty(), y=Empty()).holds


def test_prove_what_a_class_inherits() -> None:
    """A class of the same name with other bases is another class."""
    here = __name__
    assert one(["L:x"], ["type", f"{here}.Heir", [f"{here}.Layer"]], x=Heir()).holds

    for inherited in ([], [[f"{here}.Empty"]]):
        (reason,) = one(["L:x"], ["type", f"{here}.Heir", *inherited], x=Heir()).failed
        assert {"class": f"{here}.Heir", "inherits": [f"{here}.Layer"]} == reason.wanted
        assert {"class": f"{here}.Heir", "inherits": inherited[0] if inherited else []} == reason.stored


def test_prove_classes_of_many_objects_are_said_once_a_class() -> None:
    """Equal layers hold, and one of another class among them fails at its own place."""
    builder = SheetBuilder()
    for place in range(3):
        builder.add(("L:x", f"#{place}"), ["type", f"{__name__}.Layer"])

    assert held(builder, x=[Layer(), Layer(), Layer()]).holds
    assert ["x[1]"] == [reason.name for reason in held(builder, x=[Layer(), Heir(), Layer()]).failed]
