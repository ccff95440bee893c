"""Explain on published stores: the hook's own decision, all of its reasons, the nearest entries, and damage."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cachectl.errors import ConfigError, StoreError
from cachectl.schemas.report import ExplainReport
from cachectl.services.explain import explain
from cachectl.store.manifest import ManifestRepo
from cachectl.store.reading import read_manifest
from tests.stores import MadeStore, make_store, tree

SEMANTIC = "semantic"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """A store with one published warm set of two cases; its toolchain is the one that this process would find."""
    store = make_store(tmp_path / "made")
    monkeypatch.syspath_prepend(str(store.site))
    store.publish()
    return store


def ask(made: MadeStore, recipe: Path | None = None, **environ: str | None) -> ExplainReport:
    """Explain the store's recipe for a program in the made-up environment with these changes."""
    return explain(made.layout, recipe or made.recipe, environ=made.hook_environ(environ))


def named(report: ExplainReport, kind: str | None = None) -> list[tuple[str, str, Any, Any]]:
    """Return part, name, stored and wanted of the reasons, of one kind only if given."""
    return [
        (reason.part, reason.name, reason.stored, reason.wanted)
        for reason in report.reasons
        if kind is None or reason.kind == kind
    ]


def edit(path: Path, old: str, new: str) -> None:
    """Replace the one place where `old` stands."""
    text = path.read_text()
    assert 1 == text.count(old)
    path.write_text(text.replace(old, new))


def test_explain_warm_has_the_entries_at_distance_none(made: MadeStore) -> None:
    """What the hook hands out is warm, has no reason, and is nearest; nothing was written."""
    before = tree(made.layout.root)

    report = ask(made)

    assert ("warm", (), 0) == (report.outcome, report.reasons, report.exit_code)
    assert [0, 0] == [entry.distance for entry in report.nearest]
    assert {member.key for member in made.publish().members} == {entry.key for entry in report.nearest}
    assert set(before) == set(tree(made.layout.root)) - {"manifest.db-wal", "manifest.db-shm"}


def test_explain_store_moved_to_another_place_is_warm(made: MadeStore, tmp_path: Path) -> None:
    """A store that was copied elsewhere holds as it did (field report O3)."""
    moved = made.copy(tmp_path / "elsewhere")

    assert ("warm", []) == (ask(moved).outcome, named(ask(moved)))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"N_LAYERS": "8"}, [("environment", "N_LAYERS", "4", "8")]),
        ({"FAST_PATH": "1"}, [("environment", "FAST_PATH", None, "1")]),
        ({"CACHECTL_SIM_SOC": "Ascend910_9391"}, [("device", "soc", "ascend910b1", "ascend910_9391")]),
        (
            {"CACHECTL_SIM_CANN": "9.0.0"},
            [("toolchain", f"cann.{name}", "8.5.0", "9.0.0") for name in ("CANN", "COMPILER", "HCCL", "OPP")],
        ),
        (
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
            [("topology", "world_size", 1, 2), ("topology", "rank", 0, 1)],
        ),
    ],
)
def test_explain_changed_surroundings_are_named(
    made: MadeStore, environ: Mapping[str, str | None], expected: list[tuple[Any, ...]]
) -> None:
    """What is different about the machine is named exactly, each with a command; no secret is shown."""
    report = ask(made, **environ)

    assert ("cold", 1) == (report.outcome, report.exit_code)
    assert sorted(expected, key=str) == sorted(named(report, SEMANTIC), key=str)
    assert all(reason.hint for reason in report.reasons)
    assert "hunter2" not in report.model_dump_json()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("args: {batch: 4}", "args: {batch: 8}", ("model", "args.batch", 4, 8)),
        ('"decoder:build"', '"decoder:other"', ("model", "factory", "decoder:build", "decoder:other")),
        ("functions:", "compile: {dynamic: true}\nfunctions:", ("options", "dynamic", False, True)),
        ("functions:", 'environment: {DEPTH: "4"}\nfunctions:', ("environment", "DEPTH", None, "4")),
    ],
)
def test_explain_changed_recipe_is_named(made: MadeStore, old: str, new: str, expected: tuple[Any, ...]) -> None:
    """No record has the new meaning; what changed in it is the reason, not that it is unknown."""
    edit(made.recipe, old, new)

    report = ask(made)

    assert ("cold", [expected]) == (report.outcome, named(report))
    assert expected in [
        (reason.part, reason.name, reason.stored, reason.wanted) for entry in report.nearest for reason in entry.differs
    ]


