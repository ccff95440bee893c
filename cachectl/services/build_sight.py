"""What a build can see of all that may make a case fail, as one digest: unchanged, a gate's refusal comes again.

Owns what is looked at: the recipe, the request, the environment, the files below the recipe's folders (linked folders
too; small files by content, large ones by size and time), and the installed distributions by name. Too much is better
than too little: whatever else changes here costs one more try. Reads only.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachectl.identity.environment import is_placement, recorded_value
from cachectl.schemas.canonical import digest_of
from cachectl.services.request import RecipeRequest

__all__ = ["seen_digest"]

# A folder of more files than this is no model's: what a build could see of it is not known.
_FILES = 20_000
# By content, since a mounted ConfigMap or a new checkout has new times; weights are larger, and seldom change in place.
_SMALL_BYTES = 256 << 10
_CONTENT_BYTES = 64 << 20
# Written by Python itself.
_LEFT_OUT = frozenset({"__pycache__"})


def seen_digest(request: RecipeRequest, store: Path) -> str | None:
    """Return the digest; None where there is too much to look at.

    Args:
        store: the store's folder, which building changes.
    """
    files: dict[str, Any] = {}
    left_bytes = _CONTENT_BYTES
    for root in sorted({*request.roots.values()}):
        for path, status in _files(root, store):
            if path in files:
                continue
            content = None
            if status.st_size <= min(_SMALL_BYTES, left_bytes):
                content = _content(path)
                left_bytes -= status.st_size
            files[path] = content or [status.st_size, status.st_mtime_ns]
            if len(files) > _FILES:
                return None
    return digest_of(
        {
            "recipe": request.loaded.digest,
            "request": request.request,
            "environment": {
                name: recorded_value(name, value) for name, value in request.environ.items() if not is_placement(name)
            },
            "files": files,
            "installed": sorted(_distributions()),
            "python": sys.executable,
        }
    )


def _files(root: Path, store: Path) -> Iterator[tuple[str, os.stat_result]]:
    # Linked folders count: a package often lies elsewhere. A link that leads up would never end.
    seen = {_identity(folder) for folder in (store, *Path(os.path.realpath(root)).parents)}
    for folder, folders, names in os.walk(root, followlinks=True):
        identity = _identity(folder)
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(".")]
        for name in names:
            path = os.path.join(folder, name)
            try:
                # What a link leads to counts: weights and configurations often lie elsewhere.
                status = os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status


def _identity(folder: str | Path) -> tuple[int, int] | None:
    """Return which folder it is, by whatever path; None for one that is gone."""
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _content(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(_SMALL_BYTES)).hexdigest()
    except OSError:
        return None


def _distributions() -> Iterator[str]:
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        yield from (name for name in names if name.endswith((".dist-info", ".egg-link", ".pth")))
