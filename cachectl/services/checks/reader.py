"""The reader of source text: what names mean, what attributes are, and which branches a trace takes.

Owns names and branches; expressions, objects, calls and statements stand beside it. Nothing is imported or run: what is
not known stays unknown, and both branches of an unknown condition are read.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence

from cachectl.services.checks.modules import Module, Modules
from cachectl.services.checks.torch_calls import tensor_attribute
from cachectl.services.checks.values import (
    HOST,
    UNKNOWN,
    Bound,
    Class,
    Const,
    Dim,
    Ext,
    ExtObj,
    Func,
    Host,
    ModuleRef,
    Obj,
    Seq,
    Shape,
    Tensor,
    Unknown,
    Value,
    element_of,
    join,
)
from cachectl.services.checks.watcher import Frame, Watcher

__all__ = ["Reader"]


class Reader(ABC):
    """Knows names, and what a watcher is told. SourceReader is the whole one; the classes between have a file each."""

    def __init__(self, modules: Modules, watcher: Watcher | None = None) -> None:
        self.modules = modules
        self.watcher = watcher or Watcher()
        self.watching = False
        self.changing: set[str] = set()
        self.globals: dict[str, Frame] = {}

    def module_frame(self, module: Module) -> Frame:
        """Return the frame of a module's own names."""
        return self.globals.setdefault(module.id, Frame(module))

    def lookup(self, frame: Frame, name: str) -> Value:
        """Return what a name means in a frame."""
        scope: Frame | None = frame
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        found = self.global_name(frame.module, name)
        return Ext(f"builtins.{name}") if found is None else found

    def global_name(self, module: Module, name: str) -> Value | None:
        """Return what a module's name means, None where it binds no such name."""
        if name in module.values:
            return module.values[name]
        statements = module.bindings.get(name)
        if statements is None:
            for star in module.bindings.get("*", []):
                if isinstance(star, ast.ImportFrom):
                    found = self.modules.imported(module, star, name)
                    if isinstance(found, tuple):
                        return self.resolved(found)
            return None
        module.values[name] = UNKNOWN  # Where evaluating it asks for it again.
        watching, self.watching = self.watching, False
        try:
            value = join(*(self._binding(module, statement, name) for statement in statements))
        finally:
            self.watching = watching
        module.values[name] = value
        return value

    def resolved(self, found: Value) -> Value:
        """Return the value of a (module, name) pair that an import leads to; anything else as it is."""
        while isinstance(found, tuple):
            module, name = found
            value = self.global_name(module, name)
            found = UNKNOWN if value is None else value
        return found

    def _binding(self, module: Module, statement: ast.AST, name: str) -> Value:
        frame = self.module_frame(module)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Func(statement, module)
        if isinstance(statement, ast.ClassDef):
            return Class(statement, module)
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return self.resolved(self.modules.imported(module, statement, name))
        if isinstance(statement, ast.Assign):
            value = self.eval(statement.value, frame)
            target = statement.targets[0]
            return value if isinstance(target, ast.Name) else self._unpacked(target, value).get(name, UNKNOWN)
        if isinstance(statement, ast.AnnAssign):
            return self.eval(statement.value, frame) if statement.value is not None else UNKNOWN
        return UNKNOWN

    def _unpacked(self, target: ast.expr, value: Value) -> dict[str, Value]:
        found: dict[str, Value] = {}
        if isinstance(target, ast.Name):
            found[target.id] = value
        elif isinstance(target, ast.Starred):
            found |= self._unpacked(target.value, Seq("list", None, element_of(value)))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part, item in zip(target.elts, self.spread(value, target.elts), strict=True):
                found |= self._unpacked(part, item)
        return found

    @staticmethod
    def spread(value: Value, targets: Sequence[ast.expr]) -> list[Value]:
        """Return what unpacking a value gives each of the targets."""
        starred = any(isinstance(target, ast.Starred) for target in targets)
        if isinstance(value, Seq) and value.items is not None and len(value.items) == len(targets) and not starred:
            return list(value.items)
        if isinstance(value, Shape):
            return [Dim(value.owner, index, value.node) for index in range(len(targets))]
        return [element_of(value)] * len(targets)

    def eval(self, node: ast.expr, frame: Frame) -> Value:
        """Return what is known of an expression's value; the watcher is told what it does."""
        method = getattr(self, f"_eval_{type(node).__name__}", None)
        if method is not None:
            return method(node, frame)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.eval(child, frame)
        return UNKNOWN

    def condition(self, node: ast.AST, test: ast.expr, frame: Frame, kind: str) -> bool | None:
        """Return whether a condition holds, None where both is possible; the watcher is told."""
        several = isinstance(test, ast.BoolOp)
        value = self.tested(test, frame) if isinstance(test, ast.BoolOp) else self.eval(test, frame)
        if self.watching:
            decode = self.watcher.prefill_branch(frame, node, test, value)
            if decode is not None:
                return decode
            if not several:
                self.watcher.branch(frame, node, test, value, kind)
        return self.truth(value)

    @staticmethod
    def truth(value: Value) -> bool | None:
        """Return a value's truth where it is known."""
        if isinstance(value, Const):
            return bool(value.value)
        if isinstance(value, Seq) and value.items is not None:
            return bool(value.items)
        if isinstance(value, (Obj, Func, Class, Bound, ModuleRef)):
            return True
        return None

    def quietly(self, node: ast.expr, frame: Frame) -> Value:
        """Evaluate an expression without telling the watcher."""
        watching, self.watching = self.watching, False
        try:
            return self.eval(node, frame)
        finally:
            self.watching = watching

    def attribute(self, value: Value, name: str, node: ast.AST, frame: Frame) -> Value:
        """Return an attribute of a value."""
        if isinstance(value, Tensor):
            return tensor_attribute(value, name, node)
        if isinstance(value, ModuleRef):
            found = self.global_name(value.module, name)
            return found if found is not None else self.modules.module_value(f"{value.module.name}.{name}")
        if isinstance(value, Ext):
            return Ext(f"{value.path}.{name}")
        if isinstance(value, ExtObj):
            if name in value.attrs:
                return value.attrs[name]
            if value.path.startswith("torch.nn.") and name in ("weight", "bias"):
                return Tensor(home=name, kind="parameter")
            return HOST if value.path == "torch.nn.Linear" else Unknown(name)
        if isinstance(value, (Obj, Class)):
            return self.member(value, name, node, frame)
        if isinstance(value, (Host, Const)):
            return HOST
        return Unknown(name)

    @abstractmethod
    def tested(self, node: ast.BoolOp, frame: Frame) -> Value:
        """Evaluate `and` or `or` whose truth is asked for."""

    @abstractmethod
    def member(self, value: Obj | Class, name: str, node: ast.AST, frame: Frame) -> Value:
        """Return an attribute of an object or a class that the reader has the source of."""
