"""The guard sheet's form: values, paths, expressions, and the sharing of equal subtrees."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import json
import math
import subprocess
import sys
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.identity.guard_expressions import evaluate, parse_expression, paths_in, render
from cachectl.identity.guard_paths import item_step, parse_source, readable, secret_name
from cachectl.identity.guard_reader import GuardReader, named_constant
from cachectl.identity.guard_values import Unsayable, length_of, plain_value, same
from cachectl.identity.guards import SHEET_SCHEMA, SheetBuilder, sheet_digest
from cachectl.schemas.canonical import canonical_bytes

CONSTANTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=4) | st.text("abc.:", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(st.integers() | st.text("ab", max_size=2), max_size=3)
    ),
    max_leaves=8,
)


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclasses.dataclass
class Config:
    width: int = 4


class Loud(int):
    def __int__(self) -> int:
        raise AssertionError("ran")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("ran")

    __hash__ = int.__hash__


def reader() -> GuardReader:
    return GuardReader(None)


@given(CONSTANTS)
def test_value_of_any_constant_survives_json(value: object) -> None:
    """What is said of a value reads back from JSON as the same document."""
    said = reader().value(value)

    assert same(said, json.loads(canonical_bytes(said)))


@given(CONSTANTS, CONSTANTS)
def test_value_of_two_constants_is_the_same_only_if_they_are(first: object, second: object) -> None:
    """Equal documents mean equal values of equal types."""
    if same(reader().value(first), reader().value(second)):
        assert type(first) is type(second)
        assert first == second or repr(first) == repr(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        ((1, True), (1, 1)),
        ({1}, frozenset({1})),
        (b"a", "a"),
        (None, False),
        (range(2), (0, 1)),
        (Mode.FAST, Mode.SLOW),
        (Mode.FAST, 1),
        (int, "builtins.int"),
        (Config(4), Config(5)),
        (math.nan, math.inf),
        (1j, 1 + 1j),
        (slice(1), slice(2)),
        (..., NotImplemented),
    ],
)
def test_value_of_unlike_constants_differs(first: object, second: object) -> None:
    """What Python takes for equal, or nearly so, stays apart."""
    assert not same(reader().value(first), reader().value(second))


def test_value_of_nan_is_itself() -> None:
    """A guard on nan holds for nan."""
    assert same(reader().value(math.nan), reader().value(float("nan")))


@pytest.mark.parametrize("text", ["https://user:pw@host/x", "redis://:secret@cache:6379", "/data/models/tiny"])
def test_value_of_credentials_and_paths_is_unsayable(text: str) -> None:
    """URL credentials and absolute paths are kept in no form, nor in the message."""
    with pytest.raises(Unsayable) as caught:
        reader().value(("a", text))

    assert text not in str(caught.value)


@pytest.mark.parametrize("text", ["", "/", "https://host/x", "a/b", "mailto:a@b", "BNSD"])
def test_value_of_plain_text_is_itself(text: str) -> None:
    """Ordinary strings are kept as they are."""
    assert text == reader().value(text)


def test_value_of_a_stranger_is_unsayable() -> None:
    """An object without a value is refused; its repr may hold an address."""
    with pytest.raises(Unsayable, match="SimpleNamespace"):
        reader().value(types.SimpleNamespace())


def made(factor: float) -> Any:
    def inner(x: float) -> float:
        return x * factor

    return inner


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math, ["module", "math"]),
        (collections.OrderedDict, ["class", "collections.OrderedDict"]),
        (len, ["builtin", "builtins", "len"]),
        (str.join, ["builtin", "builtins.str", "str.join"]),
        ([].append, ["builtin", "a builtins.list", "list.append"]),
        (object(), ["sentinel"]),
        (Mode.FAST, ["value", {"$enum": [f"{__name__}.Mode", "FAST", 1]}]),
    ],
)
def test_identity_names_what_it_is(value: object, expected: list[object]) -> None:
    """Objects that are compared by address are told by their names."""
    assert expected == reader().identity(value)


def test_identity_of_equal_code_is_equal_and_of_other_code_is_not() -> None:
    """Functions are told by place and code, whatever their cells hold, which Dynamo guards apart."""
    assert reader().identity(made(1.0)) == reader().identity(made(2.0))
    assert reader().identity(made(1.0)) != reader().identity(made)


def test_identity_looks_into_wrappers() -> None:
    """Partial, cached and bound functions are what they wrap and hold."""
    assert reader().identity(functools.partial(made, 1.0)) != reader().identity(functools.partial(made, 2.0))
    assert ["cached", reader().identity(made)] == reader().identity(functools.lru_cache(made))
    assert "method" == reader().identity(Mode.FAST.__reduce_ex__)[0]


def test_identity_of_an_instance_is_unsayable() -> None:
    """Which of several equal-looking objects it is can't be said in another process."""
    with pytest.raises(Unsayable, match=r"which types\.SimpleNamespace it is"):
        reader().identity(types.SimpleNamespace())


