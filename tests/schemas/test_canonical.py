"""Canonical JSON: one byte form per value, in every process; what it can't say is refused with its place."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.schemas.canonical import (
    canonical_bytes,
    digest_bytes,
    digest_file,
    digest_of,
    digest_of_parsed,
    is_digest,
)
from tests.strategies import CANONICAL_VALUES, JSON_VALUES, TEXTS

EMPTY_DIGEST = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def _shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        names = list(value)
        order.shuffle(names)
        return {name: _shuffled(value[name], order) for name in names}
    return [_shuffled(member, order) for member in value] if isinstance(value, (list, tuple)) else value


@given(JSON_VALUES)
def test_canonical_bytes_json_value_reads_back_equal(value: Any) -> None:
    """Canonical JSON is JSON: reading it gives the value, types included."""
    again = json.loads(canonical_bytes(value))

    assert value == again
    assert repr(json.loads(json.dumps(value, sort_keys=True))) == repr(again)


@given(CANONICAL_VALUES)
def test_canonical_bytes_own_output_is_a_fixed_point(value: Any) -> None:
    """Sets, tuples and non-finite floats survive a stored document: the bytes of what was read are the same bytes."""
    data = canonical_bytes(value)

    assert data == canonical_bytes(json.loads(data))


@given(JSON_VALUES, st.randoms(use_true_random=False))
def test_canonical_bytes_key_order_changes_nothing(value: Any, order: random.Random) -> None:
    """The order in which an object was filled is not part of its value."""
    assert canonical_bytes(value) == canonical_bytes(_shuffled(value, order))


@given(st.lists(TEXTS | st.integers(), max_size=8))
def test_canonical_bytes_set_equals_sorted_list_of_its_members(members: list[Any]) -> None:
    """A set is written as the list of its members in the order of their canonical bytes."""
    expected = canonical_bytes(sorted(set(members), key=canonical_bytes))

    assert expected == canonical_bytes(set(members))
    assert expected == canonical_bytes(frozenset(reversed(members)))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        (None, "null"),
        (1, "1"),
        ([], {}),
        ("", None),
        (math.nan, "nan"),
        (math.inf, -math.inf),
        ([1, 2], [2, 1]),
        ("\u00e9", "e\u0301"),
    ],
)
def test_canonical_bytes_different_values_differ(left: Any, right: Any) -> None:
    """What Python or a reader may take for equal stays apart."""
    assert canonical_bytes(left) != canonical_bytes(right)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"b": 1, "a": [True, None, 1.5]}, b'{"a":[true,null,1.5],"b":1}'),
        ('\u00e9\u4e16\n"', '"é世\\n\\""'.encode()),
        (1e16, b"1e+16"),
        (0.1, b"0.1"),
        (math.nan, b'{"$float":"nan"}'),
        (math.inf, b'{"$float":"inf"}'),
        (-math.inf, b'{"$float":"-inf"}'),
        ({3, 1, 2}, b"[1,2,3]"),
        ((1, (2,)), b"[1,[2]]"),
        (2**70, b"1180591620717411303424"),
    ],
)
def test_canonical_bytes_known_value_gives_known_bytes(value: Any, expected: bytes) -> None:
    """The byte form is fixed: a change of it would orphan every stored key."""
    assert expected == canonical_bytes(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object, "$: a value of type type has no canonical form"),
        (b"x", "$: a value of type bytes has no canonical form"),
        ({"a": [0, {"b": 1j}]}, "$.a[1].b: a value of type complex has no canonical form"),
        ({"a": {1: 2}}, "$.a: the key 1 is no string (int)"),
        ({"a": {None: 2}}, "$.a: the key None is no string (NoneType)"),
        ({"a": {(1, b"x")}}, "$.a{}[1]: a value of type bytes has no canonical form"),
    ],
)
def test_canonical_bytes_unsayable_value_names_its_place(value: Any, message: str) -> None:
    """A value without a canonical form is refused with its place, never stringified."""
    with pytest.raises(TypeError) as caught:
        canonical_bytes(value)

    assert message == str(caught.value)


def test_canonical_bytes_object_is_refused_without_its_address() -> None:
    """The message holds the type only: an object's repr may hold an address."""
    with pytest.raises(TypeError) as caught:
        canonical_bytes({"model": object()})

    assert "$.model: a value of type object has no canonical form" == str(caught.value)


def test_digest_of_other_hash_seed_is_equal() -> None:
    """Sets of text give the same digest in a process with another hash seed."""
    program = "from cachectl.schemas.canonical import digest_of; print(digest_of({'names': {'a', 'b', 'c', 'd', 'e'}}))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2", "3")
    }

    assert {digest_of({"names": ["a", "b", "c", "d", "e"]})} == digests


@given(st.binary(max_size=64))
def test_digest_bytes_any_bytes_is_digest(data: bytes) -> None:
    """Every digest has the form that `is_digest` accepts."""
    assert is_digest(digest_bytes(data))


def test_digest_file_equals_digest_of_its_bytes(tmp_path: Path) -> None:
    """A file's digest is that of its bytes, also beyond one read."""
    data = bytes(range(256)) * 8192
    (tmp_path / "blob").write_bytes(data)
    (tmp_path / "empty").write_bytes(b"")

    assert digest_bytes(data) == digest_file(tmp_path / "blob")
    assert EMPTY_DIGEST == digest_file(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256:",
        EMPTY_DIGEST.upper(),
        EMPTY_DIGEST[:-1],
        EMPTY_DIGEST + "\n",
        EMPTY_DIGEST[7:],
        EMPTY_DIGEST.replace("sha256", "sha512"),
        EMPTY_DIGEST[:-1] + "\u0665",
        EMPTY_DIGEST.encode(),
        None,
    ],
)
def test_is_digest_other_form_is_refused(text: object) -> None:
    """Only `sha256:` and 64 lower-case hex digits make a digest; it becomes a path below the store."""
    assert not is_digest(text)


@given(JSON_VALUES)
def test_digest_of_parsed_is_the_digest_of_what_json_reads(value: Any) -> None:
    """The fast digest of a parsed document is the canonical one."""
    parsed = json.loads(json.dumps(value))

    assert digest_of(parsed) == digest_of_parsed(parsed)


@pytest.mark.parametrize("text", ["NaN", "[1, -Infinity]", '{"b": Infinity, "a": 1.0}', '"\\ud800"'])
def test_digest_of_parsed_takes_what_json_reads_and_can_not_write(text: str) -> None:
    """Python's reader takes NaN, infinities and lone surrogates: the digests are equal there too."""
    parsed = json.loads(text)

    assert digest_of(parsed) == digest_of_parsed(parsed)
