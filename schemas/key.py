"""The nine key parts of one entry as one validated value.

Owns no rule of its own: the key is computed by `keying`, which the boot path uses too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachectl.schemas.fields import Document
from cachectl.schemas.keying import KEY_PARTS, KEY_VERSION, compute_key, part_digests

__all__ = ["KEY_VERSION", "KeyParts"]


class KeyParts(Document):
    """One document per key part, in the order of the key; what the documents say is free."""

    model: dict[str, Any]
    sources: dict[str, Any]
    inputs: dict[str, Any]
    topology: dict[str, Any]
    options: dict[str, Any]
    toolchain: dict[str, Any]
    device: dict[str, Any]
    environment: dict[str, Any]
    guards: dict[str, Any]

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> KeyParts:
        """Return the parts of a plain mapping; raises pydantic's ValidationError for a missing or unknown part."""
        return cls.model_validate(dict(parts))

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return the documents by part name, sets and tuples in them untouched."""
        return {name: getattr(self, name) for name in KEY_PARTS}

    def digests(self) -> dict[str, str]:
        """Return the digest of each part, in the order of the key."""
        return part_digests(self.documents())

    def key(self, version: int = KEY_VERSION) -> str:
        """Return the entry's key; `version` is the entry's own, where an earlier program made it."""
        return compute_key(self.documents(), version=version)
