"""What gates refused: held for a while, of the very same sight only, and forgotten when tried again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cachectl.schemas.canonical import digest_bytes
from cachectl.store.layout import StoreLayout
from cachectl.store.refusals import REFUSAL_KEPT_S, Refusal, note_refusals, read_refusals

RECIPE, SEEN = digest_bytes(b"recipe"), digest_bytes(b"seen")
REFUSED = Refusal(SEEN, "main_decode", "b4", 1, "draws random numbers", "/logs/rank1.log", 1000.0)


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    """An empty store."""
    made = StoreLayout(tmp_path / "store")
    made.create()
    return made


@pytest.mark.parametrize(
    ("seen", "now", "held"),
    [
        (SEEN, 1000.0, True),
        (SEEN, 1000.0 + REFUSAL_KEPT_S - 1, True),
        (SEEN, 1000.0 + REFUSAL_KEPT_S, False),
        # The clock was set back: nobody knows how long ago it was.
        (SEEN, 999.0, False),
        (digest_bytes(b"other"), 1000.0, False),
    ],
)
def test_refusal_holds_for_a_while_where_nothing_has_changed(
    layout: StoreLayout, seen: str, now: float, held: bool
) -> None:
    """Expired, from the future, or of another sight: tried again."""
    note_refusals(layout, RECIPE, [REFUSED], tried=[])

    assert ([REFUSED] if held else []) == read_refusals(layout, RECIPE, seen, now)
    assert [] == read_refusals(layout, digest_bytes(b"other recipe"), seen, now)


def test_refusal_of_a_line_that_was_tried_again_is_forgotten(layout: StoreLayout) -> None:
    """Built, or failed in another way; other lines' stay."""
    other = replace(REFUSED, case="b2")
    note_refusals(layout, RECIPE, [REFUSED, other], tried=[])
    note_refusals(layout, RECIPE, [], tried=[("main_decode", "b4", 1)])

    assert [other] == read_refusals(layout, RECIPE, SEEN, 1000.0)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "x"}', '{"schema": "cachectl/refusals/v1", "refused": [1]}'])
def test_refusals_that_can_not_be_read_are_none(layout: StoreLayout, text: str) -> None:
    """A build that tries once more is the safe side."""
    path = layout.refusals(RECIPE)
    path.parent.mkdir(parents=True)
    path.write_text(text)

    assert [] == read_refusals(layout, RECIPE, SEEN, 1000.0)
    note_refusals(layout, RECIPE, [REFUSED], tried=[])
    assert [REFUSED] == read_refusals(layout, RECIPE, SEEN, 1000.0)
