"""A framework's recipe in plan, explain and hook: found by the bytes of several files, missed by what counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.candidates import find_record
from cachectl.errors import ConfigError
from cachectl.identity.environment import observed_part
from cachectl.schemas.boot import Reason
from cachectl.schemas.recipe_reading import load_recipe
from cachectl.services.build import build
from cachectl.services.explain import explain
from cachectl.services.framework import refuse_inert
from cachectl.services.plan import plan
from cachectl.services.request import read_request
from tests.stores import Hooked, MadeStore

RECIPE = """\
schema: cachectl/recipe/v1
name: tiny-executor
device: simulated
framework: {kind: cann-recipes, config: config/decode.yaml}
command: [python3, infer.py, --config, config/decode.yaml]
"""
CONFIG = """\
model_config:
  model_name: tiny
  model_path: weights
  platform_version: "A3"
  exe_mode: npugraph_ex
  enable_cache_compile: true
  next_n: 0
data_config: {dataset: default, temperature: 0.5}
parallel_config: {world_size: 1}
scheduler_config: {batch_size: 4}
"""
CASE = "decode-A3"
# An interpreter without site-packages has neither PyYAML nor pydantic, as a pod that installed with --no-deps.
BARE = (sys.executable, "-S")


@pytest.fixture
def made(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """An empty store with a framework's recipe, its config and its model's config.json."""
    monkeypatch.syspath_prepend(str(made.site))
    made.recipe.write_text(RECIPE)
    for place, text in (("config/decode.yaml", CONFIG), ("weights/config.json", '{"num_hidden_layers": 4}')):
        path = made.recipe.parent / place
        path.parent.mkdir()
        path.write_text(text)
    return made


def config_of(made: MadeStore) -> Path:
    return made.recipe.parent / "config" / "decode.yaml"


def model_of(made: MadeStore) -> Path:
    return made.recipe.parent / "weights" / "config.json"


def edit(path: Path, old: str, new: str) -> None:
    """Replace what stands once in a file."""
    text = path.read_text()
    assert 1 == text.count(old)
    path.write_text(text.replace(old, new))


def against(hooked: Hooked) -> list[tuple[str, str, str]]:
    return hooked.against


def test_request_is_that_of_the_equivalent_recipe(made: MadeStore) -> None:
    """Model and functions are those of a program that is run as it is; what it reads is beside them."""
    document = read_request(made.recipe).document

    assert "cachectl.programs:model" == document["model"]["factory"]
    assert {
        "command": ["python", "infer.py", "--config", "config/decode.yaml"],
        "methods": ["main_decode"],
    } == document["model"]["config"]
    (function,) = document["functions"]
    assert "main_decode" == function["method"]
    assert [
        {"name": CASE, "inputs": "cachectl.programs:call", "args": {"method": "main_decode", "number": 0}}
    ] == function["cases"]
    assert {"TASK_QUEUE_ENABLE": "1"} == document["environment"]
    assert ("npugraph_ex", True) == (document["compile"]["mode"], document["compile"]["dynamic"])
    assert 4 == document["framework"]["config"]["scheduler_config"]["batch_size"]


def test_request_and_entries_hold_the_config(made: MadeStore) -> None:
    """What is in the key is in the request, by which candidates are found, and in each line's model part."""
    request = read_request(made.recipe)
    (case,) = request.cases()

    asked = request.asked(case, 0, made.layout.root)

    assert request.document["framework"] == request.request["model"]["framework"]
    assert request.document["framework"] == asked.model["framework"]


@pytest.mark.parametrize(
    ("field", "text", "part", "path"),
    [
        ("compile", "compile: {options: {clone_input: false}, dynamic: false}", "compile", ("options", "clone_input")),
        ("topology", "topology: {pipeline_parallel: 2}", "topology", ("pipeline_parallel",)),
        ("environment", 'environment: {HCCL_ALGO: "ring"}', "environment", ("HCCL_ALGO",)),
    ],
)
def test_what_the_recipe_states_itself_stands_beside_what_is_derived(
    made: MadeStore, field: str, text: str, part: str, path: tuple[str, ...]
) -> None:
    """A fork of the framework compiles with an option more: the recipe says so, and the rest stays derived."""
    before = read_request(made.recipe).document[part]
    made.recipe.write_text(f"{RECIPE}{text}\n")

    after = read_request(made.recipe).document[part]

    stated: Any = after
    for step in path:
        stated = stated[step]
    assert stated is not None
    assert {**before, **after} == after
    assert field != "compile" or (True, False) == (after["options"]["frozen_parameter"], after["dynamic"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topology: {world_size: 2}\n", "topology.world_size: 2, and config/decode.yaml says world_size 1"),
        ("model: {factory: 'a:b'}\n", "framework: stands beside model"),
    ],
)
def test_recipe_that_contradicts_its_config_is_refused(made: MadeStore, text: str, message: str) -> None:
    """Exit 2, both values in one line."""
    made.recipe.write_text(RECIPE + text)

    with pytest.raises(ConfigError) as raised:
        read_request(made.recipe)

    assert message in str(raised.value)