def test_identity_is_equal_in_another_process_and_hash_seed() -> None:
    """Nothing of this process gets in: no address, no path, no hash order."""
    program = (
        "import collections, json, sys; from cachectl.identity.guard_reader import GuardReader; r = GuardReader(None);"
        "f = collections.namedtuple; json.dump([r.identity(f), r.value(frozenset('abcdef'))], sys.stdout)"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]

    assert texts[0] == texts[1]
    assert "0x" not in texts[0]


def test_iterator_says_what_is_left() -> None:
    """Iterators that were moved are told from fresh ones."""
    numbers, pairs = iter(range(3, 9, 2)), iter((1, 2, 3))
    next(numbers)
    next(pairs)

    assert ["range_iterator", 5, 9, 2] == reader().iterator(numbers)
    assert ["tuple_iterator", 2] == reader().iterator(pairs)
    assert ["count_iterator", 3, 2] == reader().iterator(itertools.count(3, 2))
    assert ["count_iterator", 3, 1] == reader().iterator(itertools.count(3))


def test_lengths_and_plain_values_run_no_foreign_code() -> None:
    """A subclass's own len and int are not asked."""

    class Liar(list[int]):
        def __len__(self) -> int:
            raise AssertionError("ran")

    assert 2 == length_of(Liar([1, 2]))
    assert 5 == plain_value(Loud(5))


@pytest.mark.parametrize(
    ("source", "path", "text"),
    [
        ("L['self']", ("L:self",), "self"),
        (
            "L['self']._modules['layers']._modules['0'].norm.eps",
            ("L:self", "._modules", ":layers", "._modules", ":0", ".norm", ".eps"),
            "self.layers[0].norm.eps",
        ),
        ("L['self']._parameters['w-1']", ("L:self", "._parameters", ":w-1"), "self.w-1"),
        ("L['x'].size()[1]", ("L:x", "@size:1"), "x.size(1)"),
        ("L['x'].stride()[0]", ("L:x", "@stride:0"), "x.stride(0)"),
        ("L['x'].storage_offset()", ("L:x", "@offset"), "x.storage_offset()"),
        ("G['Base'].__subclasses__()[0]", ("G:Base", "@subclasses", "#0"), "Base.__subclasses__()[0]"),
        ("L['lens'][0]", ("L:lens", "#0"), "lens[0]"),
        ("L['d'][True]", ("L:d", "=true"), "d[true]"),
        ("L['d'][(1, 'a')]", ("L:d", '={"$tuple":[1,"a"]}'), 'd[{"$tuple":[1,"a"]}]'),
        ("G['EPS']", ("G:EPS",), "EPS"),
        ("G['f'].__closure__[0].cell_contents", ("G:f", ".__closure__", "#0", ".cell_contents"), None),
        ("G['f'].__kwdefaults__['shift']", ("G:f", ".__kwdefaults__", ":shift"), None),
        ("G['__import_a_dot_b'].F", ("I:a.b", ".F"), "a.b.F"),
        ("G['__builtins_dict___0']['len']", ("B", ":len"), "builtins['len']"),
        ("__import__('a.b')", ("I:a.b",), "a.b"),
        ("dict(type(L['s']).__mro__[1].__dict__)['f']", ("L:s", "@type", ".__mro__", "#1", "@classdict", ":f"), None),
        ("list(dict.keys(L['d']))[2]", ("L:d", "@key:2"), "list(d)[2]"),
        ("L['d'][list(dict.keys(L['d']))[2]]", ("L:d", "@value:2"), "list(d.values())[2]"),
        ("list(L['s'].names)[0]", ("L:s", ".names", "@member:0"), None),
        ("___tuple_iterator_getitem(L['it'], 1)", ("L:it", "@next:1"), None),
        ("dict.__getitem__(L['d'], 'k')", ("L:d", ":k"), "d['k']"),
        ("list.__getitem__(L['d'], 3)", ("L:d", "#3"), "d[3]"),
        ("object.__getattribute__(L['o'], 'values')", ("L:o", "!values"), "o.values"),
        ("getattr(L['o'], 'odd name')", ("L:o", ".odd name"), None),
        ("G['ref']()", ("G:ref", "@weakref"), None),
        ("___from_numpy(L['a'])", ("L:a", "@numpy"), None),
        ("___as_tensor(L['a']).item()", ("L:a", "@scalar_tensor", "@item"), None),
    ],
)
def test_parse_source_gives_the_path(source: str, path: tuple[str, ...], text: str | None) -> None:
    """Dynamo's names become steps, and steps a name for people."""
    aliases = {"__import_a_dot_b": ("I:a.b",), "__builtins_dict___0": ("B",)}

    assert path == parse_source(source, aliases)
    assert text is None or text == readable(path)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "L[",
        "x",
        "L[0]",
        "L['x'].__tensor_flatten__()[0]",
        "L['x'].get_base()",
        "L['x'](1)",
        "f(L['x'], key=1)",
        "___get_current_stream(torch.device('npu', 0))",
        "L['x'][L['y']]",
        "(lambda: 0)()",
        "G['installed']",
        "L['x']" + ".a" * 2000,
    ],
)
def test_parse_source_that_is_no_chain_is_unsayable(source: str) -> None:
    """What a boot may not walk is refused at build, never evaluated."""
    with pytest.raises(Unsayable):
        parse_source(source, {"installed": None})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("L:self", ".api_key"), "api_key"),
        (("G:TOKENS", "#0"), "TOKENS"),
        (("L:d", ":db_password"), "db_password"),
        (("L:self", "._modules", ":key", ".layout"), None),
        (("L:self", ".scale"), None),
    ],
)
def test_secret_name_is_the_last_name(path: tuple[str, ...], expected: str | None) -> None:
    """Only the name that a value lies under says that it may be a secret; a module called `key` is none."""
    assert expected == secret_name(path)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("2 <= L['x'].size()[0] <= 8", {"x.size(0)": 8}, True),
        ("2 <= L['x'].size()[0] <= 8", {"x.size(0)": 9}, False),
        ("L['a'] + 3*L['b'] < 40 and not L['a'] == 7", {"a": 1, "b": 2}, True),
        ("Eq(Mod(L['a'], 2), 0)", {"a": 21}, False),
        ("(L['a'] // 2) == FloorDiv(L['a'], 2)", {"a": -3}, True),
        ("L['a']**2 == 9 or L['a'] % 2 == 1", {"a": -3}, True),
        ("max(L['a'], 2, 5) - min(L['a'], 2) != abs(-L['a'])", {"a": 9}, True),
        ("not math.isnan(L['s'])", {"s": math.nan}, False),
        ("math.floor(L['s'] / 2) == int(3.9)", {"s": 7.0}, True),
        ("(1 if L['a'] > 0 else 2) == 2", {"a": 0}, True),
        ("L['a'] < int_oo", {"a": 2**62}, True),
        ("L['s'].is_integer()", {"s": 2.0}, True),
    ],
)
def test_expression_is_evaluated_as_python_would(text: str, values: dict[str, Any], expected: bool) -> None:
    """Shape expressions keep their meaning through the tree and JSON."""
    tree = json.loads(canonical_bytes(parse_expression(text)))

    assert expected is bool(evaluate(tree, lambda path: values[readable(path)]))
    assert set(values) == {readable(path) for path in paths_in(tree)}
    assert render(tree)


