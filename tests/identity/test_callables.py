"""Functions in a key: by their code, constants and bound values, never by their disassembly or an address."""

from __future__ import annotations

import enum
import functools
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cachectl
from cachectl.identity.callables import Undigestible, callable_digest, describe_callable, home_module
from cachectl.schemas.canonical import canonical_bytes

ROOT = Path(cachectl.__file__).resolve().parents[1]
MODULE = """\
import functools

SCALE = 2
LOG = object()


def helper(x):
    return x + SCALE


def custom_pass(graph, depth=1):
    "Multiply."
    def inner(node):
        return node * 3
    return helper(inner(graph)) + depth


def make(factor):
    def apply(graph):
        return graph * factor
    return apply


class Pass:
    kind = "add"

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, graph):
        return graph + self.factor

    def run(self, graph):
        return graph - self.factor
"""
EXPRESSIONS = {
    "function": "custom_pass",
    "closure": "make(3)",
    "partial": "functools.partial(custom_pass, depth=4)",
    "object": "Pass(5)",
    "method": "Pass(6).run",
    "lambda": "lambda graph: graph * 7",
}


def loaded(text: str, expression: str) -> Any:
    """Return what an expression in a module of this text is."""
    names: dict[str, Any] = {"__name__": "passes", "functools": functools}
    exec(compile(text, "/anywhere/passes.py", "exec"), names)
    return eval(expression, names)


def digest(expression: str, *edit: str, text: str = MODULE) -> str:
    """Return the digest of an expression's function, in a module that is edited first."""
    return callable_digest(loaded(text.replace(*edit) if edit else text, expression))


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_callable_digest_equal_in_fresh_processes(name: str, tmp_path: Path) -> None:
    """No address, no hash seed and no file's place is in it: the runtime's own digest changes in each process."""
    (tmp_path / "passes.py").write_text(MODULE)
    script = (
        "import functools, passes; from passes import *\n"
        "from cachectl.identity.callables import callable_digest\n"
        f"print(callable_digest({EXPRESSIONS[name]}))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }

    assert 1 == len(digests)


@pytest.mark.parametrize(
    ("expression", "old", "new"),
    [
        ("custom_pass", "node * 3", "node * 4"),
        ("custom_pass", "depth=1", "depth=2"),
        ("custom_pass", "SCALE = 2", "SCALE = 3"),
        ("custom_pass", "x + SCALE", "x - SCALE"),
        ("make(3)", "graph * factor", "graph / factor"),
        ("Pass(5)", "graph + self.factor", "graph * self.factor"),
        ("Pass(5)", 'kind = "add"', 'kind = "sub"'),
        ("functools.partial(custom_pass, depth=4)", "node * 3", "node * 5"),
    ],
)
def test_callable_digest_code_counts(expression: str, old: str, new: str) -> None:
    """Code, nested code, defaults, plain constants and helpers of its own module are in the digest."""
    assert digest(expression) != digest(expression, old, new)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("make(3)", "make(4)"),
        ("Pass(5)", "Pass(6)"),
        ("Pass(5)", "Pass(5).run"),
        ("functools.partial(custom_pass, depth=4)", "functools.partial(custom_pass, depth=5)"),
        ("functools.partial(custom_pass, 1)", "functools.partial(custom_pass, True)"),
        ("functools.partial(custom_pass, depth=4)", "functools.partial(helper)"),
        ("custom_pass", "helper"),
        ("lambda graph: graph * 7", "lambda graph: graph * 8"),
    ],
)
def test_callable_digest_bound_values_count(left: str, right: str) -> None:
    """Objects and partials have no code of their own; what is bound tells them apart, as the runtime does not."""
    assert digest(left) != digest(right)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"Multiply."', '"Multiply and more."'),
        ("    return helper", "    # adds\n    return helper"),
        ("SCALE = 2", "\n\n\nSCALE = 2"),
        ("LOG = object()", "LOG = None"),
    ],
)
def test_callable_digest_layout_never_counts(old: str, new: str) -> None:
    """Comments, docstrings, lines and what the code does not read change nothing."""
    assert digest("custom_pass") == digest("custom_pass", old, new)


def test_describe_callable_is_canonical_and_names_no_place() -> None:
    """The description is JSON, and holds neither a path nor an address."""
    for expression in EXPRESSIONS.values():
        text = canonical_bytes(describe_callable(loaded(MODULE, expression))).decode()
        assert "/anywhere" not in text
        assert "0x" not in text
        json.loads(text)


class Mode(enum.Enum):
    """Two modes."""

    FAST = 1
    EXACT = 2


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Mode.FAST, Mode.EXACT),
        ((1, 2), [1, 2]),
        ({1, 2}, {1, 3}),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (1j, 2j),
        (b"a", b"b"),
        (math.sin, math.cos),
        (len, abs),
        (str.upper, str.lower),
        (math, os),
        (int, float),
        (0.0, -0.0),
    ],
    ids=repr,
)
def test_callable_digest_kinds_of_bound_values(left: Any, right: Any) -> None:
    """Each kind of value that can be compared elsewhere is told from another of its kind, and from itself not."""

    def digest_with(value: Any) -> str:
        return callable_digest(functools.partial(print, value))

    assert digest_with(left) == digest_with(left)
    assert digest_with(left) != digest_with(right)


def test_callable_digest_recursive_function_ends() -> None:
    """A function that refers to itself, by its closure or its module, has a digest."""
    text = "def outer():\n    def walk(x):\n        return walk(x - 1) if x else 0\n    return walk\n"
    text += "def ping(x):\n    return pong(x)\ndef pong(x):\n    return ping(x)\n"

    assert digest("outer()", text=text) == digest("outer()", text=text)
    assert digest("ping", text=text) != digest("pong", text=text)


@pytest.mark.parametrize("bind", [functools.partial, lambda function, value: lambda: function(value)])
def test_callable_digest_of_a_handle_is_refused_by_name(bind: Callable[[Any, Any], Any]) -> None:
    """A lock lives in this process only; the error says where it was found."""
    with pytest.raises(Undigestible, match=r"(args\[0\]|closure 'value') is a _thread.lock"):
        callable_digest(bind(print, threading.Lock()))


def test_home_module_looks_through_wrappers() -> None:
    """Whose code a callable is does not depend on how it is wrapped."""

    @functools.wraps(json.dumps)
    def wrapped() -> None:
        """Nothing."""

    assert {"json"} == {home_module(item) for item in (json.dumps, functools.partial(json.dumps, 1), wrapped)}
    assert "threading" == home_module(threading.Thread().run)
