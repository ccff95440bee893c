"""Which definitions, class headers and bindings traced code stands on, followed through names and imports.

Owns the walk that build makes once; a check compares what came out and follows nothing. Given the functions that Dynamo
traced, it lists for each file the digests that have to stay equal, so that whatever could lead the walk elsewhere is
itself in the list. Files that can't be followed by name are taken whole. Finding modules is the caller's: this room
imports nothing. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cachectl.identity.guard_classes import IMPLICIT_METHODS
from cachectl.identity.source_digest import ImportTarget, Read, SourceIndex

__all__ = ["FoundModule", "ModuleNames", "SourceClosure"]

# And those by which objects are made and their attributes found: a guard sheet says by other facts that they lack.
_UNASKED = IMPLICIT_METHODS | {"__getattr__", "__init__", "__new__", "__post_init__", "__setattr__"}


@dataclass
class FoundModule:
    """A module that belongs to the identity.

    Args:
        name: its name as the program imports it.
        index: its source; None where it can't be parsed, and counts whole.
        is_package: whether it is a package's `__init__`.
        pinned: whether it belongs to an installed package: version and raw bytes stand for it, and nothing in it is
            followed.
    """

    name: str
    index: SourceIndex | None
    is_package: bool = False
    pinned: bool = False


@dataclass
class ModuleNames:
    """What counts in one module, by name. `whole` says why all of its bytes do; then the names don't matter."""

    traced: bool = False
    # The recipe names a function of it, which the program need not import.
    asked: bool = False
    whole: str | None = None
    definitions: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    bindings: set[str] = field(default_factory=set)


