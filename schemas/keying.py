"""The key: which parts it is made of, how it is computed, and what may never enter it.

Owns `KEY_VERSION`, the order of the key parts and the pure functions over their documents; what a part's document says
is identity's business. Standard library only: a boot recomputes keys, and so does the reading of an entry manifest.
A change of anything here that alters the key of unchanged parts raises `KEY_VERSION`, so that old entries are missed
and never mistaken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from cachectl.schemas.canonical import digest_of, is_digest

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "KEY_PARTS",
    "KEY_VERSION",
    "READABLE_KEY_VERSIONS",
    "compute_key",
    "is_secret_name",
    "part_digests",
    "warm_set_id",
    "without_credentials",
]

# 2: guard sheets say what classes inherit and what was not there, and `sources` holds what runs untraced.
# 3: guard sheets say what modules and functions lack, which objects are one, what abstract classes say of an object,
# and the defaults and closures of functions of objects that traced code makes.
KEY_VERSION = 3
# Whose entries are listed and verified; only those of KEY_VERSION are ever used.
READABLE_KEY_VERSIONS = (1, 2, 3)

KEY_PARTS = (
    "model",
    "sources",
    "inputs",
    "topology",
    "options",
    "toolchain",
    "device",
    "environment",
    "guards",
)

# The last word or its ending: HF_TOKEN and OPENAI_APIKEY are secrets, MAX_TOKENS and TOKENIZERS_PARALLELISM are not
# and shape graphs, so they have to stay in the key.
# Texts, which re compiles when they are first asked for: it took 1 ms of the hook's start.
_HIDDEN_WORD = r"(KEY|TOKEN|SECRET|SECRETS|PASSWORD|PASSWORDS|PASSWD)[0-9]*\Z"
_URL_CREDENTIALS = r"(?i:(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://)[^/?#\s@]*(?:@[^/?#\s@]*)*@)"


def part_digests(parts: Mapping[str, Any], digest: Callable[[Any], str] = digest_of) -> dict[str, str]:
    """Return the digest of each key part's document, in the order of `KEY_PARTS`.

    Args:
        parts: the documents.
        digest: `digest_of`, or `digest_of_parsed` where the documents were read from JSON.

    Raises:
        ValueError: a part is missing, or one is no key part.
        TypeError: a document that canonical JSON can't say.
    """
    missing = [name for name in KEY_PARTS if name not in parts]
    if missing:
        raise ValueError(f"key parts are missing: {', '.join(missing)}")
    unknown = sorted(str(name) for name in parts if name not in KEY_PARTS)
    if unknown:
        raise ValueError(f"no key parts: {', '.join(unknown)}")
    return {name: digest(parts[name]) for name in KEY_PARTS}


def compute_key(
    parts: Mapping[str, Any], digest: Callable[[Any], str] = digest_of, *, version: int = KEY_VERSION
) -> str:
    """Return the key of the nine key parts' documents; raises as `part_digests` does.

    Each part enters by its digest, so two entries whose keys differ can be compared part by part without the documents.

    Args:
        parts: the documents.
        digest: as for `part_digests`.
        version: that of the entry, where an earlier program made it.
    """
    return digest_of({"key_version": version, "parts": part_digests(parts, digest)})


def warm_set_id(keys: Iterable[str]) -> str:
    """Return the id of the warm set that has these members, in whatever order they come.

    Raises:
        ValueError: no member, or a key that is no digest.
    """
    members = sorted(keys)
    if not members:
        raise ValueError("a warm set has at least one member")
    for key in members:
        if not is_digest(key):
            raise ValueError(f"{key!r} is no key")
    return digest_of(members)


def is_secret_name(name: str) -> bool:
    """Say whether the value of the environment variable `name` is a secret: never stored, hashed or shown."""
    return any(re.search(_HIDDEN_WORD, word) for word in re.split(r"[^A-Z0-9]+", name.upper()))


def without_credentials(text: str) -> str:
    """Return `text` with the user and password of every URL in it left out."""
    return re.sub(_URL_CREDENTIALS, r"\1", text) if "@" in text else text