def test_environment_that_the_framework_overwrites_is_told(made: MadeStore) -> None:
    """TASK_QUEUE_ENABLE is what the framework sets, whatever recipe and pod say."""
    made.recipe.write_text(RECIPE + 'environment: {TASK_QUEUE_ENABLE: "2"}\n')
    loaded = load_recipe(made.recipe)
    assert loaded.framework is not None

    notes = [note for note in loaded.framework.framework.notes if note.startswith("environment.")]

    assert ["environment.TASK_QUEUE_ENABLE: the framework overwrites '2' with '1'"] == notes
    assert "1" == loaded.document["environment"]["TASK_QUEUE_ENABLE"]


def test_command_that_reads_another_config_is_told(made: MadeStore) -> None:
    """A recipe whose program reads another file would have a key about nothing."""
    edit(made.recipe, "infer.py, --config, config/decode.yaml]", "infer.py, --config, other.yaml]")
    loaded = load_recipe(made.recipe)
    assert loaded.framework is not None

    assert any(note.startswith("command does not name decode.yaml") for note in loaded.framework.framework.notes)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "npugraph_ex",
            "ge_graph",
            "decode.yaml: model_config.exe_mode ge_graph: this version builds npugraph_ex only",
        ),
        ("npugraph_ex", "eager", "decode.yaml: model_config.exe_mode eager: nothing is compiled"),
    ],
)
def test_mode_that_is_not_built_is_refused_by_build_and_shown_by_plan(
    made: MadeStore, old: str, new: str, words: str
) -> None:
    """Exit 2, the setting, and what to set; plan has it as the reason of each line, beside what was understood."""
    edit(config_of(made), f"exe_mode: {old}", f"exe_mode: {new}")

    with pytest.raises(ConfigError) as raised:
        build(made.layout, [made.recipe])
    report = plan(made.layout, [made.recipe])

    assert words in raised.value.message
    assert "set exe_mode: npugraph_ex" == raised.value.hint
    assert [("policy", raised.value.message)] == [
        (reason.part, reason.stored) for entry in report.entries for reason in entry.reasons
    ]
    assert [new] == [block.mode for block in report.framework]


def test_build_refuses_a_program_that_never_reads_its_cache(made: MadeStore) -> None:
    """enable_cache_compile false: built entries would be inert, and the setting is named. Plan only says so."""
    edit(config_of(made), "enable_cache_compile: true", "enable_cache_compile: false")

    with pytest.raises(ConfigError) as raised:
        build(made.layout, [made.recipe])
    (block,) = plan(made.layout, [made.recipe]).framework

    assert "enable_cache_compile false" in raised.value.message
    assert "exec --lift" in str(raised.value.hint)
    assert block.inert is not None


def test_program_that_no_setting_makes_read_its_cache_is_built_for_lift(made: MadeStore) -> None:
    """Kimi K3 calls torch.compile whatever the setting says: not refused, and no hint names the setting."""
    kimi = Path(__file__).parents[1] / "fixtures" / "cann_recipes" / "b_kimi.yaml"
    config_of(made).write_text(kimi.read_text(encoding="utf-8"), encoding="utf-8")
    loaded = load_recipe(made.recipe)
    assert loaded.framework is not None
    told: list[Reason] = []

    refuse_inert(loaded)
    find_record(made.layout, made.recipe, told)

    assert [("framework config", "run the program under: cachectl exec --lift")] == [
        (reason.name, reason.hint) for reason in told
    ]


