"""Graph captures: what is counted in the runtime's class, and what an artifact says of its graph keys."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachectl.runtimes.artifact import ArtifactSummary, inspect_artifact
from cachectl.runtimes.captures import GraphKeys, captures, predicted_keys

DATA = Path(__file__).parent / "artifact" / "data"


class AclGraph:
    """Captures as the runtime's class does, as far as it is counted (acl_graph.py of torch_npu 2.13.0)."""

    def __init__(self, limit: int = 64) -> None:
        self.graphs_meta: dict[str, int] = {}
        self.limit = limit
        self._captured = False

    def compile(self, key: str, moved: bool = False) -> str:
        self._captured = True
        if key in self.graphs_meta and not moved:
            return key
        if len(self.graphs_meta) == self.limit:
            self.reset_captured_graph()
            return "fallback_to_eager"
        self.compile_for_graph_key(key)
        return key

    def compile_for_graph_key(self, key: str) -> None:
        self.graphs_meta[key] = 1

    def reset_captured_graph(self) -> None:
        self.graphs_meta = {}


@pytest.fixture
def graph_class(monkeypatch: pytest.MonkeyPatch) -> type[AclGraph]:
    """A class of its own, where the runtime has it."""
    kind = type("AclGraph", (), dict(vars(AclGraph)))
    names = ("npugraph_ex", "npugraph_ex._acl_concrete_graph", "npugraph_ex._acl_concrete_graph.acl_graph")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[2]].AclGraph = kind  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "torch_npu.dynamo.npugraph_ex._acl_concrete_graph.acl_graph", raising=False)
    return kind


def test_captures_are_counted_from_the_first_time_on(graph_class: type[AclGraph]) -> None:
    """New keys, known keys that moved, the limit; each graph is told apart."""
    before = captures()
    one, other = graph_class(), graph_class(limit=1)

    answers = [one.compile("a"), one.compile("a"), one.compile("a", moved=True), one.compile("b")]
    answers += [other.compile("a"), other.compile("b")]

    after = captures()
    assert before is not None
    assert after is not None
    made = after.since(before)
    assert ["a", "a", "a", "b", "a", "fallback_to_eager"] == answers
    assert (4, 1, 1) == (made.captured, made.recaptured, made.fell_back)
    assert ({id(one), id(other)}, {id(other)}) == (made.graphs, made.fallen)
    assert made.seconds >= 0 <= made.warm_up_seconds


def test_counting_begins_once(graph_class: type[AclGraph]) -> None:
    """Asking again wraps nothing again."""
    captures()
    wrapped = graph_class.compile_for_graph_key
    captures()

    assert wrapped is graph_class.compile_for_graph_key


def test_class_that_is_another_one_is_not_counted(graph_class: type[AclGraph]) -> None:
    """A wheel without that method: nobody knows."""
    del graph_class.compile_for_graph_key  # type: ignore[attr-defined]

    assert captures() is None


def test_wheel_without_the_classes_module_is_not_counted(
    graph_class: type[AclGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's first call asks: it goes on, and nobody knows."""
    assert captures() is not None
    monkeypatch.delitem(sys.modules, "npugraph_ex._acl_concrete_graph.acl_graph")

    assert captures() is None


def summary_of(name: str, **settings: str) -> ArtifactSummary:
    """Return what a stored artifact says, as if it had captured; `settings` replace its own."""
    found = inspect_artifact((DATA / f"{name}.bin").read_bytes())
    return replace(found, settings={**found.settings, "force_eager": "False", **settings})


def integer(low: int | None, high: int | None) -> dict[str, Any]:
    return {"integer": {"range": [low, high]}}


def test_static_graph_has_one_key() -> None:
    """And the inputs that it writes are named: they are captured again where they move."""
    assert GraphKeys(64, 1, (), (), ("arg4_1",)) == predicted_keys(summary_of("npugraph_ex_static"), {})


def test_forced_eager_graph_captures_nothing() -> None:
    """Whatever its inputs are."""
    keys = predicted_keys(summary_of("npugraph_ex_dynamic", force_eager="True"), {})

    assert (0, None) == (keys.keys, keys.warning)


def test_sizes_that_are_symbols_are_no_warning() -> None:
    """A program of one batch size has one key; how many it has nobody can say."""
    keys = predicted_keys(summary_of("npugraph_ex_dynamic"), {"L['x']": {"tensor": {"shape": [{"range": [2, 8]}]}}})

    assert (None, ("arg2_1", "arg5_1"), (), None) == (keys.keys, keys.sizes, keys.values, keys.warning)


@pytest.mark.parametrize(
    ("part", "keys", "words"),
    [
        ({"L['n']": integer(2, None)}, None, "each new value of L['n'] is another graph key: after 64 of them"),
        ({"L['n']": integer(1, 64)}, 64, None),
        ({"L['n']": integer(1, 65)}, 65, "each new value of L['n'] is another graph key"),
        ({"L['n']": integer(1, 8), "L['m']": integer(1, 4)}, None, "each new value of L['m'], L['n'] is"),
        ({}, None, "each new value of arg9_1 is another graph key"),
    ],
)
def test_integers_in_the_graph_key_are_a_warning_beyond_the_limit(
    part: dict[str, Any], keys: int | None, words: str | None
) -> None:
    """A length or position has another value at each step: after capture_limit of them nothing is replayed."""
    static = summary_of("npugraph_ex_static")
    spec = replace(static.inputs[0], index=9, name="arg9_1", shape=None, value="s9")
    summary = replace(static, inputs=(*static.inputs, spec), graph_key_inputs=((9, True),))

    found = predicted_keys(summary, part)

    assert keys == found.keys
    assert (words is None) == (found.warning is None)
    assert (words or "") in (found.warning or "")


def test_artifact_that_says_nothing_of_its_keys_is_no_warning() -> None:
    """Another runtime's, or another form."""
    keys = predicted_keys(replace(summary_of("npugraph_ex_static"), graph_key_inputs=None, settings={}), {})

    assert (None, None, None) == (keys.limit, keys.keys, keys.warning)
