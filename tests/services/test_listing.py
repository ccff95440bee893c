"""`ls` and `show`: what is stored, and one entry whole."""

from __future__ import annotations

import pytest

from cachectl.errors import ArtifactCorruptedError, ConfigError, StoreError
from cachectl.services.listing import list_entries, show_entry
from cachectl.store.manifest import ManifestRepo
from tests.stores import MadeStore


def test_ls_of_an_empty_store_is_empty(made: MadeStore) -> None:
    """No entries, no error."""
    assert () == tuple(list_entries(made.layout).entries)


def test_ls_tells_each_entry_with_state_and_size(made: MadeStore) -> None:
    """Line, state, bytes and times of each; an invalidated entry stays listed as such."""
    warm_set = made.publish(size_bytes=3000)
    with ManifestRepo.open(made.layout.database) as repo:
        repo.invalidate([made.member(warm_set, "b4").key], "wrong answers")

    entries = {entry.case: entry for entry in list_entries(made.layout).entries}

    assert {"b4": "invalid", "b2": "ready"} == {case: entry.state for case, entry in entries.items()}
    assert {"2026-03-01T12:00:00Z"} == {entry.created_at for entry in entries.values()}
    assert all(entry.size_bytes == 3000 + len(b"#!/bin/sh\n") for entry in entries.values())
    assert all((entry.last_used_at, entry.pinned) == (None, False) for entry in entries.values())


def test_ls_of_a_recipe_leaves_others_out(made: MadeStore) -> None:
    """By the recipe's name; one that nothing was built for has none."""
    made.publish()

    assert 2 == len(list_entries(made.layout, "made-up").entries)
    assert () == tuple(list_entries(made.layout, "other").entries)


def test_show_gives_the_manifest_and_what_the_database_knows(made: MadeStore) -> None:
    """The document as it was written, with state and pin beside; a key's beginning is enough."""
    member = made.member(made.publish(), "b4")

    document = show_entry(made.layout, member.key[7:23])

    assert (member.key, member.manifest, "b4") == (document["key"], document["manifest"], document["case"])
    assert ("ready", None, False, []) == tuple(
        document[name] for name in ("state", "state_reason", "pinned", "signatures")
    )
    assert {"model", "sources", "guards", "toolchain"} <= set(document["parts"])
    assert "hunter2" not in str(document)


@pytest.mark.parametrize("key", ["sha256:" + "0" * 64, "zz", ""])
def test_show_of_an_unknown_key_is_a_usage_error(made: MadeStore, key: str) -> None:
    """Exit 2, whatever the key looks like."""
    made.publish()

    with pytest.raises(ConfigError):
        show_entry(made.layout, key)


def test_show_of_a_damaged_manifest_says_so(made: MadeStore) -> None:
    """Bytes that are not what the name says are not shown as the entry."""
    member = made.member(made.publish(), "b4")
    path = made.layout.manifest(member.key, member.manifest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ArtifactCorruptedError):
        show_entry(made.layout, member.key)


def test_listing_without_a_store_says_so(made: MadeStore) -> None:
    """No store is no empty store."""
    made.layout.root.rename(made.folder / "moved")

    with pytest.raises(StoreError):
        list_entries(made.layout)
    with pytest.raises(StoreError):
        show_entry(made.layout, "3f9c")
