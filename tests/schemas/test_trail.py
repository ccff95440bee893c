"""The trail from bytes to meaning: what a store keeps is read back, and every file on the way counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.trail import fold, pointer_bytes, read_pointer

DIGEST = digest_bytes(b"recipe")
PATHS = st.lists(st.text(min_size=1).filter(lambda text: text.isprintable()), min_size=1, max_size=4)


@given(paths=PATHS)
def test_pointer_to_files_is_read_back(paths: list[str]) -> None:
    """Whatever a path holds."""
    assert tuple(paths) == read_pointer(pointer_bytes(paths))


def test_pointer_to_a_meaning_is_one_line() -> None:
    """As stores before framework recipes have it."""
    assert (f"{DIGEST}\n".encode(), DIGEST) == (pointer_bytes(DIGEST), read_pointer(pointer_bytes(DIGEST)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"sha256:12",
        b"{",
        b"[]",
        b"7",
        b'{"then": []}',
        b'{"then": [1]}',
        b'{"then": [""]}',
        b'{"then": "a"}',
        b"\xff",
    ],
)
def test_pointer_that_is_none_is_none(data: bytes) -> None:
    """Damage is told from an unknown recipe by the reader."""
    assert read_pointer(data) is None


def test_fold_tells_contents_their_order_and_their_absence_apart() -> None:
    """Two files changed for each other, or one that is not there, are other bytes."""
    one, other = digest_bytes(b"1"), digest_bytes(b"2")
    folded = [fold(DIGEST, contents) for contents in ([one], [other], [None], [one, other], [other, one], [one, None])]

    assert len(folded) == len({*folded, DIGEST}) - 1
    assert fold(DIGEST, [one]) != fold(one, [one])
