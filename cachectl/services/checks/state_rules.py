"""The rules of a compiled method that its source text shows: state, branches, shapes, outputs.

Owns what each rule looks at; its words stand in schemas/check.py. What calls of torch and torch_npu break stands in
call_rules.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cachectl.schemas.check import SEVERITIES, Finding, Severity, rule_finding
from cachectl.services.checks.torch_calls import words_of
from cachectl.services.checks.values import (
    Const,
    Dim,
    ExtObj,
    Func,
    Map,
    Obj,
    Seq,
    Tensor,
    Union,
    Unknown,
    Value,
    alternatives,
    has_tensor,
    is_cache_name,
    is_host,
    is_tensor,
)
from cachectl.services.checks.watcher import Frame, Watcher

__all__ = ["LENGTH_WORDS", "Findings", "StateRules", "text_of"]

LENGTH_WORDS = frozenset({"len", "lens", "length", "lengths", "seqlen", "seqlens", "seq", "tokens", "sequence"})
_CARRIERS = frozenset({"ids", "hidden", "embeds", "positions", "position", "tokens", "x", "key", "keys", "k", "states"})
_TOKENS = frozenset({"ids", "positions", "tokens"})
_PREFILL = re.compile(r"(is_|in_|_|^)(prefill|prompt)(_?(stage|phase|step|mode|only))?$")
_KINDS = {"buffer": "buffer", "parameter": "parameter", "plain": "tensor"}
_SHOWN = 70


@dataclass
class Findings:
    """The findings of one check, one per rule and place; the graver one stands."""

    found: dict[tuple[str, str | None, int | None], Finding]

    def add(self, finding: Finding) -> None:
        place = (finding.rule, finding.path, finding.line)
        before = self.found.get(place)
        if before is None or SEVERITIES.index(finding.severity) < SEVERITIES.index(before.severity):
            self.found[place] = finding

    def of_rule(self, rule: str) -> list[Finding]:
        return [item for item in self.found.values() if item.rule == rule]


class StateRules(Watcher):
    """Rules on state, branches, shapes and outputs.

    Args:
        findings: where what is found goes.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.method_name: str | None = None
        self.flagged = False
        self.flag_argument = False

    def report(
        self, frame: Frame, node: ast.AST, rule: str, severity: Severity, what: str, rewrite: str | None = None
    ) -> None:
        """Add a finding at a node of the function that is being read."""
        self.findings.add(
            rule_finding(
                rule,
                severity,
                what,
                path=frame.module.shown,
                line=getattr(node, "lineno", None),
                rewrite=rewrite,
                method=self.method_name,
            )
        )

    # Branches.

    def branch(self, frame: Frame, node: ast.AST, test: ast.expr, value: Value, kind: str) -> None:
        if is_tensor(value):
            self.report(frame, test, "tensor-branch", "error", f"{_KIND_WORDS.get(kind, kind)} on `{text_of(test)}`")

    def prefill_branch(self, frame: Frame, node: ast.AST, test: ast.expr, value: Value) -> bool | None:
        asked = _asks_prefill(test)
        if asked is None or (isinstance(value, Const) and not value.given):
            return None
        if not self.flagged:
            # Once a method: the first branch names the flag, and the others are read as decode.
            self.flagged = True
            what = f"branch on `{text_of(test)}`"
            if self._is_flag_of_method(frame, test):
                self.report(frame, test, "prefill-flag", "warning", what)
            else:
                # Plain data that came in with the call: decided while tracing, and one more value to be guarded.
                self.report(frame, test, "prefill-flag", "advice", f"{what}, which comes in with the call")
        if isinstance(test, ast.BoolOp):
            # `is_prefill and more` never holds in decode; `not is_prefill and more` may.
            decided = isinstance(test.op, ast.And) is asked
            return (not asked) if decided else None
        return not asked

    def _is_flag_of_method(self, frame: Frame, test: ast.expr) -> bool:
        """Say whether a flag is an argument of the compiled method itself, or an attribute of a module that changes."""
        if self.flag_argument:
            return True
        return any(
            isinstance(node, ast.Attribute)
            and _PREFILL.search(node.attr)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "this")
            for node in ast.walk(test)
        )

    # State.

    def attribute_set(
        self, frame: Frame, node: ast.AST, receiver: Value, name: str, old: Value, new: Value, source: ast.expr | None
    ) -> None:
        shown = text_of(node)
        if isinstance(receiver, Tensor):
            if name == "data":
                self.report(frame, node, "rebound-buffer", "error", f"`{shown}` is bound to another tensor")
            elif name == "requires_grad" and new != Const(False):
                self.report(frame, node, "backward", "error", f"`{shown}` is set in the compiled path")
            return
        if isinstance(receiver, (Obj, ExtObj)) and receiver.name == "local":
            return  # Made in this step, and gone with it.
        known = next((item for item in alternatives(old) if isinstance(item, Tensor) and item.kind), None)
        if known is not None and is_tensor(old):
            if not (isinstance(new, Tensor) and new.home == known.home and _writes_in_place(source)):
                self._rebound(frame, node, shown, source, _KINDS[known.kind])
        elif is_tensor(new) and (is_cache_name(name) or (source is not None and _reads(source, name))):
            self._rebound(frame, node, shown, source, "tensor")
        elif not (is_host(old) or isinstance(old, Unknown)) or not is_host(new):
            return
        elif source is None or _reads(source, name):
            self.report(frame, node, "changed-attribute", "error", f"`{shown}` changes at every step")

    def element_bound(
        self, frame: Frame, node: ast.Subscript, receiver: Value, value: Value, source: ast.expr | None
    ) -> None:
        holder: ast.AST = node.value
        while isinstance(holder, ast.Subscript):
            holder = holder.value
        if not isinstance(holder, ast.Attribute) or not is_tensor(value):
            return  # A list of this call's own may hold what it likes.
        if holder.attr in ("_buffers", "_parameters"):
            self._rebound(frame, node, text_of(node), source, "buffer" if holder.attr == "_buffers" else "parameter")
        if not isinstance(receiver, (Seq, Map)):
            return
        kept = [item for item in _tensors(receiver) if item.kind]
        if kept and not _writes_in_place(source):
            self._rebound(frame, node, text_of(node), source, _KINDS[kept[0].kind])

    def _rebound(self, frame: Frame, node: ast.AST, shown: str, source: ast.expr | None, kind: str) -> None:
        if source is not None and _grows(source):
            self.report(frame, node, "grown-cache", "error", f"`{shown}` grows at every step")
        else:
            self.report(frame, node, "rebound-buffer", "error", f"the {kind} `{shown}` is bound to another tensor")

    def global_set(self, frame: Frame, node: ast.AST, name: str, value: ast.expr | None) -> None:
        self.report(
            frame, node, "changed-attribute", "error", f"the global `{name}` is bound anew in the compiled path"
        )

    def item_set(self, frame: Frame, node: ast.AST, receiver: Value) -> None:
        for member in alternatives(receiver):
            if isinstance(member, Tensor) and member.kind == "parameter":
                self.report(frame, node, "parameter-written", "error", f"`{text_of(node)}` is a parameter")

    # Shapes.

    def name_bound(self, frame: Frame, node: ast.AST, name: str, value: Value) -> None:
        if frame.top and isinstance(value, Dim) and value.index not in (0, -1) and words_of(name) & LENGTH_WORDS:
            self.report(
                frame, value.node, "shape-as-length", "advice", f"`{name}` is read from the shape of `{value.owner}`"
            )

    def arithmetic(self, frame: Frame, node: ast.AST, left: Value, right: Value) -> None:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Dim) and is_tensor(other) and words_of(one.target) & LENGTH_WORDS:
                self.length_used(frame, one, f"in `{text_of(node)}`")

    def subscript(self, frame: Frame, node: ast.Subscript, receiver: Value, index: Value) -> None:
        if not is_tensor(receiver):
            return
        parts = (
            index.items if isinstance(index, Seq) and index.kind == "tuple" and index.items is not None else (index,)
        )
        for part in parts:
            if isinstance(part, Seq) and part.kind == "slice":
                for bound in part.items or ():
                    if is_tensor(bound):
                        self.report(frame, node, "host-sync", "error", f"`{text_of(node)}` is cut at a tensor's value")
                    elif isinstance(bound, Dim) and isinstance(node.ctx, ast.Load) and _is_kept(receiver):
                        self.length_used(frame, bound, f"to cut `{text_of(node)}`")
            elif isinstance(part, Tensor) and part.boolean and isinstance(node.ctx, ast.Load):
                self.report(frame, node, "data-dependent-shape", "error", f"`{text_of(node)}` selects by a mask")

    def length_used(self, frame: Frame, dim: Dim, how: str) -> None:
        """Report a number that was read from a shape and serves as a sequence length."""
        # Positions that a shape counts are found as such, on the same line.
        counted = ("computed-positions", frame.module.shown, getattr(dim.node, "lineno", None))
        if _is_length(dim) and counted not in self.findings.found:
            what = f"dimension {dim.index} of `{dim.owner}` serves as a length, {how}"
            self.report(frame, dim.node, "shape-as-length", "warning", what)

    def iterated(self, frame: Frame, node: ast.AST, value: Value) -> None:
        if isinstance(value, Seq) and value.kind == "set":
            members = value.items if value.items is not None else (value.element,)
            if any(isinstance(item, Const) and isinstance(item.value, str) for item in members):
                self.report(frame, node, "hash-order", "error", f"a loop over the set `{text_of(node)}`")

    # Outputs.

    def top_returned(self, frame: Frame, node: ast.Return, value: Value) -> None:
        for part in _tensors(value):
            name = part.home or part.name
            if is_cache_name(name) and (part.kind or part.argument):
                self.report(frame, node, "returned-cache", "warning", f"the cache `{name}` is returned")
                return
        for name, item in _returned_fields(value):
            if is_cache_name(name) and _is_kept_whole(item):
                self.report(frame, node, "returned-cache", "warning", f"the cache `{name}` is returned")
                return
        for name in _returned_names(node):
            found = frame.names.get(name)
            if is_cache_name(name) and isinstance(found, (Unknown, Seq, Union)) and _is_argument(frame, name):
                self.report(frame, node, "returned-cache", "warning", f"the cache `{name}` is returned")
                return


