"""Builds that were killed and are run again: what was proved is kept, what was recorded is only proved."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cachectl.store.drafts import DRAFT_KEPT_S
from tests.services.standin import RANK, TORCH, TORCHRUN, Site, finish
from tests.services.test_build import assert_store_is_whole, wait_until
from tests.services.test_build_ranks import WORLD, places
from tests.stores import write_site


def drafts(site: Site) -> list[Path]:
    """Return the drafts in the store."""
    return sorted(site.layout.draft("x").parent.glob("*.json"))


def runs(site: Site, after: int = 0) -> list[tuple[str, str]]:
    """Return phase and case of what ranks began, without the first ones."""
    return [(phase, case) for _, phase, case in site.ranks()[after:]]


def kill(site: Site, recipe: Path, begun: int, *options: str, drafted: int = 0, kept: int = 0) -> None:
    """Build, and kill the build alone when ranks have begun so many cases: `wait-` holds it there.

    Args:
        drafted: how many drafts lie there then.
        kept: how many entries.
    """
    process = site.start("build", "--json", *options, str(recipe))
    assert wait_until(lambda: (begun, drafted, kept) == (len(site.ranks()), len(drafts(site)), len(site.entries())))

    os.kill(process.pid, signal.SIGKILL)
    finish(process)

    assert [] == site.records()
    assert_store_is_whole(site)
    (site.folder / "go").touch()


def test_build_that_is_killed_while_it_records_loses_the_case_it_was_at(site: Site) -> None:
    """Two of three were recorded: nobody sees them, no file is called extra, and they are proved by the next build."""
    recipe = site.recipe({"b2": "build", "b4": "build", "b8": "wait-record"})
    kill(site, recipe, 3, drafted=2)
    plan = site.run("plan", "--json", str(recipe)).report
    verified = site.run("verify", "--json", "--quick").report
    hooked = site.run("hook", str(recipe)).report

    again = site.build(recipe)

    assert ({"missing"}, [], "cold") == (
        {entry["state"] for entry in plan["entries"]},
        [finding for finding in verified["findings"] if finding["kind"] == "extra-file"],
        hooked["outcome"],
    )
    assert [("record", "b8"), ("reload", "b2"), ("reload", "b4"), ("reload", "b8")] == runs(site, 3)
    assert (0, ["b2", "b4", "b8"]) == (again.returncode, [entry["case"] for entry in again.report["built"]])
    assert "main_decode/b4 rank 0: recorded by an earlier build" in again.stderr
    assert "main_decode/b8 rank 0: recorded by an earlier build" not in again.stderr
    assert ([], "warm") == (drafts(site), site.run("hook", str(recipe)).report["outcome"])
    assert_store_is_whole(site)


def test_build_that_is_killed_while_it_proves_keeps_what_was_proved_and_records_nothing_again(site: Site) -> None:
    """Killed at the proof of the second of three: one is reused, two are proved, none is compiled."""
    recipe = site.recipe({"b2": "build", "b4": "wait-reload", "b8": "build"})
    kill(site, recipe, 5, drafted=2, kept=1)

    again = site.build(recipe)

    assert [("reload", "b4"), ("reload", "b8")] == runs(site, 5)
    assert (0, ["b4", "b8"], 1) == (
        again.returncode,
        [entry["case"] for entry in again.report["built"]],
        len(again.report["reused"]),
    )
    assert ([], "warm") == (drafts(site), site.run("hook", str(recipe)).report["outcome"])


def test_build_that_is_killed_again_and_again_comes_to_its_end(site: Site) -> None:
    """Killed twice at its second case: the first one is compiled once, the second one once more for each kill."""
    recipe = site.recipe({"b2": "build", "b4": "wait-record"})
    kill(site, recipe, 2, drafted=1)
    (site.folder / "go").unlink()
    kill(site, recipe, 3, drafted=1)

    assert 0 == site.build(recipe).returncode
    assert [("record", "b2"), *[("record", "b4")] * 3, ("reload", "b2"), ("reload", "b4")] == runs(site)


def test_build_that_fails_while_it_records_leaves_the_others_to_be_proved(site: Site) -> None:
    """One case can't be recorded: when it is mended, the good one is not compiled again."""
    recipe = site.recipe({"b2": "build", "b4": "fail-record"})
    failed = site.build(recipe)
    (site.folder / "mended").touch()

    again = site.build(recipe)

    assert (1, [], 0) == (failed.returncode, failed.report["built"], again.returncode)
    assert [("record", "b4"), ("reload", "b2"), ("reload", "b4")] == runs(site, 2)


def test_build_whose_proof_fails_records_that_case_again(site: Site) -> None:
    """What was refused, or may have killed its process, is not tried as it lies there: the next one is."""
    recipe = site.recipe({"b2": "die-reload", "b4": "build"})
    site.build(recipe)
    (site.folder / "mended").touch()

    again = site.build(recipe)

    assert 0 == again.returncode
    assert [("record", "b2"), ("reload", "b2"), ("reload", "b4")] == runs(site, 3)


def test_draft_that_a_fresh_process_refuses_is_recorded_again_in_the_same_build(site: Site) -> None:
    """It held when it was read and does not prove: no failure of this build, which says so and compiles it."""
    recipe = site.recipe({"b1": "build", "b2": "doubt-reload", "b4": "wait-record"})
    kill(site, recipe, 3, drafted=2)

    again = site.build(recipe)

    assert (0, ["b1", "b2", "b4"]) == (again.returncode, [entry["case"] for entry in again.report["built"]])
    assert [] == again.report["failed"]
    assert "what an earlier build recorded could not be proved" in again.stderr
    assert [
        *[("record", "b4"), ("reload", "b1"), ("reload", "b2")],
        *[("record", "b2"), ("reload", "b2"), ("reload", "b4")],
    ] == runs(site, 3)
    assert ([], "warm") == (drafts(site), site.run("hook", str(recipe)).report["outcome"])


