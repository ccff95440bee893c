"""Guards that relate values: one object at two places, shared memory, what classes give, what was not there.

Owns the facts that no single guard of Dynamo's says, or that torch compares otherwise than another process can. Rank
processes only.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from cachectl.build.guard_absences import Gone, absences
from cachectl.build.guard_functions import brought_along, home_of
from cachectl.build.guard_places import Places, keyword_of
from cachectl.build.untraced import UntracedRecorder
from cachectl.build.untraced_reads import UntracedReads
from cachectl.identity.guard_classes import IMPLICIT_METHODS, class_members, function_of, is_known
from cachectl.identity.guard_paths import Path, item_step
from cachectl.identity.guard_values import Unsayable, in_order

__all__ = ["Relations", "joined"]

# What is told by what it is.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, enum.Enum, FunctionType, BuiltinFunctionType, ModuleType)


class Relations(Places):
    """What relates places, for one compilation while it is read."""

    def add_pair(self, guard: Any) -> None:
        other = keyword_of(guard, "source_b")
        if not any(_passes_through(source, "SkipGuardSource") for source in (guard.originating_source, other)):
            self.pair(guard.originating_source, other)

    def add_methods(self) -> None:
        """Keep, for each guarded object, which of the traced functions its class gave it."""
        traced = frozenset(getattr(self.graph, "traced_code", None) or ())
        facts = {kind: self._traced_methods(kind, traced) for kind in set(self.classes.values())}
        for path, kind in self.classes.items():
            if methods := facts[kind]:
                self.put(path, "methods", methods)

        for kind in facts:
            if not is_known(kind.__module__):
                members = class_members(kind)
                lacking = {name: None for name in sorted(IMPLICIT_METHODS) if function_of(members.get(name)) is None}
                # What a class lacks it lacks wherever it stands.
                self.put(min(path for path in self.classes if self.classes[path] is kind), "methods", lacking)

    def _traced_methods(self, kind: type, traced: frozenset[CodeType]) -> dict[str, Any]:
        found = {name: function_of(member) for name, member in class_members(kind).items()}
        return {
            name: self.reader.identity(function)
            for name, function in sorted(found.items())
            if function is not None and function.__code__ in traced
        }

    def add_key_orders(self) -> None:
        """Keep the order of keys wherever the traced code walked a dict, whether or not a guard says so."""
        for source in getattr(self.graph, "guard_on_key_order", ()):
            value = self.builder.get(source)
            if isinstance(value, dict) and value is not self.registry:
                try:
                    self.put(self.path(source), "ordered", list(map(self.reader.member, in_order(value))))
                except Unsayable as error:
                    self.unrepresented.append(f"key order of {source.name}: {error}")

    def add_absences(self) -> None:
        """Keep what was looked for and not found: torch guards only some of it."""
        self.lookups.fault.raise_kept()
        found = absences(
            self.lookups,
            value_at=self.live,
            path_of=self.path,
            reader=self.reader,
            variables=self.variables,
        )
        for item in found:
            if isinstance(item, str):
                self.unrepresented.append(item)
            else:
                self.put(item[0], *item[1])
        self.unrepresented += self.lookups.disorder

    def add_identities(self) -> None:
        """Keep which objects `is` told apart, and what classes said that decide themselves what an instance is."""
        names: dict[int, str] = {}
        for pair in sorted(self.lookups.apart):
            try:
                held = [self.live(self.lookups.sources[name]) for name in pair]
                if held[0] is not held[1] and not any(map(_is_plain, held)):
                    for name, value in zip(pair, held, strict=True):
                        # An object with several names by one of them: whatever is apart is another object each.
                        self.put(self.path(self.lookups.sources[names.setdefault(id(value), name)]), "apart")
            except (Gone, Unsayable):
                continue
        for name, kinds in sorted(self.lookups.instances.items()):
            for kind in kinds:
                try:
                    value, path = self.live(self.lookups.sources[name]), self.path(self.lookups.sources[name])
                except (Gone, Unsayable):
                    continue
                says = issubclass(value, kind) if isinstance(value, type) else isinstance(value, kind)
                self.put(path, "instance", kind.__module__, kind.__qualname__, says)

    def add_unplaced(self) -> None:
        """Keep what functions without a source brought along."""
        for function, kind in self.lookups.unplaced.values():
            for item in brought_along(function, kind, self.homes, self.reader):
                if isinstance(item, str):
                    self.unrepresented.append(item)
                else:
                    self.put(item[0], *item[1])

    def add_untraced(self, untraced: UntracedRecorder) -> None:
        """Keep what functions read that ran while the graph was made and were not traced."""
        reads = UntracedReads(self.reader, lambda path, fact: self.put(path, *fact), self.path_of_object)
        for item in untraced.functions():
            reads.add(item)
        for kind, names in untraced.enumerations().items():
            reads.add_enumeration(kind, names)
        self.unrepresented += [*reads.refused, *untraced.unknown]

    def path_of_object(self, value: Any) -> Path | None:
        """Return where an object stands that the traced code looked at; None if nowhere that can be said."""
        if isinstance(value, type):
            return self.homes.get(value) or home_of(value)
        if isinstance(value, enum.Enum):
            home, name = self.path_of_object(type(value)), value._name_
            known = home is not None and type(value)._member_map_.get(name) is value
            return (*home, "._member_map_", item_step(name)) if home is not None and known else None
        for source in self.lookups.sources.values():
            try:
                if self.live(source) is value:
                    return self.path(source)
            except (Gone, Unsayable):
                continue
        return None

    def live(self, source: Any) -> Any:
        """Return the live value behind a source of Dynamo's. Raises Gone for what tracing made itself."""
        try:
            return self.builder.get(source)
        except Exception as error:
            raise Gone(source) from error

    def add_compiler_guards(self) -> None:
        """Add what the compiler behind Dynamo asked for: one object in two places. Shared memory is compared anyway."""
        for guard in getattr(self.graph, "aotautograd_guards", ()):
            kind = type(guard).__name__
            if kind == "DuplicateInputs":
                self.pair(guard.input_source_a, guard.input_source_b)
            elif kind != "StorageOverlap":
                self.unrepresented.append(f"{kind}: a guard of the compiler that this program doesn't know")

    def add_memory(self) -> None:
        paths = {id(tensor): path for path, tensor in sorted(self.apart.items(), reverse=True)}
        spans = []
        for path, tensor in sorted(self.apart.items()):
            if paths[id(tensor)] == path and (extent := self._extent(tensor)) is not None:
                spans.append((*extent, path))
        clusters: list[list[Path]] = []
        end = -1
        for start, stop, path in sorted(spans):
            if start >= end:
                clusters.append([])
            clusters[-1].append(path)
            end = max(end, stop)
        self.sheet.add_groups("memory", (cluster for cluster in clusters if len(cluster) > 1))

    def _extent(self, tensor: Any) -> tuple[int, int] | None:
        try:
            return self.reader.extent(tensor)
        except (RuntimeError, NotImplementedError, TypeError):
            return None  # A subclass or a fake tensor has no memory of its own to share.


def joined(pairs: Iterable[tuple[Path, Path]]) -> list[set[Path]]:
    """Return the groups that pairs of equal members make."""
    group_of: dict[Path, set[Path]] = defaultdict(set)
    for first, second in pairs:
        joined = group_of[first] | group_of[second] | {first, second}
        for member in joined:
            group_of[member] = joined
    unique = {id(group): group for group in group_of.values()}
    return [group for group in unique.values() if len(group) > 1]


def _is_plain(value: Any) -> bool:
    """Say whether a value is told by what it is and not by which: constants, classes, functions, modules, tensors."""
    return value is None or isinstance(value, (*_PLAIN, type)) or hasattr(type(value), "__torch_function__")


def _passes_through(source: Any, kind: str) -> bool:
    while source is not None:
        if type(source).__name__ == kind:
            return True
        source = getattr(source, "base", None)
    return False