def test_config_that_is_not_there_is_named(made: MadeStore) -> None:
    """The recipe's field, the path, and where it was looked for."""
    config_of(made).unlink()

    with pytest.raises(ConfigError) as raised:
        load_recipe(made.recipe)

    assert "framework.config: config/decode.yaml: no such file; looked in" in str(raised.value)


def test_plan_shows_what_the_framework_would_do(made: MadeStore) -> None:
    """One block a framework's recipe, none for others, and the document is plain JSON."""
    report = plan(made.layout, [made.recipe])

    (block,) = json.loads(report.model_dump_json())["framework"]
    assert ("tiny-executor", "config/decode.yaml", "A") == (block["recipe"], block["config"], block["family"])
    assert [{"name": "main_decode", "ranks": None}] == block["methods"]
    assert {"model_config.model_path", "data_config.temperature"} <= {item["name"] for item in block["not_in_key"]}
    assert "LOCAL_RANK + RANK_OFFSET" in block["rank_rule"]


# The hook: by the bytes of recipe, config and the model's config.json.

NOISE: dict[str, Callable[[MadeStore], None]] = {
    "nothing": lambda made: None,
    "temperature": lambda made: edit(config_of(made), "temperature: 0.5", "temperature: 0.7"),
    "dataset": lambda made: edit(config_of(made), "dataset: default", "dataset: LongBench"),
    "comment": lambda made: edit(config_of(made), "model_config:", "# a comment\nmodel_config:"),
    "written-out default": lambda made: edit(config_of(made), "next_n: 0", "next_n: 0\n  enable_weight_nz: 1"),
    "label of the model": lambda made: edit(model_of(made), "{", '{"_name_or_path": "x", '),
}
CHANGES: dict[str, tuple[Callable[[MadeStore], None], str]] = {
    "batch_size": (
        lambda made: edit(config_of(made), "batch_size: 4", "batch_size: 8"),
        "framework.config.scheduler_config.batch_size",
    ),
    "custom param": (
        lambda made: edit(config_of(made), "next_n: 0", "next_n: 0\n  custom_params: {enable_sp: true}"),
        "framework.config.model_config.custom_params.enable_sp",
    ),
    "unknown field": (
        lambda made: edit(config_of(made), "next_n: 0", "next_n: 0\n  novel: 1"),
        "framework.config.model_config.novel",
    ),
    "model": (lambda made: edit(model_of(made), "4", "5"), "framework.models.model_path"),
}


@pytest.mark.parametrize("name", NOISE)
def test_hook_is_warm_after_a_change_that_does_not_count(made: MadeStore, name: str) -> None:
    """New bytes are read once more, where PyYAML and pydantic are; plan agrees."""
    made.publish(cases=(CASE,), observed={})
    NOISE[name](made)

    hooked = made.hook("--format", "json")

    assert ("warm", []) == (hooked.outcome, hooked.against)
    assert (1, 0) == (plan(made.layout, [made.recipe]).ready, plan(made.layout, [made.recipe]).exit_code)


@pytest.mark.parametrize("name", CHANGES)
def test_hook_is_cold_after_a_change_that_counts_and_explain_names_it(made: MadeStore, name: str) -> None:
    """The field by its place in the config, with both values."""
    made.publish(cases=(CASE,), observed={})
    change, field = CHANGES[name]
    change(made)

    hooked = made.hook("--format", "json")
    report = explain(made.layout, made.recipe, environ=made.hook_environ())

    assert "cold" == hooked.outcome
    assert "cold" == report.outcome
    assert field in {reason.name for reason in report.reasons if reason.part == "model"}
    assert "stale" == plan(made.layout, [made.recipe]).entries[0].state


def test_hook_finds_the_record_without_a_yaml_parser(made: MadeStore) -> None:
    """By the bytes of recipe, config and the model's config.json alone."""
    made.publish(cases=(CASE,), observed={})

    hooked = made.hook("--format", "json", python=BARE)

    assert ("warm", []) == (hooked.outcome, hooked.against)


@pytest.mark.parametrize("place", ["config/decode.yaml", "weights/config.json"])
def test_hook_without_a_yaml_parser_is_cold_for_new_bytes(made: MadeStore, place: str) -> None:
    """An edit that may count can't be read there: cold, with the reason."""
    made.publish(cases=(CASE,), observed={})
    path = made.recipe.parent / place
    path.write_text(path.read_text() + "\n")

    hooked = made.hook("--format", "json", python=BARE)

    assert ("cold", [("store", "boot record", "absent")]) == (hooked.outcome, hooked.against)
    assert "can't be read here" in hooked.report["reasons"][0]["hint"]


