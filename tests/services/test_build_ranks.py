"""Builds of worlds of several ranks: whose words come first, what is left, what the next build makes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachectl.store.manifest_deltas import is_manifest_delta
from cachectl.store.reading import read_manifest_file
from tests.services.standin import Site, finish
from tests.services.test_build import assert_store_is_whole, running, wait_until

WORLD = {"world_size": 2}
FOUR = [("b2", 0), ("b2", 1), ("b4", 0), ("b4", 1)]


def places(items: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return case and rank of each entry of a report, sorted."""
    return sorted((item["case"], item["rank"]) for item in items)


@pytest.fixture
def real_site(site: Site) -> Site:
    """A site whose torchrun is the real one."""
    return replace(site, real_torchrun=True)


@pytest.fixture(autouse=True)
def _nothing_left(site: Site) -> Iterator[None]:
    """Whatever happens in a test, no process of its builds runs on."""
    yield
    assert wait_until(lambda: not running(site))


def test_build_of_two_ranks_publishes_one_entry_a_rank_and_case(site: Site) -> None:
    """Both ranks, both cases, one pair of launches; the set has four members, each rank has its log, nothing stays."""
    recipe = site.recipe({"b2": "build", "b4": "build"}, topology=WORLD)

    done = site.build(recipe)
    plan = site.run("plan", "--json", str(recipe)).report

    assert 0 == done.returncode, done.stderr
    assert FOUR == places(done.report["built"])
    assert FOUR == places([entry for entry in plan["entries"] if entry["state"] == "ready"])
    (record,) = site.records()
    members = record["sets"][0]["members"]
    assert (FOUR, 4) == (places(members), len({member["key"] for member in members}))
    assert {"rank0.log", "rank1.log", "launcher.log"} == {path.name for path in site.layout.logs.glob("*/*")}
    assert [] == list(site.temporary.iterdir())


def test_ranks_share_their_bytes_and_are_handed_out_as_built(site: Site) -> None:
    """Rank 1's file lies there as a delta; verify reads it, the hook lays down its very bytes, its base is no extra."""
    recipe = site.recipe({"b2": "build"}, topology=WORLD)
    site.build(recipe)

    hooked = site.run("hook", str(recipe)).report
    verified = site.run("verify", "--json").report
    (first,) = [member for member in site.records()[0]["sets"][0]["members"] if member["rank"] == 0]
    site.layout.manifest(first["key"], first["manifest"]).unlink()
    without = site.run("verify", "--json").report

    assert 1 == len(list(site.layout.blobs.rglob("*.delta")))
    texts = {entry["rank"]: (Path(entry["path"]) / "compiled_module").read_text() for entry in hooked["entries"]}
    assert [f"of rank {rank}\nline 0" in texts[rank] for rank in (0, 1)] == [True, True]
    assert len(texts[0]) == len(texts[1])
    # What stands there is no artifact of a runtime.
    assert {"unreadable-artifact"} == {finding["kind"] for finding in verified["findings"]}
    assert "extra-file" not in {finding["kind"] for finding in without["findings"]}


def test_manifests_whose_base_is_gone_are_told_and_made_anew(site: Site) -> None:
    """What they stand on is deleted: verify and plan say it, the hook is cold, and the next build mends it."""
    recipe = site.recipe({"b2": "build"}, topology=WORLD)
    site.build(recipe)
    base = read_manifest_file(site.entries()[0]).base
    assert base is not None
    site.layout.blob(base).unlink()

    verified = site.run("verify", "--json", "--quick")
    hooked = site.run("hook", str(recipe)).report
    plan = site.run("plan", "--json", str(recipe)).report
    again = site.build(recipe)

    findings = verified.report["findings"]
    assert (1, {"missing-blob"}) == (verified.returncode, {finding["kind"] for finding in findings})
    assert all(base in finding["detail"] for finding in findings)
    assert ("cold", [("artifact", "absent")]) == (
        hooked["outcome"],
        sorted({(reason["part"], reason["kind"]) for reason in hooked["reasons"]}),
    )
    assert (0, 2) == (plan["ready"], plan["stale"])
    assert (0, [("b2", 0), ("b2", 1)]) == (again.returncode, places(again.report["built"]))
    assert "warm" == site.run("hook", str(recipe)).report["outcome"]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["record", "reload"])
