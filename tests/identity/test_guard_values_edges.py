"""Values that guards compare and few programs hold: rare Python objects, and torch's and numpy's own."""

from __future__ import annotations

import functools
import itertools
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cachectl.identity.guard_classes import function_of
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable, members_of, plain_value


class Placed(NamedTuple):
    """What torch.device says of itself."""

    type: str
    index: int | None


class Point(NamedTuple):
    x: int
    y: float


class Held:
    @staticmethod
    def still(x: int) -> int:
        return x

    @property
    def width(self) -> int:
        return 4

    def setter(self, value: int) -> None: ...

    wide = property(width.fget, setter)


class Bytes(bytes):
    def join(self, parts: Any) -> bytes:
        raise AssertionError("ran")


class Imaginary(complex):
    def __add__(self, other: Any) -> complex:
        raise AssertionError("ran")


def body(x: int) -> int:
    return x + 1


def reader(torch: Any = None) -> GuardReader:
    return GuardReader(torch)


@pytest.mark.parametrize("name", ["still", "width"])
def test_function_of_a_wrapped_member_is_the_function_in_it(name: str) -> None:
    """A static method and a property are known by their code; a number has none."""
    function = function_of(vars(Held)[name])

    assert function is not None
    assert name == function.__name__
    assert function_of(4) is None


def test_members_of_a_set_are_read_through_the_base_class() -> None:
    """A set that iterates as it likes is read as what it holds."""

    class Sly(set):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(())

    assert {1, 2} == {*members_of(Sly([1, 2]))}


@pytest.mark.parametrize(("value", "plain"), [(Bytes(b"ab"), b"ab"), (Imaginary(2, 3), 2 + 3j)])
def test_plain_value_of_bytes_and_complex_runs_none_of_their_code(value: object, plain: object) -> None:
    """What a subclass makes of joining and adding is left out."""
    found = plain_value(value)

    assert (type(plain), plain) == (type(found), found)


def test_identity_of_code_is_its_digest_wherever_it_stands() -> None:
    """Bare code, a function and both kinds of method wrappers name one digest; two functions of a property count."""
    said = reader()
    function = said.identity(Held.still)

    assert ["code", function[-1]] == said.identity(Held.still.__code__)
    assert ["staticmethod", function] == said.identity(vars(Held)["still"])
    assert ["property", said.identity(vars(Held)["width"].fget), None] == said.identity(vars(Held)["width"])
    assert ["property", said.identity(vars(Held)["width"].fget), said.identity(Held.setter)] == said.identity(Held.wide)
    assert {"$code": function[-1]} == said.value(Held.still.__code__)


def test_identity_of_a_static_builtin_names_it() -> None:
    """A C function that no object owns has its qualified name."""
    assert ["builtin", "None", "str.maketrans"] == reader().identity(str.maketrans)


def test_identity_of_a_partial_tells_bound_functions_apart() -> None:
    """A bound function is known by what it is, a bound number by its value."""
    said = [reader().identity(functools.partial(sorted, key=key)) for key in (len, abs, 3)]

    assert 3 == len({repr(item) for item in said})
    assert ["builtin", "builtins", "len"] == said[0][3]["key"]
    assert ["value", 3] == said[2][3]["key"]


def test_identity_of_wrappers_around_wrappers_ends() -> None:
    """A chain of wrappers is refused, not walked without end."""
    member: Any = body
    for _ in range(40):
        member = staticmethod(member)

    with pytest.raises(Unsayable, match="nested too deeply"):
        reader().identity(member)


def test_identity_of_a_kernel_is_its_function() -> None:
    """A just-in-time compiled kernel is known by the Python function it is made of."""

    class JITFunction:
        def __init__(self, fn: Any) -> None:
            self.fn = fn

    kind, name, function = reader().identity(JITFunction(body))

    assert ("kernel", f"{__name__}.{JITFunction.__qualname__}") == (kind, name)
    assert reader().identity(body) == function


def test_value_of_views_and_named_tuples_says_their_class() -> None:
    """A dict's keys have no order; a named tuple is no plain one."""
    assert {"$keys": ["a", "b"]} == reader().value({"b": 1, "a": 2}.keys())
    assert {"$tuple": [1, 2.0], "$class": f"{__name__}.Point"} == reader().value(Point(1, 2.0))


def test_iterator_of_a_count_without_a_literal_is_unsayable() -> None:
    """A count over fractions can't be read from its text."""
    with pytest.raises(Unsayable, match="something else than numbers"):
        reader().iterator(itertools.count(Fraction(1, 2)))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (Placed("npu", 3), "npu:current"),
        (Placed("npu", 1), "npu:1"),
        (Placed("npu", None), "npu"),
        (Placed("cpu", 0), "cpu:0"),
        (Placed("xpu", 0), "xpu:0"),
    ],
)
def test_device_with_an_index_is_relative_to_the_current_one(device: Placed, said: str) -> None:
    """Rank 3 computes on device 3 here and on device 1 elsewhere: both are the current one."""
    read = reader(SimpleNamespace(npu=SimpleNamespace(current_device=lambda: 3)))

    assert said == read.device(device) == read.device(device)


