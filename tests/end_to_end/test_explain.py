"""What changed since the build is what explain names, and nothing else, in text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

RECIPE = "recipe.yaml"
MODEL = "tiny_decoder/model.py"


@pytest.mark.parametrize(
    ("edit", "environ", "part", "names"),
    [
        pytest.param(
            ("nn.functional.silu(self.gate(hidden))", "nn.functional.relu(self.gate(hidden))", MODEL),
            {},
            "sources",
            {f"{MODEL}: SwiGLU.forward"},
            id="edited-forward",
        ),
        pytest.param(
            ('environment: {TASK_QUEUE_ENABLE: "1"}', 'environment: {TASK_QUEUE_ENABLE: "0"}', RECIPE),
            {"TASK_QUEUE_ENABLE": "0"},
            "environment",
            {"TASK_QUEUE_ENABLE"},
            id="environment-of-the-recipe",
        ),
        pytest.param(None, {"TASK_QUEUE_ENABLE": "0"}, "environment", {"TASK_QUEUE_ENABLE"}, id="environment-here"),
        pytest.param(
            None,
            {"CACHECTL_SIM_CANN": "9.0.0"},
            "toolchain",
            {"cann.CANN", "cann.COMPILER", "cann.HCCL", "cann.OPP"},
            id="other-cann",
        ),
        pytest.param(("args: {batch: 4}", "args: {batch: 6}", RECIPE), {}, "model", {"args.batch"}, id="batch"),
        pytest.param(("layers: 1", "layers: 2", RECIPE), {}, "model", {"config.layers"}, id="layers"),
        pytest.param(
            ("options: {frozen_parameter: true}", "options: {frozen_parameter: false}", RECIPE),
            {},
            "options",
            {"options.frozen_parameter"},
            id="options",
        ),
    ],
)
def test_explain_names_exactly_what_changed(
    program: Any, edit: tuple[str, str, str] | None, environ: Mapping[str, str], part: str, names: set[str]
) -> None:
    """One thing is changed; the reasons are about it alone, each with a command, and the text says the same."""
    if edit is not None:
        program.edit(*edit)

    done = program.cachectl("explain", RECIPE, "--json", environ=environ)
    document = json.loads(done.stdout)
    text = program.cachectl("explain", RECIPE, environ=environ).stdout

    assert (1, "cold") == (done.returncode, document["outcome"]), done.stderr
    assert {(part, name) for name in names} == {(reason["part"], reason["name"]) for reason in document["reasons"]}
    assert {"semantic"} == {reason["kind"] for reason in document["reasons"]}
    assert all("cachectl build" in reason["hint"] for reason in document["reasons"])
    for reason in document["reasons"]:
        assert f"  {part}: {reason['name']}: " in text
    assert document["nearest"]
    assert 1 >= document["nearest"][0]["distance"]


def test_explain_unchanged_program_is_warm_without_reasons(program: Any) -> None:
    """What was built is warm, and nothing differs from it; an edited comment is noise."""
    environ = {"TASK_QUEUE_ENABLE": "1"}
    document = json.loads(program.cachectl("explain", RECIPE, "--json", environ=environ).stdout)
    program.edit("class SwiGLU(nn.Module):", "# smooth\nclass SwiGLU(nn.Module):")
    edited = program.cachectl("explain", RECIPE, "--json", environ=environ)

    assert ("warm", []) == (document["outcome"], document["reasons"])
    assert [0, 0] == [entry["distance"] for entry in document["nearest"]]
    assert 0 == edited.returncode
    assert [("sources", "noise")] == [(item["part"], item["kind"]) for item in json.loads(edited.stdout)["reasons"]]


def test_rehearsed_upgrade_names_the_sets_that_are_lost(program: Any) -> None:
    """Another CANN makes the set stale, with the time that compiling it took; the version that is here does not."""
    rehearsed = program.cachectl("plan", RECIPE, "--toolchain", "cann=9.0.0,torch_npu=2.14.0")
    document = json.loads(program.cachectl("plan", RECIPE, "--toolchain", "cann=9.0.0", "--json").stdout)
    same = program.cachectl("plan", RECIPE, "--toolchain", "cann=8.5.0,torch=2.13.0")

    assert 1 == rehearsed.returncode
    assert "with cann 9.0.0, torch_npu 2.14.0 warm set " in rehearsed.stdout
    assert " of tiny-decoder is lost: 2 of 2 entries, which took " in rehearsed.stdout
    assert {"toolchain"} == {reason["part"] for entry in document["entries"] for reason in entry["reasons"]}
    assert 0 < document["expected_seconds"]
    assert (0, True) == (same.returncode, "no warm set that is ready today is lost" in same.stdout)


def test_diff_of_two_cases_is_the_batch(program: Any) -> None:
    """Two cases of one method differ in what they are called with, and in what follows from it."""
    rows = json.loads(program.cachectl("ls", "--json").stdout)["entries"]
    done = program.cachectl("diff", *(row["key"] for row in sorted(rows, key=lambda row: row["case"])), "--json")
    document = json.loads(done.stdout)

    parts = {reason["part"]: reason for reason in document["differs"] if reason["kind"] == "semantic"}
    assert 0 == done.returncode
    assert {"model", "inputs"} <= set(parts) <= {"model", "inputs", "guards"}
    assert ("args.batch", 2, 4) == tuple(parts["model"][name] for name in ("name", "stored", "wanted"))