class SourceClosure:
    """The names that count, growing with each function that is added.

    Args:
        find: returns the module of a name, or None where it isn't ours to follow (torch, the standard library,
            extension modules, what doesn't exist).
    """

    def __init__(self, find: Callable[[str], FoundModule | None]) -> None:
        self.modules: dict[str, ModuleNames] = {}
        self.attributes: set[str] = set()
        self._find = find
        self._seen: set[tuple[str, tuple[str, ...], bool]] = set()
        self._done: set[tuple[str, str, str, bool]] = set()

    def add_function(self, module: str, qualname: str, *, runs: bool = False, asked: bool = False) -> bool:
        """Add a function that Dynamo traced, or one to be treated so.

        Args:
            runs: it ran as it is while the graph was made, so that what it calls counts whole.
            asked: the recipe names it and the graph may hold nothing of it: a program that never imports it is as good.

        A nested function counts as its outermost one, which then is taken to have run untraced, as a maker of closures
        does. If that one was traced too, add it first.

        Returns:
            Whether the module's source names it. If not, the module has been taken whole.
        """
        found = self._open(module)
        if found is None:
            return False
        if asked:
            self._names(module).asked = True
        else:
            self._names(module).traced = True
        if found.index is None:
            return True
        if not found.index.has_definition(qualname):
            self.add_whole(module, f"no definition of {qualname}")
            return False
        # Its own name too: a subclass that comes to define it would be called in its place.
        self.attributes |= found.index.attribute_names(qualname) | {qualname.rpartition(".")[2]} | _UNASKED
        if not found.pinned:
            self._definition(found, found.index, qualname, traced=not runs)
        return True

    def add_class(self, module: str, qualname: str) -> None:
        """Add a class that an object in the traced code had, by its header."""
        found = self._open(module)
        if found is None or found.index is None or found.pinned:
            return
        if found.index.is_class(qualname):
            self._class(found, found.index, qualname, runs=False)

    def add_whole(self, module: str, why: str) -> None:
        """Take a module by its raw bytes, and what its names come from."""
        found = self._open(module)
        if found is None:
            return
        names = self._names(module)
        names.whole = names.whole or why
        step = ("whole", module, "", False)
        if found.index is None or found.pinned or step in self._done:
            return
        self._done.add(step)
        for name in sorted(found.index.bound_names()):
            # A module among its names is not taken along: its files would bring theirs, and all would count.
            if not any(self._is_module(found, target) for target in found.index.imports(name)):
                self._read(found, (name,), runs=False)

    def _names(self, module: str) -> ModuleNames:
        return self.modules.setdefault(module, ModuleNames())

    def _open(self, module: str) -> FoundModule | None:
        found = self._find(module)
        if found is None:
            return None
        fresh = module not in self.modules
        names = self._names(module)
        if fresh and found.pinned:
            names.whole = "it belongs to an installed package"
        elif fresh and found.index is None:
            names.whole = "it can't be parsed"
        elif fresh and found.index is not None and found.index.dynamic:
            names.whole = found.index.dynamic
            # Whatever a star brings in may be what is read.
            for target in found.index.star_imports():
                self.add_whole(_absolute(found, target), f"star import in {module}")
        return found

    def _definition(self, found: FoundModule, index: SourceIndex, qualname: str, *, traced: bool) -> None:
        outermost = qualname.partition(".<locals>.")[0]
        step = ("definition", found.name, outermost, traced and outermost == qualname)
        outer = ("definition", found.name, outermost, True)
        if step in self._done or (traced and outer in self._done):
            return
        self._done.add(step)
        names = self._names(found.name)
        names.definitions.add(outermost)
        top, *rest = outermost.split(".")
        if "<lambda>" not in outermost:
            names.bindings.add(top)
            self._follow(found, index.binding_reads(top))
        for depth in range(len(rest)):
            # What a definition stands in is a class: a function would have ended the name above.
            self._class(found, index, ".".join((top, *rest[:depth])), runs=False)
        self._follow(found, index.definition_reads(qualname, traced=traced))
        for target in index.inner_imports(qualname):
            self._import(found, target, (), not traced)

    def _class(self, found: FoundModule, index: SourceIndex, qualname: str, *, runs: bool) -> None:
        step = ("class", found.name, qualname, runs)
        if step in self._done:
            return
        self._done.add(step)
        names = self._names(found.name)
        names.classes.add(qualname)
        names.bindings.add(qualname.partition(".")[0])
        self._follow(found, index.class_reads(qualname))
        self._follow(found, index.binding_reads(qualname.partition(".")[0]))
        if runs:
            self._definition(found, index, qualname, traced=False)

    def _follow(self, found: FoundModule, reads: set[Read]) -> None:
        for read in sorted(reads):
            self._read(found, read.chain, read.runs)

    def _read(self, found: FoundModule, chain: tuple[str, ...], runs: bool) -> None:
        step = (found.name, chain, runs)
        if step in self._seen:
            return
        self._seen.add(step)
        index, name = found.index, chain[0]
        if index is None or found.pinned:
            return
        self._names(found.name).bindings.add(name)
        if not index.is_bound(name):
            return
        for target in index.imports(name):
            self._import(found, target, chain[1:], runs)
        if index.is_class(name):
            self._class(found, index, name, runs=runs)
        elif index.has_definition(name) and (runs or index.is_decorated(name)):
            # A decorator such as allow_in_graph or custom_op puts the function into the graph without tracing it.
            self._definition(found, index, name, traced=False)
        self._follow(found, index.binding_reads(name))

    def _is_module(self, found: FoundModule, target: ImportTarget) -> bool:
        module = _absolute(found, target)
        return target.attribute is None or self._find(f"{module}.{target.attribute}") is not None

    def _import(self, found: FoundModule, target: ImportTarget, rest: tuple[str, ...], runs: bool) -> None:
        module = _absolute(found, target)
        if target.attribute is not None:
            rest = (target.attribute, *rest)
        self._enter(module, rest, runs, f"used as an object by {found.name}")

    def _enter(self, module: str, chain: tuple[str, ...], runs: bool, why: str) -> None:
        holder = self._find(module)
        if not chain:
            if holder is not None:
                self.add_whole(module, why)
            return
        submodule = f"{module}.{chain[0]}" if module else chain[0]
        inner = self._find(submodule)
        bound = holder is not None and holder.index is not None and holder.index.is_bound(chain[0])
        if holder is not None and (bound or inner is None):
            self._open(module)
            self._read(holder, chain, runs)
        if inner is not None:
            # `pkg.sub` may be the submodule, or a name of pkg's own: both count.
            self._enter(submodule, chain[1:], runs, why)


def _absolute(found: FoundModule, target: ImportTarget) -> str:
    if not target.level:
        return target.module
    steps = found.name.split(".")
    kept = len(steps) - target.level + (1 if found.is_package else 0)
    return ".".join([*steps[: max(kept, 0)], *([target.module] if target.module else [])])
