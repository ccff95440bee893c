"""The module-level names that Python source reads, by Python's scoping rules. Standard library only."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import NamedTuple

from cachectl.identity.source_rendering import is_special
from cachectl.identity.source_syntax import (
    COMPREHENSIONS,
    FUNCTIONS,
    SourceError,
    bound_names,
    chain_of,
    flat,
    has_call,
    own_nodes,
)

__all__ = [
    "Read",
    "collect_reads",
    "function_reads",
    "header_reads",
]


class Read(NamedTuple):
    """A module-level name that code reads.

    Args:
        chain: the name and the attributes taken from it, `("config", "EPS")` for `config.EPS`.
        runs: the code that reads it runs untraced (at import, say), so what the name's functions do counts in full.
            Where Dynamo traces, the functions it enters are recorded on their own.
    """

    chain: tuple[str, ...]
    runs: bool


def function_reads(node: ast.FunctionDef | ast.AsyncFunctionDef, traced: bool, reads: set[Read]) -> None:
    """Add what a function reads."""
    for decorator in node.decorator_list:
        collect_reads(decorator, reads, runs=True)
    for default in [*node.args.defaults, *(value for value in node.args.kw_defaults if value is not None)]:
        collect_reads(default, reads, runs=has_call(default))
    if node.decorator_list:
        for note in _annotations(node):
            collect_reads(note, reads, runs=has_call(note))
    bare = copy.copy(node)
    bare.decorator_list = []
    bare.args = copy.copy(node.args)
    bare.args.defaults, bare.args.kw_defaults = [], []
    collect_reads(bare, reads, runs=not traced)


def header_reads(node: ast.ClassDef, reads: set[Read]) -> None:
    """Add what a class's header reads."""
    for base in node.bases:
        collect_reads(base, reads, runs=has_call(base))
    for part in [*node.keywords, *node.decorator_list]:
        collect_reads(part, reads, runs=True)
    for statement in flat(node.body):
        if isinstance(statement, ast.ClassDef):
            header_reads(statement, reads)
        elif not isinstance(statement, FUNCTIONS):
            collect_reads(statement, reads, runs=has_call(statement))
        elif is_special(statement.name):
            function_reads(statement, False, reads)


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    notes = [part.annotation for part in ast.walk(node.args) if isinstance(part, ast.arg) and part.annotation]
    return [*notes, node.returns] if node.returns else notes


def collect_reads(node: ast.AST, reads: set[Read], *, runs: bool) -> None:
    """Add what a node reads."""
    try:
        _Reader(reads, runs).read(node, ())
    except RecursionError as error:
        raise SourceError("nested deeper than this interpreter can walk") from error


class _Reader:
    """Collects the names that an expression or statement takes from its module, by Python's scoping rules.

    A class body's own names hide nothing here: reading one too many over-invalidates, one too few would be stale.
    """

    def __init__(self, reads: set[Read], runs: bool) -> None:
        self.reads = reads
        self.runs = runs

    def read(self, node: ast.AST, scopes: tuple[frozenset[str], ...]) -> None:
        if isinstance(node, (ast.Name, ast.Attribute)):
            chain = chain_of(node)
            if chain:
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                    return
                if not any(chain[0] in scope for scope in scopes):
                    self.reads.add(Read(chain, self.runs))
                return
        if isinstance(node, FUNCTIONS):
            for part in [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]:
                if part is not None:
                    self.read(part, scopes)
            if node.decorator_list:
                for note in _annotations(node):
                    self.read(note, scopes)
            declared = _declared_global(node.body)
            # Past the functions around it, too: they may have a local of that name.
            outer = tuple(scope - declared for scope in scopes) if declared else scopes
            inner = (*outer, _function_locals(node.args, node.body, getattr(node, "type_params", [])))
            for statement in node.body:
                self.read(statement, inner)
            return
        if isinstance(node, ast.Lambda):
            for part in [*node.args.defaults, *node.args.kw_defaults]:
                if part is not None:
                    self.read(part, scopes)
            self.read(node.body, (*scopes, _function_locals(node.args, [node.body])))
            return
        if isinstance(node, COMPREHENSIONS):
            self.read(node.generators[0].iter, scopes)
            scopes = (*scopes, frozenset(bound_names([part.target for part in node.generators])))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            # It stores, but reads first.
            self.read(ast.Name(node.target.id, ast.Load()), scopes)
        elif isinstance(node, ast.AnnAssign) and scopes:
            for part in (node.target, node.value):
                if part is not None:
                    self.read(part, scopes)
            return
        for child in ast.iter_child_nodes(node):
            self.read(child, scopes)


def _function_locals(
    args: ast.arguments, body: Sequence[ast.AST], type_params: Sequence[ast.AST] = ()
) -> frozenset[str]:
    names = bound_names(body)
    names |= {part.arg for part in ast.walk(args) if isinstance(part, ast.arg)}
    names |= {str(getattr(part, "name", "")) for part in type_params}
    return frozenset(names - _declared_global(body))


def _declared_global(body: Sequence[ast.AST]) -> frozenset[str]:
    declarations = [part for statement in body for part in own_nodes(statement) if isinstance(part, ast.Global)]
    return frozenset(name for declaration in declarations for name in declaration.names)
