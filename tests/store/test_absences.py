"""What ranks were found not to have: noted line by line, safe beside other builds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachectl.errors import DocumentError
from cachectl.schemas.boot import Absence
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.absences import note_absences, read_absences
from cachectl.store.layout import StoreLayout

RECIPE, REQUEST = digest_bytes(b"recipe"), digest_bytes(b"request")
FILES, OTHERS = {"path:0/model.py": digest_bytes(b"model")}, {"path:0/model.py": digest_bytes(b"other")}


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    """An empty store."""
    made = StoreLayout(tmp_path / "store")
    made.create()
    return made


def line(rank: int, method: str = "mtp_decode") -> Absence:
    """Return a line of a recipe."""
    return Absence(method, "b4", rank)


def test_absences_noted_are_read_by_request(layout: StoreLayout) -> None:
    """Another request of the recipe, and another recipe, know nothing of them."""
    note_absences(layout, RECIPE, REQUEST, looked_at=[line(0), line(1)], absent={line(1): FILES})

    assert {line(1): FILES} == read_absences(layout, RECIPE, REQUEST)
    assert read_absences(layout, RECIPE, digest_bytes(b"other")) is None
    assert read_absences(layout, digest_bytes(b"other"), REQUEST) is None


def test_absences_of_a_line_that_has_its_method_now_are_forgotten(layout: StoreLayout) -> None:
    """Only of lines that were looked at: other shards' and ranks' notes stay."""
    note_absences(layout, RECIPE, REQUEST, looked_at=[], absent={line(1): FILES, line(2): OTHERS})
    note_absences(layout, RECIPE, REQUEST, looked_at=[line(1)], absent={})

    assert {line(2): OTHERS} == read_absences(layout, RECIPE, REQUEST)


def test_absences_noted_at_once_are_all_kept(layout: StoreLayout) -> None:
    """Eight ranks note theirs at the same time."""
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda rank: note_absences(layout, RECIPE, REQUEST, looked_at=[line(rank)], absent={line(rank): FILES}),
                range(8),
            )
        )

    assert dict.fromkeys(map(line, range(8)), FILES) == read_absences(layout, RECIPE, REQUEST)


def test_absences_of_the_first_version_are_as_if_nothing_were_noted(layout: StoreLayout) -> None:
    """Nobody knows on which code they stand: the lines are missing until a build has looked again."""
    path = layout.absences(RECIPE)
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": "cachectl/absences/v1", "requests": [{"request": "x", "absent": []}]}')

    assert read_absences(layout, RECIPE, REQUEST) is None
    note_absences(layout, RECIPE, REQUEST, looked_at=[], absent={line(1): FILES})
    assert {line(1): FILES} == read_absences(layout, RECIPE, REQUEST)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "cachectl/absences/v2"}', '{"schema": 1, "requests": 2}'])
def test_absences_damaged_are_told_and_replaced_by_the_next_note(layout: StoreLayout, text: str) -> None:
    """A note is made anew by each build: what can't be read costs a build of one case."""
    path = layout.absences(RECIPE)
    path.parent.mkdir(parents=True)
    path.write_text(text)

    with pytest.raises(DocumentError):
        read_absences(layout, RECIPE, REQUEST)
    note_absences(layout, RECIPE, REQUEST, looked_at=[], absent={line(3): {}})
    assert {line(3): {}} == read_absences(layout, RECIPE, REQUEST)
