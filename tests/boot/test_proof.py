"""The proof on plain objects: each fact holds and fails, and nothing that a live value does gets out of it.

What needs torch is held against torch's own guards in tests/build/test_guards.py.
"""

from __future__ import annotations

import collections
import json
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.boot.proof import FAILURE_LIMIT, Proof, prove
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guards import SHEET_SCHEMA, SheetBuilder
from cachectl.schemas.boot import PARTS
from cachectl.schemas.canonical import canonical_bytes

LIMIT = 3


class Layer:
    eps = 1e-6

    def run(self) -> float:
        return self.eps


class Model:
    def __init__(self) -> None:
        self.scale = 2.0
        self.layers = [Layer(), Layer()]
        self.options = {"gain": 1, "late": None}
        self.names = frozenset({"a", "b"})
        self._forward_hooks = {-7: None, -5: None}

    def decode(self, x: int, lengths: list[int], *, flag: bool = True) -> float:
        return self.scale * x * len(lengths) * LIMIT if flag else 0.0


def proof_of(path: tuple[str, ...], *facts: list[Any], model: Any = None, function: Any = None, **call: Any) -> Proof:
    """Prove one place of a model's call, through a sheet as it is stored."""
    builder = SheetBuilder()
    for fact in facts:
        builder.add(path, fact)
    sheet = json.loads(canonical_bytes(builder.sheet()))
    model = Model() if model is None else model
    return prove(
        sheet, arguments={"self": model, **call}, function=function or Model.decode, torch=types.SimpleNamespace()
    )


def run_code() -> Any:
    return GuardReader(None).identity(Layer.run)


@pytest.mark.parametrize(
    ("path", "holds", "fails"),
    [
        (("L:self", ".scale"), ["equals", 2.0], ["equals", 2]),
        (("L:self",), ["type", f"{__name__}.Model"], ["type", f"{__name__}.Layer"]),
        (("L:self", ".layers"), ["length", 2], ["length", 3]),
        (("L:self", ".options"), ["keys", ["gain", "late"]], ["keys", ["gain"]]),
        (("L:self", ".options"), ["ordered", ["gain", "late"]], ["ordered", ["late", "gain"]]),
        (("L:self",), ["hooks", "_forward_hooks", [[0, 1], [], []]], ["hooks", "_forward_hooks", [[1, 0], [], []]]),
        (("L:self", ".options"), ["contains", "gain", True], ["contains", "gain", False]),
        (("L:self", ".names"), ["contains", "c", False], ["contains", "b", False]),
        (("L:self", ".options", ":late"), ["equals", None], ["present"]),
        (("L:self", ".options", ":gain"), ["present"], ["equals", True]),
        (("L:self",), ["has", "scale", True], ["has", "scale", False]),
        (("L:self",), ["absent", "decode"], ["absent", "scale"]),
        (("L:self", ".layers", "#1", ".eps"), ["equals", 1e-6], ["equals", 1e-5]),
        (("L:self", ".layers", "#0"), ["methods", {"run": run_code()}], ["methods", {"run": ["sentinel"]}]),
        (("L:x",), ["base", 4], ["base", 5]),
        (("L:flag",), ["equals", True], ["equals", False]),
        (("L:lengths", "#0"), ["equals", 7], ["equals", 8]),
        (("G:LIMIT",), ["equals", 3], ["equals", 4]),
        (("G:Layer",), ["is", ["class", f"{__name__}.Layer"]], ["is", ["class", f"{__name__}.Model"]]),
        (("B", ":len"), ["is", ["builtin", "builtins", "len"]], ["is", ["builtin", "builtins", "sum"]]),
        (("I:json",), ["is", ["module", "json"]], ["is", ["module", "sys"]]),
        (("L:self", "@type", "@classdict", ":decode"), ["present"], ["is", ["sentinel"]]),
        (("G:Layer", "@subclasses"), ["length", 0], ["length", 1]),
        (("L:self",), ["instance", __name__, "Model", True], ["instance", __name__, "Model", False]),
        (("L:self",), ["instance", "collections.abc", "Sized", False], ["instance", "no.such.module", "Sized", False]),
        (("G:Layer",), ["instance", __name__, "Layer", True], ["instance", __name__, "Layer.run", True]),
        (("L:self", ".options", "@key:1"), ["equals", "late"], ["equals", "gain"]),
        (("L:self", ".options", "@value:0"), ["equals", 1], ["equals", 2]),
        (("L:lengths",), ["later", 1], None),
    ],
)
def test_prove_a_fact_holds_or_fails(path: tuple[str, ...], holds: list[Any], fails: list[Any] | None) -> None:
    """Each kind of fact says yes to the value that was recorded, and no to another; an unknown kind always no."""
    call = {"x": 4, "lengths": [7]}

    assert (fails is not None) is proof_of(path, holds, **call).holds
    if fails is not None:
        assert not proof_of(path, fails, **call).holds


