"""Expressions as the reader of source text evaluates them.

Owns what each kind of expression is worth, as far as the text tells.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from cachectl.services.checks.folding import cut, folded, holds, is_given, is_plain
from cachectl.services.checks.reader import Reader
from cachectl.services.checks.torch_calls import FREQUENCY_WORDS, words_of
from cachectl.services.checks.values import (
    HOST,
    NONE,
    UNKNOWN,
    Bound,
    Class,
    Const,
    Dim,
    Ext,
    ExtObj,
    Func,
    Host,
    Map,
    ModuleRef,
    Obj,
    Seq,
    Shape,
    Tensor,
    Unknown,
    Value,
    alternatives,
    element_of,
    is_deep,
    is_host,
    is_tensor,
    join,
    named,
    present,
)
from cachectl.services.checks.watcher import Frame

__all__ = ["ExpressionReader"]

_UNROLLED = 8


class ExpressionReader(Reader):
    """Evaluates expressions."""

    def _eval_Constant(self, node: ast.Constant, frame: Frame) -> Value:  # noqa: N802 - the syntax tree's names
        return Const(node.value)

    def _eval_Name(self, node: ast.Name, frame: Frame) -> Value:  # noqa: N802
        return self.lookup(frame, node.id)

    def _eval_Attribute(self, node: ast.Attribute, frame: Frame) -> Value:  # noqa: N802
        value = self.eval(node.value, frame)
        return join(*(self.attribute(member, node.attr, node, frame) for member in present(value)))

    def _eval_JoinedStr(self, node: ast.JoinedStr, frame: Frame) -> Value:  # noqa: N802
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.eval(part.value, frame)
        return HOST

    def _eval_Tuple(self, node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:  # noqa: N802
        kind = type(node).__name__.lower()
        items = [self.eval(item.value if isinstance(item, ast.Starred) else item, frame) for item in node.elts]
        if any(map(is_deep, items)):
            return Seq(kind, None, UNKNOWN)
        if not any(isinstance(item, ast.Starred) for item in node.elts):
            return Seq(kind, tuple(items))
        spread: list[Value] = []
        for item, value in zip(node.elts, items, strict=True):
            if not isinstance(item, ast.Starred):
                spread.append(value)
            elif isinstance(value, Seq) and value.items is not None:
                spread += value.items
            else:
                pairs = zip(node.elts, items, strict=True)
                return Seq(kind, None, join(*(element_of(v) if isinstance(i, ast.Starred) else v for i, v in pairs)))
        return Seq(kind, tuple(spread))

    _eval_List = _eval_Set = _eval_Tuple  # noqa: N815

    def _eval_Dict(self, node: ast.Dict, frame: Frame) -> Value:  # noqa: N802
        known: dict[Any, Value] = {}
        rest: list[Value] = []
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.eval(item, frame)
            if key is None:
                if isinstance(value, Map):
                    known |= value.known
                    rest += [] if value.rest is None else [value.rest]
                else:
                    rest.append(UNKNOWN)
            elif isinstance(found := self.eval(key, frame), Const) and is_plain(found.value):
                known[found.value] = value
            else:
                rest.append(value)
        return Map(known, join(*rest) if rest else None)

    def _eval_Lambda(self, node: ast.Lambda, frame: Frame) -> Value:  # noqa: N802
        return Func(node, frame.module, frame, frame.owner)

    def _eval_Starred(self, node: ast.Starred, frame: Frame) -> Value:  # noqa: N802
        return self.eval(node.value, frame)

    def _eval_Await(self, node: ast.Await, frame: Frame) -> Value:  # noqa: N802
        return self.eval(node.value, frame)

    def _eval_Yield(self, node: ast.Yield, frame: Frame) -> Value:  # noqa: N802
        frame.yielded.append(self.eval(node.value, frame) if node.value is not None else NONE)
        return UNKNOWN

    def _eval_NamedExpr(self, node: ast.NamedExpr, frame: Frame) -> Value:  # noqa: N802
        value = self.eval(node.value, frame)
        frame.names[node.target.id] = named(value, node.target.id)
        return value

    def _eval_UnaryOp(self, node: ast.UnaryOp, frame: Frame) -> Value:  # noqa: N802
        value = self.eval(node.operand, frame)
        if isinstance(node.op, ast.Not):
            if self.watching:
                self.watcher.branch(frame, node, node.operand, value, "not")
            truth = self.truth(value)
            return HOST if truth is None else Const(not truth, is_given(value))
        if isinstance(value, Const) and isinstance(value.value, (int, float)):
            if isinstance(node.op, ast.USub):
                return Const(-value.value, value.given)
            return value if isinstance(node.op, ast.UAdd) else HOST
        if is_tensor(value):
            return Tensor(boolean=isinstance(value, Tensor) and value.boolean)
        return HOST if is_host(value) else value if isinstance(value, Unknown) else UNKNOWN

    def _eval_BinOp(self, node: ast.BinOp, frame: Frame) -> Value:  # noqa: N802
        left, right = self.eval(node.left, frame), self.eval(node.right, frame)
        if self.watching:
            self.watcher.arithmetic(frame, node, left, right)
        return self.binary(node.op, left, right)

    def binary(self, op: ast.operator, left: Value, right: Value) -> Value:
        """Return what is known of a binary operation's result."""
        if isinstance(left, Const) and isinstance(right, Const):
            result = folded(op, left.value, right.value)
            return HOST if result is None else Const(result, left.given or right.given)
        if isinstance(left, Seq) and isinstance(right, Seq) and isinstance(op, ast.Add):
            if left.items is not None and right.items is not None:
                return Seq(left.kind, left.items + right.items)
            return Seq(left.kind, None, join(element_of(left), element_of(right)))
        if isinstance(left, Seq) and isinstance(op, ast.Mult):
            return Seq(left.kind, None, element_of(left), left.name)
        tensors = [item for side in (left, right) for item in alternatives(side) if isinstance(item, Tensor)]
        if is_tensor(left) or is_tensor(right):
            frequencies = [item for item in tensors if words_of(item.home or item.name) & FREQUENCY_WORDS]
            multiplied = isinstance(op, (ast.Mult, ast.MatMult)) and len(tensors) == 2 and bool(frequencies)
            return Tensor(
                ramp=all(item.ramp for item in tensors),
                angles=multiplied or any(item.angles for item in tensors),
                boolean=isinstance(op, (ast.BitAnd, ast.BitOr)) and all(item.boolean for item in tensors),
            )
        if tensors:
            return UNKNOWN
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Dim) and is_host(other):
                return one
        return HOST if is_host(left) and is_host(right) else UNKNOWN

    def _eval_BoolOp(self, node: ast.BoolOp, frame: Frame) -> Value:  # noqa: N802
        return self._bool(node, frame, tested=False)

    def tested(self, node: ast.BoolOp, frame: Frame) -> Value:
        return self._bool(node, frame, tested=True)

    def _bool(self, node: ast.BoolOp, frame: Frame, *, tested: bool) -> Value:
        """Evaluate `and` and `or`; `tested` where the result's truth is asked for, so that of its last part too."""
        found: list[Value] = []
        stops = isinstance(node.op, ast.Or)
        for index, part in enumerate(node.values):
            value = self.eval(part, frame)
            last = index == len(node.values) - 1
            if self.watching and (tested or not last):
                self.watcher.branch(frame, node, part, value, "and" if not stops else "or")
            truth = self.truth(value)
            if truth is stops:
                found.append(value)
                break
            if truth is None or last:
                found.append(value)
        return join(*found)

    def _eval_Compare(self, node: ast.Compare, frame: Frame) -> Value:  # noqa: N802
        values = [self.eval(part, frame) for part in (node.left, *node.comparators)]
        results = [
            self._compare(op, left, right) for op, left, right in zip(node.ops, values, values[1:], strict=False)
        ]
        if len(results) > 1 and self.watching and any(is_tensor(result) for result in results):
            # a < b < c asks for the truth of a < b.
            self.watcher.branch(frame, node, node, results[0] if is_tensor(results[0]) else results[1], "comparison")
        if len(results) == 1:
            return results[0]
        truths = [self.truth(result) for result in results]
        return Const(False) if False in truths else Const(True) if all(truths) else join(*results)

    def _compare(self, op: ast.cmpop, left: Value, right: Value) -> Value:
        if isinstance(op, (ast.Is, ast.IsNot)):
            same = self._identical(left, right)
            given = is_given(left) or is_given(right)
            return HOST if same is None else Const(same is isinstance(op, ast.Is), given)
        if isinstance(op, (ast.In, ast.NotIn)):
            held = holds(left, right)
            return HOST if held is None else Const(held is isinstance(op, ast.In), is_given(left))
        if is_tensor(left) or is_tensor(right):
            return Tensor(boolean=True)
        if isinstance(left, Const) and isinstance(right, Const):
            result = folded(op, left.value, right.value)
            return HOST if result is None else Const(result, left.given or right.given)
        if NONE in (left, right) and isinstance(op, (ast.Eq, ast.NotEq)):
            same = self._identical(left, right)
            return HOST if same is None else Const(same is isinstance(op, ast.Eq))
        return HOST if is_host(left) and is_host(right) else UNKNOWN

    @staticmethod
    def _identical(left: Value, right: Value) -> bool | None:
        for one, other in ((left, right), (right, left)):
            if isinstance(other, Const) and (other.value is None or isinstance(other.value, bool)):
                if isinstance(one, Const):
                    return one.value is other.value
                if isinstance(one, (Tensor, Seq, Map, Obj, Func, Class, Bound, ExtObj, Dim, Shape, Ext, ModuleRef)):
                    return False
        return None

    def _eval_IfExp(self, node: ast.IfExp, frame: Frame) -> Value:  # noqa: N802
        truth = self.condition(node, node.test, frame, "conditional expression")
        if truth is not None:
            return self.eval(node.body if truth else node.orelse, frame)
        return join(self.eval(node.body, frame), self.eval(node.orelse, frame))

    def _eval_Subscript(self, node: ast.Subscript, frame: Frame) -> Value:  # noqa: N802
        value, index = self.eval(node.value, frame), self.index(node.slice, frame)
        if self.watching:
            self.watcher.subscript(frame, node, value, index)
        return join(*(self.item(member, index, node) for member in present(value)))

    def index(self, node: ast.expr, frame: Frame) -> Value:
        """Evaluate what stands in brackets; a slice is a Seq of its bounds."""
        if isinstance(node, ast.Slice):
            parts = [
                self.eval(part, frame) if part is not None else NONE for part in (node.lower, node.upper, node.step)
            ]
            return Seq("slice", tuple(parts))
        if isinstance(node, ast.Tuple):
            return Seq("tuple", tuple(self.index(part, frame) for part in node.elts))
        return self.eval(node, frame)

    def item(self, value: Value, index: Value, node: ast.Subscript) -> Value:
        """Return what an index or a slice of a value is."""
        if isinstance(value, Tensor):
            return cut(value, index)
        if isinstance(value, Shape):
            if isinstance(index, Const) and isinstance(index.value, int):
                return Dim(value.owner, index.value, value.node)
            return value if isinstance(index, Seq) and index.kind == "slice" else HOST
        if isinstance(value, Seq):
            if isinstance(index, Const) and isinstance(index.value, int) and value.items is not None:
                if -len(value.items) <= index.value < len(value.items):
                    return value.items[index.value]
                return UNKNOWN
            if isinstance(index, Seq) and index.kind == "slice":
                bounds: list[Any] = [part.value if isinstance(part, Const) else ... for part in index.items or ()]
                if value.items is not None and all(bound is None or isinstance(bound, int) for bound in bounds):
                    lower, upper, step = bounds
                    return replace(value, items=value.items[lower:upper:step])
                return Seq(value.kind, None, element_of(value))
            return element_of(value)
        if isinstance(value, Map):
            if isinstance(index, Const) and is_plain(index.value) and index.value in value.known:
                return value.known[index.value]
            rest = [] if value.rest is None else [value.rest]
            return UNKNOWN if isinstance(index, Const) and value.rest is None else join(*value.known.values(), *rest)
        if isinstance(value, ExtObj):
            inner = [arg for arg in value.args if isinstance(arg, (Obj, ExtObj))]
            return join(*inner) if value.path == "torch.nn.Sequential" and inner else UNKNOWN
        return HOST if isinstance(value, (Host, Const)) and not isinstance(index, Tensor) else UNKNOWN

    def _comprehension(self, node: Any, frame: Frame) -> tuple[Frame, bool]:
        """Bind a comprehension's variables; return the frame, and whether it is known to yield nothing."""
        inner = Frame(frame.module, frame.func, outer=frame, receiver=frame.receiver, owner=frame.owner)
        for generator in node.generators:
            value = self.eval(generator.iter, inner)
            if self.watching:
                self.watcher.iterated(inner, generator.iter, value)
            if isinstance(value, Seq) and value.items == ():
                return inner, True
            for name, item in self._unpacked(generator.target, element_of(value)).items():
                inner.names[name] = named(item, name)
            for test in generator.ifs:
                if self.condition(node, test, inner, "condition of a comprehension") is False:
                    return inner, True
        return inner, False

    def _eval_ListComp(self, node: ast.ListComp, frame: Frame) -> Value:  # noqa: N802
        if len(node.generators) == 1 and not node.generators[0].ifs:
            values = self.eval(node.generators[0].iter, frame)
            if isinstance(values, Seq) and values.items is not None and 0 < len(values.items) <= _UNROLLED:
                found = []
                for item in values.items:
                    inner = Frame(frame.module, frame.func, outer=frame, receiver=frame.receiver, owner=frame.owner)
                    inner.names |= self._unpacked(node.generators[0].target, item)
                    found.append(self.eval(node.elt, inner))
                return Seq("list", tuple(found))
        inner, empty = self._comprehension(node, frame)
        return Seq("list", ()) if empty else Seq("list", None, self.eval(node.elt, inner))

    def _eval_GeneratorExp(self, node: ast.GeneratorExp, frame: Frame) -> Value:  # noqa: N802
        inner, empty = self._comprehension(node, frame)
        return Seq("list", ()) if empty else Seq("list", None, self.eval(node.elt, inner))

    def _eval_SetComp(self, node: ast.SetComp, frame: Frame) -> Value:  # noqa: N802
        inner, empty = self._comprehension(node, frame)
        return Seq("set", ()) if empty else Seq("set", None, self.eval(node.elt, inner))

    def _eval_DictComp(self, node: ast.DictComp, frame: Frame) -> Value:  # noqa: N802
        inner, empty = self._comprehension(node, frame)
        if empty:
            return Map({})
        self.eval(node.key, inner)
        return Map({}, self.eval(node.value, inner))