def test_build_in_which_one_rank_fails_says_that_ranks_words(real_site: Site, phase: str) -> None:
    """The other one waits for it and is stopped by the real torchrun; whose words these are the log says, too."""
    site = real_site
    done = site.build(site.recipe({"b2": "build", "b4": f"fail-{phase}@1"}, topology=WORLD))

    (failure,) = done.report["failed"]
    assert (1, "b4", 1) == (done.returncode, failure["case"], failure["rank"])
    assert failure["error"].startswith("main_decode [b4]: does not work")
    assert "rank1.log" == Path(failure["log"]).name
    # What all ranks had proved before is kept.
    kept = {"record": [], "reload": [("b2", 0), ("b2", 1)]}[phase]
    assert kept == places(done.report["built"])
    assert (len(kept), [], []) == (len(site.entries()), site.records(), list(site.temporary.iterdir()))


@pytest.mark.real
@pytest.mark.slow
def test_build_whose_rank_is_killed_names_it_and_works_next_time(real_site: Site) -> None:
    """Real torchrun says who ended how; once mended, a build makes all of it and nothing of torchrun's stays."""
    site = real_site
    recipe = site.recipe({"b2": "die-record@1"}, topology=WORLD)

    done = site.build(recipe)

    (failure,) = done.report["failed"]
    assert (1, 1) == (done.returncode, failure["rank"])
    assert "rank 1 died in record by signal SIGKILL" in failure["error"]
    assert ([], []) == (site.entries(), list(site.temporary.iterdir()))
    (site.folder / "mended").touch()
    again = site.build(recipe)
    assert (0, [("b2", 0), ("b2", 1)]) == (again.returncode, places(again.report["built"]))
    assert [] == list(site.temporary.iterdir())


def test_build_in_which_a_rank_only_lost_its_peer_says_how_the_peer_ended(site: Site) -> None:
    """An echo may come first: what counts is the rank that was killed."""
    done = site.build(site.recipe({"b2": "echo-record@0,die-record@1"}, topology=WORLD))

    (failure,) = done.report["failed"]
    assert 1 == failure["rank"]
    assert "rank 1 died in record by signal SIGKILL" in failure["error"]


def test_build_in_which_both_ranks_fail_says_the_one_that_came_first_by_itself(site: Site) -> None:
    """Rank 0 says that its peer is gone, rank 1 what was wrong."""
    done = site.build(site.recipe({"b2": "echo-record@0,fail-record@1"}, topology=WORLD))

    assert [("b2", 1)] == places(done.report["failed"])


def test_build_in_which_a_rank_hangs_says_where_each_rank_is(site: Site) -> None:
    """Both are late, one waits for the other; both are stopped."""
    recipe = site.recipe({"b2": "wait-record@1"}, topology=WORLD)
    where = "rank 0 in record of main_decode [b2], rank 1 in record of main_decode [b2]"

    # On a slow machine ranks have not begun their case so soon, and are told as starting.
    for bound_s in (4, 32, 256):
        done = site.build(recipe, "--timeout", str(bound_s))
        (failure,) = done.report["failed"]
        if where in failure["error"]:
            break

    assert f"ranks 0, 1 did not finish record within {bound_s} s: {where}" in failure["error"]
    assert [] == site.entries()


@pytest.mark.parametrize("missing", ["entry", "rows"])
def test_build_makes_what_one_rank_lacks_and_keeps_the_others(site: Site, missing: str) -> None:
    """One deleted entry: plan, verify and explain name it, the hook is cold; all ranks run, one entry is new."""
    recipe = site.recipe({"b2": "build", "b4": "build"}, topology=WORLD)
    site.build(recipe)
    (record,) = site.records()
    gone = next(item for item in record["sets"][0]["members"] if (item["case"], item["rank"]) == ("b4", 1))
    site.layout.manifest(gone["key"], gone["manifest"]).unlink()
    if missing == "rows":
        site.run("db", "reindex")

    plan = site.run("plan", "--json", str(recipe)).report
    verify = site.run("verify", "--json", "--quick")
    explain = site.run("explain", "--json", str(recipe))
    hook = site.run("hook", str(recipe)).report
    again = site.build(recipe)

    not_ready = [entry for entry in plan["entries"] if entry["state"] != "ready"]
    assert [("b4", 1)] == places(not_ready)
    assert not_ready[0]["reasons"]
    assert (1, ["incomplete-set"]) == (
        verify.returncode,
        [finding["kind"] for finding in verify.report["findings"] if finding["kind"] == "incomplete-set"],
    )
    assert any("main_decode [b4] of rank 1" in finding["detail"] for finding in verify.report["findings"])
    assert 1 == explain.returncode
    assert "b4 rank 1" in explain.stdout or gone["key"] in explain.stdout
    assert "cold" == hook["outcome"]
    assert (0, [("b4", 1)], 3) == (again.returncode, places(again.report["built"]), len(again.report["reused"]))
    assert "warm" == site.run("hook", str(recipe)).report["outcome"]


