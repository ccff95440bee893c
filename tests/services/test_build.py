"""Builds that fail, are killed, wait for each other or are asked twice: what the store shows and what is left."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cachectl.store.manifest import ManifestRepo
from tests.services.standin import Site, finish


def wait_until(condition: Callable[[], bool], timeout_s: float = 240.0) -> bool:
    """Wait for a condition; say whether it came true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def running(site: Site) -> list[int]:
    """Return the processes that a build at a site has started and that run."""
    mark = f"TMPDIR={site.temporary}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and is_alive(int(folder.name)):
            found.append(int(folder.name))
    return found


def assert_store_is_whole(site: Site) -> None:
    """Every set that a hook could be given has all its entries and blobs."""
    done = site.run("verify", "--json", "--quick")
    findings = [finding for finding in done.report["findings"] if finding["kind"] != "extra-file"]
    # What a killed build had written and not named yet is found again by content; it is no half set.
    assert [] == [finding for finding in findings if finding["kind"] != "index-drift"], done.stdout
    for record in site.records():
        for warm_set in record["sets"]:
            for member in warm_set["members"]:
                assert site.layout.manifest(member["key"], member["manifest"]).is_file()


def test_build_publishes_every_case_and_leaves_no_workspace(site: Site) -> None:
    """Two cases, one pair of processes, one warm set; nothing stays in the folder for temporary files."""
    done = site.build(site.recipe({"b2": "build", "b4": "build"}))

    assert 0 == done.returncode, done.stderr
    assert ["b2", "b4"] == [entry["case"] for entry in done.report["built"]]
    assert [("record", "b2"), ("record", "b4"), ("reload", "b2"), ("reload", "b4")] == [
        (phase, case) for _, phase, case in site.ranks()
    ]
    assert [] == list(site.temporary.iterdir())
    assert done.report["warm_set"] == site.records()[0]["sets"][0]["warm_set"]


def test_build_of_two_cases_with_equal_inputs_hands_out_both(site: Site) -> None:
    """Two names for one key: both members are in the set, and the hook can hand it out."""
    recipe = site.recipe({"b2": "build", "two": "build"}, twins=True)

    done = site.build(recipe)
    (record,) = site.records()
    hooked = site.run("hook", str(recipe)).report

    assert 0 == done.returncode, done.stderr
    assert 1 == len({entry["key"] for entry in done.report["built"]})
    assert {"b2", "two"} == {member["case"] for member in record["sets"][0]["members"]}
    assert ("warm", []) == (hooked["outcome"], hooked["reasons"])
    assert {"b2", "two"} == {entry["case"] for entry in hooked["entries"]}


@pytest.mark.parametrize(("phase", "failed", "built"), [("record", ["b2", "b4"], []), ("reload", ["b4"], ["b2"])])
def test_build_whose_rank_is_killed_fails_and_works_next_time(
    site: Site, phase: str, failed: list[str], built: list[str]
) -> None:
    """SIGKILL in either process: exit 1, the signal named, no set; what was not proved is built when it is mended."""
    recipe = site.recipe({"b2": "build", "b4": f"die-{phase}"})

    done = site.build(recipe)

    assert 1 == done.returncode
    assert failed == [failure["case"] for failure in done.report["failed"]]
    assert built == [entry["case"] for entry in done.report["built"]]
    assert all(f"rank 0 died in {phase} by signal SIGKILL" in failure["error"] for failure in done.report["failed"])
    assert all(Path(failure["log"]).is_file() for failure in done.report["failed"])
    assert (len(built), [], []) == (len(site.entries()), site.records(), list(site.temporary.iterdir()))
    (site.folder / "mended").touch()
    again = site.build(recipe)
    assert (0, failed) == (again.returncode, [entry["case"] for entry in again.report["built"]])


def test_build_without_keep_going_blames_the_case_that_failed(site: Site) -> None:
    """The rank's own words, and only of the case they are about."""
    done = site.build(site.recipe({"b2": "build", "b4": "fail-record"}))

    assert 1 == done.returncode
    (failure,) = done.report["failed"]
    assert ("b4", True) == (failure["case"], failure["error"].startswith("main_decode [b4]: does not work"))
    assert [] == site.entries()


