"""Makes the key part `sources` of the code that Dynamo traced.

Owns the mapping from code objects to files under the recipe's roots or in packages. What a digest is and what is
followed stands in cachectl.identity. No module is imported here: loaded ones are read, the others found.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from cachectl.build.source_places import TOOLCHAIN, Place, SourcePlaces, top_of
from cachectl.build.untraced import Untraced
from cachectl.errors import BuildError
from cachectl.identity.source_closure import FoundModule, SourceClosure
from cachectl.identity.source_digest import code_digest
from cachectl.identity.sources import PACKAGE_ROOT, SOURCES_VERSION, live_class_names, live_code
from cachectl.schemas.canonical import digest_bytes

__all__ = ["TracedCode", "sources_document"]

# Functions that Dynamo itself makes of a frame after a graph break; the frame they come from is recorded.
_RESUMED = "torch_dynamo_resume_in_"


@dataclass
class TracedCode:
    """One code object that Dynamo went through, with the module it reads its globals from."""

    code: CodeType
    module: str
    types: set[type] = field(default_factory=set)


def sources_document(
    traced: list[TracedCode],
    roots: Mapping[str, Path],
    extra_modules: Sequence[str],
    extra_files: Iterable[Path],
    untraced: Sequence[Untraced] = (),
    asked: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the key part `sources` and the raw table beside it, as `SourceRecorder.document` describes them.

    Args:
        untraced: functions that ran while the graph was made, and whose bodies are in it though Dynamo saw none.
    """
    documenter = _Documenter(roots)
    documenter.add_untraced(untraced)
    return documenter.document(traced, extra_modules, extra_files, asked)


