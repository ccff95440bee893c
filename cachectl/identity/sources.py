"""The key part `sources`: which code the graph came from, and whether the code here is still the same.

Owns the document's shape and both comparisons. The document names, file by file, the digests that count:

    {"version": 1,
     "attributes": ["decode", …],          names that traced code takes from objects
     "files": [{"root": "path:0", "path": "pkg/model.py", "module": "pkg.model", "traced": true, "whole": null,
                "definitions": {"Decoder.main_decode": "sha256:…"},   functions and classes, whole
                "classes": {"Decoder": "sha256:…"},                   bases, decorators, class attributes
                "bindings": {"EPS": "sha256:…", "len": null}}],       null: the module binds no such name
     "packages": [{"name": "einops", "distribution": "einops", "version": "0.8.0"}]}

`whole` is the raw digest of a file that counts by all of its bytes; the three maps are empty then. Roots are names, so
that the document holds no absolute path: "path:<n>" and "recipe" are folders that the caller knows, "package:<name>" is
wherever the import system finds that top-level package.

Beside it lies the raw table, which is no part of the key, since a comment changes it:

    {"files": {"path:0/pkg/model.py": "sha256:…"},                     an equal file is not parsed
     "code": {"path:0/pkg/model.py": {"Decoder.main_decode": ["sha256:…"]}},   the loaded functions' code
     "classes": {"path:0/pkg/model.py": {"Decoder": ["forward", "main_decode"]}},     the loaded classes' members
     "notes": ["pkg/model.py counts whole: star import at line 3"]}

Standard library only. Nothing here imports or runs what it checks, and no check raises: what can't be read is a reason.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from cachectl.schemas.boot import Reason
from cachectl.schemas.canonical import digest_bytes

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

    from cachectl.identity.source_digest import SourceIndex

__all__ = [
    "PACKAGE_ROOT",
    "SOURCES_VERSION",
    "changed_bytes",
    "check_files",
    "check_modules",
    "file_label",
    "live_class_names",
    "live_code",
    "package_folders",
]

SOURCES_VERSION = 1
PACKAGE_ROOT = "package:"
_REBUILD = "the code the graph was traced from has changed: build again with `cachectl build RECIPE`"
_MISSING = "missing"


def file_label(entry: Mapping[str, Any]) -> str:
    """Return the name by which the raw table knows a file of the document."""
    return f"{entry['root']}/{entry['path']}"


def check_files(document: Mapping[str, Any], raw: Mapping[str, Any], roots: Mapping[str, Path]) -> list[Reason]:
    """Compare a document with the files as they lie on disk; for the hook, where the program isn't running yet.

    Args:
        document: the key part.
        raw: the table beside it.
        roots: the folders behind the document's root names, packages apart.

    Returns:
        A reason for each difference, in the document's order; none means that all of it holds.
    """
    try:
        reasons = _check_packages(document)
        attributes = frozenset(document["attributes"])
        for entry in document["files"]:
            _check_shape(entry)
            found = _locate(entry, roots)
            if isinstance(found, Reason):
                reasons.append(found)
            else:
                reasons += _check_content(entry, raw, attributes, found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [_malformed(document, error)]
    return reasons


def changed_bytes(document: Mapping[str, Any], raw: Mapping[str, Any], roots: Mapping[str, Path]) -> list[Reason]:
    """Return a reason of kind noise for each file whose bytes are others than at build.

    What counts in the file is for `check_files` to say. A file that can't be read is not named here. Raises as reading
    a malformed document does: KeyError, TypeError, ValueError, AttributeError.
    """
    reasons = []
    for entry in document["files"]:
        found = _locate(entry, roots)
        if isinstance(found, Reason):
            continue
        try:
            digest = digest_bytes(_read(found))
        except OSError:
            continue
        stored = _raw_digest(entry, raw)
        if digest != stored:
            hint = "nothing to do: the code that the graph was traced from is the same"
            reasons.append(Reason("sources", str(entry["path"]), stored, digest, "noise", hint))
    return reasons


def check_modules(
    document: Mapping[str, Any],
    raw: Mapping[str, Any],
    modules: Mapping[str, ModuleType],
    roots: Mapping[str, Path] | None = None,
) -> list[Reason]:
    """Compare a document with what this process has imported: the files behind its modules, and the code it loaded.

    The file says what the source is now, the live function what is going to run: they differ after an edit since the
    import, a monkeypatch, or a stale .pyc. Both have to agree with the build.

    Args:
        document: the key part.
        raw: the table beside it.
        modules: sys.modules.
        roots: folders behind the root names; without them a file whose module was not imported is a reason even where
            no traced function stands in it.

    Returns:
        A reason for each difference, in the document's order; none means that all of it holds.
    """
    try:
        reasons = _check_packages(document)
        attributes = frozenset(document["attributes"])
        for entry in document["files"]:
            _check_shape(entry)
            module = _find_module(entry, modules, roots or {})
            if module is None:
                found = _missing_module(entry, roots or {})
                reasons += [found] if isinstance(found, Reason) else _check_content(entry, raw, attributes, found)
                continue
            path = _source_of(module)
            if path is None:
                hint = f"module {module.__name__} has no source file here: install its .py files, no .pyc or zip"
                stored = _raw_digest(entry, raw)
                reasons.append(Reason("sources", str(entry["path"]), stored, _MISSING, kind="absent", hint=hint))
                continue
            content = _check_content(entry, raw, attributes, path)
            reasons += content or _check_live(entry, raw, attributes, module)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [_malformed(document, error)]
    return reasons


# The parts of a check.


def _check_packages(document: Mapping[str, Any]) -> list[Reason]:
    if document["version"] != SOURCES_VERSION:
        raise ValueError(f"version {document['version']!r}, this program reads {SOURCES_VERSION}")
    if not document["packages"]:
        return []
    from importlib import metadata  # a fifth of the hook's start, and most models trace no package

    reasons = []
    for package in document["packages"]:
        stored, name = package["version"], package["distribution"]
        try:
            wanted = metadata.version(name)
        except (metadata.PackageNotFoundError, OSError, KeyError, ValueError):
            wanted = None
        if stored != wanted:
            reasons.append(
                Reason(
                    "sources",
                    f"package {package['name']}",
                    stored=stored,
                    wanted=wanted or _MISSING,
                    kind="semantic" if wanted else "absent",
                    hint=f"install {name}=={stored}, or build for this version with `cachectl build RECIPE`",
                )
            )
    return reasons


def _check_content(
    entry: Mapping[str, Any], raw: Mapping[str, Any], attributes: frozenset[str], path: Path
) -> list[Reason]:
    """Compare one file: its bytes first, then, where they differ, the digests of what counts in it."""
    label, stored = str(entry["path"]), _raw_digest(entry, raw)
    try:
        data = _read(path)
    except OSError as error:
        return [
            Reason(
                "sources",
                label,
                stored=stored,
                wanted=_MISSING,
                kind="absent",
                hint=f"can't be read ({error.strerror or type(error).__name__}): put the file back, or {_REBUILD}",
            )
        ]
    digest = digest_bytes(data)
    if digest == stored:
        return []
    if entry["whole"] is not None:
        return [] if digest == entry["whole"] else [Reason("sources", label, entry["whole"], digest, hint=_REBUILD)]
    from cachectl.identity.source_digest import SourceError, SourceIndex  # equal files are not parsed

    try:
        index = SourceIndex(data)
        if index.dynamic:
            hint = f"{index.dynamic}: such a file counts by all of its bytes, so {_REBUILD}"
            return [Reason("sources", label, stored, digest, hint=hint)]
        return list(_check_names(entry, index, attributes))
    except SourceError as error:
        return [Reason("sources", label, stored, digest, kind="corrupt", hint=f"can't be parsed: {error}")]


def _check_names(entry: Mapping[str, Any], index: SourceIndex, attributes: frozenset[str]) -> Iterator[Reason]:
    found = {
        "definitions": index.definition,
        "classes": lambda name: index.class_header(name, attributes),
        "bindings": index.binding,
    }
    for kind, digest in found.items():
        for name, stored in sorted(entry[kind].items()):
            wanted = digest(name)
            if wanted != stored:
                yield Reason(
                    "sources",
                    f"{entry['path']}: {name if kind != 'classes' else f'class {name}'}",
                    stored=stored or _MISSING,
                    wanted=wanted or _MISSING,
                    kind="semantic" if wanted or not stored else "absent",
                    hint=_REBUILD,
                )


def _check_live(
    entry: Mapping[str, Any], raw: Mapping[str, Any], attributes: frozenset[str], module: ModuleType
) -> Iterator[Reason]:
    for qualname, stored in sorted(raw["code"].get(file_label(entry), {}).items()):
        wanted = live_code(module, qualname)
        if wanted != stored:
            yield Reason(
                "sources",
                f"{entry['path']}: {qualname}",
                stored=stored,
                wanted=_MISSING if wanted is None else wanted,
                kind="absent" if wanted is None else "semantic",
                hint="the loaded function differs from its file: it was patched, edited after the import, or came from "
                "a stale .pyc; restart the program, or build with the patch in place",
            )
    for qualname, names in sorted(raw["classes"].get(file_label(entry), {}).items()):
        live = live_class_names(module, qualname, attributes)
        if live != names:
            yield Reason(
                "sources",
                f"{entry['path']}: class {qualname}",
                stored=names,
                wanted=_MISSING if live is None else live,
                hint="the loaded class has other members than at build: it was patched; restart the program, or build "
                "with the patch in place",
            )


# Finding files.


def package_folders(name: str) -> list[Path]:
    """Return the folders that hold the top-level module or package `name`, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        # A module of that name is loaded and has no spec: ask the path alone.
        spec = importlib.machinery.PathFinder.find_spec(name)
    if spec is None:
        return []
    folders = [Path(place).parent for place in spec.submodule_search_locations or ()]
    if spec.has_location and spec.origin and not spec.submodule_search_locations:
        folders.append(Path(spec.origin).parent)
    return folders