def test_build_keep_going_keeps_the_good_entries_for_the_next_build(site: Site) -> None:
    """The good ones are stored and proved, no set is visible; the next build makes the rest and publishes all."""
    recipe = site.recipe({"b2": "build", "b4": "fail-reload", "b8": "build"})

    done = site.build(recipe, "--keep-going")
    plan = site.run("plan", "--json", str(recipe)).report
    hooked = site.run("hook", str(recipe)).report

    assert 1 == done.returncode
    assert (["b2", "b8"], ["b4"], None) == (
        [entry["case"] for entry in done.report["built"]],
        [failure["case"] for failure in done.report["failed"]],
        done.report["warm_set"],
    )
    assert {"b2": "ready", "b4": "missing", "b8": "ready"} == {
        entry["case"]: entry["state"] for entry in plan["entries"]
    }
    assert ("cold", []) == (hooked["outcome"], site.records())
    (site.folder / "mended").touch()
    again = site.build(recipe)
    assert (0, ["b4"], 2) == (
        again.returncode,
        [entry["case"] for entry in again.report["built"]],
        len(again.report["reused"]),
    )
    assert "warm" == site.run("hook", str(recipe)).report["outcome"]


def test_build_keep_going_goes_past_a_recipe_whose_code_is_wrong(site: Site) -> None:
    """What raises in a recipe's code is a failed entry, and the other recipe is built; without it, exit 2 at once."""
    wrong = site.recipe({"b2": "refuse-record"}, name="wrong", file="wrong.yaml")
    good = site.recipe({"b2": "build"}, name="good", file="good.yaml")

    strict = site.build(wrong, good)
    done = site.build(wrong, good, "--keep-going")

    assert (2, True) == (strict.returncode, "main_decode [b2]: does not work" in strict.stderr)
    assert 1 == done.returncode
    (failure,) = done.report["failed"]
    assert ("b2", 1) == (failure["case"], len(done.report["built"]))
    assert failure["error"].startswith("main_decode [b2]: does not work")
    assert ["good"] == [record["recipe"] for record in site.records()]


def test_build_of_a_wrong_second_recipe_starts_nothing(site: Site) -> None:
    """All recipes are read before the first is built: a typo in the last costs no NPU time."""
    good = site.recipe({"b2": "build"})
    (site.folder / "typo.yaml").write_text("schema: cachectl/recipe/v1\nnam: x\n")

    done = site.build(good, site.folder / "typo.yaml", "--keep-going")

    assert (2, []) == (done.returncode, site.ranks())


def test_build_failure_is_remembered_for_a_day_and_forgotten_by_success(site: Site) -> None:
    """A row for the case that failed, with toolchain, text and log; gone when the case is built, or expired."""
    recipe = site.recipe({"b2": "build", "b4": "fail-record"})
    site.build(recipe)
    before = datetime.now(timezone.utc)

    with ManifestRepo.open(site.layout.database, read_only=True) as repo:
        (row,) = repo.failures(recipe="own")

    assert ("main_decode", "b4", 0) == (row.method, row.case, row.rank)
    assert row.toolchain.startswith("sha256:")
    assert "does not work" in row.error
    assert Path(str(row.log_path)).is_file()
    assert abs(row.expires_at - before - timedelta(hours=24)) < timedelta(minutes=5)
    (site.folder / "mended").touch()
    site.build(recipe)
    with ManifestRepo.open(site.layout.database) as repo:
        assert () == tuple(repo.failures(recipe="own"))


def test_build_deletes_failures_that_expired(site: Site) -> None:
    """What nobody will read any more does not pile up."""
    site.build(site.recipe({"b4": "fail-record"}))
    with ManifestRepo.open(site.layout.database) as repo, repo.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE build_failures SET expires_at = '2020-01-01 00:00:00.000000'")

    site.build(site.recipe({"b2": "build"}, name="other"))

    with ManifestRepo.open(site.layout.database, read_only=True) as repo:
        assert 0 == repo.stats().failures


