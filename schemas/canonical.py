"""Canonical JSON and digests: equal values give equal bytes in every process, on every machine.

Owns the byte form under every key and digest. Standard library only. The rules: object keys are strings and sorted by
code point, sets are sorted by their members' canonical bytes, no white space, UTF-8 without escapes beyond JSON's own,
floats in Python's shortest round-trip form, and the three non-finite floats as `{"$float": "nan"}`; a mapping of just
that form has the same bytes on purpose, so that a stored document read back keeps its digest. Integers and floats
stay different (1 is not 1.0), and so do True and 1. What JSON can't say is refused, never stringified: an object's repr
may hold an address, and then no key would ever be found again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "DIGEST_PREFIX",
    "canonical_bytes",
    "canonical_bytes_of_parsed",
    "digest_bytes",
    "digest_file",
    "digest_of",
    "digest_of_parsed",
    "is_digest",
]

DIGEST_PREFIX = "sha256:"
_CHUNK_BYTES = 1 << 20
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def canonical_bytes(value: Any) -> bytes:
    """Return the canonical JSON of `value` as UTF-8.

    Args:
        value: None, bool, int, float, str, lists, tuples, sets and mappings with string keys of these.

    Raises:
        TypeError: a value or key that canonical JSON can't say, named with its place in the document.
    """
    return json.dumps(
        _normalize(value, "$"), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
    ).encode("utf-8", "surrogatepass")


def digest_bytes(data: bytes) -> str:
    """Return the digest of bytes, as `sha256:<hex>`."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


def digest_of(value: Any) -> str:
    """Return the digest of a value's canonical JSON; raises as `canonical_bytes` does."""
    return digest_bytes(canonical_bytes(value))


def digest_of_parsed(value: Any) -> str:
    """Return `digest_of` of a value that `json.loads` returned; as `canonical_bytes_of_parsed`."""
    return digest_bytes(canonical_bytes_of_parsed(value))


def canonical_bytes_of_parsed(value: Any) -> bytes:
    """Return `canonical_bytes` of a value that `json.loads` returned, several times faster: for the hook's manifests.

    Only for such values: elsewhere the C encoder would turn a key that is no string into one without a word.
    """
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        return canonical_bytes(value)  # json.loads reads NaN, and canonical JSON says it in its own way.
    return text.encode("utf-8", "surrogatepass")


def digest_file(path: Path | str) -> str:
    """Return the digest of a file's bytes; raises OSError as `open` does."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return DIGEST_PREFIX + hasher.hexdigest()


def is_digest(text: object) -> bool:
    """Say whether `text` has the form `sha256:` and 64 lower-case hex digits."""
    return (
        isinstance(text, str)
        and len(text) == len(DIGEST_PREFIX) + 64
        and text.startswith(DIGEST_PREFIX)
        # Nothing is left: one call for 64 characters, since a boot looks at hundreds of digests.
        and not text[len(DIGEST_PREFIX) :].strip("0123456789abcdef")
    )


def _normalize(value: Any, place: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        # A subclass of str (an enum member, say) is written by its text, as json would.
        return value if not isinstance(value, str) else str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"$float": "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")}
    if isinstance(value, Mapping):
        document = {}
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: the key {key!r} is no string ({type(key).__name__})")
            document[str.__str__(key)] = _normalize(member, f"{place}.{key}")
        return document
    if isinstance(value, (list, tuple)):
        return [_normalize(member, f"{place}[{index}]") for index, member in enumerate(value)]
    if isinstance(value, AbstractSet):
        return sorted((_normalize(member, f"{place}{{}}") for member in value), key=canonical_bytes)
    raise TypeError(f"{place}: a value of type {type(value).__name__} has no canonical form")
