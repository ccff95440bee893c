"""What was looked for while tracing and not found, as facts of a guard sheet.

Owns the way from lookups (cachectl.build.lookups) to the facts `lacks`, `absent`, `contains` and `ordered`. Rank
processes only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from cachectl.build.lookups import Holder, Lookups
from cachectl.identity.environment import is_placement
from cachectl.identity.guard_classes import class_members, own_members, unset_slot
from cachectl.identity.guard_paths import Path
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable, in_order
from cachectl.schemas.keying import is_secret_name

__all__ = ["Gone", "absences"]


class Gone(Exception):
    """There is no live value behind a source of Dynamo's."""


def absences(
    lookups: Lookups,
    *,
    value_at: Callable[[Any], Any],
    path_of: Callable[[Any], Path],
    reader: GuardReader,
    variables: set[str],
) -> Iterator[tuple[Path, list[Any]] | str]:
    """Yield each fact with its path, and a line for each that no sheet can hold.

    Args:
        value_at: gives the live value behind a source of Dynamo's; raises Gone.
        path_of: gives a source's path; raises Unsayable.
        variables: where the environment variables go that were looked for and are not set.
    """
    for name, source in sorted(lookups.sources.items()):
        try:
            value = value_at(source)
        except Gone:
            continue
        try:
            path = functools.partial(path_of, source)
            yield from _of_object(value, lookups.attributes.get(name, ()), path)
            for own in (False, True):
                yield from _of_dict(value, (name, own), lookups, path, reader, variables)
        except Unsayable as error:
            yield f"what was not found in {name}: {error}"


def _of_object(value: Any, names: Iterable[str], path: Callable[[], Path]) -> Iterator[tuple[Path, list[Any]]]:
    """Yield what has to stay unset for attributes to be what they were: on the instance, and maybe on its class."""
    if isinstance(value, (ModuleType, FunctionType, MethodType)):
        # A module's own __getattr__ may answer later, as torch.ops does once an operator is there.
        yield from ((path(), ["has", name, False]) for name in sorted(names) if not hasattr(value, name))
        return
    own = own_members(value)
    members = class_members(type(value))
    missing = []
    for name in sorted(set(names) - own.keys()):
        if name not in members or unset_slot(value, members[name]):
            missing.append(name)
        elif not hasattr(type(members[name]), "__set__"):
            # A property and the like stands before the instance's own attribute.
            yield path(), ["absent", name]
    if missing:
        yield path(), ["lacks", missing]


def _of_dict(
    value: Any, holder: Holder, lookups: Lookups, path: Callable[[], Path], reader: GuardReader, variables: set[str]
) -> Iterator[tuple[Path, list[Any]]]:
    keys, walked = lookups.keys.get(holder, []), holder in lookups.walked
    if not keys and not walked:
        return
    held = own_members(value) if holder[1] else value
    if held is getattr(os.environ, "_data", None):
        names = {os.fsdecode(key) for key in keys if isinstance(key, (str, bytes))}
        variables.update(name for name in names if not is_placement(name) and not is_secret_name(name))
        return
    if not isinstance(held, dict):
        return
    where = (*path(), ".__dict__") if holder[1] else path()
    if walked:
        yield where, ["ordered", list(map(reader.member, in_order(held)))]
    for key in keys:
        if not dict.__contains__(held, key):
            yield where, ["contains", reader.member(key), False]
