"""The guards part: the guard sheet, Dynamo's guards as plain JSON, made small by sharing equal subtrees.

Owns the sheet's form. A sheet is a tree over the places that guards look at (cachectl.identity.guard_paths); a node
holds facts about the value there and the steps to the values below it. Nodes with equal facts and equal children are
one node, so 32 equal layers cost little more than one.

    {"schema": "cachectl/guard-sheet/v2",
     "nodes": [[[fact, ...], {step: number of a node}], ...],      children before parents, the root last
     "ambient": {name: value},                                     state around the call
     "expressions": [tree, ...]}                                   cachectl.identity.guard_expressions

A fact is a list, its kind first; values are as cachectl.identity.guard_values writes them:

    ["type", class, inherits]                  what it inherits only where the toolchain does not say it
    ["is", identity]  ["equals", value]  ["base", value]      what the value is
    ["tensor", {...}]                          class, dtype, device, shape, stride, ...; null is a dynamic size
    ["length", n]  ["keys", [...]]  ["ordered", [...]]                         of containers
    ["hooks", dict, [order, ...]]              hooks of a module, by their positions in the dict: in the order
                                               in which they run, and those in each dict beside it
    ["registered", [...]]                      keys of torch's pytree registry that are not torch's own
    ["contains", value, bool]  ["has", name, bool]  ["absent", name]           keys, attributes, instance dict
    ["lacks", [name, ...]]                     neither the instance nor its class has these
    ["methods", {name: identity}]              what the value's class gives it: the code that was traced
    ["instance", module, class, bool]          what a class with checks of its own says of the value
    ["present"]                                                                is not None
    ["range_iterator", start, stop, step]  ["tuple_iterator", n]  ["count_iterator", start, step]
    ["group", n]     all places of one group hold one object
    ["apart"]        another object than every other one that is apart, outside of its group
    ["memory", n]    and shares memory with those of group n, and with no other

Facts about aliasing carry a group's number, not the other paths: so layers that share one mask stay equal nodes.

Standard library only: written by the recorder (cachectl.build.guards), read by the proof (cachectl.boot.proof).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachectl.identity.guard_paths import Path
from cachectl.schemas.canonical import canonical_bytes, digest_of

__all__ = ["SHEET_SCHEMA", "SheetBuilder", "facts_at", "sheet_digest"]

SHEET_SCHEMA = "cachectl/guard-sheet/v2"

# What is evaluated first: a value of another type has nothing more to say.
_ORDER = ("type", "tensor", "is", "equals", "base", "length")


def sheet_digest(sheet: Mapping[str, Any]) -> str:
    """Return the digest of a guard sheet's canonical JSON."""
    return digest_of(sheet)


def facts_at(sheet: Mapping[str, Any], path: Path) -> list[list[Any]]:
    """Return the facts that a sheet holds about one place; none where no guard looked at it."""
    nodes = sheet["nodes"]
    node = nodes[-1]
    for step in path:
        below = node[1].get(step)
        if below is None:
            return []
        node = nodes[below]
    return list(node[0])


@dataclass
class _Place:
    facts: dict[bytes, list[Any]] = field(default_factory=dict)
    below: dict[str, _Place] = field(default_factory=dict)


class SheetBuilder:
    """Collects facts by path, in any order, and returns the one sheet they make."""

    def __init__(self) -> None:
        self._root = _Place()
        self._expressions: dict[bytes, Any] = {}
        self._ambient: dict[str, Any] = {}

    def add(self, path: Path, fact: Sequence[Any]) -> None:
        """Add a fact about the value at a path; the same fact twice is one."""
        place = self._root
        for step in path:
            place = place.below.setdefault(step, _Place())
        place.facts[canonical_bytes(fact)] = list(fact)

    def add_groups(self, kind: str, groups: Iterable[Iterable[Path]]) -> None:
        """Number groups of paths in the order of their first path, and say at each path which group it is in."""
        ordered = sorted(sorted(set(group)) for group in groups)
        for number, group in enumerate(ordered):
            for path in group:
                self.add(path, [kind, number])

    def add_expression(self, tree: Any) -> None:
        """Add a shape expression that has to be true."""
        self._expressions[canonical_bytes(tree)] = tree

    def add_ambient(self, state: Mapping[str, Any]) -> None:
        """Add state around the call."""
        self._ambient.update(state)

    def sheet(self) -> dict[str, Any]:
        """Return the sheet; equal facts give equal sheets, whatever the order they came in."""
        nodes: list[list[Any]] = []
        numbers: dict[bytes, int] = {}
        self._number(self._root, nodes, numbers)
        return {
            "schema": SHEET_SCHEMA,
            "nodes": nodes,
            "ambient": dict(sorted(self._ambient.items())),
            "expressions": [tree for _, tree in sorted(self._expressions.items())],
        }

    def _number(self, place: _Place, nodes: list[list[Any]], numbers: dict[bytes, int]) -> int:
        steps = {step: self._number(below, nodes, numbers) for step, below in sorted(place.below.items())}
        facts = [fact for _, fact in sorted(place.facts.items(), key=_fact_order)]
        node = [facts, steps]
        identity = canonical_bytes(node)
        number = numbers.get(identity)
        if number is None:
            number = numbers[identity] = len(nodes)
            nodes.append(node)
        return number


def _fact_order(item: tuple[bytes, list[Any]]) -> tuple[int, bytes]:
    kind = item[1][0]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), item[0])
