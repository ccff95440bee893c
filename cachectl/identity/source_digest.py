"""Digests of Python source and of compiled code, insensitive to comments, docstrings and layout.

Owns what "the same code" means. From a file's bytes `SourceIndex` makes three kinds of digest by name: a definition
(function or class, whole), a class's header (bases, metaclass, decorators and every statement of its body that is no
ordinary method), and a module-level binding (all statements that bind or change the name). Each digest is of the
statements themselves and never of what they read; the names they read come out beside it, and
cachectl.identity.source_closure follows them once, at build. So a check needs only the names that were listed then.

What is left out of a digest: positions, comments, bare constants as statements (docstrings), `pass`, and annotations of
undecorated functions, which nobody evaluates into a graph. A decorator may read them, so with one they count;
annotations in class bodies and modules always count, since dataclass fields are made of them.

What defeats naming (`dynamic`): star imports, a module's `__getattr__`, `exec`, `eval`, `globals`, `vars()`,
`sys.modules`, `inspect.getsource`. Such a file is compared by its raw bytes.

Never imports or runs what it reads. Digests of one text differ between CPython minors, as their syntax trees do; the
minor is in the toolchain part. Standard library only, CPython 3.10 to 3.13.
"""

from __future__ import annotations

import ast
import functools
import opcode
import warnings
from collections.abc import Collection, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from cachectl.identity.source_reads import Read, collect_reads, function_reads, header_reads
from cachectl.identity.source_rendering import class_form, digest_of_nodes, reduced
from cachectl.identity.source_syntax import (
    DEFINITIONS,
    FUNCTIONS,
    SourceError,
    dynamic_feature,
    effects_of,
    first_line,
    flat,
    functions_with_global,
    has_call,
    outermost,
    walk_functions,
)
from cachectl.schemas.canonical import digest_bytes

__all__ = ["DEFINES", "ImportTarget", "Read", "SourceError", "SourceIndex", "code_digest"]

# Methods by which a class takes part whatever the traced code says.
DEFINES = frozenset({"forward", "__call__"})


class ImportTarget(NamedTuple):
    """What an import statement binds a name to: a module, or the name `attribute` in one."""

    module: str
    level: int
    attribute: str | None


