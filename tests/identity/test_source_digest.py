"""Digests of source and of code: equal for equal code, whatever its layout."""

from __future__ import annotations

from typing import Any

import pytest

from cachectl.identity.source_digest import SourceError, SourceIndex, code_digest


def test_source_index_unparsable_text_raises_with_its_line() -> None:
    """The error names the line."""
    with pytest.raises(SourceError, match="line 2"):
        SourceIndex(b"x = 1\ndef (:\n")


def test_source_index_invalid_escape_is_no_warning() -> None:
    """Parsing somebody's file says nothing about its style."""
    assert SourceIndex(b"x = '\\d'\n").is_bound("x")


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("return x", "return  x  # note", True),
        ("'doc'\n    return x", "return x", True),
        ("return 1", "return True", False),
        ("return 0.0", "return -0.0", False),
        ("return 'a'", "return b'a'", False),
        ("return x in {1, 2}", "return x in {2, 1}", False),
        ("return f'{x}'", "return f'{x!r}'", False),
        ("return [y for y in x]", "return [y + 0 for y in x]", False),
    ],
)
def test_source_index_definition_is_equal_for_equal_code(left: str, right: str, equal: bool) -> None:
    """Layout is left out of a digest and nothing else is."""
    digests = {SourceIndex(f"def f(x):\n    {body}\n".encode()).definition("f") for body in (left, right)}

    assert equal == (len(digests) == 1)


def test_code_digest_follows_behaviour_and_not_place() -> None:
    """Lines, file names and docstrings are left out; constants, names and nested code are not."""

    def digest(text: str, name: str = "one.py") -> str:
        namespace: dict[str, Any] = {}
        exec(compile(text, name, "exec"), namespace)
        return code_digest(namespace["f"].__code__)

    plain = digest("def f(x):\n    return None if x in {'a', 'b'} else 3\n")

    assert plain == digest("\n\n\ndef f(x):\n    'doc'\n    return None if x in {'a', 'b'} else 3\n", "two.py")
    assert plain != digest("def f(x):\n    return None if x in {'a', 'b'} else 4\n")
    assert plain != digest("def f(x):\n    return None if x in {'a', 'c'} else 3\n")
    nested = "def f(x):\n    class C:\n        {}\n        y = 1\n    return C\n"
    assert digest(nested.format("'doc'")) == digest("\n" + nested.format("'other'"))
    assert digest(nested.format("'doc'")) != digest(nested.format("z = 2"))


def test_kernel_is_registered_by_its_decorator_only() -> None:
    """A statement elsewhere in the file may put any function into an operator."""
    index = SourceIndex(
        b"@torch.library.impl(lib, 'f', 'CPU')\ndef f(x):\n    return x\n\n\ndef g(x):\n    return x\n\n\n"
        b"lib.impl('g', g)\n\n\nclass C:\n    @torch.library.impl(lib, 'h', 'CPU')\n    def h(x):\n        return x\n"
    )

    assert index.is_registered("f")
    assert not index.is_registered("g")
    assert not index.is_registered("C.h")
    assert not index.is_registered("missing")