def test_build_force_makes_a_new_manifest_of_the_same_key(site: Site) -> None:
    """The old manifest stays in the store; record and hook take the new one."""
    recipe = site.recipe({"b2": "build"})
    first = site.build(recipe).report
    (old,) = site.entries()
    time.sleep(1.1)  # Provenance counts seconds; an equal manifest would be the same file.

    second = site.build(recipe, "--force").report

    assert [entry["key"] for entry in first["built"]] == [entry["key"] for entry in second["built"]]
    (new,) = set(site.entries()) - {old}
    (member,) = site.records()[0]["sets"][0]["members"]
    assert f"sha256:{new.stem}" == member["manifest"]
    assert 1 == len(site.records()[0]["sets"])
    plan = site.run("plan", "--json", str(recipe)).report
    assert (1, 0) == (plan["ready"], plan["stale"])


def test_build_under_another_name_reuses_nothing_and_makes_the_same_keys(site: Site) -> None:
    """A recipe's name is a label: a renamed one is built anew, under the keys it had."""
    first = site.build(site.recipe({"b2": "build"})).report

    second = site.build(site.recipe({"b2": "build"}, name="renamed")).report

    assert ([], [entry["key"] for entry in first["built"]]) == (
        second["reused"],
        [entry["key"] for entry in second["built"]],
    )


def test_build_of_two_methods_keeps_them_apart(site: Site) -> None:
    """Two methods with one case each: two keys, two members."""
    functions = [
        {"method": method, "cases": [{"name": "b2", "inputs": "model:inputs"}]} for method in ("main_decode", "mtp")
    ]

    done = site.build(site.recipe({}, functions=functions))

    assert 0 == done.returncode, done.stderr
    assert 2 == len({entry["key"] for entry in done.report["built"]})
    assert {"main_decode", "mtp"} == {member["method"] for member in site.records()[0]["sets"][0]["members"]}


def test_build_beside_another_waits_says_for_whom_and_reuses(site: Site) -> None:
    """The second build of a recipe starts no rank: it says who builds, and finds everything ready afterwards."""
    recipe = site.recipe({"b2": "wait-record"})
    first = site.start("build", "--json", str(recipe))
    assert wait_until(lambda: len(site.ranks()) == 1)

    second = site.start("build", "--json", str(recipe))
    assert second.stderr is not None
    said = second.stderr.readline()
    (site.folder / "go").touch()
    done, waited = finish(first), finish(second)

    assert (0, 0) == (done.returncode, waited.returncode)
    assert ([], 1) == (waited.report["built"], len(waited.report["reused"]))
    assert done.report["warm_set"] == waited.report["warm_set"]
    assert f"(pid {first.pid} on " in said
    assert 2 == len(site.ranks())


