"""KeyParts: the nine documents as one value that computes the same key as the boot path."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from cachectl.schemas.key import KeyParts
from cachectl.schemas.keying import KEY_PARTS, compute_key, part_digests
from tests.strategies import KEY_PART_DOCUMENTS


def test_key_parts_fields_are_the_key_parts_in_order() -> None:
    """The model names the parts as the key does."""
    assert list(KEY_PARTS) == list(KeyParts.model_fields)


@given(KEY_PART_DOCUMENTS)
def test_key_parts_key_is_that_of_the_plain_documents(parts: dict[str, Any]) -> None:
    """The model adds nothing to the key and takes nothing away."""
    model = KeyParts.of(parts)

    assert compute_key(parts) == model.key()
    assert part_digests(parts) == model.digests()
    assert list(KEY_PARTS) == list(model.documents())


@pytest.mark.parametrize("change", [{"guards": None}, {"guards": []}, {"trust": {}}])
def test_key_parts_wrong_part_is_refused(change: dict[str, Any]) -> None:
    """A part that is no object, or no part, doesn't pass."""
    with pytest.raises(ValidationError):
        KeyParts.of({name: {} for name in KEY_PARTS} | change)


def test_key_parts_missing_part_is_refused() -> None:
    """All nine parts are needed, also empty ones."""
    with pytest.raises(ValidationError, match="guards"):
        KeyParts.of({name: {} for name in KEY_PARTS if name != "guards"})