@pytest.mark.parametrize("python", [(sys.executable,), BARE], ids=["whole", "bare"])
def test_hook_that_cannot_see_the_weights_hands_out(made: MadeStore, python: tuple[str, ...]) -> None:
    """An init container without the weights' volume: pending, the program's process proves what it loads."""
    made.publish(cases=(CASE,), observed={})
    model_of(made).unlink()

    assert "warm" == made.hook("--format", "json", python=python).outcome
    assert 1 == plan(made.layout, [made.recipe]).ready
    assert "warm" == explain(made.layout, made.recipe, environ=made.hook_environ()).outcome


def test_hook_without_the_config_is_cold_and_says_so(made: MadeStore) -> None:
    """A config that was not shipped with the recipe."""
    made.publish(cases=(CASE,), observed={})
    config_of(made).unlink()

    hooked = made.hook("--format", "json")

    assert ("cold", [("policy", "recipe", "policy")]) == (hooked.outcome, hooked.against)
    assert "config/decode.yaml: no such file" in hooked.report["reasons"][0]["stored"]


def test_hook_for_a_mode_that_is_not_built_names_the_setting(made: MadeStore) -> None:
    """Eager: exec tells which setting makes caching inert, and CMD runs."""
    made.publish(cases=(CASE,), observed={})
    edit(config_of(made), "exe_mode: npugraph_ex", "exe_mode: eager")

    hooked = made.hook("--format", "json")

    assert ("cold", [("policy", "framework config", "policy")]) == (hooked.outcome, hooked.against)
    assert "exe_mode eager: nothing is compiled" in hooked.report["reasons"][0]["stored"]


def test_hook_for_a_program_that_never_reads_its_cache_says_which_setting_it_is(made: MadeStore) -> None:
    """What is there is handed out, for exec --lift, and the report names enable_cache_compile."""
    made.publish(cases=(CASE,), observed={})
    edit(config_of(made), "enable_cache_compile: true", "enable_cache_compile: false")

    hooked = made.hook("--format", "json")

    assert ("warm", [("policy", "framework config", "policy")]) == (hooked.outcome, hooked.against)
    assert "enable_cache_compile false" in hooked.report["reasons"][0]["stored"]
    assert "--lift" in hooked.report["reasons"][0]["hint"]
    report = explain(made.layout, made.recipe, environ=made.hook_environ())
    assert ("warm", ["framework config", "recipe bytes"]) == (
        report.outcome,
        [reason.name for reason in report.reasons],
    )


def test_explain_asks_for_no_variable_that_the_framework_sets(made: MadeStore) -> None:
    """TASK_QUEUE_ENABLE is overwritten whatever the pod sets: nothing to export, and no difference."""
    made.publish(cases=(CASE,), observed={})

    for value in (None, "2"):
        report = explain(made.layout, made.recipe, environ=made.hook_environ({"TASK_QUEUE_ENABLE": value}))
        hooked = made.hook("--format", "json", environ={"TASK_QUEUE_ENABLE": value})

        assert ("warm", (), "warm") == (report.outcome, report.reasons, hooked.outcome)


def test_hook_is_warm_after_midnight(made: MadeStore) -> None:
    """The launch script's result folder holds the date, and the program reads it: no difference (field report S1)."""
    made.publish(cases=(CASE,), observed=observed_part(["RES_PATH", "WORK_DIR", "RANK_ID"], {}))
    today = {"RES_PATH": "res/20261201/tiny_decode", "WORK_DIR": "/recipes/models/tiny", "RANK_ID": "0"}

    hooked = made.hook("--format", "json", environ=today)

    assert ("warm", []) == (hooked.outcome, hooked.against)


def test_hook_for_a_damaged_trail_is_cold(made: MadeStore) -> None:
    """A pointer in the store that is none."""
    made.publish(cases=(CASE,), observed={})
    for pointer in (made.layout.root / "boot" / "raw").iterdir():
        pointer.chmod(0o644)
        pointer.write_text('{"then": [1]}')

    hooked = made.hook("--format", "json")

    assert ("cold", [("store", "document", "corrupt")]) == (hooked.outcome, hooked.against)
