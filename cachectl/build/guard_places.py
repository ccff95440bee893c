"""Where guards look: Dynamo's sources as paths of a guard sheet, and the state of one reading.

Owns what every kind of guard needs while one compilation is read: sources parsed, values looked up, facts put down, and
lines for what no sheet can hold. Rank processes only.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

from cachectl.boot.proof_steps import access_of
from cachectl.build.guard_hooks import HookNumbers
from cachectl.build.lookups import Lookups
from cachectl.identity.guard_paths import Path, parse_source
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable
from cachectl.identity.guards import SheetBuilder

__all__ = ["Places", "keyword_of"]

# Dynamo traces its own stand-ins for built-in functions; they are torch's, and only tracing imports them.
_POLYFILLS = "I:torch._dynamo.polyfills"


@dataclass
class Places:
    """One compilation while it is read.

    Args:
        graph: Dynamo's output graph.
        builder: the GuardBuilder that has just made Dynamo's own checks.
        lookups: what was looked for meanwhile.
    """

    graph: Any
    builder: Any
    lookups: Lookups
    sheet: SheetBuilder = field(default_factory=SheetBuilder)
    unrepresented: list[str] = field(default_factory=list)
    # Which paths hold one object, as pairs, and the tensors that torch looks at for aliasing.
    pairs: list[tuple[Path, Path]] = field(default_factory=list)
    apart: dict[Path, Any] = field(default_factory=dict)
    classes: dict[Path, type] = field(default_factory=dict)
    # Where the traced code found classes themselves.
    homes: dict[type, Path] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reader = GuardReader(importlib.import_module("torch"))
        # Torch itself gives up comparing this one's keys and looks whether it was touched at all.
        self.registry = importlib.import_module("torch.utils._pytree").SUPPORTED_NODES
        self.aliases = self._installed_globals()
        self.apart_names = frozenset(self.builder.no_tensor_aliasing_names)
        self.hooks = HookNumbers(self.reader.torch, getattr(self.graph, "traced_code", None), self.live_at)

    def refuse(self, guard: Any, why: str) -> None:
        stack = guard.user_stack
        line = f" ({PurePath(stack[-1].filename).name}:{stack[-1].lineno} in {stack[-1].name})" if stack else ""
        self.unrepresented.append(f"{guard.create_fn_name()} {guard.name or 'ambient'}: {why}{line}")

    def path(self, source: Any) -> Path:
        return self.hooks.path(parse_source(source.name, self.aliases))

    def fact(self, guard: Any, *fact: Any) -> None:
        self.put(self.path(guard.originating_source), *fact)

    def put(self, path: Path, *fact: Any) -> None:
        if not path[0].startswith(_POLYFILLS):
            self.sheet.add(*self.hooks.fact(path, fact))

    def pair(self, first: Any, second: Any) -> None:
        paths = self.path(first), self.path(second)
        if not any(path[0].startswith(_POLYFILLS) for path in paths):
            self.pairs.append(paths)

    def value(self, guard: Any) -> Any:
        return self.builder.get(guard)

    def live_at(self, path: Path) -> Any:
        """Return the live value at a path, as the proof finds it; raises whatever a step raises."""
        kind, name = path[0][0], path[0][2:]
        if kind == "I":
            value: Any = sys.modules[name]
        else:
            value = self.builder.scope[kind][name]
        for step in path[1:]:
            access, key = access_of(step)
            value = access(self.reader, value, key)
        return value

    def _installed_globals(self) -> dict[str, Path | None]:
        """Return the globals that tracing left in the method's module, and the paths that mean the same without it."""
        held = self.builder.scope["G"]
        aliases: dict[str, Path | None] = dict.fromkeys(getattr(self.graph, "installed_globals", ()))
        for name, value in held.items():
            if name.startswith("__import_") and isinstance(value, ModuleType):
                aliases[name] = (f"I:{value.__name__}",)
        builtins_name = getattr(self.graph, "name_of_builtins_dict_key_in_fglobals", None)
        if builtins_name is not None:
            aliases[builtins_name] = ("B",)
        scopes = {name: held[name] for name, path in aliases.items() if path is None and type(held.get(name)) is dict}
        return aliases | self._function_scopes(scopes, aliases)

    def _function_scopes(
        self, scopes: Mapping[str, dict[str, Any]], aliases: Mapping[str, Path | None]
    ) -> dict[str, Path | None]:
        """Return paths of globals dicts that belong to no module, as a namedtuple's: through a function of theirs."""
        found: dict[str, Path | None] = {}
        for guard in self.graph.guards if scopes else ():
            value = self.value(guard) if guard.name else None
            for name, scope in scopes.items():
                if type(value) is FunctionType and value.__globals__ is scope:
                    try:
                        path = (*parse_source(guard.name, aliases), ".__globals__")
                    except Unsayable:
                        continue
                    known = found.get(name)
                    found[name] = path if known is None else min(known, path)
        return found


def keyword_of(guard: Any, name: str, *default: Any) -> Any:
    """Return what a guard was made with, by name. Raises Unsayable where it has no such thing and no default."""
    create = guard.create_fn
    keywords = create.keywords if isinstance(create, functools.partial) else {}
    if name in keywords:
        return keywords[name]
    if default:
        return default[0]
    raise Unsayable(f"a guard without its {name}")
