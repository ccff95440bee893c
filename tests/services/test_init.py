"""Making a store: new, there already, or not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.errors import StoreError
from cachectl.services.init import init_store
from cachectl.services.listing import list_entries
from cachectl.store.layout import StoreLayout
from tests.stores import MadeStore


def test_init_makes_a_store_that_can_be_listed(tmp_path: Path) -> None:
    """Folders, mark and database, parents too."""
    layout = StoreLayout(tmp_path / "some" / "where" / "store")

    assert {"store": str(layout.root), "created": True} == init_store(layout)
    assert () == tuple(list_entries(layout).entries)


def test_init_of_a_store_changes_nothing(made: MadeStore) -> None:
    """A second time is a check: what is in it stays."""
    made.publish()

    assert {"store": str(made.layout.root), "created": False} == init_store(made.layout)
    assert 2 == len(list_entries(made.layout).entries)


def test_init_of_a_store_without_database_makes_one(made: MadeStore) -> None:
    """A database that was lost is made anew, empty: reindex fills it."""
    made.publish()
    made.layout.database.unlink()

    init_store(made.layout)

    assert () == tuple(list_entries(made.layout).entries)


@pytest.mark.parametrize("kind", ["file", "folder with other things", "file below"])
def test_init_where_something_else_is_refuses_and_touches_nothing(tmp_path: Path, kind: str) -> None:
    """A file, or a folder that is somebody's: an error of the store, and no file more or less."""
    root = tmp_path / "place"
    if kind == "folder with other things":
        root.mkdir()
        (root / "thesis.tex").write_text("precious")
    else:
        root.write_text("precious")
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}

    with pytest.raises(StoreError):
        init_store(StoreLayout(root / "below" if kind == "file below" else root))

    assert before == {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
