"""Plan on published stores: ready, missing, stale line by line, and what each reason names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cachectl.errors import ConfigError, StoreError
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.report import PlanReport
from cachectl.services.plan import plan
from cachectl.services.request import read_request
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import FailureRow
from tests.stores import ENVIRON, MadeStore, make_store, tree, write_site

Change = Callable[[MadeStore], None]


@pytest.fixture
def made(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """A store with one warm set that this interpreter's toolchain and environment fit."""
    monkeypatch.syspath_prepend(str(made.site))
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    made.publish()
    return made


def states(report: PlanReport) -> dict[str, str]:
    """Return the state of each case."""
    return {entry.case: entry.state for entry in report.entries}


def reasons(report: PlanReport) -> set[tuple[str, str]]:
    """Return part and name of every reason."""
    return {(reason.part, reason.name) for entry in report.entries for reason in entry.reasons}


def _keys(made: MadeStore) -> dict[str, str]:
    with ManifestRepo.open(made.layout.database, read_only=True) as repo:
        return {row.case: row.key for row in repo.entries()}


def _edit(old: str, new: str) -> Change:
    def change(made: MadeStore) -> None:
        text = made.recipe.read_text()
        assert old in text
        made.recipe.write_text(text.replace(old, new))

    return change


def _edit_source(old: str, new: str) -> Change:
    def change(made: MadeStore) -> None:
        made.source.write_text(made.source.read_text().replace(old, new))

    return change


def _invalidate(made: MadeStore) -> None:
    with ManifestRepo.open(made.layout.database) as repo:
        repo.invalidate([_keys(made)["b4"]], "wrong answers")


def _damage_manifest(made: MadeStore) -> None:
    (path,) = made.layout.entries.glob(f"*/{_keys(made)['b4'][7:]}/*.json")
    path.chmod(0o644)
    path.write_text("{}")


def _store_files(made: MadeStore) -> dict[str, object]:
    # SQLite's files are touched by readers too: the shared memory of its journal.
    return {folder: tree(made.layout.root / folder) for folder in ("entries", "blobs", "boot")}


