"""Sheets, sources and expressions at their edges: places nobody guarded, texts that are none, trees without end."""

from __future__ import annotations

from typing import Any

import pytest

from cachectl.identity.guard_expressions import evaluate, parse_expression
from cachectl.identity.guard_paths import parse_source, secret_name
from cachectl.identity.guard_values import Unsayable
from cachectl.identity.guards import SheetBuilder, facts_at


def test_facts_at_a_place_are_those_that_were_added_there() -> None:
    """A place that no guard looked at has none, and neither has one below it."""
    builder = SheetBuilder()
    builder.add(("L:self", ".eps"), ["equals", 1e-6])
    sheet = builder.sheet()

    assert [["equals", 1e-6]] == facts_at(sheet, ("L:self", ".eps"))
    assert [] == facts_at(sheet, ("L:self",))
    assert [] == facts_at(sheet, ("L:self", ".scale", ".eps"))


def test_secret_name_of_a_path_without_names_is_none() -> None:
    """Indices name nothing."""
    assert secret_name(("@type", "#0")) is None


@pytest.mark.parametrize(
    "source", ["dict(L['x'])", "dict(L['x'].items)", "L['x'][1j]", "L['x'].size()['0']", "list(L['x'])[None]"]
)
def test_parse_source_access_that_no_boot_walks_raises(source: str) -> None:
    """A copy of a dict, a key that JSON can't say and an index that is no integer are refused."""
    with pytest.raises(Unsayable):
        parse_source(source)


def test_evaluate_shift_is_computed_up_to_a_limit() -> None:
    """A small shift has its value; a huge one would take all memory."""

    def nothing(path: tuple[str, ...]) -> Any:
        raise AssertionError(path)

    assert 8 == evaluate(parse_expression("1 << 3"), nothing)
    with pytest.raises(OverflowError, match="shift"):
        evaluate(parse_expression("1 << 99999"), nothing)


@pytest.mark.parametrize(
    ("text", "message"), [("1 +", "the shape expression '1 [+]'"), ("-" * 250 + "1", "nested too deeply")]
)
def test_parse_expression_of_no_bounded_expression_raises(text: str, message: str) -> None:
    """Half a text and a tree without end are refused before anything is evaluated."""
    with pytest.raises(Unsayable, match=message):
        parse_expression(text)
