"""Paths inside an artifact: what has to say where its hand-out lies, once its bytes were verified.

Owns the list of files that hold absolute paths which the runtime follows. Facts (torch_npu 2.13.0, npugraph_ex):

    static_kernel_compile_outputs/static_kernel_cache/CANN-<version>_<device>.json
        {key: path of a .run}; the runtime installs that `.run` where it exists, whoever owns it
        (_acl_concrete_graph/static_kernel.py, `_query_static_kernel_cache`)
    compiled_module
        the folder of static kernels is set anew at each load (`CompiledModel.rebase`); file names in its code serve
        tracebacks only

Standard library only. No NPU has run any of it here: the simulated CANN compiles no static kernels.
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath

from cachectl.schemas.boot import StoredEntry

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["repoint"]

_OUTPUTS, _CACHE = "static_kernel_compile_outputs", "static_kernel_cache"


def repoint(entry: StoredEntry, method_folder: Path) -> None:
    """Point what was laid down at its own files; a path to anything else goes. Raises OSError."""
    files = {item.path for item in entry.files}
    for path in sorted(files):
        parts = PurePosixPath(path).parts
        if parts[:-1] == (_OUTPUTS, _CACHE) and path.endswith(".json"):
            _rewrite(method_folder / path, _repointed(method_folder, path, files))


def _repointed(method_folder: Path, path: str, files: set[str]) -> dict[str, Any]:
    try:
        known = json.loads((method_folder / path).read_bytes())
        items = list(known.items())
    except (ValueError, AttributeError, RecursionError):
        return {}
    found = {}
    for key, value in items:
        # What lies below the folder of static kernels keeps its place; where that folder lay is the builder's affair.
        below = f"{_OUTPUTS}/{value.rpartition(f'/{_OUTPUTS}/')[2]}" if isinstance(value, str) else ""
        if below in files:
            found[key] = str(method_folder / below)
    return found


def _rewrite(path: Path, document: dict[str, Any]) -> None:
    pending = path.with_name(f".{path.name}")
    descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(document, indent=4).encode())
    os.replace(pending, path)