def test_explain_edited_source_is_named_and_edited_comment_is_noise(made: MadeStore) -> None:
    """The function is the reason of a cold start; a comment changes bytes and nothing else."""
    edit(made.source, "doubles", "twice")
    comment = ask(made)
    edit(made.source, "x * SCALE", "x + SCALE")
    code = ask(made)

    assert ("warm", ["noise"]) == (comment.outcome, [reason.kind for reason in comment.reasons])
    assert ("cold", [("sources", "decoder.py: main_decode")]) == (code.outcome, [item[:2] for item in named(code)])


def test_explain_two_changes_are_both_named(made: MadeStore) -> None:
    """The hook stops at the first part that differs; explain goes through all of them."""
    edit(made.source, "x * SCALE", "x + SCALE")

    report = ask(made, CACHECTL_SIM_CANN="9.0.0", N_LAYERS="8")

    assert {"sources", "toolchain", "environment"} == {reason.part for reason in report.reasons}
    assert [3, 3] == [entry.distance for entry in report.nearest]


def test_explain_nearest_comes_first_and_older_sets_count(made: MadeStore) -> None:
    """Of several builds the one with the fewest differing parts comes first, whatever its age."""
    old = {entry.key for entry in ask(made).nearest}
    cann = {"toolchain": {**ask_toolchain(made), "cann": {"CANN": "7.0.0"}}}
    made.publish("b", request=cann, observed={"N_LAYERS": "9"}, created_at="2026-03-02T12:00:00Z")

    report = ask(made, N_LAYERS="8")

    assert [1, 1, 2, 2] == [entry.distance for entry in report.nearest]
    assert old == {entry.key for entry in report.nearest[:2]}
    assert ("environment", "N_LAYERS", "9", "8") in named(report)


def ask_toolchain(made: MadeStore) -> dict[str, Any]:
    """Return the toolchain that the store's set was published for."""
    with ManifestRepo.open(made.layout.database, read_only=True) as repo:
        (row,) = repo.line("made-up", "main_decode", "b4", 0, limit=1)
    document: dict[str, Any] = read_manifest(made.layout, row.key, row.manifest).entry.parts["toolchain"]
    return document


def test_explain_reformatted_recipe_is_noise(made: MadeStore) -> None:
    """New bytes with a known meaning are warm here, and told: an image without a YAML parser would start cold."""
    with made.recipe.open("a") as file:
        file.write("# a comment\n")

    report = ask(made)

    assert ("warm", [("store", "recipe bytes")]) == (report.outcome, [item[:2] for item in named(report, "noise")])
    assert "cachectl build" in report.reasons[0].hint


def test_explain_renamed_recipe_finds_the_entries_by_their_model(made: MadeStore) -> None:
    """A name is a label: the entries of the old name are nearest, and the name is noise."""
    edit(made.recipe, "name: made-up", "name: renamed")

    report = ask(made)

    assert "cold" == report.outcome
    assert [("store", "entry", None, "main_decode/b4 rank 0, main_decode/b2 rank 0")] == named(report, "absent")
    assert [("store", "recipe", "made-up", "renamed")] == named(report, "noise")
    assert [0, 0] == [entry.distance for entry in report.nearest]


def test_explain_other_world_says_what_is_there_and_what_is_asked(tmp_path: Path, monkeypatch: Any) -> None:
    """Built for 8 ranks and asked for 16, and the other way round: both numbers are in the hint (T7)."""
    made = make_store(tmp_path / "made", world_size=8)
    monkeypatch.syspath_prepend(str(made.site))
    made.publish(ranks=range(8), size_bytes=64)
    edit(made.recipe, "world_size: 8", "world_size: 16")
    more = ask(made)
    beyond = ask(made, RANK="12", LOCAL_RANK="4")
    edit(made.recipe, "world_size: 16", "world_size: 1")
    one = ask(made)

    assert ("topology", "world_size", 8, 16) in named(more)
    assert any(reason.hint.startswith("have world 8, asked 16; run: cachectl build ") for reason in more.reasons)
    assert {("topology", "world_size", 8, 16)} <= set(named(beyond))
    assert [("rank", 12)] == [(name, wanted) for _, name, _, wanted in named(beyond) if name == "rank"]
    assert [("topology", "world_size", 8, 1)] == named(one)