@pytest.mark.parametrize(
    "text", ["__import__('os').system('id')", "L['a'] is 3", "open('x')", "[1, 2]", "L['a'] in (1,)", "'a' * 9"]
)
def test_expression_that_is_no_arithmetic_is_unsayable(text: str) -> None:
    """Nothing but arithmetic on live numbers gets into a sheet."""
    with pytest.raises(Unsayable):
        evaluate(parse_expression(text), {}.__getitem__)


@pytest.mark.parametrize(
    "tree",
    [["**", 10, 10**6], ["<<", 1, 10**9], ["/", 1, 0], ["nonsense", 1], [], None, "text", ["at", "L:text"], [[1]]],
)
def test_evaluate_is_bounded(tree: Any) -> None:
    """A forged tree neither computes for long nor reads what is no number."""
    with pytest.raises((Unsayable, ArithmeticError, TypeError)):
        evaluate(tree, lambda path: "text")


def test_evaluate_of_a_deep_tree_is_unsayable() -> None:
    """A tree deeper than any that building makes is refused before Python's own limit."""
    tree: Any = 1
    for _ in range(1000):
        tree = ["neg", tree]

    with pytest.raises(Unsayable):
        evaluate(tree, {}.__getitem__)


def layered(layers: int, eps: float = 1e-6) -> SheetBuilder:
    builder = SheetBuilder()
    for layer in range(layers):
        base = ("L:self", "._modules", ":layers", "._modules", f":{layer}")
        builder.add(base, ["type", "model.Layer"])
        builder.add((*base, ".eps"), ["equals", eps])
        builder.add((*base, ".mask"), ["tensor", {"shape": [4]}])
    builder.add_groups(
        "group", [{("L:self", "._modules", ":layers", "._modules", f":{n}", ".mask") for n in range(layers)}]
    )
    return builder


