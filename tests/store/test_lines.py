"""What builds leave for the next one: advice, so that whatever is wrong with it costs nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachectl.schemas.canonical import digest_bytes
from cachectl.store.layout import StoreLayout
from cachectl.store.lines import LineNote, note_line, noted_blobs, read_line

RECIPE, OTHER = digest_bytes(b"recipe"), digest_bytes(b"other")
FILES = {"compiled_module": digest_bytes(b"file")}


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    """An empty store."""
    made = StoreLayout(tmp_path / "store")
    made.create()
    return made


def test_note_keeps_what_is_not_given(layout: StoreLayout) -> None:
    """Ranks and phases note theirs one after the other; another line knows nothing of it."""
    note_line(layout, RECIPE, "main_decode", "b2", files=FILES)
    note_line(layout, RECIPE, "main_decode", "b2", manifest=OTHER)
    note_line(layout, RECIPE, "main_decode", "b2", seconds={"record": 2.5})

    assert LineNote(FILES, OTHER, {"record": 2.5}) == read_line(layout, RECIPE, "main_decode", "b2")
    assert LineNote() == read_line(layout, RECIPE, "main_decode", "b4")
    assert LineNote() == read_line(layout, OTHER, "main_decode", "b2")
    assert {OTHER, *FILES.values()} == noted_blobs(layout)


def test_notes_at_once_lose_nothing(layout: StoreLayout) -> None:
    """Ranks under a launcher of their own: one writes files, the others seconds."""

    def note(number: int) -> None:
        if number:
            note_line(layout, RECIPE, "main_decode", "b2", seconds={"record": float(number)})
        else:
            note_line(layout, RECIPE, "main_decode", "b2", files=FILES)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(8)))

    found = read_line(layout, RECIPE, "main_decode", "b2")
    assert (FILES, {"record"}) == (found.files, set(found.seconds))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": "cachectl/line/v9"}',
        '{"schema": "cachectl/line/v1"}',
        '{"schema": "cachectl/line/v1", "files": 1, "manifest": null, "seconds": {}}',
        '{"schema": "cachectl/line/v1", "files": {}, "manifest": null, "seconds": {"record": "soon"}}',
    ],
)
def test_note_that_can_not_be_read_is_none_and_is_replaced(layout: StoreLayout, text: str) -> None:
    """Damaged, or of a later version."""
    note_line(layout, RECIPE, "main_decode", "b2", files=FILES)
    (path,) = (layout.root / "boot" / "lines").iterdir()
    path.chmod(0o644)
    path.write_text(text)

    assert LineNote() == read_line(layout, RECIPE, "main_decode", "b2")
    assert set() == noted_blobs(layout)
    note_line(layout, RECIPE, "main_decode", "b2", manifest=OTHER)
    assert LineNote(manifest=OTHER) == read_line(layout, RECIPE, "main_decode", "b2")


def test_note_names_no_path_for_a_digest(layout: StoreLayout) -> None:
    """A digest becomes a path in the store: what is none is left out."""
    note_line(layout, RECIPE, "main_decode", "b2", files={"a": "../../etc/passwd", "b": OTHER}, manifest="no digest")

    assert LineNote({"b": OTHER}) == read_line(layout, RECIPE, "main_decode", "b2")


def test_note_in_a_store_that_can_not_be_written_is_left_as_it_was(layout: StoreLayout) -> None:
    """Advice never fails a build: here a file stands where the folder should."""
    (layout.root / "boot" / "lines").write_text("in the way")

    note_line(layout, RECIPE, "main_decode", "b2", files=FILES)

    assert LineNote() == read_line(layout, RECIPE, "main_decode", "b2")
