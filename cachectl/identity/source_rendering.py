"""Syntax trees as digests: what of a statement counts, as one text in which every node, list and constant is delimited.

What is left out is listed in cachectl/identity/source_digest.py. Standard library only.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection
from typing import Any

from cachectl.identity.source_syntax import (
    DEFINITIONS,
    FUNCTIONS,
    SourceError,
    effects_of_expression,
    flat,
    functions_with_global,
    is_compound,
)
from cachectl.schemas.canonical import digest_bytes

__all__ = [
    "class_form",
    "digest_of_nodes",
    "is_special",
    "reduced",
]

# Special methods that never shape a graph: what __init__ leaves behind is guarded by value, the rest is for people,
# pickles and the garbage collector. Every other one may run without Dynamo tracing it, and belongs to the header.
_QUIET_METHODS = frozenset(
    {
        "__init__",
        "__repr__",
        "__str__",
        "__del__",
        "__format__",
        "__dir__",
        "__sizeof__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__copy__",
        "__deepcopy__",
    }
)


def digest_of_nodes(nodes: list[Any] | None) -> str | None:
    """Return the digest of syntax trees, lists and constants; None for None."""
    if nodes is None:
        return None
    out: list[str] = []
    try:
        _render(nodes, out, local=False)
    except RecursionError as error:
        raise SourceError("nested deeper than this interpreter can walk") from error
    return digest_bytes(" ".join(out).encode("utf-8", "surrogatepass"))


def _render(value: Any, out: list[str], *, local: bool, notes: bool = True) -> None:
    """Write `value` to `out`.

    Args:
        local: inside a function's body, where annotations of variables are never evaluated.
        notes: whether parameters' annotations count.
    """
    if isinstance(value, list):
        out.append("[")
        for member in value:
            if not _is_idle(member):
                _render(member, out, local=local, notes=notes)
        out.append("]")
        return
    if not isinstance(value, ast.AST):
        # A complex or float constant's repr round-trips, and says nan, inf and -0.0 apart.
        out.append(f"{type(value).__name__}:{value!r}")
        return
    out.append(f"({type(value).__name__}")
    skipped: tuple[str, ...] = ("ctx", "type_comment", "kind")
    if isinstance(value, FUNCTIONS):
        notes = bool(value.decorator_list)
        local = True
        if not notes:
            skipped = (*skipped, "returns")
    elif isinstance(value, ast.ClassDef):
        local = False
    elif (isinstance(value, ast.arg) and not notes) or (isinstance(value, ast.AnnAssign) and local):
        skipped = (*skipped, "annotation")
    for field in value._fields:
        if field in skipped:
            continue
        member = getattr(value, field, None)
        _render(member, out, local=local, notes=notes)
    out.append(")")


def _is_idle(node: object) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def class_form(node: ast.ClassDef, wanted: Collection[str]) -> list[Any]:
    """Return what of a class belongs to its header."""
    defined = sorted(
        {
            statement.name
            for statement in flat(node.body)
            if isinstance(statement, DEFINITIONS) and (statement.name in wanted or is_special(statement.name))
        }
    )
    body = [_without_methods(part, wanted) for part in node.body]
    return [node.name, node.bases, node.keywords, node.decorator_list, defined, body]


def is_special(name: str) -> bool:
    """Say whether a method of this name may run without Dynamo tracing it."""
    return name.startswith("__") and name.endswith("__") and name not in _QUIET_METHODS


def _without_methods(statement: ast.stmt, wanted: Collection[str]) -> Any:
    if isinstance(statement, ast.ClassDef):
        return class_form(statement, wanted)
    if isinstance(statement, FUNCTIONS):
        return statement if is_special(statement.name) else ast.Pass()
    if is_compound(statement):
        return _with_bodies(statement, lambda part: _without_methods(part, wanted))
    return statement


def reduced(statement: ast.stmt, name: str, *, stub: bool) -> Any:
    """Return what of a statement concerns `name`: foreign definitions are taken out, all else stays."""
    if isinstance(statement, DEFINITIONS):
        if statement.name == name:
            return f"{'class' if isinstance(statement, ast.ClassDef) else 'def'} {name}" if stub else statement
        writers = functions_with_global(statement, name)
        if writers:
            return writers
        if any(name in effects_of_expression(decorator) for decorator in statement.decorator_list):
            return [f"decorates {statement.name}", statement.decorator_list]
        return ast.Pass()
    if is_compound(statement):
        return _with_bodies(statement, lambda part: reduced(part, name, stub=stub))
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        # Another name in the same import line concerns nobody.
        own = [alias for alias in statement.names if (alias.asname or alias.name.split(".")[0]) == name]
        if own:
            statement = copy.copy(statement)
            statement.names = own
    return statement


def _with_bodies(statement: ast.stmt, change: Any) -> ast.AST:
    def copied(node: ast.AST) -> ast.AST:
        other = copy.copy(node)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, field, None), list):
                setattr(other, field, [change(part) for part in getattr(node, field)])
        for field in ("handlers", "cases"):
            if hasattr(node, field):
                setattr(other, field, [copied(part) for part in getattr(node, field)])
        return other

    return copied(statement)
