"""Hints for one recipe and store, and guards that differ in more than one value."""

from __future__ import annotations

from typing import Any

from cachectl.identity.explain import Commands, compare_entries
from cachectl.identity.guards import SheetBuilder
from cachectl.schemas.keying import KEY_PARTS


def test_commands_name_recipe_and_store_quoted() -> None:
    """Every command can be pasted, whatever the recipe is called."""
    commands = Commands("my recipe.yaml", "/store")

    assert "cachectl verify 'my recipe.yaml' --store /store" == commands.verify()
    assert "cachectl diff one two --store /store" == commands.diff("one", "two")


def test_compare_entries_guard_of_two_values_shows_both() -> None:
    """A guard on a key says which key, and whether it was there."""

    def entry(present: bool) -> dict[str, Any]:
        builder = SheetBuilder()
        builder.add(("L:self", ".options"), ["contains", "gain", present])
        return {
            "recipe": "made-up",
            "case": "b4",
            "parts": {**{part: {} for part in KEY_PARTS}, "guards": builder.sheet()},
            "raw_sources": {},
            "artifact": {"runtime_path": "Model_0123/main_decode", "files": []},
        }

    (reason,) = compare_entries(entry(True), entry(False), "run: cachectl build")

    assert ("guards", "self.options: contains") == (reason.part, reason.name)
    assert (["gain", True], ["gain", False]) == (reason.stored, reason.wanted)
