"""The key: every part changes it, nothing else does, and secrets never enter it."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.schemas.canonical import digest_of
from cachectl.schemas.keying import (
    KEY_PARTS,
    KEY_VERSION,
    READABLE_KEY_VERSIONS,
    compute_key,
    is_secret_name,
    part_digests,
    warm_set_id,
    without_credentials,
)
from tests.strategies import DIGESTS, KEY_PART_DOCUMENTS

EMPTY_PARTS: dict[str, Any] = {name: {} for name in KEY_PARTS}


def test_compute_key_known_parts_give_known_key() -> None:
    """The formula is fixed: another key for unchanged parts needs another KEY_VERSION."""
    expected = digest_of({"key_version": 3, "parts": {name: digest_of({}) for name in KEY_PARTS}})

    assert expected == compute_key(EMPTY_PARTS)
    assert "sha256:73699c829a64b6ae6ab4be9e1f44c130783a9a9f0135fafedd8a4b9c292363d3" == compute_key(EMPTY_PARTS)
    assert 3 == KEY_VERSION


def test_compute_key_of_an_earlier_version_is_what_it_was() -> None:
    """Entries of an earlier program are read and verified by the key that it gave them."""
    first = "sha256:c7309743f036fd7c22de53f7b9cb3f63e7f7271ed063c68cd23a8d4135c8d118"
    second = "sha256:f3abf6fee6a51a5237a6243a5c2adf0c7d864733742a47c5eeb7c3bd13821a13"

    assert [first, second] == [compute_key(EMPTY_PARTS, version=version) for version in (1, 2)]
    assert KEY_VERSION == READABLE_KEY_VERSIONS[-1]


@pytest.mark.parametrize("name", KEY_PARTS)
def test_compute_key_other_part_gives_other_key(name: str) -> None:
    """Each of the nine parts is in the key."""
    assert compute_key(EMPTY_PARTS) != compute_key(EMPTY_PARTS | {name: {"x": 1}})


def test_compute_key_documents_swapped_between_parts_gives_other_key() -> None:
    """A document counts as that of its part."""
    first = EMPTY_PARTS | {"model": {"x": 1}}
    second = EMPTY_PARTS | {"sources": {"x": 1}}

    assert compute_key(first) != compute_key(second)


@given(KEY_PART_DOCUMENTS, st.randoms(use_true_random=False))
def test_compute_key_order_of_parts_changes_nothing(parts: dict[str, Any], order: random.Random) -> None:
    """The order in which the parts were gathered is not part of the key."""
    names = list(parts)
    order.shuffle(names)

    assert compute_key(parts) == compute_key({name: parts[name] for name in names})


@given(KEY_PART_DOCUMENTS)
def test_part_digests_are_in_the_order_of_the_key(parts: dict[str, Any]) -> None:
    """One digest per part, in the fixed order."""
    assert [(name, digest_of(parts[name])) for name in KEY_PARTS] == list(part_digests(parts).items())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, f"key parts are missing: {', '.join(KEY_PARTS)}"),
        ({name: {} for name in KEY_PARTS if name != "guards"}, "key parts are missing: guards"),
        (EMPTY_PARTS | {"trust": {}, "agreement": {}}, "no key parts: agreement, trust"),
    ],
)
def test_compute_key_wrong_parts_is_value_error(parts: dict[str, Any], message: str) -> None:
    """A key over other than the nine parts is refused, with their names."""
    with pytest.raises(ValueError) as caught:
        compute_key(parts)

    assert message == str(caught.value)


@given(st.lists(DIGESTS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_warm_set_id_any_order_is_equal(keys: list[str], order: random.Random) -> None:
    """A warm set is its members, in whatever order they were built."""
    shuffled = list(keys)
    order.shuffle(shuffled)

    assert digest_of(sorted(keys)) == warm_set_id(shuffled)


@pytest.mark.parametrize(
    ("keys", "message"), [([], "a warm set has at least one member"), (["main_decode"], "'main_decode' is no key")]
)
def test_warm_set_id_without_keys_is_value_error(keys: list[str], message: str) -> None:
    """An empty set, or one of other things than keys, has no id."""
    with pytest.raises(ValueError) as caught:
        warm_set_id(keys)

    assert message == str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "API_KEY",
        "OPENAI_APIKEY",
        "hf_token",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "MY_SECRET",
        "KEY2",
        "TOKEN",
    ],
)
def test_is_secret_name_secret_is_recognized(name: str) -> None:
    """Keys, tokens, secrets and passwords, in whatever case."""
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["MAX_TOKENS", "TOKENIZERS_PARALLELISM", "MONKEYPATCH", "TASK_QUEUE_ENABLE", "KEYBOARD", ""]
)
def test_is_secret_name_other_name_is_none(name: str) -> None:
    """Names that count tokens shape graphs and have to stay in the key."""
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host/path", "https://host/path"),
        ("https://token@host", "https://host"),
        ("postgresql+psycopg://u:p@db:5432/x and http://a@b", "postgresql+psycopg://db:5432/x and http://b"),
        ("https://u:p@ss@host/", "https://host/"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://host?mail=a@b", "https://host?mail=a@b"),
        ("me@host", "me@host"),
        ("", ""),
    ],
)
def test_without_credentials_url_loses_user_and_password(text: str, expected: str) -> None:
    """What stands before the host of a URL is left out, what stands after it stays."""
    assert expected == without_credentials(text)


def test_import_keying_loads_the_standard_library_only() -> None:
    """A boot computes keys in an image without any of our dependencies."""
    program = (
        "import sys; before = set(sys.modules); import cachectl.schemas.keying; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )

    assert "cachectl\n" == result.stdout