def _locate(entry: Mapping[str, Any], roots: Mapping[str, Path]) -> Path | Reason:
    root, path = str(entry["root"]), str(entry["path"])
    if root.startswith(PACKAGE_ROOT):
        name = root[len(PACKAGE_ROOT) :]
        folders = package_folders(name)
        if not folders:
            hint = f"package {name} is not installed here: install it, or run in the image that was built for"
            return Reason("sources", path, stored=name, wanted=_MISSING, kind="absent", hint=hint)
        return next((folder / path for folder in folders if (folder / path).is_file()), folders[0] / path)
    if root not in roots:
        hint = f"the recipe gives no folder {root}: check model.path"
        return Reason("sources", path, stored=root, wanted=_MISSING, kind="absent", hint=hint)
    return Path(roots[root]) / path


def _find_module(
    entry: Mapping[str, Any], modules: Mapping[str, ModuleType], roots: Mapping[str, Path]
) -> ModuleType | None:
    """Return the loaded module of a file: by its name, else by its file, since a script is `__main__` when run."""
    name = entry["module"]
    if name is None:
        return None
    module = modules.get(name)
    if module is not None and name != "__main__":
        return module
    base, tail = os.path.basename(entry["path"]), f"/{entry['path']}"
    wanted = os.path.realpath(Path(roots[entry["root"]]) / entry["path"]) if entry["root"] in roots else None
    for other in list(modules.values()):
        file = _file_of(other)
        if file is None or os.path.basename(file) != base:
            continue
        if os.path.realpath(file) == wanted if wanted is not None else os.path.abspath(file).endswith(tail):
            return other
    return None


