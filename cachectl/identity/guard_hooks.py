"""Forward hooks of modules, as a guard sheet says them: by order and kind, never by the number of their handle.

torch keys hooks by a number that counts all hooks of a process, of whatever module: a program that registers another
one first has other numbers, and the same hooks. What a call makes of the numbers is all that is compared: the order in
which hooks run, and which of them are in the dicts beside (`with_kwargs`, `always_call`). The hooks themselves lie at
their positions in the dict (the step `@value:n`). Standard library only.

Facts: torch 2.13 utils/hooks.py (`RemovableHandle.next_id`), nn/modules/module.py (`register_forward_hook`,
`_call_impl`).
"""

from __future__ import annotations

import sys
from typing import Any

from cachectl.identity.guard_classes import own_members
from cachectl.identity.guard_values import in_order

__all__ = ["HOOK_DICTS", "hooks_of"]

# Which dicts hold which hooks: those of one module, and those of every module, with the dicts beside them.
_BESIDE = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_global_forward_hooks": ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"),
    "_global_forward_pre_hooks": (),
}
HOOK_DICTS = {name: name for name in _BESIDE} | {beside: name for name, all_ in _BESIDE.items() for beside in all_}
"""For each dict that has handles' numbers as keys the one that holds the hooks."""


def hooks_of(holder: Any, name: str) -> list[Any] | None:
    """Return the hooks in one dict by their positions in it: in the order in which they run, and those in each dict
    beside it.

    Args:
        holder: a module, or torch's own Python module for the hooks of all modules.
        name: of the dict that holds the hooks.

    Returns:
        None where more than that may count: a number that two kinds of hooks share, as where a module comes from a
        pickle, or one in a dict beside that no hook has.
    """
    held = own_members(holder)
    hooks = held.get(name)
    if not isinstance(hooks, dict):
        return None
    places = {number: place for place, number in enumerate(dict.keys(hooks))}
    for shared in _of_all_modules(name):
        if places.keys() & shared.keys():
            return None
    said: list[Any] = [[places[number] for number in in_order(hooks)]]
    for beside in _BESIDE[name]:
        numbers = held.get(beside, {})
        if not isinstance(numbers, dict) or numbers.keys() - places.keys():
            return None
        said.append(sorted(places[number] for number in dict.keys(numbers)))
    return said


def _of_all_modules(name: str) -> list[dict[Any, Any]]:
    if name.startswith("_global_"):
        return []
    held = own_members(sys.modules.get("torch.nn.modules.module"))
    return [held[other] for other in _BESIDE if other.startswith("_global_") and isinstance(held.get(other), dict)]
