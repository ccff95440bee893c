"""The facts of a guard sheet, by kind: each compared with the live value at its place.

A check returns HOLDS or the Mismatch that it found, and may raise whatever a stranger's value raises. Types are
compared before values, and containers are read through their base classes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cachectl.identity.guard_classes import class_members, found_by_name, function_of, own_members, unset_slot
from cachectl.identity.guard_hooks import hooks_of
from cachectl.identity.guard_paths import readable
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable, in_order, length_of, members_of, plain_value, same
from cachectl.schemas.canonical import canonical_bytes

__all__ = [
    "CHECKS",
    "HOLDS",
    "Facts",
    "Mismatch",
    "TensorFact",
    "Trail",
    "name_of",
    "shown",
    "steps_of",
    "stored_in",
    "unknown_fact",
]

_SHOWN_LIMIT = 1000

# A path while walking: a chain from the last step to the root, turned into text only for a failure.
Trail: TypeAlias = "tuple[Trail, str] | None"

HOLDS = object()


@dataclass(frozen=True)
class Mismatch:
    """What a fact says, and what was found instead."""

    stored: Any
    wanted: Any


class TensorFact:
    """A tensor fact with what is compared for each of its many tensors made ready."""

    __slots__ = ("format", "known", "shape", "stored", "stride")

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self.stored = stored
        self.shape = tuple(stored["shape"])
        self.stride = tuple(stored["stride"] or ())
        self.format = stored.get("format")
        self.known: set[Any] = set()


class Facts:
    """Compares facts with live values, and remembers what was seen where for those that relate places."""

    def __init__(self, reader: GuardReader) -> None:
        self.reader = reader
        # Held so that no id is used twice.
        self.groups: dict[int, tuple[Any, Trail]] = {}
        self.apart: dict[int, tuple[Any, Trail, int | None, int | None]] = {}
        self.methods: dict[tuple[int, type], Any] = {}
        self.types: dict[type, list[Any]] = {}
        self.lacking: dict[tuple[int, type], Any] = {}

    def is_type(self, value: Any, fact: Any, trail: Trail) -> Any:
        kind = type(value)
        # Most of a sheet's facts, over few classes.
        said = self.types.get(kind)
        if said is None:
            said = self.types[kind] = list(self.reader.type_fact(kind))
        if said == fact:
            return HOLDS
        live = said[1]
        if live != fact[1]:
            return Mismatch(fact[1], live)
        stored, inherited = fact[2] if len(fact) > 2 else [], said[2] if len(said) > 2 else []
        return Mismatch({"class": live, "inherits": stored}, {"class": live, "inherits": inherited})

    def is_object(self, value: Any, fact: Any, trail: Trail) -> Any:
        live = self.reader.identity(value)
        return HOLDS if same(fact[1], live) else Mismatch(fact[1], live)

    def equals(self, value: Any, fact: Any, trail: Trail) -> Any:
        stored = fact[1]
        kind = type(stored)
        if kind is type(value) and (kind is int or kind is str or kind is bool):
            return HOLDS if stored == value else Mismatch(stored, shown(self.reader, value))
        try:
            live = self.reader.value(value)
        except Unsayable:
            return Mismatch(stored, shown(self.reader, value))
        return HOLDS if same(stored, live) else Mismatch(stored, live)

    def base_equals(self, value: Any, fact: Any, trail: Trail) -> Any:
        live = plain_value(value)
        return HOLDS if same(fact[1], self.reader.value(live)) else Mismatch(fact[1], shown(self.reader, live))

    def is_tensor(self, value: Any, fact: TensorFact, trail: Trail) -> Any:
        if not isinstance(value, self.reader.torch.Tensor):
            return Mismatch(fact.stored, shown(self.reader, value))
        # Objects that stand for the same facts were compared before; sizes, marks and format differ tensor by tensor.
        looks = (type(value), value.dtype, value.device, value.requires_grad, self.reader.raw_keys(value))
        if (
            looks in fact.known
            and tuple(value.shape) == fact.shape
            and value.stride() == fact.stride
            and not value.__dict__
            and self.reader.npu_format(value) == fact.format
        ):
            return HOLDS
        return self.compare_tensor(value, fact, looks)

    def compare_tensor(self, value: Any, fact: TensorFact, looks: Any) -> Any:
        stored, live = fact.stored, self.reader.tensor(value)
        differing = [
            name
            for name in sorted(stored.keys() | live.keys())
            if not _tensor_field_holds(name, stored.get(name), live.get(name), live["shape"])
        ]
        if not differing:
            fact.known.add(looks)
            return HOLDS
        return Mismatch(
            {name: stored[name] for name in differing if name in stored},
            {name: live[name] for name in differing if name in live},
        )

    def has_length(self, value: Any, fact: Any, trail: Trail) -> Any:
        live = length_of(value)
        return HOLDS if live == fact[1] else Mismatch({"length": fact[1]}, {"length": live})

    def has_keys(self, value: Any, fact: Any, trail: Trail) -> Any:
        stored, live = fact[1], list(map(self.reader.member, in_order(value)))
        if fact[0] == "keys" and len(stored) == len(live):
            # Kept in the order of their canonical bytes.
            live.sort(key=canonical_bytes)
        return HOLDS if same(stored, live) else Mismatch({"keys": stored}, {"keys": live})

    def has_hooks(self, value: Any, fact: Any, trail: Trail) -> Any:
        live = hooks_of(value, fact[1])
        return HOLDS if same(fact[2], live) else Mismatch({fact[1]: fact[2]}, {fact[1]: live})

    def has_registered(self, value: Any, fact: Any, trail: Trail) -> Any:
        live = self.reader.registered(value)
        return HOLDS if same(fact[1], live) else Mismatch({"keys": fact[1]}, {"keys": live})

    def has_methods(self, value: Any, fact: Any, trail: Trail) -> Any:
        kind, stored = type(value), fact[1]
        place = (id(stored), kind)
        if place in self.methods:
            return self.methods[place]
        members = class_members(kind)
        live = {name: members.get(name) for name in stored}
        said = {name: (found := function_of(live[name])) and self.reader.identity(found) for name in stored}
        differing = [name for name in sorted(stored) if not same(stored[name], said[name])]
        verdict = HOLDS
        if differing:
            shown = {name: said[name] or shown(self.reader, live[name]) for name in differing}
            verdict = Mismatch({name: stored[name] for name in differing}, shown)
        self.methods[place] = verdict
        return verdict

    def contains(self, value: Any, fact: Any, trail: Trail) -> Any:
        key, wanted = fact[1], fact[2]
        if type(key) is str and isinstance(value, dict):
            live = dict.__contains__(value, key)
        else:
            live = any(same(key, self.reader.member(item)) for item in members_of(value))
        return HOLDS if live == wanted else Mismatch({"contains": key, "is": wanted}, {"contains": key, "is": live})

    def has_attribute(self, value: Any, fact: Any, trail: Trail) -> Any:
        live = hasattr(value, fact[1])
        return HOLDS if live == fact[2] else Mismatch({fact[1]: fact[2]}, {fact[1]: live})

    def lacks_own_attribute(self, value: Any, fact: Any, trail: Trail) -> Any:
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return HOLDS  # An object of slots has no dict of its own.
        if fact[1] not in own:
            return HOLDS
        kind = self.reader.class_name(type(own[fact[1]]))
        return Mismatch(f"no {fact[1]} of its own", f"{fact[1]}, a {kind}")

    def lacks_names(self, value: Any, fact: Any, trail: Trail) -> Any:
        kind, names = type(value), fact[1]
        place = (id(names), kind)
        if place not in self.lacking:
            members = class_members(kind)
            self.lacking[place] = {name: members[name] for name in names if name in members}
        found = [name for name, member in self.lacking[place].items() if not unset_slot(value, member)]
        own = own_members(value)
        found += [name for name in names if name in own]
        return Mismatch(f"no {found[0]}", f"{found[0]} is set") if found else HOLDS

    def is_instance(self, value: Any, fact: Any, trail: Trail) -> Any:
        _, module, qualname, wanted = fact
        kind = found_by_name(module, qualname)
        if not isinstance(kind, type):
            return Mismatch(f"a class {module}.{qualname}", None)
        live = issubclass(value, kind) if isinstance(value, type) else isinstance(value, kind)
        return HOLDS if live == wanted else Mismatch({f"{module}.{qualname}": wanted}, {f"{module}.{qualname}": live})

    def is_present(self, value: Any, fact: Any, trail: Trail) -> Any:
        return HOLDS if value is not None else Mismatch("present", None)

    def iterates(self, value: Any, fact: Any, trail: Trail) -> Any:
        live = self.reader.iterator(value)
        return HOLDS if same(list(fact), live) else Mismatch(list(fact), live)

    def in_group(self, value: Any, fact: Any, trail: Trail) -> Any:
        held, first = self.groups.setdefault(fact[1], (value, trail))
        if held is value:
            return HOLDS
        return Mismatch(f"the same object as {name_of(first)}", "another object")

    def is_apart(self, value: Any, fact: Any, trail: Trail) -> Any:
        _, group, memory = fact
        held = self.apart.setdefault(id(value), (value, trail, group, memory))
        if held[1] is trail or (group is not None and group == held[2]):
            return HOLDS
        return Mismatch(f"another tensor than {name_of(held[1])}", "the same tensor")


def unknown_fact(facts: Facts, value: Any, fact: Any, trail: Trail) -> Any:
    """Find a mismatch: the sheet is of another program."""
    return Mismatch(fact, "a kind of guard that this program doesn't know")


CHECKS: dict[str, Callable[[Facts, Any, Any, Trail], Any]] = {
    "type": Facts.is_type,
    "is": Facts.is_object,
    "equals": Facts.equals,
    "base": Facts.base_equals,
    "tensor": Facts.is_tensor,
    "length": Facts.has_length,
    "keys": Facts.has_keys,
    "ordered": Facts.has_keys,
    "contains": Facts.contains,
    "hooks": Facts.has_hooks,
    "registered": Facts.has_registered,
    "methods": Facts.has_methods,
    "has": Facts.has_attribute,
    "absent": Facts.lacks_own_attribute,
    "lacks": Facts.lacks_names,
    "instance": Facts.is_instance,
    "present": Facts.is_present,
    "range_iterator": Facts.iterates,
    "tuple_iterator": Facts.iterates,
    "count_iterator": Facts.iterates,
    "group": Facts.in_group,
    "apart": Facts.is_apart,
}


def shown(reader: GuardReader, value: Any) -> Any:
    """Return a live value as a reason shows it: as in a sheet where it can be said, else its type."""
    if isinstance(value, str) and len(value) > _SHOWN_LIMIT:
        return f"a str of {len(value)} characters"
    try:
        return reader.value(value)
    except Unsayable:
        pass
    try:
        return reader.identity(value)
    except Unsayable:
        return reader.class_name(type(value))


def steps_of(trail: Trail) -> tuple[str, ...]:
    """Return the steps from the root."""
    steps: list[str] = []
    while trail is not None:
        trail, step = trail
        steps.append(step)
    return tuple(reversed(steps))


def name_of(trail: Trail) -> str:
    """Return a place as messages name it."""
    return readable(steps_of(trail))


def _tensor_field_holds(name: str, stored: Any, live: Any, shape: Sequence[int]) -> bool:
    if name == "shape" and stored is not None and live is not None:
        return len(stored) == len(live) and all(
            wanted is None or wanted == size for wanted, size in zip(stored, live, strict=True)
        )
    if name == "stride" and stored is not None and live is not None:
        return len(stored) == len(live) and all(
            wanted is None or wanted == step for wanted, step in zip(stored, live, strict=True)
        )
    if name == "marks":
        # A mark that was there may be gone; one that is there has to have been.
        return all(set(live[mark]) <= set((stored or {}).get(mark, ())) for mark in live or {})
    return same(stored, live)


def stored_in(fact: Any) -> Any:
    """Return what a fact says, as a reason shows it."""
    return fact.stored if isinstance(fact, TensorFact) else fact[1:]