def test_build_with_a_method_that_some_ranks_lack_is_whole_without_it(site: Site) -> None:
    """Rank 1 has no such method: three members, plan and hook are ready, and the next build has nothing to do."""
    recipe = site.recipe({"b2": "build", "draft": "lack-record@1"}, topology=WORLD)

    done = site.build(recipe)
    plan = site.run("plan", "--json", "--require-ready", str(recipe))
    again = site.build(recipe)

    assert (0, [("b2", 0), ("b2", 1), ("draft", 0)]) == (done.returncode, places(done.report["built"])), done.stderr
    assert [{"method": "main_decode", "case": "draft", "rank": 1}] == site.records()[0]["sets"][0]["absent"]
    assert (0, 3, 0) == (plan.returncode, plan.report["ready"], plan.report["missing"])
    assert (done.report["warm_set"], []) == (again.report["warm_set"], again.report["built"])
    for rank in ("0", "1"):
        assert "warm" == site.run("hook", str(recipe), "--rank", rank).report["outcome"]
    assert "warm" == site.run("explain", "--json", str(recipe)).report["outcome"]


def test_absence_stands_on_the_code_that_the_rank_had(site: Site) -> None:
    """The model gets the method: the line is missing, no set is ready without it; a comment changes nothing."""
    model = site.folder / "model.py"
    model.write_text("class Model:\n    pass\n")
    recipe = site.recipe({"b2": "build", "draft": "lack-record@1"}, topology=WORLD)
    site.build(recipe)

    model.write_text("class Model:\n    pass  # Nothing more.\n")
    same = site.run("plan", "--json", "--require-ready", str(recipe))
    model.write_text("class Model:\n    def mtp(self): ...\n")
    plan = site.run("plan", "--json", "--require-ready", str(recipe))
    (site.folder / "mended").touch()
    again = site.build(recipe)

    assert (0, 3) == (same.returncode, same.report["ready"])
    assert (1, [("draft", 1)]) == (
        plan.returncode,
        places([entry for entry in plan.report["entries"] if entry["state"] != "ready"]),
    )
    assert (0, [("draft", 1)]) == (again.returncode, places(again.report["built"]))
    assert [("b2", 0), ("b2", 1), ("draft", 0), ("draft", 1)] == places(site.records()[0]["sets"][0]["members"])


def test_build_with_a_method_that_all_ranks_lack_is_a_recipe_error(site: Site) -> None:
    """No rank has it: that is a typo, not a layout."""
    done = site.build(site.recipe({"b2": "lack-record"}, topology=WORLD))

    assert (2, []) == (done.returncode, site.entries())
    assert "has no such method" in done.stderr


def test_build_that_keeps_going_keeps_the_cases_that_all_ranks_passed(site: Site) -> None:
    """One rank's failure costs its case in all ranks, and no other."""
    recipe = site.recipe({"b2": "build", "b4": "fail-reload@1", "b8": "build"}, topology=WORLD)

    done = site.build(recipe, "--keep-going")

    assert [("b4", 1)] == places(done.report["failed"])
    assert [("b2", 0), ("b2", 1), ("b8", 0), ("b8", 1)] == places(done.report["built"])
    assert [] == site.records()
    (site.folder / "mended").touch()
    again = site.build(recipe)
    assert ([("b4", 0), ("b4", 1)], 4) == (places(again.report["built"]), len(again.report["reused"]))
    assert 6 == len(site.records()[0]["sets"][0]["members"])