def test_prove_with_what_an_earlier_proof_prepared_says_the_same() -> None:
    """What is kept between the proofs of one sheet saves work, and changes no answer."""
    builder = SheetBuilder()
    builder.add(("L:self", ".scale"), ["equals", 2.0])
    sheet = json.loads(canonical_bytes(builder.sheet()))
    prepared: dict[int, Any] = {}
    model, other = Model(), Model()
    other.scale = 3.0

    def holds(held: Model) -> bool:
        torch = types.SimpleNamespace()
        return prove(sheet, arguments={"self": held}, function=Model.decode, torch=torch, prepared=prepared).holds

    assert [True, False, True] == [holds(model), holds(other), holds(model)]
    assert prepared


def test_prove_an_object_of_slots_has_nothing_of_its_own_before_its_class() -> None:
    """It has no dict that a method could be shadowed in: this held never, and such a model was never warm."""

    class Lean:
        __slots__ = ("gain",)

        def run(self) -> int:
            return 1

    model = Model()
    model.scale = Lean()

    assert proof_of(("L:self", ".scale"), ["absent", "run"], model=model).holds


def test_prove_reason_names_place_and_both_values() -> None:
    """A failure reads as the program's author would say it, with the part that the call or the model is."""
    model = Model()
    model.layers[1].eps = 1e-3

    (changed,) = proof_of(("L:self", ".layers", "#1", ".eps"), ["equals", 1e-6], model=model).failed
    (other,) = proof_of(("L:lengths",), ["length", 2], lengths=[1]).failed

    assert ("guards", "self.layers[1].eps", 1e-6, 1e-3) == (changed.part, changed.name, changed.stored, changed.wanted)
    assert ("inputs", "lengths", {"length": 2}, {"length": 1}) == (other.part, other.name, other.stored, other.wanted)
    assert {changed.part, other.part} <= set(PARTS)
    assert all((changed.hint, other.hint))


def test_prove_counts_facts_and_time() -> None:
    """The proof says how much it compared."""
    proof = proof_of(("L:self", ".scale"), ["equals", 2.0], ["type", "builtins.float"])

    assert 2 == proof.guards
    assert proof.seconds > 0


def test_prove_collects_the_first_failures_only() -> None:
    """A wholly different model is told in twenty reasons."""
    builder = SheetBuilder()
    for number in range(3 * FAILURE_LIMIT):
        builder.add(("L:self", f".missing{number}"), ["present"])

    proof = prove(builder.sheet(), arguments={"self": Model()}, function=Model.decode, torch=None)

    assert FAILURE_LIMIT == len(proof.failed)


def test_prove_below_another_type_says_nothing_more() -> None:
    """What lies below a value of another kind is not told as well."""
    builder = SheetBuilder()
    builder.add(("L:self", ".layers"), ["type", "builtins.tuple"])
    builder.add(("L:self", ".layers", "#0", ".eps"), ["equals", 5])

    proof = prove(builder.sheet(), arguments={"self": Model()}, function=Model.decode, torch=None)

    assert ["self.layers"] == [reason.name for reason in proof.failed]


def test_prove_a_bound_method_reads_cells_globals_and_defaults() -> None:
    """Arguments that the call leaves out are the function's defaults, free variables its cells."""
    factor = 2.0

    class Closed:
        def decode(self, x: int, shift: int = 3) -> float:
            return x * factor + shift

    model = Closed()

    for path, value in ((("L:factor",), 2.0), (("L:shift",), 3)):
        proof = proof_of(path, ["equals", value], model=model, function=model.decode, x=1)
        assert proof.holds, proof.failed