BOTH = {"b4": "stale", "b2": "stale"}
# A change, what each case is then, and a reason that has to be among those given.
CHANGES: dict[str, tuple[Change, dict[str, str], tuple[str, str] | None]] = {
    "nothing": (lambda made: None, {"b4": "ready", "b2": "ready"}, None),
    "comment-in-recipe": (_edit("name: made-up", "name: made-up  # same"), {"b4": "ready", "b2": "ready"}, None),
    "comment-in-source": (_edit_source("# doubles", "# twice"), {"b4": "ready", "b2": "ready"}, None),
    "source": (_edit_source("x * SCALE", "x + SCALE"), BOTH, ("sources", "decoder.py")),
    "source-gone": (lambda made: made.source.unlink(), BOTH, ("sources", "decoder.py")),
    "case-args": (_edit("{batch: 4}", "{batch: 5}"), {"b4": "stale", "b2": "ready"}, ("model", "args.batch")),
    "case-added": (
        _edit("  - method", "  - method: mtp\n    cases: [{name: b1, inputs: 'decoder:inputs'}]\n  - method"),
        {"b1": "missing", "b4": "ready", "b2": "ready"},
        ("store", "entry"),
    ),
    "renamed": (_edit("name: made-up", "name: other"), {"b4": "missing", "b2": "missing"}, ("store", "entry")),
    "toolchain": (
        lambda made: write_site(made.site, torch="2.14.0+cpu"),
        BOTH,
        ("toolchain", "torch.version"),
    ),
    "blob-gone": (lambda made: made.blob().unlink(), {"b4": "stale", "b2": "ready"}, ("artifact", "compiled_module")),
    "manifest-damaged": (_damage_manifest, {"b4": "stale", "b2": "ready"}, ("artifact", "manifest")),
    "invalidated": (_invalidate, {"b4": "stale", "b2": "ready"}, ("policy", "state")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_plan_after_a_change_says_what_it_did(made: MadeStore, name: str) -> None:
    """Each change: the state of each line, and the reason that names it; nothing of the store is written."""
    change, expected, reason = CHANGES[name]
    change(made)
    before = _store_files(made)

    report = plan(made.layout, [made.recipe])

    assert expected == states(report)
    assert (reason is None) == (not reasons(report))
    assert reason is None or any(
        part == reason[0] and (found == reason[1] or reason[1] in found) for part, found in reasons(report)
    ), reasons(report)
    assert (report.ready, report.missing, report.stale) == tuple(
        sum(state == kind for state in expected.values()) for kind in ("ready", "missing", "stale")
    )
    assert before == _store_files(made)


def test_plan_changed_environment_names_the_variable(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that model code read while building is compared; a secret's value is never shown."""
    monkeypatch.setenv("N_LAYERS", "5")

    report = plan(made.layout, [made.recipe])

    assert BOTH == states(report)
    assert ("environment", "N_LAYERS") in reasons(report)
    assert ENVIRON["HUB_TOKEN"] not in report.model_dump_json()


def test_plan_rolled_back_source_finds_the_older_entries(made: MadeStore) -> None:
    """Of a line's several entries the one that holds is taken, not the newest."""
    old = _keys(made)
    text = made.source.read_text()
    made.source.write_text(text.replace("SCALE = 2", "SCALE = 3"))
    made.publish("b", created_at="2026-03-02T12:00:00Z")
    made.source.write_text(text)

    report = plan(made.layout, [made.recipe])

    assert old == {entry.case: entry.key for entry in report.entries}


@pytest.mark.parametrize("what", ["boot record", "warm set", "corrupt"])
def test_plan_entries_that_no_boot_record_names_are_not_ready(made: MadeStore, what: str) -> None:
    """The hook reads the record and would start cold: plan says so, and that publishing again compiles nothing."""
    (record,) = (made.layout.root / "boot" / "recipes").glob("*.json")
    record.chmod(0o644)
    if what == "boot record":
        record.unlink()
    elif what == "corrupt":
        record.write_text("{")
    else:
        document = json.loads(record.read_text())
        record.write_text(json.dumps({**document, "sets": []}))

    report = plan(made.layout, [made.recipe])

    assert BOTH == states(report)
    assert {("store", "warm set" if what == "warm set" else "boot record")} == reasons(report)
    assert {"corrupt" if what == "corrupt" else "absent"} == {
        reason.kind for entry in report.entries for reason in entry.reasons
    }
    assert (None, 1) == (report.expected_seconds, report.exit_code)
    assert all("cachectl build" in reason.hint for entry in report.entries for reason in entry.reasons)


def test_plan_shows_the_last_failure_of_a_line_while_it_is_kept(made: MadeStore) -> None:
    """Its text and its log, of this toolchain alone, until it expires or the line is ready again (D1, D3)."""
    now = datetime.now(timezone.utc)
    request = read_request(made.recipe)
    failure = FailureRow(
        recipe="made-up",
        method="main_decode",
        case="b4",
        rank=0,
        toolchain=digest_of(request.request["toolchain"]),
        error="main_decode [b4]: out of memory",
        log_path="/logs/rank0.log",
        failed_at=now,
        expires_at=now + timedelta(hours=1),
    )
    with ManifestRepo.open(made.layout.database) as repo:
        repo.record_failure(failure)
        repo.record_failure(replace(failure, case="b2", expires_at=now - timedelta(seconds=1)))
    ready = plan(made.layout, [made.recipe])
    made.source.write_text(made.source.read_text().replace("x * SCALE", "x + SCALE"))

    report = plan(made.layout, [made.recipe])
    elsewhere = plan(made.layout, [made.recipe], toolchain={"torch_npu": "2.14.0"})

    assert set() == reasons(ready)
    shown = [
        (entry.case, reason.stored, reason.kind, "/logs/rank0.log" in reason.hint)
        for entry in report.entries
        for reason in entry.reasons
        if reason.name == "last build"
    ]
    assert [("b4", "main_decode [b4]: out of memory", "noise", True)] == shown
    assert "last build" not in {name for _, name in reasons(elsewhere)}


def test_plan_rehearsed_upgrade_names_what_is_lost(made: MadeStore) -> None:
    """With other versions every line is stale, for the toolchain and nothing else; the set that goes is named."""
    report = plan(made.layout, [made.recipe], toolchain={"torch_npu": "2.14.0"})

    assert BOTH == states(report)
    assert {"toolchain"} == {part for part, _ in reasons(report)}
    assert [("made-up", 2, 2)] == [(lost.recipe, lost.lost, lost.entries) for lost in report.lost]


def test_plan_rehearsed_name_that_is_none_is_a_usage_error(made: MadeStore) -> None:
    """A version of something that is no part of the toolchain."""
    with pytest.raises(ConfigError):
        plan(made.layout, [made.recipe], toolchain={"tensorflow": "2"})


def test_plan_of_two_recipes_counts_both(made: MadeStore, tmp_path: Path) -> None:
    """Entries of each, in the order asked."""
    other = made.recipe.with_name("other.yaml")
    other.write_text(made.recipe.read_text().replace("made-up", "other"))

    report = plan(made.layout, [made.recipe, other])

    assert ["made-up", "made-up", "other", "other"] == [entry.recipe for entry in report.entries]
    assert (2, 2) == (report.ready, report.missing)


def test_plan_of_a_recipe_that_is_not_there_is_a_usage_error(made: MadeStore) -> None:
    """Before the store is looked at."""
    with pytest.raises(ConfigError):
        plan(made.layout, [made.folder / "nowhere.yaml"])


def test_plan_without_a_store_says_so(made: MadeStore) -> None:
    """A store that is gone is an error, not a plan to build everything into nowhere."""
    made.layout.root.rename(made.folder / "moved")

    with pytest.raises(StoreError):
        plan(made.layout, [made.recipe])


TWO_NODES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("built_in", "tied", "environ", "missing"),
    [
        (4, True, {}, []),
        (4, True, TWO_NODES, [2, 3]),
        (2, True, TWO_NODES, []),
        (2, True, {}, [2, 3]),
        (4, False, TWO_NODES, []),
        (None, True, TWO_NODES, []),
        (4, True, {**TWO_NODES, "LOCAL_WORLD_SIZE": "3"}, []),
        (4, True, {**TWO_NODES, "WORLD_SIZE": "8"}, []),
    ],
    ids=["own", "other", "own, launched", "other, plain", "free", "not noted", "unequal", "of another world"],
)
def test_plan_in_another_node_cut_misses_what_names_other_devices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built_in: int | None,
    tied: bool,
    environ: dict[str, str],
    missing: list[int],
) -> None:
    """Without a launcher all ranks have one node, as in a build; what can't be told is ready, as it was built."""
    made = make_store(tmp_path / "cuts", world_size=4)
    monkeypatch.syspath_prepend(str(made.site))
    for name, value in {**ENVIRON, **environ}.items():
        monkeypatch.setenv(name, value)
    made.publish(ranks=range(4), cases=("b4", "b2"), ranks_per_node=built_in, tied=tied)

    report = plan(made.layout, [made.recipe])

    assert [("missing" if entry.rank in missing else "ready") for entry in report.entries] == [
        entry.state for entry in report.entries
    ]
    told = {(reason.stored, reason.wanted) for entry in report.entries for reason in entry.reasons}
    cuts = ("1 node of 4", "2 nodes of 2")
    assert ({cuts if built_in == 4 else cuts[::-1]} if missing else set()) == told
    assert ({("topology", "node cut")} if missing else set()) == reasons(report)