def test_splits_of_one_world_are_two_sets_and_the_difference_is_named(site: Site) -> None:
    """tp4×dp2 and tp2×dp4 share nothing; explain says which sizes, with both values."""
    cases, world = {"b2": "build"}, {"world_size": 2}
    first = site.recipe(cases, topology={**world, "tensor_parallel": 2})
    second = site.recipe(cases, topology={**world, "data_parallel": 2}, file="other.yaml")

    built = site.build(first).report
    explained = site.run("explain", "--json", str(second))
    other = site.build(second).report

    assert 1 == explained.returncode
    differs = {(item["part"], item["name"]): item for near in explained.report["nearest"] for item in near["differs"]}
    assert (2, 1) == tuple(differs["topology", "tensor_parallel"][side] for side in ("stored", "wanted"))
    assert (1, 2) == tuple(differs["topology", "data_parallel"][side] for side in ("stored", "wanted"))
    assert built["warm_set"] != other["warm_set"]
    assert 2 == len(other["built"])


def test_shards_build_their_parts_and_the_last_one_closes_the_set(site: Site) -> None:
    """Two parts of one recipe: the first publishes entries only, the second makes the set whole."""
    recipe = site.recipe({"b2": "build", "b4": "build"}, topology=WORLD)

    first = site.build(recipe, "--shard", "0/2")
    between = site.records()
    second = site.build(recipe, "--shard", "1/2")

    assert (0, [("b2", 0), ("b2", 1)], None, []) == (
        first.returncode,
        places(first.report["built"]),
        first.report["warm_set"],
        between,
    )
    assert (0, [("b4", 0), ("b4", 1)]) == (second.returncode, places(second.report["built"]))
    assert FOUR == places(site.records()[0]["sets"][0]["members"])
    assert second.report["warm_set"] == site.records()[0]["sets"][0]["warm_set"]


def test_shards_at_once_one_of_which_fails_publish_the_other_ones_set(site: Site) -> None:
    """Two recipes in two parts on one store at the same time: the good one is warm, the bad one says why."""
    good = site.recipe({"b2": "build"}, name="good", file="good.yaml", topology=WORLD)
    bad = site.recipe({"b2": "fail-record@1"}, name="bad", file="bad.yaml", topology=WORLD)
    both = [site.start("build", "--json", str(good), str(bad), "--shard", f"{part}/2") for part in (1, 2)]
    ended = {done.returncode: done for done in map(finish, both)}

    assert {0, 1} == set(ended)
    assert [("b2", 1)] == places(ended[1].report["failed"])
    assert ["good"] == [record["recipe"] for record in site.records()]
    assert "warm" == site.run("hook", str(good)).report["outcome"]
    assert_store_is_whole(site)


def test_jobs_build_recipes_at_once_and_a_failure_takes_no_other_with_it(site: Site) -> None:
    """Two recipes wait for each other's start: they run at the same time; the failed one's words are its own."""
    good = site.recipe({"b2": "wait-record"}, name="good", file="good.yaml")
    bad = site.recipe({"b2": "wait-record", "b4": "fail-record"}, name="bad", file="bad.yaml")
    process = site.start("build", "--json", "--jobs", "2", str(good), str(bad))
    assert wait_until(lambda: len(site.ranks()) == 2)
    (site.folder / "go").touch()

    done = finish(process)

    assert (1, ["b2"], ["b4"]) == (
        done.returncode,
        [entry["case"] for entry in done.report["built"]],
        [failure["case"] for failure in done.report["failed"]],
    )
    assert ["good"] == [record["recipe"] for record in site.records()]


def test_jobs_that_are_interrupted_leave_no_rank(site: Site) -> None:
    """Ctrl-C in the middle of two builds: both ranks end, nothing is published."""
    recipes = [site.recipe({"b2": "wait-record"}, name=name, file=f"{name}.yaml") for name in ("one", "two")]
    process = site.start("build", "--jobs", "2", *recipes)
    assert wait_until(lambda: len(site.ranks()) == 2)

    process.send_signal(signal.SIGINT)
    done = finish(process)

    assert 0 != done.returncode
    assert wait_until(lambda: not running(site))
    assert ([], []) == (site.entries(), list(site.temporary.iterdir()))


