"""Statements as the reader of source text goes through them: what they bind, and which paths end.

Owns the state of a function while it is read. A loop's body is read twice, so that what one pass binds is seen by the
next.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from cachectl.services.checks.calls import REST, CallReader
from cachectl.services.checks.modules import Modules
from cachectl.services.checks.objects import held
from cachectl.services.checks.values import (
    HOST,
    NONE,
    UNKNOWN,
    Class,
    Const,
    ExtObj,
    Func,
    Map,
    Obj,
    Seq,
    Tensor,
    Unknown,
    Value,
    alternatives,
    element_of,
    join,
    named,
)
from cachectl.services.checks.watcher import Frame, Watcher

__all__ = ["SourceReader", "TooLargeError"]

_UNROLLED = 6
_READ_TWICE = 2
_MOST_STATEMENTS = 300_000


class TooLargeError(Exception):
    """There is more to read than a check may take time for."""


class SourceReader(CallReader):
    """Reads whole functions."""

    def __init__(self, modules: Modules, watcher: Watcher | None = None) -> None:
        super().__init__(modules, watcher)
        # How many statements were read since somebody set it to 0, and how many loops stand around this one.
        self.statements = 0
        self.loops = 0
        # How many loops and branches stand around it: what is bound there joins what was.
        self.unsure = 0

    def watch(self, func: Func, args: Sequence[Value], kwargs: dict[str, Value] | None) -> Value:
        """Read a compiled method with these arguments, None where they are not known; tell the watcher what it does."""
        self.watching, self.doubt, self.unsure, self.loops, self.depth = True, 0, 0, 0, 0
        self.calls = self.statements = 0
        try:
            frame = self.bind(func, list(args), {REST: UNKNOWN} if kwargs is None else kwargs)
            frame.top = True
            return self.run(func, frame)
        finally:
            self.watching = False

    def run(self, func: Func, frame: Frame) -> Value:
        if isinstance(func.node, ast.Lambda):
            return self.eval(func.node.body, frame)
        ended = self.execute(func.node.body, frame)
        if frame.doubtful:
            self.doubt -= 1
        if frame.yielded:
            return Seq("list", None, join(*frame.yielded))
        if not ended:
            frame.returned.append(NONE)
        return join(*frame.returned) if frame.returned else UNKNOWN

    def execute(self, body: Sequence[ast.stmt], frame: Frame) -> bool:
        """Read statements; return whether no path comes out at their end."""
        for statement in body:
            self.statements += 1
            if self.statements > _MOST_STATEMENTS:
                raise TooLargeError
            method = getattr(self, f"_exec_{type(statement).__name__}", None)
            if method is None:
                for child in ast.iter_child_nodes(statement):
                    if isinstance(child, ast.expr):
                        self.eval(child, frame)
            elif method(statement, frame):
                return True
        return False

    # Simple statements.

    def _exec_Expr(self, node: ast.Expr, frame: Frame) -> bool:  # noqa: N802 - the syntax tree's names
        if not isinstance(node.value, ast.Constant):
            self.eval(node.value, frame)
            self._grow(node.value, frame)
        return False

    def _grow(self, node: ast.expr, frame: Frame) -> None:
        """Let a list that is a local name know of what is appended to it."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            return
        if node.func.attr not in ("append", "extend", "insert", "add"):
            return
        target = node.func.value
        value = self.lookup(frame, target.id) if isinstance(target, ast.Name) else None
        watching, self.watching = self.watching, False
        new = self.eval(node.args[-1], frame)
        if isinstance(target, ast.Attribute):
            receiver = self.eval(target.value, frame)
            if isinstance(receiver, Obj) and isinstance(held_ := receiver.attrs.get(target.attr), Seq):
                receiver.attrs[target.attr] = held(_with(held_, new, node.func.attr), target.attr)
        self.watching = watching
        if isinstance(target, ast.Name) and isinstance(value, Seq):
            frame.names[target.id] = _with(value, new, node.func.attr)

    def _exec_Assign(self, node: ast.Assign, frame: Frame) -> bool:  # noqa: N802
        value = self.eval(node.value, frame)
        for target in node.targets:
            self.assign(target, value, node.value, frame)
        return False

    def _exec_AnnAssign(self, node: ast.AnnAssign, frame: Frame) -> bool:  # noqa: N802
        if node.value is not None:
            self.assign(node.target, self.eval(node.value, frame), node.value, frame)
        return False

    def _exec_AugAssign(self, node: ast.AugAssign, frame: Frame) -> bool:  # noqa: N802
        target = ast.copy_location(_as_load(node.target), node.target)
        old = self.eval(target, frame)
        added = self.eval(node.value, frame)
        # What is not known may be a tensor, which += writes in place, unless a plain number is added to a number.
        value = HOST if isinstance(old, Unknown) and isinstance(added, Const) else self.binary(node.op, old, added)
        if isinstance(old, Tensor):
            value = old  # += writes in place.
            if self.watching and isinstance(node.target, ast.Attribute):
                self.watcher.item_set(frame, node, old)  # type: ignore[arg-type]
        if isinstance(node.target, ast.Attribute) and isinstance(old, Tensor):
            return False
        self.assign(node.target, value, node, frame)
        return False

    def assign(self, target: ast.expr, value: Value, source: ast.AST, frame: Frame) -> None:
        """Bind a target to a value; `source` is the expression, or the augmented assignment, it comes from."""
        if isinstance(target, ast.Name):
            if target.id in frame.shared:
                if self.watching:
                    self.watcher.global_set(frame, target, target.id, source if isinstance(source, ast.expr) else None)
                return
            frame.names[target.id] = named(value, target.id)
            if self.watching:
                self.watcher.name_bound(frame, target, target.id, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Seq("list", None, element_of(value)), source, frame)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = [source] * len(target.elts)
            if isinstance(source, (ast.Tuple, ast.List)) and len(source.elts) == len(target.elts):
                parts = list(source.elts)
            for part, item, from_ in zip(target.elts, self.spread(value, target.elts), parts, strict=True):
                self.assign(part, item, from_, frame)
        elif isinstance(target, ast.Attribute):
            receiver = self.eval(target.value, frame)
            for member in alternatives(receiver):
                self.set_attribute(target, member, value, source, frame)
        elif isinstance(target, ast.Subscript):
            receiver = self.eval(target.value, frame)
            index = self.index(target.slice, frame)
            if self.watching:
                self.watcher.item_set(frame, target, receiver)
                self.watcher.subscript(frame, target, receiver, index)
                self.watcher.element_bound(
                    frame, target, receiver, value, source if isinstance(source, ast.expr) else None
                )
            if isinstance(receiver, Map):
                if isinstance(index, Const) and isinstance(index.value, (str, int)):
                    receiver.known[index.value] = value
                else:
                    receiver.rest = value if receiver.rest is None else join(receiver.rest, value)

    def set_attribute(
        self, target: ast.Attribute, receiver: Value, value: Value, source: ast.AST, frame: Frame
    ) -> None:
        if self.watching:
            old = self.attribute(receiver, target.attr, target, frame)
            self.watcher.attribute_set(
                frame, target, receiver, target.attr, old, value, source if isinstance(source, ast.expr) else None
            )
            if isinstance(receiver, (Obj, ExtObj)):
                receiver.attrs.setdefault(target.attr, value)
        elif isinstance(receiver, (Obj, ExtObj)):
            owner = receiver.cls.name if isinstance(receiver, Obj) else ""
            new = held(value, f"{owner}.{target.attr}" if "cache" in owner.lower() else target.attr)
            before = receiver.attrs.get(target.attr)
            if isinstance(before, Tensor) and isinstance(new, Tensor) and before.kind:
                new = held(value, target.attr, before.kind)
            receiver.attrs[target.attr] = new if before is None or not self.unsure else join(before, new)

    def _exec_Delete(self, node: ast.Delete, frame: Frame) -> bool:  # noqa: N802
        for target in node.targets:
            if isinstance(target, ast.Name):
                frame.names.pop(target.id, None)
        return False

    def _exec_Return(self, node: ast.Return, frame: Frame) -> bool:  # noqa: N802
        value = self.eval(node.value, frame) if node.value is not None else NONE
        frame.returned.append(value)
        if self.watching and frame.top:
            self.watcher.top_returned(frame, node, value)
        return True

    def _exec_Raise(self, node: ast.Raise, frame: Frame) -> bool:  # noqa: N802
        return True  # What an error's text says is no part of a graph.

    def _exec_Break(self, node: ast.Break, frame: Frame) -> bool:  # noqa: N802
        return False

    def _exec_Continue(self, node: ast.Continue, frame: Frame) -> bool:  # noqa: N802
        return False

    def _exec_Assert(self, node: ast.Assert, frame: Frame) -> bool:  # noqa: N802
        self.condition(node, node.test, frame, "assert")
        return False

    def _exec_Global(self, node: ast.Global, frame: Frame) -> bool:  # noqa: N802
        frame.shared |= set(node.names)
        return False

    def _exec_Nonlocal(self, node: ast.Nonlocal, frame: Frame) -> bool:  # noqa: N802
        frame.shared |= set(node.names)
        return False

    def _exec_Import(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> bool:  # noqa: N802
        for alias in node.names:
            name = alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)
            frame.names[name] = self.resolved(self.modules.imported(frame.module, node, name))
        return False

    _exec_ImportFrom = _exec_Import  # noqa: N815

    def _exec_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> bool:  # noqa: N802
        frame.names[node.name] = Func(node, frame.module, frame)
        return False

    _exec_AsyncFunctionDef = _exec_FunctionDef  # noqa: N815

    def _exec_ClassDef(self, node: ast.ClassDef, frame: Frame) -> bool:  # noqa: N802
        frame.names[node.name] = Class(node, frame.module, frame)
        return False

    # Compound statements.

    def _exec_If(self, node: ast.If, frame: Frame) -> bool:  # noqa: N802
        truth = self.condition(node, node.test, frame, "if")
        if truth is not None:
            return self.execute(node.body if truth else node.orelse, frame)
        return self._paths([node.body, node.orelse], frame)

    def _paths(self, bodies: Sequence[Sequence[ast.stmt]], frame: Frame) -> bool:
        """Read paths of which one is taken; join what they bind."""
        before = dict(frame.names)
        ends: list[dict[str, Value]] = []
        self.unsure += 1
        self.doubt += 1
        for body in bodies:
            frame.names = dict(before)
            if not self.execute(body, frame):
                ends.append(frame.names)
        self.unsure -= 1
        self.doubt -= 1
        if ends and len(ends) < len(bodies) and not frame.doubtful:
            # One path went out: what follows need not be reached.
            frame.doubtful = True
            self.doubt += 1
        if not ends:
            frame.names = before
            return True
        names = {name for end in ends for name in end}
        frame.names = {
            name: join(*(end[name] for end in ends)) if all(name in end for end in ends)
            else next(end[name] for end in ends if name in end)
            for name in names
        }  # fmt: skip
        return False

    def _exec_For(self, node: ast.For, frame: Frame) -> bool:  # noqa: N802
        value = self.eval(node.iter, frame)
        if self.watching:
            self.watcher.iterated(frame, node.iter, value)
        if isinstance(value, Seq) and value.items is not None and len(value.items) <= _UNROLLED:
            for item in value.items:
                self.assign(node.target, item, node.iter, frame)
                if self.execute(node.body, frame):
                    break
        else:
            self._loop(node.body, frame, lambda: self.assign(node.target, element_of(value), node.iter, frame))
        self.execute(node.orelse, frame)
        return False

    _exec_AsyncFor = _exec_For  # noqa: N815

    def _exec_While(self, node: ast.While, frame: Frame) -> bool:  # noqa: N802
        if self.condition(node, node.test, frame, "while") is False:
            return self.execute(node.orelse, frame)
        self._loop(node.body, frame, lambda: None)
        self.execute(node.orelse, frame)
        return False

    def _loop(self, body: Sequence[ast.stmt], frame: Frame, start: Any) -> None:
        self.unsure += 1
        self.loops += 1
        # Loops within loops are read once: what the first pass binds, the outer one's second pass sees.
        for _ in range(2 if self.loops <= _READ_TWICE else 1):
            before = dict(frame.names)
            start()
            self.execute(body, frame)
            frame.names = {
                name: join(before[name], value) if name in before else value for name, value in frame.names.items()
            }
        self.loops -= 1
        self.unsure -= 1

    def _exec_With(self, node: ast.With | ast.AsyncWith, frame: Frame) -> bool:  # noqa: N802
        for item in node.items:
            value = self.eval(item.context_expr, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, item.context_expr, frame)
        return self.execute(node.body, frame)

    _exec_AsyncWith = _exec_With  # noqa: N815

    def _exec_Try(self, node: ast.Try, frame: Frame) -> bool:  # noqa: N802
        ended = self._paths([[*node.body, *node.orelse], *(handler.body for handler in node.handlers)], frame)
        return self.execute(node.finalbody, frame) or ended

    _exec_TryStar = _exec_Try  # noqa: N815

    def _exec_Match(self, node: ast.Match, frame: Frame) -> bool:  # noqa: N802
        self.condition(node, node.subject, frame, "match")
        for case in node.cases:
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchAs) and part.name:
                    frame.names[part.name] = UNKNOWN
        return self._paths([*(case.body for case in node.cases), []], frame)


def _with(value: Seq, new: Value, how: str) -> Seq:
    """Return a list with what was appended to it."""
    added = element_of(new) if how == "extend" else new
    if value.items is not None and how == "append" and len(value.items) < 8:
        return Seq(value.kind, (*value.items, new), name=value.name)
    items = value.items if value.items is not None else (value.element,)
    return Seq(value.kind, None, join(*items, added), name=value.name)


def _as_load(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    if isinstance(node, ast.Attribute):
        return ast.Attribute(node.value, node.attr, ast.Load())
    if isinstance(node, ast.Subscript):
        return ast.Subscript(node.value, node.slice, ast.Load())
    return node
