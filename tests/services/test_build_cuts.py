"""Builds of one world in two cuts into nodes: each finds and makes its own, and what fits both is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.standin import Done, Site, finish
from tests.services.test_build_ranks import WORLD, places

# What a launcher of one rank a node says beside RANK.
APART = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}


def apart(site: Site, *arguments: str | Path, **environ: str) -> list[Done]:
    """Run a command once a rank, each on a node of its own."""
    variables = {**APART, "MEETING": str(site.folder / "shared-workspace"), **environ}
    return [
        finish(process)
        for process in [site.start(*arguments, environ={**variables, "RANK": str(rank)}) for rank in range(2)]
    ]


def sets(site: Site) -> list[dict[str, Any]]:
    """Return the recipe's warm sets, newest first."""
    (record,) = site.records()
    found: list[dict[str, Any]] = record["sets"]
    return found


def test_build_in_a_second_cut_makes_what_names_another_device(site: Site) -> None:
    """Only rank 1 has another device there; its case is built without --force, and each set is ready in its cut."""
    recipe = site.recipe({"b2": "tied", "b4": "build"}, topology=WORLD)
    first = site.build(recipe)

    explained = [done.report["reasons"] for done in apart(site, "explain", "--json", recipe)]
    planned = [done.report["entries"] for done in apart(site, "plan", "--json", recipe)]
    built = apart(site, "build", "--json", recipe)
    plans = [*apart(site, "plan", recipe), site.run("plan", str(recipe))]
    record = site.records()
    again = [*apart(site, "build", "--json", recipe), site.build(recipe)]

    assert [[], [("node cut", "1 node of 2", "2 nodes of 1")]] == [
        [(reason["name"], reason["stored"], reason["wanted"]) for reason in found] for found in explained
    ]
    missing = [(entry["case"], entry["rank"]) for entry in planned[0] if entry["state"] != "ready"]
    assert [("b2", 1)] == missing
    assert planned[0] == planned[1]
    assert [0, 0] == [done.returncode for done in built], built[0].stderr + built[1].stderr
    assert [[], [("b2", 1)]] == [places(done.report["built"]) for done in built]
    assert [1, 2] == [item["ranks_per_node"] for item in sets(site)]
    assert [0, 0, 0] == [done.returncode for done in plans]
    # Each finds its own set in the record, and leaves it as it is.
    assert [[], [], []] == [done.report["built"] for done in again]
    assert record == site.records()
    assert first.report["warm_set"] == again[2].report["warm_set"] == sets(site)[1]["warm_set"]
    assert sets(site)[0]["warm_set"] == again[0].report["warm_set"]


def test_build_of_what_names_no_device_serves_all_cuts(site: Site) -> None:
    """In a second cut there is nothing to build; the one set is tied to none."""
    recipe = site.recipe({"b2": "build"}, topology=WORLD)
    site.build(recipe)

    built = apart(site, "build", "--json", recipe)

    assert [[], []] == [done.report["built"] for done in built]
    assert [None] == [item.get("ranks_per_node") for item in sets(site)]


@pytest.mark.parametrize("environ", [{"LOCAL_WORLD_SIZE": ""}, {"GROUP_WORLD_SIZE": "3"}], ids=["unknown", "unequal"])
def test_build_in_a_cut_that_is_not_known_takes_what_is_there(site: Site, environ: dict[str, str]) -> None:
    """As a start there would, which the program's process then refuses where it has another device."""
    recipe = site.recipe({"b2": "tied"}, topology=WORLD)
    site.build(recipe)

    built = apart(site, "build", "--json", recipe, **environ)

    assert [(0, []), (0, [])] == [(done.returncode, done.report["built"]) for done in built]
    assert [2] == [item["ranks_per_node"] for item in sets(site)]