def test_sheet_shares_equal_layers() -> None:
    """32 equal layers take as many nodes as two, aliasing included."""
    assert len(layered(2).sheet()["nodes"]) == len(layered(32).sheet()["nodes"])


def test_sheet_keeps_one_layer_that_differs() -> None:
    """A layer with another value gets a node of its own."""
    builder = layered(4)
    builder.add(("L:self", "._modules", ":layers", "._modules", ":2", ".late"), ["equals", True])

    assert len(layered(4).sheet()["nodes"]) < len(builder.sheet()["nodes"])


@given(
    st.permutations(
        [
            (("L:a",), ["equals", 1]),
            (("L:a",), ["type", "int"]),
            (("L:b", ".c"), ["present"]),
            (("G:d",), ["is", ["sentinel"]]),
        ]
    )
)
def test_sheet_is_equal_in_any_order_of_facts(facts: list[tuple[tuple[str, ...], list[Any]]]) -> None:
    """Dynamo keeps guards in a set, whose order is no part of the key."""
    builder, other = SheetBuilder(), SheetBuilder()
    for path, fact in facts:
        builder.add(path, fact)
    for path, fact in sorted(facts, key=repr):
        other.add(path, fact)
        other.add(path, fact)

    assert sheet_digest(other.sheet()) == sheet_digest(builder.sheet())


def test_sheet_survives_json() -> None:
    """A sheet read back from its canonical bytes has its digest."""
    builder = layered(3)
    builder.add_ambient({"grad_mode": False})
    builder.add_expression(parse_expression("L['n'] < 4"))
    sheet = builder.sheet()

    assert SHEET_SCHEMA == sheet["schema"]
    assert sheet_digest(sheet) == sheet_digest(json.loads(canonical_bytes(sheet)))


def test_sheet_digest_changes_with_every_fact() -> None:
    """Another value, path, ambient state or expression is another sheet."""
    digests = {
        sheet_digest(layered(2).sheet()),
        sheet_digest(layered(2, 1e-5).sheet()),
        sheet_digest(layered(3).sheet()),
    }
    for change in ("ambient", "expression"):
        builder = layered(2)
        if change == "ambient":
            builder.add_ambient({"grad_mode": True})
        else:
            builder.add_expression(["<", 1, 2])
        digests.add(sheet_digest(builder.sheet()))

    assert 5 == len(digests)


def test_item_step_tells_keys_of_different_types_apart() -> None:
    """`d[1]`, `d["1"]` and `d[True]` are three places."""
    assert 3 == len({item_step(1), item_step("1"), item_step(True)})


class Place(enum.Enum):
    HERE = "/srv/model/one"
    THING = object()


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


def test_value_of_an_enumeration_is_its_name_and_what_it_stands_for() -> None:
    """A member whose number changes gives another graph; a value that can't be said leaves the name."""
    read = reader()

    assert {"$enum": [f"{__name__}.Level", "LOW", 1]} == read.value(Level.LOW)
    assert 3 == read.value(Level.LOW | Level.HIGH)["$enum"][2]
    assert {"$enum": [f"{__name__}.Place", "HERE"]} == read.value(Place.HERE)
    assert {"$enum": [f"{__name__}.Place", "THING"]} == read.value(Place.THING)


def test_value_of_a_nameless_member_needs_a_value() -> None:
    """A combination without a name and with a value that can't be said is nothing at all."""
    member = object.__new__(Place)
    member._name_, member._value_ = None, object()  # type: ignore[assignment]

    with pytest.raises(Unsayable):
        reader().value(member)


def test_named_constant_is_for_enumerations_only() -> None:
    """Inputs take members of enumerations and torch's constants; what can't be said is no constant."""
    member = object.__new__(Place)
    member._name_, member._value_ = None, object()  # type: ignore[assignment]

    assert {"$enum": [f"{__name__}.Mode", "FAST", 1]} == named_constant(Mode.FAST)
    assert named_constant(7) is None
    assert named_constant(types.SimpleNamespace()) is None
    assert named_constant(member) is None


class Derived(Config):
    pass


def test_class_says_what_it_inherits() -> None:
    """One name with other bases is another class."""
    read = reader()

    assert ["class", f"{__name__}.Derived", [f"{__name__}.Config"]] == read.identity(Derived)
    assert {"$class": [f"{__name__}.Derived", [f"{__name__}.Config"]]} == read.value(Derived)
    assert {"$class": f"{__name__}.Config"} == read.value(Config)
    assert ("type", f"{__name__}.Derived", [f"{__name__}.Config"]) == read.type_fact(Derived)
    assert ("type", "builtins.dict") == read.type_fact(dict)