def _blob_gone(site: Site) -> None:
    for path in site.layout.blobs.glob("*/*"):
        path.unlink()


def _blob_damaged(site: Site) -> None:
    for path in site.layout.blobs.glob("*/*"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().swapcase())


def _toolchain(site: Site) -> None:
    write_site(site.folder / "site", torch="2.13.1+cpu")
    (site.folder / "site" / "torch" / "__init__.py").write_text(TORCH.format(rank=RANK, torchrun=TORCHRUN))


def _edited(site: Site, change: Callable[[str], str]) -> None:
    for path in drafts(site):
        path.chmod(0o644)
        path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_blob_gone, id="blob-gone"),
        pytest.param(_blob_damaged, id="blob-damaged"),
        pytest.param(_toolchain, id="toolchain"),
        pytest.param(lambda site: _edited(site, lambda text: text[:-9]), id="half"),
        pytest.param(lambda site: _edited(site, lambda text: "[]"), id="other-document"),
        pytest.param(lambda site: _edited(site, lambda text: text.replace("draft/v1", "draft/v0")), id="other-schema"),
        pytest.param(lambda site: _edited(site, lambda text: text.replace('"case": "b2"', '"case": "b4"')), id="case"),
        pytest.param(lambda site: _edited(site, lambda text: text.replace("model:inputs", "model:more")), id="key"),
        pytest.param(
            lambda site: _edited(site, lambda text: text.replace('"ranks": {"0"', '"ranks": {"1"')), id="rank"
        ),
    ],
)
def test_draft_that_does_not_hold_here_is_recorded_again(site: Site, change: Callable[[Site], None]) -> None:
    """Other toolchain, lost or damaged files: nothing of it is taken, and the build is as if it weren't there."""
    recipe = site.recipe({"b2": "build", "b4": "wait-record"})
    kill(site, recipe, 2, drafted=1)
    change(site)

    again = site.build(recipe)

    assert 0 == again.returncode, again.stderr
    assert [("record", "b2"), ("record", "b4"), ("reload", "b2"), ("reload", "b4")] == runs(site, 2)
    assert "recorded by an earlier build" not in again.stderr
    assert "warm" == site.run("hook", str(recipe)).report["outcome"]


def test_build_with_force_takes_no_draft(site: Site) -> None:
    """Whoever forces a build wants all of it made now."""
    recipe = site.recipe({"b2": "build", "b4": "wait-record"})
    kill(site, recipe, 2, drafted=1)

    again = site.build(recipe, "--force")

    assert 0 == again.returncode
    assert [("record", "b2"), ("record", "b4"), ("reload", "b2"), ("reload", "b4")] == runs(site, 2)


def test_draft_that_nobody_came_back_for_is_forgotten(site: Site) -> None:
    """Any later build in this store deletes it; a younger one stays."""
    kill(site, site.recipe({"b2": "build", "b4": "build", "b8": "wait-record"}), 3, drafted=2)
    old, young = drafts(site)
    os.utime(old, (old.stat().st_mtime - DRAFT_KEPT_S - 60,) * 2)

    site.build(site.recipe({"b1": "build"}, name="other", file="other.yaml"))

    assert [young] == drafts(site)


def test_build_of_two_ranks_that_is_killed_goes_on_where_all_ranks_were(site: Site) -> None:
    """One draft holds both ranks, also one that has no such method; a case that one rank had finished is no draft."""
    recipe = site.recipe({"b2": "build", "draft": "lack-record@1", "b8": "wait-record@1"}, topology=WORLD)
    kill(site, recipe, 6, drafted=2)
    noted = [json.loads(path.read_text())["ranks"] for path in drafts(site)]

    again = site.build(recipe)

    assert [["absent", "document"], ["document", "document"]] == sorted(
        sorted(next(name for name in ("absent", "document") if name in item) for item in ranks.values())
        for ranks in noted
    )
    assert 0 == again.returncode, again.stderr
    assert [*[("record", "b8")] * 2, *[("reload", case) for case in ("b2", "b8", "draft") for _ in (0, 1)]] == sorted(
        runs(site, 6)
    )
    assert [("b2", 0), ("b2", 1), ("b8", 0), ("b8", 1), ("draft", 0)] == places(again.report["built"])
    (record,) = site.records()
    assert [{"method": "main_decode", "case": "draft", "rank": 1}] == record["sets"][0]["absent"]
    for rank in ("0", "1"):
        assert "warm" == site.run("hook", str(recipe), "--rank", rank).report["outcome"]


def test_build_of_two_ranks_that_is_killed_while_it_proves_keeps_cases_of_both(site: Site) -> None:
    """A case is kept when both ranks proved it; the one that rank 1 was at is proved again in both."""
    recipe = site.recipe({"b2": "build", "b4": "wait-reload@1"}, topology=WORLD)
    kill(site, recipe, 8, drafted=1, kept=2)

    again = site.build(recipe)

    assert 0 == again.returncode, again.stderr
    assert [("reload", "b4")] * 2 == runs(site, 8)
    assert ([("b4", 0), ("b4", 1)], 2) == (places(again.report["built"]), len(again.report["reused"]))


def test_build_that_keeps_going_and_is_killed_while_it_proves_records_nothing_again(site: Site) -> None:
    """A launch a case: the one that was at its proof has its record behind it."""
    recipe = site.recipe({"b2": "build", "b4": "wait-reload"})
    kill(site, recipe, 4, "--keep-going", drafted=1, kept=1)

    again = site.build(recipe, "--keep-going")

    assert (0, [("reload", "b4")]) == (again.returncode, runs(site, 4))