def test_npu_format_is_asked_for_on_the_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on the CPU has no private format, and none has one without torch_npu."""
    there, here = (SimpleNamespace(device=Placed(kind, 0)) for kind in ("npu", "cpu"))
    without = reader()
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda _: 29))

    assert (29, None) == (reader().npu_format(there), reader().npu_format(here))
    monkeypatch.setattr(without, "_format_of", None)
    assert without.npu_format(there) is None


def test_extent_of_a_tensor_spans_its_strides() -> None:
    """From the first to past the last byte; a tensor without elements or memory reaches nowhere."""

    def extent(start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int] | None:
        return reader().extent(
            SimpleNamespace(data_ptr=lambda: start, shape=shape, stride=lambda: stride, element_size=lambda: 4)
        )

    assert (64, 64 + 4 * (1 + 2 * 10 + 3 * 2)) == extent(64, (3, 4), (10, 2))
    assert extent(64, (3, 0), (10, 2)) is None
    assert extent(0, (3, 4), (10, 2)) is None


@pytest.mark.real
def test_values_of_torch_are_said_by_name() -> None:
    """A dtype, a device, a size, dispatch keys and an enum of torch are constants."""
    import torch

    read = reader(torch)
    keys = torch._C._dispatch_keys(torch.zeros(1))

    assert {"$torch.dtype": "torch.float16"} == read.value(torch.float16)
    assert {"$torch.device": "cpu"} == read.value(torch.device("cpu"))
    assert {"$torch.Size": [2, 3]} == read.value(torch.Size([2, 3]))
    assert "CPU" in read.value(keys)["$dispatch_keys"]
    assert read.value(keys) == read.value(keys)
    mode = torch._C._functorch.RandomnessType.Same
    assert {"$enumeration": ["torch._C._functorch.RandomnessType", "Same", 1]} == read.value(mode)
    assert {"$enumeration": ["torch.DispatchKey", "CPU", int(torch._C.DispatchKey.CPU)]} == read.value(
        torch._C.DispatchKey.CPU
    )
    math = torch.nn.attention.SDPBackend.MATH
    assert {"$enumeration": ["torch.nn.attention._SDPBackend", "MATH", int(math)]} == read.value(math)


@pytest.mark.real
def test_value_of_a_numpy_scalar_keeps_its_dtype() -> None:
    """A numpy number is no Python number."""
    numpy = pytest.importorskip("numpy")

    assert {"$numpy": ["float32", 0.5]} == reader().value(numpy.float32(0.5))


@pytest.mark.real
def test_identity_of_operators_is_their_name() -> None:
    """An overload, a packet and an operator that Python code defines are known by name."""
    import torch

    # Its schema is written out: annotations are text here, which torch would look up in this module.
    twice = torch.library.custom_op(
        "cachectl_edges::twice", lambda x: x + x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )

    assert "aten.add.Tensor" == reader(torch).identity(torch.ops.aten.add.Tensor)[2]
    assert ["operator", "cachectl_edges::twice"] == reader(torch).identity(twice)[::2]


@pytest.mark.real
def test_tensor_fact_has_marks_and_format_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain tensor says neither; a marked one on the device both."""
    import torch

    read = reader(torch)
    monkeypatch.setattr(read, "_format_of", None)
    tensor, again = torch.zeros(2, 3), torch.zeros(2, 3)
    plain = read.tensor(tensor)
    torch._dynamo.mark_dynamic(again, 1)
    again.note = "anything"  # type: ignore[attr-defined]
    monkeypatch.setattr(read, "npu_format", lambda _: 29)
    marked = read.tensor(again)

    assert {"marks", "format"} == marked.keys() - plain.keys()
    assert ([1], 29) == (marked["marks"]["_dynamo_dynamic_indices"], marked["format"])
    assert ([2, 3], [3, 1], "float32") == (plain["shape"], plain["stride"], plain["dtype"])
    assert "CPU" in plain["keys"]
    assert read.tensor(torch.zeros(2, 3).to_sparse())["stride"] is None


@pytest.mark.real
def test_ambient_state_follows_the_modes_around_the_call() -> None:
    """Grad mode is in it, and so is the default device."""
    import torch

    read = reader(torch)
    before = read.ambient()
    with torch.no_grad():
        quiet = read.ambient()

    assert before == read.ambient()
    assert {"grad_mode"} == {name for name in before if before[name] != quiet[name]}
    assert "num_threads" not in before


class ProcessGroup:
    """A process group as far as its identity goes."""

    def __init__(self, name: str) -> None:
        self.group_name = name


def ranks_of(group: ProcessGroup) -> list[int]:
    if group.group_name == "gone":
        raise KeyError(group.group_name)
    return [3, 1]


def test_process_group_is_its_name_and_ranks() -> None:
    """Which group a collective goes to is in the graph; one that is gone, or of somebody else's, is nothing."""
    distributed = SimpleNamespace(ProcessGroup=ProcessGroup, get_process_group_ranks=ranks_of)
    read = reader(SimpleNamespace(distributed=distributed))

    assert ["process_group", "0", [1, 3]] == read.identity(ProcessGroup("0"))
    with pytest.raises(Unsayable, match="destroyed"):
        read.identity(ProcessGroup("gone"))
    with pytest.raises(Unsayable, match="ProcessGroup"):
        reader().identity(ProcessGroup("0"))
