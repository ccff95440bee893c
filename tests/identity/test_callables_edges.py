"""Functions whose descriptions hold what few do: code, unbound cells, foreign and undescribable globals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from fractions import Fraction
from json import dumps
from typing import Any

import pytest

from cachectl.identity.callables import Undigestible, callable_digest, describe_callable

LOG = logging.getLogger(__name__)


def narrow(x: int, *, width: int = 4) -> int:
    return x * width


def wide(x: int, *, width: int = 8) -> int:
    return x * width


def reading(x: Any) -> Any:
    LOG.debug("seen")
    return dumps(x), Fraction(x)


def _unbound() -> Callable[[], Any]:
    def inner() -> Any:
        return later

    if len(__name__) < 0:
        later = 1
    return inner


def _holding(value: Any) -> Callable[[], Any]:
    return lambda: value


def test_describe_callable_keyword_defaults_count() -> None:
    """A keyword-only default is a constant that the code uses."""
    assert [["width", 4]] == describe_callable(narrow)["keyword_defaults"]["mapping"]
    assert callable_digest(narrow) != callable_digest(wide)


def test_describe_callable_unbound_cell_is_left_out() -> None:
    """A name that is not bound yet has nothing to compare."""
    assert "closure" not in describe_callable(_unbound())


def test_describe_callable_bound_code_is_its_digest() -> None:
    """Code that a closure holds counts as code, wherever it was compiled."""
    same, other = compile("x + 1", "other.py", "eval"), compile("x + 2", "a.py", "eval")
    digests = [callable_digest(_holding(code)) for code in (compile("x + 1", "a.py", "eval"), same, other)]

    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_describe_callable_globals_of_others_are_known_by_name_or_type() -> None:
    """A foreign function or class is its name; a logger, which leads to all the others, is its type."""
    found = describe_callable(reading)["globals"]

    assert {"name": ["json", "dumps"]} == found["dumps"]
    assert {"name": ["fractions", "Fraction"]} == found["Fraction"]
    assert {"type": ["logging", "Logger"]} == found["LOG"]


def test_describe_callable_bound_tensor_is_undigestible() -> None:
    """What lives in this process only is refused, with its place."""
    tensor = type("Tensor", (), {"__module__": "torch"})()

    with pytest.raises(Undigestible, match=r"closure 'value' is a torch\.Tensor"):
        describe_callable(_holding(tensor))


def test_describe_callable_bound_dtype_is_its_text() -> None:
    """What torch prints the same everywhere is a constant."""
    dtype = type("dtype", (), {"__module__": "torch", "__str__": lambda _: "torch.float16"})()

    assert {"value": {"torch.dtype": "torch.float16"}} == describe_callable(_holding(dtype))["closure"]