_KIND_WORDS = {
    "and": "`and`",
    "or": "`or`",
    "not": "`not`",
    "if": "an `if`",
    "while": "a `while`",
    "assert": "an `assert`",
    "match": "a `match`",
    "comparison": "a chain of comparisons",
    "conditional expression": "a conditional expression",
    "condition of a comprehension": "a condition of a comprehension",
}


def text_of(node: ast.AST) -> str:
    """Return a node's source text in one short line."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (ValueError, RecursionError):
        return type(node).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _is_length(dim: Dim) -> bool:
    """Say whether a dimension is one of tokens, by the name that it or its tensor has."""
    if dim.index == -1 and words_of(dim.owner) & _TOKENS:
        return True  # [batch, tokens]
    if dim.index in (0, -1):
        return False
    if words_of(dim.target) & LENGTH_WORDS:
        return True
    return dim.index in (1, -2) and bool(words_of(dim.owner) & _CARRIERS)


def _is_kept(value: Value) -> bool:
    """Say whether a tensor is one of the model's own: a cache, or a table of all positions."""
    return any(isinstance(item, Tensor) and bool(item.home) for item in alternatives(value))


def _asks_prefill(test: ast.expr) -> bool | None:
    """Return True where a condition asks for prefill, False where for its opposite, None where for something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _asks_prefill(test.operand)
        return None if inner is None else not inner
    if isinstance(test, (ast.Name, ast.Attribute)):
        name = test.id if isinstance(test, ast.Name) else test.attr
        return True if _PREFILL.search(name) else None
    if isinstance(test, ast.Subscript) and isinstance(test.slice, ast.Constant):
        return True if _PREFILL.search(str(test.slice.value)) else None
    if isinstance(test, ast.BoolOp):
        return next((answer for part in test.values if (answer := _asks_prefill(part)) is not None), None)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        equal = isinstance(test.ops[0], (ast.Eq, ast.Is))
        if not equal and not isinstance(test.ops[0], (ast.NotEq, ast.IsNot)):
            return None
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and isinstance(right.value, bool):
            inner = _asks_prefill(test.left)
            return None if inner is None else inner is (equal is right.value)
        if isinstance(right, ast.Constant) and right.value in ("prefill", "decode"):
            return equal is (right.value == "prefill")
    return None


def _reads(source: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(source))


def _grows(source: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("cat", "concat", "concatenate", "hstack", "vstack")
        for node in ast.walk(source)
    )


def _writes_in_place(source: ast.expr | None) -> bool:
    if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute):
        return source.func.attr.endswith("_") and not source.func.attr.endswith("__")
    return False


def _tensors(value: Value) -> Iterator[Tensor]:
    for member in alternatives(value):
        if isinstance(member, Tensor):
            yield member
        elif isinstance(member, Seq):
            for item in member.items if member.items is not None else (member.element,):
                yield from _tensors(item)
        elif isinstance(member, Map):
            for item in (*member.known.values(), member.rest):
                yield from _tensors(item)
        elif isinstance(member, (Obj, ExtObj)):
            record: dict[str, Any] = member.attrs if isinstance(member, Obj) else member.kwargs
            for item in record.values():
                if isinstance(item, Tensor):
                    yield item


def _returned_fields(value: Value) -> Iterator[tuple[str, Value]]:
    """Yield what a dict or a record that is returned holds, by its names."""
    for member in alternatives(value):
        held = (
            member.known
            if isinstance(member, Map)
            else member.attrs
            if isinstance(member, Obj)
            else member.kwargs
            if isinstance(member, ExtObj)
            else {}
        )
        yield from ((name, item) for name, item in held.items() if isinstance(name, str))


def _is_kept_whole(value: Value) -> bool:
    """Say whether a value is a cache for sure: tensors, or an object; None and what isn't known are none."""
    found = alternatives(value)
    return all(
        isinstance(item, (Tensor, Obj, ExtObj)) or (isinstance(item, Seq) and has_tensor(item)) for item in found
    )


def _returned_names(node: ast.Return) -> Iterator[str]:
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    for value in values:
        if isinstance(value, ast.Name):
            yield value.id


def _is_argument(frame: Frame, name: str) -> bool:
    func: Func | None = frame.func
    if func is None:
        return False
    spec = func.node.args
    return any(item.arg == name for item in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs))
