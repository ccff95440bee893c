"""Sources with rare statements: what they bind, read and change, and texts too deep to walk."""

from __future__ import annotations

import ast

import pytest

from cachectl.identity.source_digest import SourceIndex, code_digest
from cachectl.identity.source_reads import Read, collect_reads
from cachectl.identity.source_rendering import digest_of_nodes
from cachectl.identity.source_syntax import SourceError

RARE = """\
import json

TABLE = {}


def register(table, rank=1):
    def keep(function):
        table[function] = rank
        return function

    return keep


def note(x: int) -> int:
    global COUNT

    def inner():
        global HIDDEN
        HIDDEN = 1

    COUNT = x
    return inner


def plain(x):
    return x


plain.width = 4
plain = register(TABLE, 3)(plain)


@register(TABLE)
def twice(x):
    return 2 * x


if json:
    TABLE["a"] = 1

    def beside(x):
        return x

try:
    import fast
except ImportError as missing:
    REASON = str(missing)
except OSError:
    REASON = ""

match json.__name__:
    case {"kind": KIND, **REST}:
        pass
    case {"kind": _}:
        pass
    case [FIRST, *OTHERS] if FIRST:
        def picked(x):
            return x * FIRST
    case _:
        def picked(x):
            return -x

        def spare(x):
            return x
"""


def index(text: str = RARE) -> SourceIndex:
    return SourceIndex(text.encode())


def deep_sum() -> ast.expr:
    node: ast.expr = ast.Name("x", ast.Load())
    for _ in range(3000):
        node = ast.BinOp(node, ast.Add(), ast.Constant(1))
    return node


@pytest.mark.parametrize("name", ["KIND", "REST", "FIRST", "OTHERS", "missing", "fast", "COUNT", "TABLE"])
def test_source_index_handlers_and_patterns_bind_names(name: str) -> None:
    """A handler's name, a pattern's captures and a global statement bind at the module's level."""
    assert index().is_bound(name)


def test_source_index_match_is_a_scope_as_an_if_is() -> None:
    """A function defined in a case is found, with the pattern and guard around it; one beside it is another."""
    edits = {"return -x": "return +x", "if FIRST": "if not FIRST", "[FIRST, *OTHERS]": "[FIRST, _, *OTHERS]"}

    assert index().has_definition("picked")
    for old, new in edits.items():
        assert index().definition("picked") != index(RARE.replace(old, new)).definition("picked")
    spare = index(RARE.replace("def spare(x):\n            return x", "def spare(x):\n            return 2 * x"))
    assert index().definition("picked") == spare.definition("picked")
    assert index().definition("spare") != spare.definition("spare")


def test_source_index_function_that_writes_a_global_counts() -> None:
    """What a function writes to a global is part of the name's digest, a function inside another's too."""
    written, inner = (
        index(RARE.replace(*edit)) for edit in (("COUNT = x", "COUNT = x + 1"), ("HIDDEN = 1", "HIDDEN = 2"))
    )

    assert index().binding("COUNT") != written.binding("COUNT")
    assert index().binding("HIDDEN") != inner.binding("HIDDEN")


def test_collect_reads_of_a_name_declared_global_passes_the_locals_around_it() -> None:
    """A function two levels down that declares a name global reads the module's, though one around it has a local."""
    text = """\
def outer():
    NAME = OTHER = 1
    def middle():
        def inner():
            global NAME
            return NAME, OTHER
        return inner
    return middle, NAME
"""
    reads: set[Read] = set()
    collect_reads(ast.parse(text), reads, runs=False)

    assert {Read(("NAME",), False)} == reads


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("@register(TABLE)", "@register(TABLE, 2)", True),
        ("return 2 * x", "return 3 * x", False),
        ("def beside(x):\n        return x", "def beside(x):\n        return -x", False),
    ],
)
def test_source_index_binding_counts_decorators_that_change_it(old: str, new: str, changes: bool) -> None:
    """A decorator that is given the table may write to it; the body it decorates does not, nor does one beside it."""
    assert changes == (index().binding("TABLE") != index(RARE.replace(old, new)).binding("TABLE"))


def test_source_index_reads_of_a_name_hold_what_changes_it() -> None:
    """The decorator that is given the table counts, and what a function's name is bound to again."""
    assert Read(("register",), True) in index().binding_reads("TABLE")
    assert {("register",), ("TABLE",)} <= {read.chain for read in index().definition_reads("plain", traced=True)}


def test_qualname_at_a_line_is_told_by_name_and_first_line() -> None:
    """A decorated function starts at its decorator; lambdas of one line with two names have none."""
    source = index("""\
import a


@a.b
def f(x):
    def g():
        pass
    return g


class C:
    h = [lambda: 1]
pair = [lambda: 1, lambda: 2]
nested = lambda: (lambda: 3)
""")

    assert "f" == source.qualname_at("f", 4)
    assert "f.<locals>.g" == source.qualname_at("g", 6)
    assert "C.<lambda>" == source.qualname_at("<lambda>", 12)
    assert "<lambda>" == source.qualname_at("<lambda>", 13)
    assert source.qualname_at("<lambda>", 14) is None
    assert source.qualname_at("f", 5) is None


def test_code_digest_of_wide_code_tells_every_constant() -> None:
    """An instruction whose argument needs two bytes is read as one."""
    first, second = (
        compile("x = [" + ", ".join(f"f({number})" for number in [*range(1000, 1400), last]) + "]", "a.py", "exec")
        for last in (1, 2)
    )

    assert code_digest(first) == code_digest(first.replace(co_filename="b.py"))
    assert code_digest(first) != code_digest(second)


def test_collect_reads_of_nested_functions_follows_scopes() -> None:
    """Keyword-only parameters hide nothing by having no default; annotations count where a decorator sees them."""
    text = """\
def outer():
    @WRAP
    def inner(a: NOTE, *, key, other=OTHER):
        value: UNREAD = VALUE
        bare: UNREAD
        return key, value
    return lambda *, key, more=MORE: key
"""
    reads: set[Read] = set()
    collect_reads(ast.parse(text), reads, runs=False)

    assert {"WRAP", "NOTE", "OTHER", "VALUE", "MORE"} == {read.chain[0] for read in reads}


def test_sources_too_deep_to_walk_raise_source_error() -> None:
    """A tree deeper than the interpreter's stack is an error of its own, not a crash."""
    with pytest.raises(SourceError, match="nested deeper"):
        collect_reads(deep_sum(), set(), runs=False)
    with pytest.raises(SourceError, match="nested deeper"):
        digest_of_nodes([deep_sum()])