def _missing_module(entry: Mapping[str, Any], roots: Mapping[str, Path]) -> Path | Reason:
    if not entry["traced"] and (entry["root"] in roots or entry["root"].startswith(PACKAGE_ROOT)):
        # A data file, or a module that is imported later: nothing of it can have been loaded stale.
        return _locate(entry, roots)
    return Reason(
        "sources",
        str(entry["path"]),
        stored=entry["module"],
        wanted=_MISSING,
        kind="absent",
        hint=f"the program has not imported {entry['module'] or entry['path']}, which the graph was traced from",
    )


def _file_of(module: object) -> str | None:
    # Not by getattr: a lazy module's __getattr__ may import, or raise what it likes.
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def _source_of(module: ModuleType) -> Path | None:
    file = _file_of(module)
    # A script may have any name; a module of another name is a .pyc or an extension.
    if file is None or (not file.endswith(".py") and module.__name__ != "__main__"):
        return None
    path = Path(file)
    return path if path.is_file() else None


def _read(path: Path) -> bytes:
    # A FIFO under a source's name would block the boot.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(None, "not a regular file", str(path))
        return file.read()


def _raw_digest(entry: Mapping[str, Any], raw: Mapping[str, Any]) -> str | None:
    digest = raw["files"].get(file_label(entry))
    return None if digest is None else str(digest)


