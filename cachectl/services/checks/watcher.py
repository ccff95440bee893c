"""Who is told what the compiled path does: the interface between the reader of source text and its rules.

Owns the frame of one call, and what a watcher is told.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from cachectl.services.checks.modules import Module
from cachectl.services.checks.values import (
    Class,
    Func,
    Value,
)

__all__ = ["Frame", "Watcher"]


@dataclass(eq=False)
class Frame:
    """One call of a function: its names, and what it returns."""

    module: Module
    func: Func | None = None
    names: dict[str, Value] = field(default_factory=dict)
    outer: Frame | None = None
    receiver: Value = None
    owner: Class | None = None
    returned: list[Value] = field(default_factory=list)
    yielded: list[Value] = field(default_factory=list)
    top: bool = False
    doubtful: bool = False
    shared: set[str] = field(default_factory=set)


class Watcher:
    """Is told what the compiled path does; this one listens to nothing."""

    def call(self, frame: Frame, node: ast.Call, callee: Value, args: list[Value], kwargs: dict[str, Value]) -> None:
        """A function is called."""

    def method(
        self, frame: Frame, node: ast.Call, receiver: Value, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> None:
        """A method of something that the reader has no source of is called."""

    def entered(self, frame: Frame, node: ast.AST, func: Func) -> None:
        """A function that the reader has the source of is about to be read."""

    def branch(self, frame: Frame, node: ast.AST, test: ast.expr, value: Value, kind: str) -> None:
        """A condition is evaluated: of an `if`, a `while`, an `assert`, a ternary or a boolean operator."""

    def prefill_branch(self, frame: Frame, node: ast.AST, test: ast.expr, value: Value) -> bool | None:
        """Return what a condition is in decode, where it asks whether this is prefill; None if it doesn't."""
        return None

    def attribute_set(
        self, frame: Frame, node: ast.AST, receiver: Value, name: str, old: Value, new: Value, source: ast.expr | None
    ) -> None:
        """An attribute is bound."""

    def name_bound(self, frame: Frame, node: ast.AST, name: str, value: Value) -> None:
        """A local name is bound."""

    def arithmetic(self, frame: Frame, node: ast.AST, left: Value, right: Value) -> None:
        """Two values are computed with."""

    def item_set(self, frame: Frame, node: ast.Subscript, receiver: Value) -> None:
        """Something is written by index."""

    def element_bound(
        self, frame: Frame, node: ast.Subscript, receiver: Value, value: Value, source: ast.expr | None
    ) -> None:
        """A member of a list or a dict is bound."""

    def subscript(self, frame: Frame, node: ast.Subscript, receiver: Value, index: Value) -> None:
        """Something is read by index or slice."""

    def iterated(self, frame: Frame, node: ast.AST, value: Value) -> None:
        """Something is looped over."""

    def top_returned(self, frame: Frame, node: ast.Return, value: Value) -> None:
        """The compiled method itself returns."""

    def global_set(self, frame: Frame, node: ast.AST, name: str, value: ast.expr | None) -> None:
        """A global is bound anew."""
