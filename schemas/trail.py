"""The trail from a recipe file's bytes to its meaning, where other files take part in what it means.

Owns how the bytes of files beside a recipe are folded into the digest by which a boot finds its record. A recipe whose
meaning hangs on its own bytes has no trail. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cachectl.schemas.canonical import canonical_bytes, digest_of, is_digest

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["MAX_STEPS", "Trail", "fold", "pointer_bytes", "read_pointer"]

# By digests of bytes: the digest of their meaning, or the files to read next.
Trail: TypeAlias = "tuple[tuple[str, str | tuple[str, ...]], ...]"

# The recipe names a config, the config its models; more steps there are not.
MAX_STEPS = 4


def fold(digest: str, contents: Sequence[str | None]) -> str:
    """Return the digest after one step.

    Args:
        digest: of all bytes before.
        contents: digests of the step's files, None for one that is not there.
    """
    return digest_of({"before": digest, "beside": list(contents)})


def pointer_bytes(meaning: str | Sequence[str]) -> bytes:
    """Return what a store keeps for a digest of bytes: the digest of their meaning, or which files to look at next."""
    if isinstance(meaning, str):
        return f"{meaning}\n".encode("ascii")
    return canonical_bytes({"then": list(meaning)}) + b"\n"


def read_pointer(data: bytes) -> str | tuple[str, ...] | None:
    """Return what `pointer_bytes` wrote; None for anything else."""
    text = data.decode("utf-8", "replace").strip()
    if is_digest(text):
        return text
    try:
        then = json.loads(text)["then"]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(then, list) or not then or not all(isinstance(path, str) and path for path in then):
        return None
    return tuple(then)
