"""Whether a copy of the whole environment goes to a child process and nowhere else.

Owns the reading of model code's source around a walk over os.environ. `run(cmd, env=dict(os.environ))`
asks for no variable in particular; `settings = dict(os.environ)` may ask for any. What can't be read counts as the
latter. Imports and runs nothing.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType

__all__ = ["goes_to_child"]

_STARTERS = frozenset({"run", "Popen", "call", "check_call", "check_output"})
_MODULES = frozenset({"subprocess", "sp"})
# Methods that change a copy and tell nothing of it, where nobody looks at what they return.
_CHANGERS = frozenset({"update", "pop", "setdefault", "clear"})


def goes_to_child(code: CodeType, line: int) -> bool:
    """Say whether what a line of model code makes of os.environ is only handed to a child process.

    Args:
        code: the code object that walks over os.environ.
        line: where it does so.
    """
    tree = _tree(code.co_filename)
    if tree is None:
        return False
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not statements:
        return False
    statement = min(statements, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    walks = [node for node in ast.walk(statement) if _is_environ(node)]
    return bool(walks) and all(_is_for_child(node, statement, parents) for node in walks)


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file))) if linecache.getlines(file) else None
    except (SyntaxError, ValueError, RecursionError):
        return None


def _is_environ(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("environ", "environb")


def _is_for_child(node: ast.AST, statement: ast.stmt, parents: dict[ast.AST, ast.AST]) -> bool:
    if any(_is_env_argument(item, parents) for item in _above(node, statement, parents)):
        return True
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    target = targets[0] if len(targets) == 1 and isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
    scope: ast.AST | None = statement
    while scope is not None and not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        scope = parents.get(scope)
    if not isinstance(target, ast.Name) or scope is None:
        return False  # A module's name is there for every other module.
    return all(
        _is_for_child_use(use, parents)
        for use in ast.walk(scope)
        if isinstance(use, ast.Name) and use.id == target.id and isinstance(use.ctx, ast.Load)
    )


def _is_for_child_use(use: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[use]
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, (ast.Store, ast.Del))
    if isinstance(parent, ast.Attribute) and parent.attr in _CHANGERS:
        call = parents[parent]
        return isinstance(call, ast.Call) and isinstance(parents[call], ast.Expr)
    return _is_env_argument(parent, parents)


def _is_env_argument(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Say whether this is the `env=` of a call that starts a child process."""
    if not isinstance(node, ast.keyword) or node.arg != "env":
        return False
    call = parents[node]
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr in _STARTERS and isinstance(function.value, ast.Name) and function.value.id in _MODULES
    return isinstance(function, ast.Name) and function.id in _STARTERS - {"run", "call"}


def _above(node: ast.AST, statement: ast.stmt, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node is not statement:
        node = parents[node]
        yield node