def test_prove_groups_hold_one_object_each() -> None:
    """Tied places have to be tied; the failing pair is named."""
    builder = SheetBuilder()
    builder.add_groups("group", [[("L:self", ".layers", "#0"), ("L:self", ".layers", "#1")]])
    tied, loose = Model(), Model()
    tied.layers[1] = tied.layers[0]

    held, failed = (
        prove(builder.sheet(), arguments={"self": m}, function=Model.decode, torch=None) for m in (tied, loose)
    )

    assert held.holds
    assert "the same object as self.layers[0]" == failed.failed[0].stored


def test_prove_expression_over_live_numbers() -> None:
    """A shape expression fails with the numbers it read."""
    builder = SheetBuilder()
    builder.add_expression(["<", ["at", "L:lengths", "#0"], 10])
    held, failed = (
        prove(builder.sheet(), arguments={"lengths": [n]}, function=Model.decode, torch=None) for n in (9, 10)
    )

    assert held.holds
    assert [("inputs", {"lengths[0]": 10})] == [(reason.part, reason.wanted) for reason in failed.failed]


def test_prove_never_makes_items_or_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defaultdict gets no new key, and a module that is not imported stays so."""
    model = Model()
    model.options = collections.defaultdict(int)  # type: ignore[assignment]
    monkeypatch.delitem(sys.modules, "this", raising=False)

    assert not proof_of(("L:self", ".options", ":late"), ["present"], model=model).holds
    assert not proof_of(("I:this",), ["present"]).holds
    assert not model.options
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "sheet",
    [
        {},
        {"schema": "cachectl/guard-sheet/v1", "nodes": 7},
        {"schema": SHEET_SCHEMA},
        {"schema": SHEET_SCHEMA, "nodes": 7, "ambient": {}, "expressions": []},
        {"schema": SHEET_SCHEMA, "nodes": [[[["equals"]], {}], [[], {"L:self": 0}]], "ambient": {}, "expressions": []},
        {"schema": SHEET_SCHEMA, "nodes": [[[], {"L:self": 5}]], "ambient": {}, "expressions": []},
        {"schema": SHEET_SCHEMA, "nodes": [[[], {"L:self": 0}]], "ambient": {}, "expressions": []},
        {"schema": SHEET_SCHEMA, "nodes": [[[], {"?": 1}], [[], {"L:self": 0}]], "ambient": {}, "expressions": []},
        {"schema": SHEET_SCHEMA, "nodes": [], "ambient": {"grad_mode": False}, "expressions": []},
        {"schema": SHEET_SCHEMA, "nodes": [], "ambient": {}, "expressions": [["nonsense"]]},
    ],
)
def test_prove_an_unreadable_sheet_is_one_reason(sheet: dict[str, Any]) -> None:
    """Newer, malformed or forged sheets fail, with a reason, and never raise."""
    proof = prove(sheet, arguments={"self": Model()}, function=Model.decode, torch=types.SimpleNamespace())

    assert 1 == len(proof.failed)
    assert proof.failed[0].hint


def test_prove_a_sheet_that_unfolds_without_end_stops() -> None:
    """Shared nodes can say two to the sixty-fourth places in a few lines; the walk has an end."""
    nodes: list[Any] = [[[], {}]]
    for _ in range(64):
        nodes.append([[], {"@type": len(nodes) - 1, ".__class__": len(nodes) - 1}])
    nodes.append([[], {"L:self": len(nodes) - 1}])

    proof = prove(
        {"schema": SHEET_SCHEMA, "nodes": nodes, "ambient": {}, "expressions": []},
        arguments={"self": Model()},
        function=Model.decode,
        torch=None,
    )

    assert ["sheet"] == [reason.name for reason in proof.failed]


class Raising:
    """Raises at every turn, in the ways that live objects do."""

    def __init__(self, error: type[Exception]) -> None:
        object.__setattr__(self, "error", error)

    def __getattribute__(self, name: str) -> Any:
        raise object.__getattribute__(self, "error")("no " * 5)

    def _fail(self, *args: object) -> Any:
        raise object.__getattribute__(self, "error")

    __eq__ = __len__ = __getitem__ = __iter__ = __bool__ = __contains__ = __call__ = __str__ = __repr__ = _fail
    __hash__ = None  # type: ignore[assignment]


class Truthless:
    """Its comparisons give what has no truth value, as a tensor's do."""

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")

    __hash__ = object.__hash__


