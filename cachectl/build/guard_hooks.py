"""Forward hooks in a guard sheet: facts that hold a handle's number become facts about order and kind.

Owns that change of form (cachectl.identity.guard_hooks says why and what is compared). A number that traced code of
others than torch may have read is kept as it is: it may be in the graph. Rank processes only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path as File
from types import CodeType
from typing import Any

from cachectl.identity.guard_hooks import HOOK_DICTS, hooks_of
from cachectl.identity.guard_paths import Path

__all__ = ["HookNumbers"]

_TORCH_MODULE = "torch.nn.modules.module"


class HookNumbers:
    """Takes handles' numbers out of paths and facts, for one compilation.

    Args:
        torch: the imported module.
        traced: all code that was traced; None where this torch does not tell.
        live: gives the live value at a path, raises what it likes.
    """

    def __init__(self, torch: Any, traced: Iterable[CodeType] | None, live: Callable[[Path], Any]) -> None:
        self._torch = torch
        self._live = live
        self._known: dict[tuple[Path, str], list[Any] | None] = {}
        own = str(File(torch.__file__).parent)
        self._read_elsewhere = traced is None or any(
            not code.co_filename.startswith(own) and not HOOK_DICTS.keys().isdisjoint(_texts(code)) for code in traced
        )

    def path(self, path: Path) -> Path:
        """Return a path with the positions of hooks where their numbers stand."""
        for place, name in enumerate(path[:-1]):
            if name[1:] in HOOK_DICTS and path[place + 1][:1] == "#" and self._said(path[:place], name[1:]) is not None:
                number = int(path[place + 1][1:])
                held = list(dict.keys(getattr(self._live(path[:place]), name[1:])))
                if number in held:
                    return (*path[: place + 1], f"@value:{held.index(number)}", *path[place + 2 :])
        return path

    def fact(self, path: Path, fact: tuple[Any, ...]) -> tuple[Path, tuple[Any, ...]]:
        """Return a fact as the sheet holds it, with its path."""
        if len(path) > 2 and path[-2][1:] in HOOK_DICTS and path[-1].startswith("@key:"):
            return self._hooks(path[:-2], path[-2][1:]) or (path, fact)
        if fact[0] in ("ordered", "keys", "contains") and path[-1][1:] in HOOK_DICTS:
            numbers = [fact[1]] if fact[0] == "contains" else fact[1]
            if numbers and all(type(number) is int for number in numbers):
                return self._hooks(path[:-1], path[-1][1:]) or (path, fact)
        return path, fact

    def _hooks(self, holder: Path, name: str) -> tuple[Path, tuple[Any, ...]] | None:
        said = self._said(holder, name)
        return None if said is None else (holder, ("hooks", HOOK_DICTS[name], said))

    def _said(self, holder: Path, name: str) -> list[Any] | None:
        key = (holder, HOOK_DICTS[name])
        if key not in self._known:
            self._known[key] = None if self._read_elsewhere else self._look(*key)
        return self._known[key]

    def _look(self, holder: Path, name: str) -> list[Any] | None:
        try:
            value = self._live(holder)
        except Exception:  # noqa: BLE001 -- a step may raise what it likes: then the numbers stay
            return None
        if not isinstance(value, self._torch.nn.Module) and value is not sys.modules.get(_TORCH_MODULE):
            return None
        return hooks_of(value, name)


def _texts(code: CodeType) -> Iterable[str]:
    return {*code.co_names, *(constant for constant in code.co_consts if type(constant) is str)}
