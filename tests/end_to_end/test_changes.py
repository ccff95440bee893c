"""Each thing that can change under a cached graph, played on the real runtime from the stale start to the warm one.

For each word of the table: the plain runtime, beside, loads what no longer holds and answers wrongly, or crashes;
cachectl goes cold, says which part and name, and answers right; `explain` names exactly what changed; `cachectl build`
builds it; and a fresh process starts warm and right. The plain runtime's seconds are small: a load. What a word costs
is its compile and its build; so all starts of a stage are forked from one process that has imported torch, and recipes
are built by one command where their environment is the same.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cachectl.cli.explain import render
from cachectl.cli.output import Output
from cachectl.schemas.report import ExplainReport, PlanReport
from cachectl.services.explain import explain
from cachectl.services.plan import plan
from cachectl.store.layout import StoreLayout
from tests.changes import Changing, built_once, copy_of, other_torch_npu

# A stage is set up within the first test that needs it.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

TORCH_NPU = "2.13.1.post3"
CANN = {f"cann.{package}" for package in ("CANN", "COMPILER", "HCCL", "OPP")}


@dataclass(frozen=True)
class Change:
    """One thing that changes.

    Args:
        part: the part of the reasons for the cold start.
        names: their names.
        plain: what the plain runtime does with it: `wrong`, `crash`, or `loaded`, where the answer does not tell.
        edits: of the program's files: (file, old, new).
        start: what the program does otherwise than its recipe says; see change_zoo/play.py.
        recipe: what the recipe says when it says the same; the arguments of `Changing.lay`.
        environ: what is set otherwise, for the program and for whoever explains and builds.
        machine: the same, of what is there before a process starts, and so needs processes of its own.
        explained: part and names in `explain`, where it sees it in another place than the process.
    """

    part: str
    names: set[str]
    plain: str = "wrong"
    edits: tuple[tuple[str, str, str], ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    explained: tuple[str, set[str]] | None = None


def in_config(name: str, value: float, guard: str) -> Change:
    """What the program builds its model with: a guard of the live model's, and the recipe's to say."""
    return Change(
        "guards",
        {guard},
        start={"config": {name: value}},
        recipe={"config": {name: value}},
        explained=("model", {f"config.{name}"}),
    )


def in_call(name: str, value: object, plain: str) -> Change:
    """What the method is called with."""
    return Change(
        "inputs",
        {"L['x']"},
        plain,
        start={"calls": [{name: value}]},
        recipe={"cases": {"usual": {name: value}}},
        explained=("model", {f"args.{name}"}),
    )


def in_code(file: str, name: str, old: str, new: str) -> Change:
    """What stands in a file of the program's."""
    return Change("sources", {f"{file}: {name}"}, edits=((file, old, new),))


def in_environment(name: str, value: str) -> Change:
    """What model code reads."""
    return Change("environment", {name}, environ={name: value})


CHANGES = {
    "attribute": in_config("scale", 3.0, "self.scale"),
    "forward": in_code("model.py", "Model.main_decode", "torch.sin(", "torch.tanh("),
    "helper constant": in_code("helpers.py", "HALF", "HALF = 0.5", "HALF = 2.0"),
    "global": in_code("model.py", "OFFSET", "OFFSET = 0.25", "OFFSET = 2.25"),
    "closure": in_config("amount", 2.5, "self.shift.__closure__[0].cell_contents"),
    "dtype": in_call("dtype", "float32", "wrong"),
    "batch": in_call("batch", 2, "crash"),
    "stride": in_call("strided", True, "crash"),
    "env in __init__": in_environment("FACTOR", "3"),
    "env in forward": in_environment("GAIN", "3"),
    "unset to set": in_environment("SHIFT", ""),
    "layer count": in_config("layers", 2, "self.layers"),
    "forgotten option": Change(
        "options",
        {"inplace_pass"},
        "loaded",
        start={"options": {"inplace_pass": False}},
        recipe={"options": {"inplace_pass": False}},
        explained=("options", {"options.inplace_pass"}),
    ),
    "CANN": Change("toolchain", CANN, "loaded", machine={"CACHECTL_SIM_CANN": "8.6.0"}),
    "torch_npu": Change("toolchain", {"torch_npu.version"}, "loaded", machine={"PYTHONPATH": "other torch_npu"}),
    "SoC": Change("device", {"soc"}, "loaded", machine={"CACHECTL_SIM_SOC": "Ascend910_9391"}),
}
UPGRADES = {"CANN": {"cann": "8.6.0"}, "torch_npu": {"torch_npu": TORCH_NPU}}
IN_CALLS = ("dtype", "batch", "stride")


