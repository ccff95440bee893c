"""Python source as scopes: which statements stand in one, what they bind and change, and what defeats naming.

Never imports or runs what it reads. Standard library only, CPython 3.10 to 3.13.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

__all__ = [
    "COMPREHENSIONS",
    "DEFINITIONS",
    "FUNCTIONS",
    "LOCALS",
    "Definition",
    "Effects",
    "SourceError",
    "bound_names",
    "chain_of",
    "dynamic_feature",
    "effects_of",
    "effects_of_expression",
    "first_line",
    "flat",
    "functions_with_global",
    "has_call",
    "is_compound",
    "outermost",
    "own_nodes",
    "walk_functions",
]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOCALS = ".<locals>."

# Bare names that reach module-level names behind the syntax tree's back, and the attributes that do.
_DYNAMIC_NAMES = frozenset({"exec", "eval", "globals", "vars"})
_DYNAMIC_ATTRIBUTES = frozenset({("sys", "modules"), ("inspect", "getsource"), ("inspect", "getsourcelines")})

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class SourceError(ValueError):
    """A source text that this interpreter can't parse; the message says why."""


class Effects(NamedTuple):
    """What one module-level statement does to module-level names."""

    binds: frozenset[str]
    imports: frozenset[str]
    stores: frozenset[str]  # into attributes or items of the name
    calls: frozenset[str]  # names that a call may change: receivers and arguments


def is_compound(statement: ast.AST) -> bool:
    """Say whether a statement holds others of its own scope: if, for, while, with, try, match."""
    if isinstance(statement, ast.Match):
        return True  # Its statements are below its cases.
    return isinstance(getattr(statement, "body", None), list) and not isinstance(statement, DEFINITIONS)


def flat(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements of one scope, those inside if, for, while, with, try and match too.

    A compound statement is yielded as the expressions of its header.
    """
    for node in body:
        if not is_compound(node):
            yield node
            continue
        for field, value in ast.iter_fields(node):
            if field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from flat(value)
            elif isinstance(value, ast.AST):
                yield value
            elif isinstance(value, list):
                yield from (part for part in value if isinstance(part, ast.AST))


def walk_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every function and lambda with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
            outside = [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
            for part in outside:
                yield from walk_functions(part, prefix)
            for part in node.body:
                yield from walk_functions(ast.Module([part], []), f"{prefix}{node.name}{LOCALS}")
        elif isinstance(node, ast.Lambda):
            yield f"{prefix}<lambda>", node
            yield from walk_functions(node.args, prefix)
            yield from walk_functions(ast.Expression(node.body), f"{prefix}<lambda>{LOCALS}")
        elif isinstance(node, ast.ClassDef):
            yield from walk_functions(ast.Module([*node.body], []), f"{prefix}{node.name}.")
            for part in [*node.decorator_list, *node.bases, *node.keywords]:
                yield from walk_functions(part, prefix)
        else:
            yield from walk_functions(node, prefix)


def first_line(node: ast.AST) -> int:
    """Return the line a definition starts at, its decorators included."""
    lines: list[int] = [part.lineno for part in (node, *getattr(node, "decorator_list", []))]
    return min(lines)


def outermost(qualname: str) -> str:
    """Return the outermost function of a qualified name."""
    return qualname.partition(LOCALS)[0]


def effects_of(statement: ast.AST) -> Effects:
    """Return what a module-level statement does to module-level names."""
    binds, imports, stores, calls = set[str](), set[str](), set[str](), set[str]()
    for node in flat([statement]):
        if isinstance(node, DEFINITIONS):
            binds.add(node.name)
            for part in ast.walk(node):
                if isinstance(part, ast.Global):
                    binds.update(part.names)
            for decorator in node.decorator_list:
                calls |= effects_of_expression(decorator)
            continue
        bound = bound_names([node])
        binds |= bound
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports |= bound
        for part in ast.walk(node):
            if isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(part.ctx, ast.Load):
                stores |= {root for root in [_root(part)] if root}
        calls |= effects_of_expression(node)
    # A handler's `as` name is no node of its header.
    for part in ast.walk(statement) if is_compound(statement) else ():
        if isinstance(part, ast.ExceptHandler) and part.name:
            binds.add(part.name)
    return Effects(frozenset(binds), frozenset(imports), frozenset(stores), frozenset(calls))


def effects_of_expression(node: ast.AST) -> set[str]:
    """Return the names that calls in `node` may change: the objects whose methods are called, and the arguments."""
    names: set[str] = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            if isinstance(call.func, ast.Attribute):
                names |= {root for root in [_root(call.func)] if root}
            for argument in [*call.args, *call.keywords]:
                names |= {part.id for part in ast.walk(argument) if isinstance(part, ast.Name)}
    return names


def _root(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names bound in one scope by `nodes`; nested functions and classes are scopes of their own."""
    names: set[str] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, COMPREHENSIONS):
            # Only a walrus binds outside of its comprehension.
            names |= {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
            continue
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                names.add(node.id)
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names if alias.name != "*"}
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            if node.name:
                names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        stack.extend(ast.iter_child_nodes(node))
    return names


def functions_with_global(node: Definition, name: str) -> list[ast.AST]:
    """Return the innermost functions in `node` that declare `name` global."""
    return [
        function
        for function in ast.walk(node)
        if isinstance(function, FUNCTIONS)
        and any(
            isinstance(part, ast.Global) and name in part.names
            for statement in function.body
            for part in own_nodes(statement)
        )
    ]


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it that is in no nested definition."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, DEFINITIONS):
            yield from own_nodes(child)


def has_call(node: ast.AST) -> bool:
    """Say whether a node calls something when it runs."""
    return any(isinstance(part, (ast.Call, ast.Await)) for part in ast.walk(node))


def chain_of(node: ast.AST) -> tuple[str, ...] | None:
    """Return a name and the attributes taken from it; None for any other expression."""
    steps: list[str] = []
    while isinstance(node, ast.Attribute):
        steps.append(node.attr)
        node = node.value
    return (node.id, *reversed(steps)) if isinstance(node, ast.Name) else None


def dynamic_feature(tree: ast.Module) -> str | None:
    """Return what makes module-level names unknowable from the syntax tree, with its line, or None."""
    for statement in flat(tree.body):
        if isinstance(statement, FUNCTIONS) and statement.name == "__getattr__":
            return f"module __getattr__ at line {statement.lineno}"
    harmless = _harmless(tree)
    for node in ast.walk(tree):
        if id(node) in harmless:
            continue
        if isinstance(node, ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                return f"star import at line {node.lineno}"
            for alias in node.names:
                if (node.module or "", alias.name) in _DYNAMIC_ATTRIBUTES:
                    return f"{node.module}.{alias.name} at line {node.lineno}"
        elif isinstance(node, ast.Name) and node.id in _DYNAMIC_NAMES:
            return f"{node.id} at line {node.lineno}"
        elif isinstance(node, ast.Attribute) and chain_of(node) in _DYNAMIC_ATTRIBUTES:
            return f"{'.'.join(chain_of(node) or ())} at line {node.lineno}"
    return None


def _harmless(tree: ast.Module) -> set[int]:
    """Return the ids of nodes that look dynamic and are not: `x in sys.modules`, and `vars(x)` of some object."""
    nodes: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and all(isinstance(sign, (ast.In, ast.NotIn)) for sign in node.ops):
            nodes.update(id(part) for part in node.comparators)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
            nodes.add(id(node.func))
    return nodes