def test_build_that_is_killed_leaves_no_rank_and_the_next_one_clears_up(site: Site) -> None:
    """SIGKILL of the build alone: its rank dies too, the workspace goes with the next build, which succeeds."""
    recipe = site.recipe({"b2": "wait-reload"})
    process = site.start("build", "--json", str(recipe))
    assert wait_until(lambda: len(site.ranks()) == 2)
    rank = site.ranks()[-1][0]

    os.kill(process.pid, signal.SIGKILL)
    finish(process)

    assert wait_until(lambda: not is_alive(rank))
    assert ([], 1) == (site.records(), len(list(site.temporary.iterdir())))
    (site.folder / "go").touch()
    assert 0 == site.build(recipe).returncode
    assert [] == list(site.temporary.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_build_that_is_stopped_clears_up_by_itself(site: Site, number: int) -> None:
    """A scheduler's SIGTERM and Ctrl-C: ranks and workspace are gone when the build is."""
    process = site.start("build", "--json", str(site.recipe({"b2": "wait-record"})))
    assert wait_until(lambda: len(site.ranks()) == 1)

    os.kill(process.pid, number)
    done = finish(process)

    assert 128 + number == done.returncode
    assert not is_alive(site.ranks()[0][0])
    assert ([], []) == (site.records(), list(site.temporary.iterdir()))


def test_build_leaves_the_workspace_of_a_living_build_and_of_others(site: Site) -> None:
    """A workspace whose build lives, one without a lock, a link: none of them is ours to delete."""
    first = site.start("build", "--json", str(site.recipe({"b2": "wait-record"}, name="slow", file="slow.yaml")))
    assert wait_until(lambda: len(site.ranks()) == 1)
    (site.temporary / "cachectl-build.young").mkdir()
    (site.folder / "precious").mkdir()
    (site.folder / "precious" / "lock").touch()
    (site.temporary / "cachectl-build.link").symlink_to(site.folder / "precious")

    other = site.build(site.recipe({"b2": "build"}))
    (site.folder / "go").touch()

    assert (0, 0) == (other.returncode, finish(first).returncode)
    assert {"cachectl-build.young", "cachectl-build.link"} == {path.name for path in site.temporary.iterdir()}
    assert (site.folder / "precious" / "lock").exists()


@pytest.mark.slow
def test_build_killed_at_any_moment_never_shows_half_a_set(site: Site) -> None:
    """SIGKILL of the whole process group at random moments: the old set or the new one, and then it works."""
    recipe = site.recipe({"b2": "build", "b4": "build"})
    # A rate of its own for each machine: the kills spread over the time that one build takes here.
    started = time.monotonic()
    assert 0 == site.build(site.recipe({"b1": "build"}, name="first", file="first.yaml")).returncode
    whole_s = time.monotonic() - started
    dice = random.Random(20)
    for _ in range(8):
        process = site.start("build", "--json", str(recipe), "--force")
        time.sleep(dice.uniform(0.3, 1.1) * whole_s)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # It was done already.
        finish(process)
        assert wait_until(lambda: not running(site))
        assert_store_is_whole(site)

    assert 0 == site.build(recipe).returncode
    assert [] == list(site.temporary.iterdir())
    assert "warm" == site.run("hook", str(recipe)).report["outcome"]


def test_build_out_of_time_fails_with_its_bound_and_log(site: Site) -> None:
    """--timeout ends the rank; the message says the phase and the bound."""
    done = site.build(site.recipe({"b2": "wait-record"}), "--timeout", "1")

    assert 1 == done.returncode
    (failure,) = done.report["failed"]
    assert "rank 0 did not finish record within 1 s" in failure["error"]
    assert Path(failure["log"]).is_file()
    # Where it takes longer to start than that, the rank has not begun its case.
    assert [] == running(site)


def test_build_that_keeps_going_and_is_killed_keeps_what_was_proved(site: Site) -> None:
    """Killed in the third case: the first two are in the store, and the next build makes one."""
    recipe = site.recipe({"b2": "build", "b4": "build", "b8": "wait-record"})
    process = site.start("build", "--json", "--keep-going", str(recipe))
    assert wait_until(lambda: len(site.ranks()) == 5)

    os.kill(process.pid, signal.SIGKILL)
    finish(process)

    assert (2, []) == (len(site.entries()), site.records())
    assert_store_is_whole(site)
    (site.folder / "go").touch()
    again = site.build(recipe)
    assert (0, ["b8"], 2) == (
        again.returncode,
        [entry["case"] for entry in again.report["built"]],
        len(again.report["reused"]),
    )


def test_build_says_what_each_start_saves_and_how_long_it_takes_the_next_time(site: Site) -> None:
    """Over the cases, cold less warm; progress of a second build tells what is left by what the first one took."""
    recipe = site.recipe({"b2": "build", "b4": "build"})

    first = site.run("build", str(recipe))
    again = site.run("build", str(recipe))
    forced = site.build(recipe, "--force")

    for done in (first, again):
        assert "is ready: each start saves about 3.00 s of compiling (simulated)\n" in done.stdout
    assert " left" not in first.stderr
    assert re.search(r"^own: building, ~\d+ (s|min) left \(log: ", forced.stderr, re.MULTILINE)
    assert re.search(r"^main_decode/b4 rank 0: record, .*, ~\d+ (s|min) left$", forced.stderr, re.MULTILINE)