def test_launched_ranks_build_their_own_and_rank_0_closes_the_set(site: Site) -> None:
    """Two processes as a launcher starts them, with one store: each says what it built, the set is whole."""
    recipe = site.recipe({"b2": "build", "draft": "lack-record@1"}, topology=WORLD)

    done = launch(site, recipe)

    assert [0, 0] == [rank.returncode for rank in done], done[0].stderr + done[1].stderr
    assert [[("b2", 0), ("draft", 0)], [("b2", 1)]] == [places(rank.report["built"]) for rank in done]
    (record,) = site.records()
    assert [("b2", 0), ("b2", 1), ("draft", 0)] == places(record["sets"][0]["members"])
    assert (record["sets"][0]["warm_set"], None) == tuple(rank.report["warm_set"] for rank in done)
    # Rank 1 found what rank 0 had stored, though neither had published yet.
    assert 1 == len(list(site.layout.blobs.rglob("*.delta")))
    assert [True, True, True] == [is_manifest_delta(path.read_bytes()) for path in site.entries()]
    time.sleep(1.1)  # Provenance counts seconds; an equal manifest would be the same file.
    again = launch(site, recipe, "--force")
    assert [[("b2", 0), ("draft", 0)], [("b2", 1)]] == [places(rank.report["built"]) for rank in again]
    manifests = [{item["manifest"] for item in record["sets"][0]["members"]} for record in (record, site.records()[0])]
    assert not manifests[0] & manifests[1]


def test_launched_ranks_of_another_world_are_refused(site: Site) -> None:
    """Three ranks for a recipe of two: said at once, not waited for."""
    recipe = site.recipe({"b2": "build"}, topology=WORLD)

    done = finish(site.start("build", str(recipe), environ=launcher_variables(site, 0, 3)))

    assert 2 == done.returncode
    assert "topology.world_size 2: this is rank 0 of 3" in done.stderr


def test_launched_rank_0_does_not_wait_for_ever(site: Site) -> None:
    """The other rank ends without publishing: rank 0 says which entry did not come."""
    recipe = site.recipe({"b2": "die-reload@1"}, topology=WORLD)

    done = launch(site, recipe, "--timeout", "6")

    assert [1, 1] == [rank.returncode for rank in done]
    assert [] == site.records()


def launcher_variables(site: Site, rank: int, size: int) -> dict[str, str]:
    """Return what a launcher sets."""
    shared = site.folder / "shared-workspace"
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MEETING": str(shared)}


def launch(site: Site, recipe: Path, *options: str) -> list[Any]:
    """Run `cachectl build` once a rank, as a launcher would."""
    return [
        finish(process)
        for process in [
            site.start("build", "--json", *options, str(recipe), environ=launcher_variables(site, rank, 2))
            for rank in range(2)
        ]
    ]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=[pytest.mark.nightly, pytest.mark.timeout(1500)])])
def test_builds_killed_at_random_moments_leave_no_half_set(real_site: Site, kills: int) -> None:
    """SIGKILL of a rank, of torchrun or of the whole build, whenever: the store is whole, the next build finishes."""
    site = real_site
    recipe = site.recipe({"b2": "build", "b4": "build"}, topology=WORLD)
    rng = random.Random(kills)
    started = time.monotonic()
    site.build(recipe)
    whole_s = time.monotonic() - started
    for number in range(kills):
        force = ["--force"] if number % 2 else []
        if not force:
            for path in (*site.entries(), *site.layout.root.glob("boot/*/*")):
                path.unlink()
            site.run("db", "reindex")
        process = site.start("build", "--json", *force, str(recipe))
        time.sleep(rng.uniform(0.1, whole_s))
        children = [pid for pid in running(site) if pid != process.pid]
        victim = rng.choice([process.pid, *children])
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finish(process)
        assert wait_until(lambda: not running(site)), number
        for record in site.records():
            assert all(FOUR == places(warm_set["members"]) for warm_set in record["sets"])
        assert_store_is_whole(site)
    done = site.build(recipe)
    assert (0, "warm") == (done.returncode, site.run("hook", str(recipe)).report["outcome"]), done.stderr