def test_explain_set_without_a_rank_names_the_rank(tmp_path: Path, monkeypatch: Any) -> None:
    """Rank 7 of 8 was never built: the ranks that are there, and the one that is asked for."""
    made = make_store(tmp_path / "made", world_size=8)
    monkeypatch.syspath_prepend(str(made.site))
    made.publish(ranks=range(7), size_bytes=64)

    report = ask(made, RANK="7", LOCAL_RANK="7", WORLD_SIZE="8")

    assert ("topology", "rank", list(range(7)), 7) in named(report)
    assert ("store", "entry", None, "main_decode/b4 rank 7, main_decode/b2 rank 7") in named(report)


def test_explain_declared_variable_is_held_against_this_environment(tmp_path: Path, monkeypatch: Any) -> None:
    """The hook hands out before the program's environment is there; here another value is cold, none is pending."""
    made = make_store(tmp_path / "made")
    monkeypatch.syspath_prepend(str(made.site))
    edit(made.recipe, "topology:", 'environment: {DEPTH: "4"}\ntopology:')
    made.publish()
    right, unset, wrong = (ask(made, DEPTH=value) for value in ("4", None, "8"))

    assert ("warm", []) == (right.outcome, named(right))
    assert ("warm", [("environment", "DEPTH", "4", None)]) == (unset.outcome, named(unset, "absent"))
    assert ("cold", [("environment", "DEPTH", "4", "8")]) == (wrong.outcome, named(wrong, SEMANTIC))
    assert "export DEPTH=4" in unset.reasons[0].hint


@pytest.mark.parametrize(("name", "stored"), [("N_LAYERS", "4"), ("HUB_TOKEN", {"set": True})])
def test_explain_variable_that_is_not_set_is_pending(made: MadeStore, name: str, stored: Any) -> None:
    """As for the hook, the program's environment may still have it: warm, and told with the command that sets it."""
    report = ask(made, **{name: None})

    assert ("warm", 0) == (report.outcome, report.exit_code)
    assert [("environment", name, stored, None)] == named(report, "absent")
    assert f"export {name}=" in report.reasons[0].hint
    assert "hunter2" not in report.model_dump_json()


def test_explain_damaged_blob_is_found_and_an_older_set_counts(made: MadeStore) -> None:
    """Damage of equal size is seen as the hook would see it: cold, or warm from an older set with the damage told."""
    damage(made.blob())
    cold = ask(made)
    made.publish("b", created_at="2026-03-02T12:00:00Z")
    warm = ask(made)
    damage(made.blob("b"))
    again = ask(made)

    assert ["cold", "warm", "cold"] == [report.outcome for report in (cold, warm, again)]
    assert {("artifact", "corrupt")} == {(reason.part, reason.kind) for reason in cold.reasons}
    assert "--force" in cold.reasons[0].hint
    assert [0, 1] == [entry.distance for entry in cold.nearest]


def damage(blob: Path) -> None:
    """Change a blob's bytes and nothing else about it."""
    data = blob.read_bytes()
    blob.chmod(0o644)
    blob.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def test_explain_lost_boot_record_is_the_reason(made: MadeStore) -> None:
    """The database knows whole entries and no boot record names them: that is what is said, with what mends it."""
    shutil.rmtree(made.layout.root / "boot")

    report = ask(made)

    (reason,) = report.reasons
    assert ("cold", "store", "boot record", "absent") == (report.outcome, reason.part, reason.name, reason.kind)
    assert "every entry holds" in reason.wanted
    assert "cachectl build" in reason.hint


@pytest.mark.parametrize("fault", ["gone", "garbage"])
def test_explain_without_the_database_reads_the_manifests(made: MadeStore, fault: str) -> None:
    """Boots need no database, and neither does explaining them: the same reasons, and the fault beside them."""
    for name in ("manifest.db", "manifest.db-wal", "manifest.db-shm"):
        (made.layout.root / name).unlink(missing_ok=True)
    if fault == "garbage":
        made.layout.database.write_bytes(b"no database" * 1000)
    edit(made.recipe, "batch: 4", "batch: 8")

    changed = ask(made)
    edit(made.recipe, "batch: 8", "batch: 4")
    warm = ask(made)

    assert [("model", "args.batch", 4, 8)] == named(changed, SEMANTIC)
    assert ("store", "database") in [item[:2] for item in named(changed)]
    assert ("warm", 2) == (warm.outcome, len(warm.nearest))