class Endless:
    def __getattr__(self, name: str) -> Any:
        return getattr(self, name + "_")


class FalseClass:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise KeyError("class")


class Dictless(int):
    __slots__ = ()


HOSTILE: list[Callable[[], Any]] = [
    *(
        lambda error=error: Raising(error)
        for error in (ValueError, RecursionError, AttributeError, StopIteration, MemoryError)
    ),
    Truthless,
    Endless,
    FalseClass,
    Dictless,
    object,
    lambda: weakref.ref(Model),
    lambda: weakref.proxy(HELD),
    lambda: Raising,
    lambda: type("Odd", (), {"__module__": None}),
    lambda: [Truthless()],
    lambda: {Truthless(): Truthless()},
    lambda: {"gain": Raising(ValueError)},
    lambda: nested(5000),
    lambda: float("nan"),
    lambda: "https://user:secret@host",
    lambda: types.MappingProxyType({}),
    lambda: iter(()),
    lambda: (_ for _ in ()),
]
HELD = Model()


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


FACTS: list[list[Any]] = [
    ["type", "x.Y"],
    ["is", ["module", "x"]],
    ["equals", {"$tuple": [1]}],
    ["equals", "text"],
    ["base", 1],
    ["tensor", {"shape": [1], "stride": [1], "class": "torch.Tensor"}],
    ["length", -1],
    ["keys", ["nope"]],
    ["ordered", ["nope"]],
    ["registered", ["nope"]],
    ["contains", "nope", True],
    ["has", "nope_at_all", True],
    ["absent", "nope"],
    ["instance", "collections.abc", "Sized", True],
    ["methods", {"nope": ["sentinel"]}],
    ["tuple_iterator", 99],
    ["group", 0],
    ["apart"],
    ["memory", 0],
]
STEPS = [
    ".a",
    "!a",
    ":a",
    "#0",
    '={"$tuple":[1]}',
    "=null",
    "@type",
    "@classdict",
    "@key:0",
    "@value:0",
    "@member:0",
    "@next:0",
]
STEPS += [
    "@size:0",
    "@stride:0",
    "@offset",
    "@weakref",
    "@fields",
    "@dataclass_fields",
    "@numpy",
    "@scalar_tensor",
    "@item",
    "@int",
]


@pytest.mark.parametrize("make", HOSTILE)
def test_prove_never_raises_on_hostile_values(make: Callable[[], Any]) -> None:
    """Whatever a live value does, each fact about it and each step below it is a verdict, and its reasons are JSON."""
    for fact in FACTS:
        proof = proof_of(("L:x",), fact, x=make())
        assert proof.holds is (not proof.failed)
        canonical_bytes([reason.to_json() for reason in proof.failed])
    for step in STEPS:
        proof = proof_of(("L:x", step), ["equals", "nothing is this"], x=make())
        assert not proof.holds
        canonical_bytes([reason.to_json() for reason in proof.failed])
    builder = SheetBuilder()
    builder.add_expression(["<", ["at", "L:x"], 1])
    assert not prove(builder.sheet(), arguments={"x": make()}, function=Model.decode, torch=None).holds


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3), inner)
        ),
        max_leaves=6,
    ),
    st.sampled_from(FACTS),
    st.sampled_from(STEPS),
)
def test_prove_never_raises_on_any_value(value: Any, fact: list[Any], step: str) -> None:
    """No plain value in any place makes the proof raise."""
    proof_of(("L:x",), fact, x=value)
    proof_of(("L:x", step), fact, x=value)


def test_prove_shows_no_secret() -> None:
    """A live string under a secret's name, or one with credentials, is in no reason."""
    model = Model()
    model.api_key = "s3cr3t"  # type: ignore[attr-defined]
    model.url = "https://user:s3cr3t@host"  # type: ignore[attr-defined]

    for name in ("api_key", "url"):
        for fact in (
            ["equals", None],
            ["equals", "other"],
            ["is", ["sentinel"]],
            ["tensor", {"shape": [], "stride": []}],
        ):
            proof = proof_of(("L:self", f".{name}"), fact, model=model)
            assert not proof.holds
            assert "s3cr3t" not in str([reason.to_json() for reason in proof.failed])
    assert "s3cr3t" not in str(proof_of(("L:self",), ["absent", "api_key"], model=model).failed)
