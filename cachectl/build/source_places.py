"""Finds the files behind modules, and says where each stands in the key part `sources`.

Owns the mapping from modules to files under the recipe's roots or in packages. No module is imported here: loaded ones
are read, the others found.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cachectl.errors import BuildError
from cachectl.identity.source_closure import FoundModule
from cachectl.identity.source_digest import SourceError, SourceIndex
from cachectl.identity.sources import PACKAGE_ROOT

__all__ = ["TOOLCHAIN", "Place", "SourcePlaces", "top_of"]

# In the key part `toolchain` by version and git hash.
TOOLCHAIN = frozenset({"torch", "torch_npu", "torchgen", "functorch"})


@dataclass(frozen=True)
class Place:
    """Where a file stands in the document. `pinned`: in an installed package, whose version stands for the rest."""

    root: str
    path: str
    pinned: bool


class SourcePlaces:
    """Places files and finds modules, for one document.

    Args:
        roots: folder by root name.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = {name: os.path.realpath(folder) for name, folder in roots.items()}
        self._site = _site_folders()
        self._standard = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
        self._found: dict[str, FoundModule | None] = {}
        self._files: dict[str, str] = {}  # module name -> real path
        self._data: dict[str, bytes] = {}  # real path -> bytes
        self._modules_by_file: dict[str, str] | None = None

    def _find(self, name: str) -> FoundModule | None:
        if name not in self._found:
            self._found[name] = None  # a name that leads back to itself ends here
            self._found[name] = self._look(name)
        return self._found[name]

    def _look(self, name: str) -> FoundModule | None:
        if not name or top_of(name) in TOOLCHAIN:
            return None
        origin = _origin(name) or self._below_roots(name)
        if origin is None:
            return None
        path = os.path.realpath(origin)
        if self._is_foreign(path) or not os.path.isfile(path):
            return None
        place = self._place(path, name)
        if place is None:
            return None
        self._files[name] = path
        try:
            index: SourceIndex | None = SourceIndex(self._read(path))
        except SourceError:
            index = None
        return FoundModule(name, index, os.path.basename(path) == "__init__.py", place.pinned)

    def _below_roots(self, name: str) -> str | None:
        """Return where a module that is not loaded would come from in a rank process, which has these on its sys.path.

        A program that records need not have them there, nor import what only the recipe names.
        """
        if name in sys.modules:
            return None
        inner = os.path.join(*name.split("."))
        for root, folder in sorted(self._roots.items()):
            for candidate in (os.path.join(inner, "__init__.py"), f"{inner}.py"):
                if root != "recipe" and os.path.isfile(os.path.join(folder, candidate)):
                    return os.path.join(folder, candidate)
        return None

    def _module_of(self, path: str, name: str) -> str:
        """Return the module of a source file: the one whose globals the code reads, else the one loaded from there."""
        origin = _origin(name) if name else None
        if origin is not None and os.path.realpath(origin) == path:
            return name
        if self._modules_by_file is None:
            self._modules_by_file = {}
            for loaded in sorted(sys.modules):
                file = getattr(sys.modules[loaded], "__dict__", {}).get("__file__")
                if isinstance(file, str):
                    self._modules_by_file.setdefault(os.path.realpath(file), loaded)
        module = self._modules_by_file.get(path)
        if module is None:
            raise BuildError(
                f"Dynamo traced code of {path}, which no imported module comes from",
                hint="import it as a module instead of running its text",
            )
        return module

    def _place(self, path: str, module: str) -> Place | None:
        """Return where a file stands: the deepest folder that holds it decides, roots before others."""
        holders = [(len(folder), 1, name, folder) for name, folder in self._roots.items() if _is_under(path, folder)]
        holders += [(len(folder), 0, "", folder) for folder in self._site if _is_under(path, folder)]
        if holders:
            # Of two names for one folder the first counts: "path:0" before "recipe".
            length, rank, _, folder = max(holders, key=lambda holder: holder[:2])
            inner = os.path.relpath(path, folder).replace(os.sep, "/")
            if rank:
                name = min(name for size, kind, name, _ in holders if (size, kind) == (length, rank))
                return Place(name, inner, pinned=False)
            return Place(PACKAGE_ROOT + inner.split("/")[0].removesuffix(".py"), inner, pinned=True)
        top = top_of(module)
        if top == "__main__":
            return None
        # Outside of site-packages no version can be trusted (an editable install): its names count one by one.
        spec_origin = _origin(top)
        folders = [os.path.dirname(os.path.realpath(entry)) for entry in _package_path(top)]
        if spec_origin is not None and not folders:
            folders = [os.path.dirname(os.path.realpath(spec_origin))]
        for folder in folders:
            if _is_under(path, folder):
                return Place(PACKAGE_ROOT + top, os.path.relpath(path, folder).replace(os.sep, "/"), pinned=False)
        return None

    def _is_foreign(self, path: str) -> bool:
        """Say whether a file belongs to the standard library or to the toolchain's packages."""
        for folder in self._site:
            if _is_under(path, folder):
                return os.path.relpath(path, folder).split(os.sep)[0].removesuffix(".py") in TOOLCHAIN
        if any(_is_under(path, folder) for folder in self._roots.values()):
            return False
        return any(_is_under(path, folder) for folder in self._standard)

    def _is_library(self, module: str) -> bool:
        return top_of(module) in TOOLCHAIN or top_of(module) in sys.stdlib_module_names

    def _read(self, path: str) -> bytes:
        if path not in self._data:
            try:
                self._data[path] = Path(path).read_bytes()
            except OSError as error:
                raise BuildError(f"source {path} can't be read: {error.strerror}", hint="restore it") from error
        return self._data[path]


def _site_folders() -> list[str]:
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    folders.update(entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages"))
    return sorted({os.path.realpath(folder) for folder in folders}, key=len, reverse=True)


def top_of(module: str) -> str:
    """Return the top-level package of a module's name."""
    return module.partition(".")[0]


def _origin(name: str) -> str | None:
    """Return the source file of a module: of the loaded one, else where the import system would find it."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__dict__", {}).get("__file__")
        return file if isinstance(file, str) and (file.endswith(".py") or name == "__main__") else None
    parent = name.rpartition(".")[0]
    if parent and getattr(sys.modules.get(parent), "__path__", None) is None:
        return None  # finding it would import its parent
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec is not None and spec.has_location and str(spec.origin).endswith(".py") else None


def _package_path(top: str) -> list[str]:
    return list(getattr(sys.modules.get(top), "__path__", ()))


def _is_under(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)