class SourceIndex:
    """One source file: its definitions, classes and module-level bindings by name.

    Args:
        data: the file's bytes; encoding cookies, a BOM and any line ends are honoured.

    Raises:
        SourceError: this interpreter can't parse it.
    """

    def __init__(self, data: bytes) -> None:
        try:
            with warnings.catch_warnings():
                # Invalid escapes and the like warn at each parse; that is the file's own affair.
                warnings.simplefilter("ignore")
                self.tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SourceError(_syntax_text(error)) from error
        self.dynamic = dynamic_feature(self.tree)
        self._effects = [(statement, effects_of(statement)) for statement in self.tree.body]
        plain: set[str] = set()
        imported: set[str] = set()
        for _, effects in self._effects:
            plain |= effects.binds - effects.imports
            imported |= effects.imports
        self._bound = plain | imported
        self._only_imported = imported - plain
        self._code_names: dict[tuple[str, int], list[str]] | None = None

    # Digests by name. None: the file has no such thing.

    def definition(self, qualname: str) -> str | None:
        """Return the digest of a function or class as a whole, decorators and defaults included.

        All definitions of the name count, in order, with the conditions around them. A nested function
        (`f.<locals>.g`, a lambda or comprehension inside f) is its outermost function.

        Raises:
            SourceError: nested deeper than this interpreter can walk.
        """
        return digest_of_nodes(self._definition(outermost(qualname)))

    def class_header(self, qualname: str, attributes: Collection[str] = ()) -> str | None:
        """Return the digest of what a class is apart from its ordinary methods.

        Args:
            attributes: names that traced code takes from objects. Which of them the class defines counts too: a new
                method in a subclass changes what is called though nothing that was traced has changed.

        Raises:
            SourceError: nested deeper than this interpreter can walk.
        """
        wanted = DEFINES.union(attributes)
        headers = [class_form(node, wanted) for node in self._classes(qualname)]
        return digest_of_nodes(headers or None)

    def binding(self, name: str) -> str | None:
        """Return the digest of all module-level statements that bind or change `name`; of definitions only the fact.

        Raises:
            SourceError: nested deeper than this interpreter can walk.
        """
        return digest_of_nodes([reduced(node, name, stub=True) for node in self._touching(name)] or None)

    # What those statements read.

    def definition_reads(self, qualname: str, *, traced: bool) -> set[Read]:
        """Return what a definition reads; `traced` when Dynamo goes through its body, else the body runs as it is."""
        outer = outermost(qualname)
        traced = traced and outer == qualname
        reads: set[Read] = set()
        for node in self._nodes(outer):
            if isinstance(node, FUNCTIONS):
                function_reads(node, traced, reads)
            elif isinstance(node, ast.ClassDef):
                collect_reads(node, reads, runs=True)
            elif isinstance(node, ast.Lambda):
                collect_reads(node, reads, runs=not traced)
            else:
                collect_reads(node, reads, runs=has_call(node))
        return reads

    def class_reads(self, qualname: str) -> set[Read]:
        """Return what the header of a class reads."""
        reads: set[Read] = set()
        for node in self._classes(qualname):
            header_reads(node, reads)
        return reads

    def binding_reads(self, name: str) -> set[Read]:
        """Return what the statements that bind or change `name` read, those of definitions of that name left out."""
        reads: set[Read] = set()
        for node in self._touching(name):
            for part in flat([node]):
                if not isinstance(part, DEFINITIONS):
                    collect_reads(part, reads, runs=has_call(part))
                    continue
                for decorator in part.decorator_list if part.name != name else ():
                    collect_reads(decorator, reads, runs=True)
                for function in functions_with_global(part, name):
                    collect_reads(function, reads, runs=True)
        return reads

    # What a name is.

    def is_bound(self, name: str) -> bool:
        """Say whether a module-level statement binds `name`."""
        return name in self._bound

    def bound_names(self) -> frozenset[str]:
        """Return every name that module-level statements bind."""
        return frozenset(self._bound)

    def is_class(self, qualname: str) -> bool:
        """Say whether `qualname` is a class, by one of its definitions at least."""
        return any(True for _ in self._classes(qualname))

    def has_definition(self, qualname: str) -> bool:
        """Say whether the file defines `qualname`, or the function around it."""
        return bool(self._nodes(outermost(qualname)))

    def is_decorated(self, name: str) -> bool:
        """Say whether a module-level definition of `name` has a decorator."""
        return any(
            bool(node.decorator_list)
            for node in flat(self.tree.body)
            if isinstance(node, DEFINITIONS) and node.name == name
        )

    def is_registered(self, qualname: str) -> bool:
        """Say whether a module-level definition has a decorator by which it becomes an operator's kernel."""
        return any(
            isinstance(node, DEFINITIONS) and any("impl" in ast.unparse(decorator) for decorator in node.decorator_list)
            for node in (self._nodes(qualname) if "." not in qualname else ())
        )

    def imports(self, name: str) -> list[ImportTarget]:
        """Return what the import statements that bind `name` bind it to, in order."""
        targets = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == name:
                        targets.append(ImportTarget(alias.name, 0, None))
                    elif alias.asname is None and alias.name.split(".")[0] == name:
                        targets.append(ImportTarget(name, 0, None))
            elif isinstance(node, ast.ImportFrom):
                targets += [
                    ImportTarget(node.module or "", node.level, alias.name)
                    for alias in node.names
                    if (alias.asname or alias.name) == name
                ]
        return targets

    def inner_imports(self, qualname: str) -> list[ImportTarget]:
        """Return what a definition imports when it runs; `import a.b` is the module a.b, whatever it binds."""
        targets = []
        for root in self._nodes(outermost(qualname)):
            for node in ast.walk(root):
                if isinstance(node, ast.Import):
                    targets += [ImportTarget(alias.name, 0, None) for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    targets += [ImportTarget(node.module or "", node.level, alias.name) for alias in node.names]
        return targets

    def star_imports(self) -> list[ImportTarget]:
        """Return the modules whose names all are imported."""
        return [
            ImportTarget(node.module or "", node.level, None)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        ]

    def attribute_names(self, qualname: str) -> set[str]:
        """Return the attributes that a definition takes from objects, by syntax or by getattr with a constant."""
        names = set()
        for root in self._nodes(outermost(qualname)):
            for node in ast.walk(root):
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    names |= {
                        argument.value
                        for argument in node.args
                        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                    }
        return {name for name in names if name.isidentifier()}

    def qualname_at(self, name: str, line: int) -> str | None:
        """Return the qualified name of the function that starts at `line`: CPython 3.10 has no co_qualname.

        Args:
            name: a code object's co_name.
            line: its co_firstlineno: the first decorator's line where there is one.
        """
        if self._code_names is None:
            self._code_names = {}
            for qualname, node in walk_functions(self.tree):
                self._code_names.setdefault((qualname.rpartition(".")[2], first_line(node)), []).append(qualname)
        found = self._code_names.get((name, line), [])
        return found[0] if len(set(found)) == 1 else None

    def _touching(self, name: str) -> list[ast.stmt]:
        if name not in self._bound:
            return []
        # What is only imported is a module or somebody else's object: `torch.float16()` here does not change it.
        alone = name in self._only_imported
        return [
            statement
            for statement, effects in self._effects
            if name in effects.binds or name in effects.stores or (not alone and name in effects.calls)
        ]

    def _classes(self, qualname: str) -> Iterator[ast.ClassDef]:
        bodies: list[Sequence[ast.stmt]] = [self.tree.body]
        for step in qualname.split("."):
            found = [
                node for body in bodies for node in flat(body) if isinstance(node, ast.ClassDef) and node.name == step
            ]
            bodies = [node.body for node in found]
        yield from found

    def _nodes(self, qualname: str) -> list[ast.AST]:
        """Return the syntax trees that `definition` digests, without the conditions around them."""
        container, _, name = qualname.rpartition(".")
        if name == "<lambda>":
            return [node for found, node in walk_functions(self.tree) if found == qualname]
        bodies = [node.body for node in self._classes(container)] if container else [self.tree.body]
        nodes: list[ast.AST] = []
        defined = False
        for body in bodies:
            for statement in flat(body):
                if isinstance(statement, DEFINITIONS):
                    if statement.name == name:
                        nodes.append(statement)
                        defined = True
                elif name in effects_of(statement).binds:
                    nodes.append(statement)
        return nodes if defined else []

    def _definition(self, qualname: str) -> list[Any] | None:
        container, _, name = qualname.rpartition(".")
        nodes = self._nodes(qualname)
        if not nodes:
            return None
        if name == "<lambda>":
            return nodes
        if not container:
            return [reduced(node, name, stub=False) for node in self._touching(name)]
        return [
            reduced(statement, name, stub=False)
            for node in self._classes(container)
            for statement in node.body
            if name in effects_of(statement).binds
        ]


@functools.lru_cache(maxsize=4096)
def code_digest(code: CodeType) -> str:
    """Return the digest of a code object: equal for equal code, wherever and at whichever lines it stands.

    Nested code is included; paths, positions and docstrings are not. Constants are taken where an instruction loads
    them, since a docstring shifts their numbers. Comparable within one CPython minor only.
    """
    return digest_bytes(repr(_code_form(code)).encode("utf-8", "surrogatepass"))


_HAS_DOCSTRING = 0x4000000  # CO_HAS_DOCSTRING of CPython 3.13
_LOADS_CONSTANT = frozenset(opcode.hasconst)
_EXTENDED = opcode.opmap["EXTENDED_ARG"]
_STORE_NAME = opcode.opmap["STORE_NAME"]
# A class body inside a function stores these two, and both follow the layout.
_LAYOUT_NAMES = frozenset({"__doc__", "__firstlineno__"})


def _code_form(code: CodeType) -> tuple[Any, ...]:
    steps: list[Any] = []
    data, argument = code.co_code, 0
    for position in range(0, len(data), 2):
        operation = data[position]
        argument = argument << 8 | data[position + 1]
        if operation == _EXTENDED:
            continue
        if operation in _LOADS_CONSTANT:
            steps.append((operation, _constant_form(code.co_consts[argument])))
        else:
            if operation == _STORE_NAME and code.co_names[argument] in _LAYOUT_NAMES and steps:
                steps[-1] = "layout"
            steps.append((operation, argument))
        argument = 0
    return (
        code.co_name,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags & ~_HAS_DOCSTRING,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        getattr(code, "co_exceptiontable", b""),
        tuple(steps),
    )


def _constant_form(value: object) -> object:
    if isinstance(value, CodeType):
        return _code_form(value)
    if isinstance(value, tuple):
        return ("tuple", *map(_constant_form, value))
    if isinstance(value, frozenset):
        # Its order follows PYTHONHASHSEED.
        return ("frozenset", *sorted(repr(_constant_form(member)) for member in value))
    return (type(value).__name__, repr(value))


def _syntax_text(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    text = getattr(error, "msg", None) or str(error) or type(error).__name__
    return f"line {line}: {text}" if line else str(text)