class Played:
    """What became of every word, stage by stage."""

    def __init__(self, programs: Changing) -> None:
        self.programs = programs
        self.folders = {word: programs.lay(word, change.edits) for word, change in CHANGES.items()}
        self.asked = {
            word: programs.lay(f"{word}, asked for", change.edits, **change.recipe) for word, change in CHANGES.items()
        }
        # Calls are cases of one method: one recipe has them all, and one pair of processes builds them.
        calls = {word: CHANGES[word].recipe["cases"]["usual"] for word in IN_CALLS}
        self.calls = programs.lay("calls", cases={"usual": {}, **calls})
        self.extended = programs.lay("with an extension")
        (self.extended / "fastpath.py").touch()
        site = other_torch_npu(programs.folder / "site", TORCH_NPU)
        self.machines = {
            word: {
                name: value
                if name != "PYTHONPATH"
                else os.pathsep.join(filter(None, (str(site), os.environ.get(name))))
                for name, value in change.machine.items()
            }
            for word, change in CHANGES.items()
        }

    def recipe(self, word: str) -> Path:
        """The recipe that is built for a word."""
        return (self.calls if word in IN_CALLS else self.asked[word]) / "recipe.yaml"

    def play(self, starts: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
        """Play the starts of each word: those of one machine are forked from one process."""
        found: dict[str, list[dict[str, Any]]] = {}
        for machine in [{}, *filter(None, self.machines.values())]:
            words = [word for word in starts if self.machines.get(word, {}) == machine]
            played = iter(self.programs.play([start for word in words for start in starts[word]], environ=machine))
            found.update({word: [next(played) for _ in starts[word]] for word in words})
        return found

    def start(self, word: str, folder: Path, runtime: str = "cachectl", **more: Any) -> dict[str, Any]:
        return {"folder": str(folder), "runtime": runtime, "environ": dict(CHANGES[word].environ), **more}


@pytest.fixture(scope="module")
def played(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The programs, laid out beside a copy of the store that the unchanged one was built in."""
    return Played(copy_of(built_once(shared_folder), tmp_path_factory.mktemp("changes")))


@pytest.fixture(scope="module")
def started(played: Played) -> dict[str, list[dict[str, Any]]]:
    """Of each word the plain runtime's start beside cachectl's, after the plain runtime compiled the unchanged one."""
    folder = played.programs.folder
    usual, cache = str(folder / "usual"), str(folder / "plain" / "usual")
    starts = {"usual": [{"folder": usual, "runtime": cache}, {"folder": usual, "runtime": "cachectl"}]}
    for word, change in CHANGES.items():
        plain = played.start(word, played.folders[word], str(folder / "plain" / word), copy=cache, **change.start)
        starts[word] = [plain, played.start(word, played.folders[word], **change.start)]
    two = {"calls": [{}, {"batch": 2}]}
    starts["second call"] = [
        {"folder": usual, "runtime": str(folder / "plain" / "second"), "copy": cache, **two},
        {"folder": usual, "runtime": "cachectl", **two},
    ]
    extended = str(played.extended)
    starts["extension"] = [
        {"folder": extended, "runtime": str(folder / "plain" / "extension"), "copy": cache},
        {"folder": extended, "runtime": "cachectl"},
    ]
    return played.play(starts)


@pytest.fixture(scope="module")
def explained(played: Played) -> dict[str, tuple[ExplainReport, str]]:
    """What `explain` says of each word before it is built: its document and its text."""
    layout = StoreLayout(played.programs.store)
    found = {}
    for word, change in CHANGES.items():
        recipe, environ = played.asked[word] / "recipe.yaml", {**change.environ, **played.machines[word]}
        if change.machine:
            # Another machine is another process, and the command itself.
            done, text = (
                played.programs.run("explain", str(recipe), *options, environ=environ) for options in (["--json"], [])
            )
            assert (1, 1) == (done.returncode, text.returncode), done.stderr
            found[word] = ExplainReport.model_validate_json(done.stdout), text.stdout
        else:
            report = explain(layout, recipe, environ={**played.programs.environ, **environ})
            shown = io.StringIO()
            render(Output(stdout=shown), report)
            found[word] = ExplainReport.model_validate_json(report.model_dump_json()), shown.getvalue()
    return found


@pytest.fixture(scope="module")
def rehearsed(played: Played) -> dict[str, PlanReport]:
    """What `plan --toolchain` says of each upgrade, on the machine as it is."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in played.programs.environ.items():
            patch.setenv(name, value)
        layout, recipe = StoreLayout(played.programs.store), played.programs.folder / "usual" / "recipe.yaml"
        return {word: plan(layout, [recipe], toolchain=toolchain) for word, toolchain in UPGRADES.items()}


@pytest.fixture(scope="module")
def rebuilt(
    played: Played,
    started: dict[str, list[dict[str, Any]]],
    explained: dict[str, tuple[ExplainReport, str]],
    rehearsed: dict[str, PlanReport],
) -> dict[str, set[str]]:
    """The keys that were built for each word, each by a build in its word's environment."""
    found: dict[str, set[str]] = {}
    settings = {word: {**change.environ, **played.machines[word]} for word, change in CHANGES.items()}
    for setting in {json.dumps(setting, sort_keys=True): setting for setting in settings.values()}.values():
        words = [word for word in CHANGES if settings[word] == setting]
        recipes = dict.fromkeys(played.recipe(word) for word in words)
        report = played.programs.build(*recipes, environ=setting)
        found.update({word: {entry["key"] for entry in report["built"]} for word in words})
    return found


@pytest.fixture(scope="module")
def restarted(played: Played, rebuilt: dict[str, set[str]]) -> dict[str, list[dict[str, Any]]]:
    """Of each word a fresh start of the program as the recipe now says it."""
    starts = {
        word: [
            played.start(word, played.calls, calls=change.start["calls"])
            if word in IN_CALLS
            else played.start(word, played.asked[word])
        ]
        for word, change in CHANGES.items()
    }
    usual = {"folder": str(played.programs.folder / "usual"), "runtime": "cachectl"}
    starts["usual"] = [usual]
    starts["second call"] = [{**usual, "folder": str(played.calls), "calls": [{}, {"batch": 2}]}]
    return played.play(starts)


def reasons_of(found: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(reason["part"], reason["name"]) for reason in found["reasons"]}


@pytest.mark.parametrize("word", CHANGES)
def test_plain_runtime_loads_what_no_longer_holds(started: dict[str, list[dict[str, Any]]], word: str) -> None:
    """Beside, from its own cache of the unchanged program: loaded without a word, and wrong, or a crash."""
    plain = started[word][0]
    (call,) = plain["calls"]

    assert plain["loaded"]
    if CHANGES[word].plain == "crash":
        assert call["crash"].startswith("AssertionError: expected size ")
    else:
        assert call["crash"] is None
        assert (CHANGES[word].plain == "wrong") == (call["error"] > 0.01)


@pytest.mark.parametrize("word", CHANGES)
def test_cachectl_is_cold_for_exactly_this_reason_and_right(
    started: dict[str, list[dict[str, Any]]], word: str
) -> None:
    """Each reason is about what changed, says both sides, and what to do; the answer is eager's."""
    ours = started[word][1]
    (call,) = ours["calls"]

    assert {(CHANGES[word].part, name) for name in CHANGES[word].names} == reasons_of(ours)
    assert all(reason["stored"] != reason["wanted"] and reason["hint"] for reason in ours["reasons"])
    assert ("cold", None) == (call["outcome"], call["crash"])
    assert call["error"] < 1e-5


def test_processes_run_on_what_they_say(started: dict[str, list[dict[str, Any]]]) -> None:
    """The other machines are there: torch_npu's own words name another version, CANN and SoC."""
    names = ("torch_npu", "cann", "soc")
    usual = tuple(started["usual"][1][name] for name in names)

    for word, place, value in (("torch_npu", 0, TORCH_NPU), ("CANN", 1, "8.6.0"), ("SoC", 2, "Ascend910_9391")):
        expected = (*usual[:place], value, *usual[place + 1 :])
        assert [expected, expected] == [tuple(found[name] for name in names) for found in started[word]]


@pytest.mark.parametrize("word", CHANGES)
def test_explain_names_exactly_what_changed(explained: dict[str, tuple[ExplainReport, str]], word: str) -> None:
    """In the document and in the text, and nothing else; each with the command that mends it."""
    report, text = explained[word]
    part, names = CHANGES[word].explained or (CHANGES[word].part, CHANGES[word].names)

    assert "cold" == report.outcome
    assert {(part, name, "semantic") for name in names} == {
        (reason.part, reason.name, reason.kind) for reason in report.reasons
    }
    assert all("cachectl build" in (reason.hint or "") for reason in report.reasons)
    assert {(part, name) for name in names} == {(item.part, item.name) for item in report.nearest[0].differs}
    first = text.partition("\n\n")[0].splitlines()
    assert ["cold", *sorted(f"  {part}: {name}" for name in names)] == [
        first[0],
        *sorted(line.rpartition(": ")[0] for line in first[1:]),
    ]


@pytest.mark.parametrize("word", UPGRADES)
def test_rehearsed_upgrade_is_what_the_upgrade_then_does(
    rehearsed: dict[str, PlanReport], explained: dict[str, tuple[ExplainReport, str]], word: str
) -> None:
    """`plan --toolchain` before it names the reasons that `explain` gives after it, and the set that is lost."""
    report = rehearsed[word]
    (entry,) = report.entries

    assert {(reason.part, reason.name) for reason in explained[word][0].reasons} == {
        (reason.part, reason.name) for reason in entry.reasons
    }
    assert [("changing", 1, 1)] == [(lost.recipe, lost.lost, lost.entries) for lost in report.lost]
    assert report.lost[0].seconds == report.expected_seconds
    assert 0 < (report.expected_seconds or 0)


@pytest.mark.parametrize("word", CHANGES)
def test_build_makes_it(
    played: Played, rebuilt: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """What was built is what `plan` then calls ready, in the environment it was built for."""
    for name, value in {**played.programs.environ, **CHANGES[word].environ, **played.machines[word]}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])

    report = plan(StoreLayout(played.programs.store), [played.recipe(word)])

    assert 0 == report.exit_code, report
    ready = {entry.case: entry.key for entry in report.entries}
    assert ready[word if word in IN_CALLS else "usual"] in rebuilt[word]


@pytest.mark.parametrize("word", CHANGES)
def test_cachectl_is_warm_again_and_right(restarted: dict[str, list[dict[str, Any]]], word: str) -> None:
    """A fresh process loads what was built for it."""
    (found,) = restarted[word]
    (call,) = found["calls"]

    assert ("warm", []) == (call["outcome"], found["reasons"])
    assert call["error"] < 1e-5


def test_second_call_with_another_batch_is_cold_right_and_then_built(
    started: dict[str, list[dict[str, Any]]], restarted: dict[str, list[dict[str, Any]]]
) -> None:
    """One process, two batches: the plain runtime fails at the second; ours goes cold, and both are warm when built."""
    plain, ours = started["second call"]
    (later,) = restarted["second call"]

    assert plain["loaded"]
    assert plain["calls"][0]["error"] < 1e-5
    assert plain["calls"][1]["crash"] is not None or plain["calls"][1]["error"] > 0.01
    assert ["warm", "cold"] == [call["outcome"] for call in ours["calls"]]
    assert {("inputs", "L['x']")} == reasons_of(ours)
    assert (["warm", "warm"], []) == ([call["outcome"] for call in later["calls"]], later["reasons"])
    assert all(call["error"] < 1e-5 for call in (*ours["calls"], *later["calls"]))


def test_extension_that_appeared_is_cold_and_says_how_to_build_for_it(started: dict[str, list[dict[str, Any]]]) -> None:
    """A module that an import within `try` finds now, and no recipe names: the proof refuses what it changed (W1)."""
    plain, ours = started["extension"]

    assert (True, True) == (plain["loaded"], plain["calls"][0]["error"] > 0.01)
    assert ("cold", {("guards", "helpers.HAS_FASTPATH")}) == (ours["calls"][0]["outcome"], reasons_of(ours))
    assert ours["calls"][0]["error"] < 1e-5
    # plan can't see it and calls the entry ready.
    assert ours["reasons"][0]["hint"].endswith("run: cachectl build --force")


@pytest.mark.nightly
def test_forced_build_makes_what_only_a_running_program_shows(played: Played) -> None:
    """The command that the guard's reason names mends it, and the set without the extension stays."""
    recipe = played.extended / "recipe.yaml"
    usual = {"folder": str(played.programs.folder / "usual"), "runtime": "cachectl"}

    reused = played.programs.build(recipe)
    forced = played.programs.build(recipe, force=True)
    starts = played.programs.play([{"folder": str(played.extended), "runtime": "cachectl"}, usual])

    assert ([], 1, 1) == (reused["built"], len(reused["reused"]), len(forced["built"]))
    for found in starts:
        assert ("warm", []) == (found["calls"][0]["outcome"], found["reasons"])
        assert found["calls"][0]["error"] < 1e-5


def test_unchanged_program_is_warm_before_and_after(
    started: dict[str, list[dict[str, Any]]], restarted: dict[str, list[dict[str, Any]]]
) -> None:
    """What was built beside it takes nothing from it."""
    for found in (started["usual"][1], restarted["usual"][0]):
        assert ("warm", []) == (found["calls"][0]["outcome"], found["reasons"])
        assert found["calls"][0]["error"] < 1e-5