class _Documenter(SourcePlaces):
    """Makes one document: places files, finds modules without importing any, and writes down what the closure names."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        super().__init__(roots)
        self._compiled: dict[str, dict[str, set[str]]] = {}
        self._distributions: Mapping[str, list[str]] | None = None
        self._notes: set[str] = set()
        self._closure = SourceClosure(self._find)
        self._functions: dict[str, set[str]] = {}

    def document(
        self,
        traced: list[TracedCode],
        extra_modules: Sequence[str],
        extra_files: Iterable[Path],
        asked: Sequence[str],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        # Outer functions first: one that was traced itself is not counted as having run untraced around its inner ones.
        for item in sorted(traced, key=lambda item: bool(item.code.co_flags & inspect.CO_NESTED)):
            self._add(item)
        for item in traced:
            for kind in sorted(item.types, key=lambda kind: (kind.__module__, kind.__qualname__)):
                for part in kind.__mro__:
                    self._closure.add_class(part.__module__, part.__qualname__)
        for name in extra_modules:
            self._add_extra(name)
        for name in asked:
            self._add_extra(name, asked=True)
        files, raw = self._written()
        for path in extra_files:
            self._write_extra(path, files, raw)
        packages = self._packages()
        raw["notes"] = sorted(self._notes)
        document = {
            "version": SOURCES_VERSION,
            "attributes": sorted(self._closure.attributes),
            "files": sorted(files, key=lambda entry: (entry["root"], entry["path"])),
            "packages": packages,
        }
        return document, raw

    def add_untraced(self, untraced: Sequence[Untraced]) -> None:
        """Add functions that ran as they are, with all that they read and call.

        One that a statement apart from it has registered counts with its whole file: that statement has no name.
        """
        for item in untraced:
            code, module = item.plain().__code__, str(item.plain().__globals__.get("__name__"))
            found = self._find(module)
            if found is None:
                raise BuildError(
                    f"{item.plain().__qualname__} ran while the graph was made ({item.why}), and {code.co_filename} is "
                    "neither under the recipe's folders nor in a package",
                    hint="add its folder to model.path in the recipe",
                )
            qualname = self._qualname(found, code)
            self._add_found(found, code, qualname, runs=True)
            if item.registered and found.index is not None and not found.index.is_registered(qualname):
                self._closure.add_whole(module, f"{qualname} is {item.why}")

    # From code objects to names.

    def _add(self, item: TracedCode) -> None:
        code = item.code
        if code.co_name.startswith((_RESUMED, f"<{_RESUMED}")) or top_of(item.module) in TOOLCHAIN:
            return
        module = item.module if self._stands_in(item.module, code) else None
        if module is None:
            if not os.path.isfile(code.co_filename):
                self._add_generated(item)
                return
            path = os.path.realpath(code.co_filename)
            if self._is_foreign(path):
                return
            module = self._module_of(path, item.module)
        found = self._find(module)
        path = self._files.get(module, code.co_filename)
        if found is None:
            raise BuildError(
                f"Dynamo traced {code.co_name} in {path}, which is neither under the recipe's folders nor in a package",
                hint="add its folder to model.path in the recipe",
            )
        self._add_found(found, code, self._qualname(found, code))

    def _add_found(self, found: FoundModule, code: CodeType, qualname: str, *, runs: bool = False) -> None:
        module, path = found.name, self._files[found.name]
        if not found.pinned and code_digest(code) not in self._codes_of(path).get(qualname, ()):
            raise BuildError(
                f"{qualname} as Dynamo traced it is not what {path} says: the file was edited after its import, or an "
                "import hook rewrites it",
                hint="run the build again, without the hook",
            )
        if not self._closure.add_function(module, qualname, runs=runs):
            return
        self._functions.setdefault(module, set()).add(qualname.partition(".<locals>.")[0])

    def _stands_in(self, module: str, code: CodeType) -> bool:
        """Say whether the module whose globals the code reads has it in its file.

        Equal code objects of two files are one to Dynamo's caches, so that co_filename may name the other file.
        """
        found = self._find(module)
        if found is None or found.index is None:
            return False
        return code_digest(code) in self._codes_of(self._files[module]).get(self._qualname(found, code), ())

    def _add_generated(self, item: TracedCode) -> None:
        """Add code that was generated: a dataclass's method stands in no file, but the class's fields say all of it."""
        code, module = item.code, item.module
        found = self._find(module)
        # A named tuple's constructor has globals of its own; the name that holds the tuple is read by who calls it.
        if found is None and (top_of(module) in sys.stdlib_module_names or module.startswith("namedtuple_")):
            return
        if found is None:
            raise BuildError(
                f"Dynamo traced {code.co_name} ({code.co_filename}), which has no source file",
                hint="move what the compiled method calls into a module of its own: without a source it can't be "
                "proved unchanged",
            )
        loaded = sys.modules.get(module)
        for kind in _classes_in(loaded) if loaded is not None else ():
            if any(getattr(member, "__code__", None) is code for member in vars(kind).values()):
                self._closure.add_class(module, kind.__qualname__)
                return
        self._closure.add_whole(module, f"generated code ({code.co_name}, {code.co_filename})")

    def _add_extra(self, name: str, *, asked: bool = False) -> None:
        module, _, qualname = name.partition(":")
        found = self._find(module)
        if found is None:
            if module in sys.modules and self._is_library(module):
                return
            raise BuildError(
                f"module {module!r} is neither under the recipe's folders nor in a package",
                hint="add its folder to model.path in the recipe",
            )
        if not qualname:
            self._closure.add_whole(module, "asked for as a whole")
        elif self._closure.add_function(module, qualname, asked=asked):
            self._functions.setdefault(module, set()).add(qualname.partition(".<locals>.")[0])

    def _qualname(self, found: FoundModule, code: CodeType) -> str:
        if sys.version_info >= (3, 11):
            return code.co_qualname
        name = found.index.qualname_at(code.co_name, code.co_firstlineno) if found.index is not None else None
        if name is None and code.co_name.startswith("<") and found.index is not None:
            # A comprehension has its line, but no node of its own name: any function around it will do.
            return self._around(found, code)
        return name or code.co_name

    def _around(self, found: FoundModule, code: CodeType) -> str:
        path = self._files[found.name]
        for qualname, inner in _walk_code(compile(self._read(path), path, "exec", dont_inherit=True)):
            if inner.co_name == code.co_name and inner.co_firstlineno == code.co_firstlineno:
                return qualname
        return code.co_name

    def _codes_of(self, path: str) -> dict[str, set[str]]:
        """Return the digests of all code in a file by qualified name, as this interpreter compiles it now."""
        if path not in self._compiled:
            codes: dict[str, set[str]] = {}
            try:
                whole = compile(self._read(path), path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                raise BuildError(f"{path} can't be compiled: {error}", hint="mend the file and build again") from error
            for qualname, code in _walk_code(whole):
                codes.setdefault(qualname, set()).add(code_digest(code))
            self._compiled[path] = codes
        return self._compiled[path]

    # Writing down.

    def _written(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        files: list[dict[str, Any]] = []
        raw: dict[str, Any] = {"files": {}, "code": {}, "classes": {}, "notes": []}
        attributes = frozenset(self._closure.attributes)
        for name, names in sorted(self._closure.modules.items()):
            found = self._find(name)
            if found is None:
                continue
            path = self._files[name]
            place = self._place(path, name)
            if place is None:
                continue
            if place.pinned and not (names.traced or names.asked) and self._distribution(place) is not None:
                continue  # only read from: its package's version says it
            digest = digest_bytes(self._read(path))
            entry: dict[str, Any] = {
                "root": place.root,
                "path": place.path,
                "module": name,
                "traced": names.traced,
                "whole": digest if names.whole else None,
                "definitions": {},
                "classes": {},
                "bindings": {},
            }
            label = f"{place.root}/{place.path}"
            if names.whole:
                if not place.pinned:
                    self._notes.add(f"{place.path} counts whole: {names.whole}")
            elif found.index is not None:
                entry["definitions"] = {part: found.index.definition(part) for part in names.definitions}
                entry["classes"] = {part: found.index.class_header(part, attributes) for part in names.classes}
                entry["bindings"] = {part: found.index.binding(part) for part in names.bindings}
            files.append(entry)
            raw["files"][label] = digest
            self._write_live(name, label, path, names.classes, attributes, raw)
        return files, raw

    def _write_live(
        self, name: str, label: str, path: str, classes: set[str], attributes: frozenset[str], raw: dict[str, Any]
    ) -> None:
        module = sys.modules.get(name)
        if module is None:
            return
        for qualname in sorted(self._functions.get(name, ())):
            live = live_code(module, qualname)
            written = self._codes_of(path).get(qualname, set())
            if live is not None and written.intersection(live):
                raw["code"].setdefault(label, {})[qualname] = live
            else:
                self._notes.add(f"{label}: the loaded {qualname} is not found by its name, so only its file is checked")
        for qualname in sorted(classes):
            members = live_class_names(module, qualname, attributes)
            if members is not None:
                raw["classes"].setdefault(label, {})[qualname] = members

    def _write_extra(self, path: Path, files: list[dict[str, Any]], raw: dict[str, Any]) -> None:
        real = os.path.realpath(path)
        place = self._place(real, "__main__") if os.path.isfile(real) else None
        if place is None:
            raise BuildError(
                f"source {path} is no file under the recipe's folders",
                hint="correct model.sources in the recipe, or add its folder to model.path",
            )
        digest = digest_bytes(self._read(real))
        raw["files"][f"{place.root}/{place.path}"] = digest
        for entry in files:
            if (entry["root"], entry["path"]) == (place.root, place.path):
                entry.update(whole=digest, definitions={}, classes={}, bindings={})
                return
        entry = {"root": place.root, "path": place.path, "module": None, "traced": False, "whole": digest}
        files.append({**entry, "definitions": {}, "classes": {}, "bindings": {}})

    def _packages(self) -> list[dict[str, Any]]:
        packages = {}
        for name in self._closure.modules:
            found = self._find(name)
            place = self._place(self._files[name], name) if found is not None else None
            if place is None or not place.root.startswith(PACKAGE_ROOT):
                continue
            distribution = self._distribution(place)
            if distribution is not None:
                top = place.root[len(PACKAGE_ROOT) :]
                version = importlib.metadata.version(distribution)
                packages[top] = {"name": top, "distribution": distribution, "version": version}
        return [packages[name] for name in sorted(packages)]

    def _distribution(self, place: Place) -> str | None:
        if self._distributions is None:
            self._distributions = importlib.metadata.packages_distributions()
        owners = self._distributions.get(place.root[len(PACKAGE_ROOT) :], [])
        return min(owners) if owners else None


def _walk_code(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield all code inside a module's or function's code, with the qualified names that CPython 3.11 gives it."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            qualname = getattr(inner, "co_qualname", prefix + inner.co_name)
            yield qualname, inner
            # Of nested code only a class body's has no fresh locals of its own.
            is_class = not inner.co_flags & inspect.CO_NEWLOCALS
            yield from _walk_code(inner, f"{qualname}." if is_class else f"{qualname}.<locals>.")


def _classes_in(module: ModuleType) -> Iterator[type]:
    stack = [member for member in vars(module).values() if isinstance(member, type)]
    seen: set[type] = set()
    while stack:
        kind = stack.pop()
        if kind in seen or kind.__module__ != module.__name__:
            continue
        seen.add(kind)
        yield kind
        stack += [member for member in vars(kind).values() if isinstance(member, type)]