def test_explain_never_built_recipe_has_no_neighbours(tmp_path: Path, monkeypatch: Any) -> None:
    """Where nothing is stored, the one reason is that nothing is, with the command that builds it."""
    made = make_store(tmp_path / "made")
    monkeypatch.syspath_prepend(str(made.site))

    report = ask(made)

    assert ("cold", [("store", "boot record", None, None)], ()) == (report.outcome, named(report), report.nearest)
    assert f"cachectl build {made.recipe}" in report.reasons[0].hint


def test_explain_invalidated_entry_says_why(made: MadeStore) -> None:
    """An entry that was taken out of use is nearest and says who said what."""
    keys = [entry.key for entry in ask(made).nearest]
    shutil.rmtree(made.layout.root / "boot")
    with ManifestRepo.open(made.layout.database) as repo:
        repo.invalidate(keys, "bad driver")

    report = ask(made)

    assert ("policy", "state", "invalid", "ready") in named(report)
    assert any(reason.hint.startswith("bad driver; run: cachectl build") for reason in report.reasons)


def test_explain_part_that_changes_at_every_build_is_an_alarm(made: MadeStore) -> None:
    """Three builds that differ in one variable are told apart from bad luck: its name, and how to look (S1, S2)."""
    for number in (1, 2, 3):
        made.publish(observed={"RUN_ID": f"run-{number}"}, created_at=f"2026-03-02T12:00:0{number}Z")

    report = ask(made, RUN_ID="run-4")

    alarms = [reason for reason in report.reasons if reason.name.startswith("changes at every build")]
    assert [("environment", "changes at every build: RUN_ID", "run-2", "run-3", "noise")] == [
        (alarm.part, alarm.name, alarm.stored, alarm.wanted, alarm.kind) for alarm in alarms
    ]
    assert "cachectl diff " in alarms[0].hint


def test_explain_miss_with_nothing_different_is_an_alarm(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that finds no set though everything holds is a fault, and is called one (O5)."""
    import cachectl.services.explain as module
    from cachectl.boot.handout import Handout
    from cachectl.schemas.boot import Reason

    miss = Handout("cold", made.recipe, reasons=(Reason("store", "warm set", kind="absent"),))
    monkeypatch.setattr(module, "run_hook", lambda options, environ: miss)

    report = ask(made)

    assert ("cold", [("store", "alarm")]) == (report.outcome, [item[:2] for item in named(report)])
    assert report.reasons[0].hint.startswith("report this")


def test_explain_switched_off_says_so(made: MadeStore) -> None:
    """CACHECTL_DISABLE=1 is an outcome of its own."""
    report = ask(made, CACHECTL_DISABLE="1")

    assert ("disabled", [("policy", "CACHECTL_DISABLE")]) == (report.outcome, [item[:2] for item in named(report)])


def test_explain_key_compares_with_that_entry(made: MadeStore) -> None:
    """An entry that is named by its first digits is the only one that is compared."""
    key = made.member(made.publish(), "b2").key

    report = explain(made.layout, made.recipe, key=key[7:17], environ=made.hook_environ())

    assert [(key, 0)] == [(entry.key, entry.distance) for entry in report.nearest]


def test_explain_unknown_key_recipe_or_store_is_an_error(made: MadeStore, tmp_path: Path) -> None:
    """What was written wrongly is no cold start."""
    with pytest.raises(ConfigError):
        explain(made.layout, made.recipe, key="ffffffffffff", environ=made.hook_environ())
    with pytest.raises(ConfigError):
        ask(made, tmp_path / "nothing.yaml")
    shutil.rmtree(made.layout.root)
    with pytest.raises(StoreError):
        ask(made)


def test_explain_agrees_with_the_hook(made: MadeStore) -> None:
    """The outcome is that of the real hook in a process of its own, whatever is changed."""
    for environ in ({}, {"N_LAYERS": "8"}, {"CACHECTL_SIM_CANN": "9.0.0"}):
        hooked = made.hook("--read-only", environ=environ)
        report = ask(made, **environ)

        assert hooked.outcome == report.outcome
        assert {item[:2] for item in hooked.against} <= {(reason.part, reason.name) for reason in report.reasons}
