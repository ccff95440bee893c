"""Whole source files below a recipe's roots, by their code: what a finding about a model as a whole stands on.

Owns no finding. That a rank's model has no such method follows from no function that could be named: any code that was
imported to make it may give it one. Comments, docstrings and layout don't count. Standard library only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from cachectl.identity.source_digest import SourceIndex
from cachectl.identity.source_rendering import digest_of_nodes
from cachectl.identity.source_syntax import SourceError
from cachectl.schemas.canonical import digest_bytes

__all__ = ["imported_files", "is_unchanged"]


def imported_files(roots: Mapping[str, Path]) -> dict[str, str]:
    """Return the digest of each source file below the roots that this process has imported, by root and place.

    Args:
        roots: folders by name, as `source_roots` gives them; those that are no `path:` are left out.
    """
    found = {}
    folders = {name: os.path.realpath(folder) for name, folder in roots.items() if name.startswith("path:")}
    # An interpreter that lies below a root is part of the toolchain, with all that is installed for it.
    libraries = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    for module in list(sys.modules.values()):
        origin = getattr(module, "__file__", None)
        if not isinstance(origin, str) or not origin.endswith(".py"):
            continue
        path = Path(os.path.realpath(origin))
        name = next((name for name, folder in folders.items() if path.is_relative_to(folder)), None)
        if name is None or any(
            path.is_relative_to(library) and not Path(folders[name]).is_relative_to(library) for library in libraries
        ):
            continue
        found[f"{name}/{path.relative_to(folders[name]).as_posix()}"] = _digest(path)
    return found


def is_unchanged(noted: Mapping[str, str], roots: Mapping[str, Path]) -> bool:
    """Say whether every noted file has the code that it had."""
    for label, digest in noted.items():
        name, _, place = label.partition("/")
        if name not in roots or _digest(roots[name] / place) != digest:
            return False
    return True


def _digest(path: Path) -> str:
    """Return the digest of a file's code, of its bytes where this interpreter can't parse it, "" where it is gone."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    try:
        return str(digest_of_nodes(list(SourceIndex(data).tree.body)))
    except SourceError:
        return digest_bytes(data)
