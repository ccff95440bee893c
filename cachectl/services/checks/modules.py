"""Python files below a recipe's roots as the reader of source text sees them: modules, and what their names mean.

Owns finding and parsing files, and which statement binds a name. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from cachectl.errors import ConfigError
from cachectl.identity.source_syntax import DEFINITIONS, effects_of, flat
from cachectl.services.checks.values import Ext, ModuleRef, Value

__all__ = ["Module", "Modules", "is_module_class"]

_MOST_FILES = 400
_MOST_BYTES = 4 << 20
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist", "tests", "test"})


class Module:
    """One parsed file: its module name, its tree, and the statements that bind its names."""

    def __init__(self, name: str, path: Path, shown: str, source: bytes, *, package: bool) -> None:
        self.name, self.path, self.shown, self.source = name, path, shown, source
        self.tree = tree = ast.parse(source, filename=shown)
        self.package = name if package else name.rpartition(".")[0]
        self.bindings: dict[str, list[ast.AST]] = {}
        for statement in flat(tree.body):
            for bound in _bound(statement):
                self.bindings.setdefault(bound, []).append(statement)
        self.values: dict[str, Value] = {}

    @property
    def id(self) -> str:
        return self.name or self.shown


class Modules:
    """The modules that lie below some folders, parsed when they are first asked for.

    Args:
        roots: as a recipe's model.path, in their order.
        base: paths are shown relative to it.
    """

    def __init__(self, roots: list[Path], base: Path) -> None:
        self.roots, self.base = roots, base
        self._found: dict[str, Module | None] = {}

    def find(self, name: str) -> Module | None:
        """Return a module by its dotted name, None if it is not below the roots.

        Raises:
            ConfigError: its file can't be read or parsed.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Module | None:
        relative = Path(*name.split("."))
        for root in self.roots:
            for path, package in ((root / relative / "__init__.py", True), (root / f"{relative}.py", False)):
                if path.is_file():
                    return self.parse(path, name, package=package)
        return None

    def parse(self, path: Path, name: str = "", *, package: bool = False) -> Module:
        """Parse a file. Raises ConfigError."""
        shown = self.shown(path)
        try:
            return Module(name, path, shown, path.read_bytes(), package=package)
        except SyntaxError as error:
            raise ConfigError(
                f"{shown}:{error.lineno or 1}: can't be parsed: {error.msg}", hint="mend the file, then check again"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{shown}: can't be read: {error}", hint="mend the file, then check again") from error

    def shown(self, path: Path) -> str:
        """Return a path as findings show it: relative to the recipe's folder where it lies below."""
        try:
            return path.resolve().relative_to(self.base.resolve()).as_posix()
        except ValueError:
            return str(path)

    def files(self, root: Path | None = None, *, depth: int | None = None) -> Iterator[Path]:
        """Yield the Python files below the roots, at most so many; what has to be skipped is skipped.

        Args:
            root: the one to look in; None for all.
            depth: how many folders deep; None for no bound.
        """
        seen: set[Path] = set()
        for top in self.roots if root is None else [root]:
            for folder, folders, names in os.walk(top):
                folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
                if depth is not None and len(Path(folder).relative_to(top).parts) >= depth:
                    folders[:] = []
                for name in sorted(names):
                    path = Path(folder, name)
                    if not name.endswith(".py") or name.startswith("test_") or path in seen:
                        continue
                    seen.add(path)
                    try:
                        if path.stat().st_size <= _MOST_BYTES:
                            yield path
                    except OSError:
                        continue
                    if len(seen) >= _MOST_FILES:
                        return

    def dotted(self, path: Path) -> str:
        """Return the dotted name by which a file below a root is imported."""
        for root in self.roots:
            try:
                parts = list(path.relative_to(root).with_suffix("").parts)
            except ValueError:
                continue
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return path.stem

    def loaded(self) -> list[Module]:
        """Return the modules that were found so far."""
        return [module for module in self._found.values() if module is not None]

    def imported(self, module: Module, statement: ast.Import | ast.ImportFrom, name: str) -> Value:
        """Return what an import statement binds to a name."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return self.module_value(alias.name if alias.asname else alias.name.partition(".")[0])
        else:
            source = statement.module or ""
            if statement.level:
                package = module.package.split(".")
                kept = package[: len(package) - (statement.level - 1)]
                source = ".".join([*kept, *([source] if source else [])])
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return self.member(source, alias.name)
                if alias.name == "*" and (found := self.find(source)) is not None and name in found.bindings:
                    return self.member(source, name)
        return Ext(name)

    def module_value(self, name: str) -> Value:
        found = self.find(name)
        return ModuleRef(found) if found is not None else Ext(name)

    def member(self, module_name: str, name: str) -> Value:
        """Return what `from module_name import name` means, an Ext where another package holds it."""
        found = self.find(module_name)
        if found is None:
            return Ext(f"{module_name}.{name}")
        if name in found.bindings:
            return (found, name)
        submodule = self.find(f"{module_name}.{name}")
        return ModuleRef(submodule) if submodule is not None else Ext(f"{module_name}.{name}")

    def changing_attributes(self) -> set[str]:
        """Return the attributes that some function other than a class's __init__ sets: their values are not fixed."""
        found: set[str] = set()
        for module in self.loaded():
            for node in ast.walk(module.tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "__init__":
                    found |= set(_attributes_set(node))
        return found

    def setting_up(self) -> frozenset[str]:
        """Return the methods that some class's __init__ calls."""
        return frozenset(
            call.func.attr
            for module in self.loaded()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        )


def is_module_class(base: Value) -> bool:
    """Say whether a base class of another package is torch.nn.Module, or one that has it."""
    return isinstance(base, Ext) and (
        base.path in ("torch.nn.Module", "torch.nn.modules.module.Module") or base.path.startswith("torch.nn.")
    )


def _attributes_set(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign)
            else [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign))
            else []
        )  # fmt: skip
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    yield part.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def _bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement binds or changes in place; `*` for those of a star import."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
        return {"*"}
    effects = effects_of(statement)
    return {*effects.binds, *effects.stores}