def _check_shape(entry: Mapping[str, Any]) -> None:
    path = entry["path"]
    if not isinstance(path, str) or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError(f"path {path!r} leaves its root")


def _malformed(document: object, error: Exception) -> Reason:
    return Reason(
        "sources",
        "document",
        stored=document.get("version") if isinstance(document, Mapping) else None,
        wanted=SOURCES_VERSION,
        kind="corrupt",
        hint=f"the stored document can't be used ({type(error).__name__}: {error}): run `cachectl build RECIPE`",
    )


# Looking at what a process has loaded.


def live_code(module: ModuleType, qualname: str) -> list[str] | None:
    """Return the digests of the code behind a qualified name as loaded: the object's own, and what it wraps.

    For a function inside another the outer one counts. A property has up to three codes, a decorated function those
    of its wrapper and of what the wrapper holds; so a patch that wraps shows, too.

    Returns:
        The digests in the order in which they are reached; None where the name leads to no Python function, as for
        a lambda.
    """
    outermost = qualname.partition(".<locals>.")[0]
    codes: list[CodeType] = []
    _unwrap(_member(module, outermost), outermost, codes, set())
    from cachectl.identity.source_digest import code_digest

    return [code_digest(code) for code in codes] or None


def live_class_names(module: ModuleType, qualname: str, attributes: frozenset[str]) -> list[str] | None:
    """Return which of `attributes` a loaded class has of its own, sorted; None where there is no such class.

    A method that was put there from elsewhere shows where it comes from, `mix=patches:faster_mix`, so that a patch that
    is no longer applied is seen as well as a new one.
    """
    found = _member(module, qualname)
    if not isinstance(found, type):
        return None
    from cachectl.identity.source_digest import DEFINES

    names = []
    for name, member in vars(found).items():
        if name in attributes or name in DEFINES:
            origin = _origin(member)
            own = origin is None or origin == f"{module.__name__}:{qualname}.{name}"
            names.append(name if own else f"{name}={origin}")
    return sorted(names)


def _origin(member: object) -> str | None:
    """Return "module:qualname" of a method, property or static method; None where it is no plain function."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return f"{member.__module__}:{member.__qualname__}" if isinstance(member, FunctionType) else None


def _member(module: ModuleType, qualname: str) -> Any:
    """Return what a qualified name leads to, without running descriptors; None where it leads nowhere."""
    found: Any = module
    for step in qualname.split("."):
        members = getattr(found, "__dict__", None)
        if not isinstance(members, Mapping) or step not in members:
            return None
        found = members[step]
    return found


def _unwrap(found: Any, qualname: str, codes: list[CodeType], seen: set[int]) -> None:
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, (staticmethod, classmethod)):
        _unwrap(found.__func__, qualname, codes, seen)
    elif isinstance(found, property):
        for part in (found.fget, found.fset, found.fdel):
            if part is not None:
                _unwrap(part, qualname, codes, seen)
    elif isinstance(found, (functools.partial, functools.partialmethod, functools.cached_property)):
        _unwrap(found.func, qualname, codes, seen)
    elif isinstance(found, FunctionType):
        codes.append(found.__code__)
        wrapped = getattr(found, "__wrapped__", None)
        if wrapped is not None:
            _unwrap(wrapped, qualname, codes, seen)
        elif sys.version_info >= (3, 11) and found.__code__.co_qualname != qualname:
            # A decorator without functools.wraps: what it wraps is in its closure.
            for cell in found.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:
                    continue
                if isinstance(content, (FunctionType, staticmethod, classmethod, functools.partial)):
                    _unwrap(content, qualname, codes, seen)
    elif callable(getattr(found, "__wrapped__", None)):
        _unwrap(found.__wrapped__, qualname, codes, seen)
