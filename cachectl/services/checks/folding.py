"""Plain values computed with, as far as that is safe: numbers, texts, containers of constants, cuts of tensors.

Owns no state. Nothing of the user's is run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cachectl.services.checks.values import (
    NONE,
    Const,
    Map,
    Seq,
    Tensor,
    Union,
    Unknown,
    Value,
)

__all__ = ["cut", "folded", "holds", "is_given", "is_plain"]

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip

_LARGEST = 1 << 40


def is_given(value: Value) -> bool:
    return isinstance(value, Const) and value.given


def is_plain(value: object) -> bool:
    return isinstance(value, (str, int, float, bool, bytes, type(None)))


def folded(op: ast.operator | ast.cmpop, left: Any, right: Any) -> Any:
    """Compute on two plain values; None where that is not safe, or fails."""
    function = _OPERATORS.get(type(op))
    if function is None or not all(isinstance(side, (int, float, str, bool, type(None))) for side in (left, right)):
        return None
    if isinstance(op, ast.Mult) and not all(isinstance(side, (int, float)) for side in (left, right)):
        return None
    try:
        result = function(left, right)
    except (TypeError, ValueError, ArithmeticError):
        return None
    too_large = (isinstance(result, int) and abs(result) > _LARGEST) or (isinstance(result, str) and len(result) > 1000)
    return None if too_large else result


def holds(item: Value, container: Value) -> bool | None:
    if not isinstance(item, Const):
        return None
    if isinstance(container, Map) and container.rest is None and is_plain(item.value):
        return item.value in container.known
    if isinstance(container, Seq) and container.items is not None:
        known = all(isinstance(member, Const) for member in container.items)
        return any(member.value == item.value for member in container.items) if known else None
    if isinstance(container, Const) and isinstance(container.value, str) and isinstance(item.value, str):
        return item.value in container.value
    return None


def cut(value: Tensor, index: Value) -> Tensor:
    """Return a tensor cut by an index; `sliced` where gaps are left: cut behind the first dimension, or by steps."""
    parts = index.items if isinstance(index, Seq) and index.kind == "tuple" else (index,)
    sliced = value.sliced
    whole = (NONE, NONE, NONE)
    for place, part in enumerate(parts or ()):
        if not isinstance(part, Seq) or part.kind != "slice" or part.items is None:
            continue
        lower, upper, step = part.items
        if step not in (NONE, Const(1)):
            sliced = "cut by steps"
        elif (lower, upper, step) != whole and not (lower == Const(0) and upper == NONE) and place:
            # A cut of the first dimension is one piece of memory, as long as what stands before it has one entry.
            before = parts[:place] if parts is not None else ()
            if any(isinstance(item, Seq) or item == Const(...) for item in before):
                sliced = "cut behind its first dimension"
    gathers = any(isinstance(part, (Tensor, Unknown, Union)) for part in parts or ())
    if gathers:
        return Tensor(ramp=value.ramp, angles=value.angles)
    return replace(value, name=value.name, sliced=sliced)
