"""Build once, start warm: the product's main path on the real runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachectl.schemas.report import LsReport, PlanReport

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_build_publishes_every_case_with_equal_values(built: tuple[Any, dict[str, Any]]) -> None:
    """Both cases are built, what cold and warm took is known, and one warm set is ready."""
    report = built[1]

    assert ["b2", "b4"] == sorted(entry["case"] for entry in report["built"])
    assert all(min(entry["warm_seconds"], entry["cold_seconds"]) > 0 for entry in report["built"])
    assert [] == report["failed"]
    assert report["warm_set"].startswith("sha256:")


def test_build_again_reuses_everything_and_starts_no_rank(program: Any, built: tuple[Any, dict[str, Any]]) -> None:
    """A second build has nothing to do: same keys, same warm set, and no rank process wrote a log."""
    logs = set((program.store / "logs").iterdir())

    report = program.build()

    assert [] == report["built"]
    assert {entry["key"] for entry in built[1]["built"]} == set(report["reused"])
    assert built[1]["warm_set"] == report["warm_set"]
    assert logs == set((program.store / "logs").iterdir())


def test_generate_after_build_is_warm_and_right(program: Any) -> None:
    """A fresh process starts warm from the store and generates what eager generates."""
    warm = program.generate()
    eager = program.generate("--eager")

    assert ("warm", []) == (warm["outcome"], warm["reasons"])
    assert eager["tokens"] == warm["tokens"]


def test_generate_without_store_is_cold_and_right(empty_program: Any) -> None:
    """With no store at all the program compiles as ever, answers right, and says why it is cold."""
    cold = empty_program.generate()
    eager = empty_program.generate("--eager")

    assert "cold" == cold["outcome"]
    assert "no store" in cold["reasons"][0]
    assert eager["tokens"] == cold["tokens"]


def test_generate_from_a_handout_of_the_hook_is_warm(program: Any) -> None:
    """What `cachectl hook` laid down before serves the program through CACHECTL_HANDOUT, without the store."""
    handed = program.hook()
    (program.store / "store.json").rename(program.store / "gone.json")

    warm = program.generate(environ=handed["env"])

    assert ("warm", []) == (warm["outcome"], warm["reasons"])


def test_generate_two_cases_through_one_object_are_warm(program: Any) -> None:
    """The second case of the recipe, another batch, is as warm as the first."""
    warm = program.generate("--batch", "2")

    assert ("warm", []) == (warm["outcome"], warm["reasons"])
    assert program.generate("--batch", "2", "--eager")["tokens"] == warm["tokens"]


def test_generate_batch_without_case_is_cold_with_the_input_named(program: Any) -> None:
    """A batch that the recipe has no case for compiles, answers right, and the reason names the input."""
    cold = program.generate("--batch", "3")

    assert "cold" == cold["outcome"]
    assert any(reason.startswith("inputs: L['input_ids']") for reason in cold["reasons"])
    assert program.generate("--batch", "3", "--eager")["tokens"] == cold["tokens"]


def test_dynamic_recipe_with_changing_lengths_is_one_warm_graph(empty_program: Any) -> None:
    """dynamic=True with host lists that change at each step: one entry, warm, right at every step.

    Built where CI is set, as in a pipeline: there torch raises what it warns of in the pod.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "true")
        report = empty_program.build("recipe-dynamic.yaml")

    warm = empty_program.generate("--recipe", "recipe-dynamic.yaml")
    eager = empty_program.generate("--recipe", "recipe-dynamic.yaml", "--eager")

    assert 1 == len(report["built"])
    assert ("warm", []) == (warm["outcome"], warm["reasons"])
    assert eager["tokens"] == warm["tokens"]


def test_store_is_unchanged_by_starts(program: Any) -> None:
    """Hook and warm start leave every byte of the store as it was."""
    before = _tree(program.store)

    program.hook()
    program.generate()

    assert before == _tree(program.store)


def test_build_is_known_to_every_command(program: Any, built: tuple[Any, dict[str, Any]]) -> None:
    """What build made is planned as ready, listed, shown, inspected and verified."""
    keys = {entry["key"] for entry in built[1]["built"]}
    key = min(keys)

    plan = PlanReport.model_validate_json(program.cachectl("plan", "recipe.yaml", "--json", "--require-ready").stdout)
    listed = LsReport.model_validate_json(program.cachectl("ls", "--json").stdout)
    shown = json.loads(program.cachectl("show", key[7:19]).stdout)
    inspected = program.cachectl("inspect", key[7:19])
    verified = program.cachectl("verify")

    assert 0 == plan.exit_code
    assert keys == {entry.key for entry in plan.entries} == {entry.key for entry in listed.entries}
    assert key == shown["key"]
    assert 0 == inspected.returncode
    assert "npugraph_ex" in inspected.stdout
    assert f"{len(keys)} checked, no findings\n" == verified.stdout


def test_inspect_reads_the_entry_without_torch(program: Any, built: tuple[Any, dict[str, Any]]) -> None:
    """inspect tells runtime, format, interpreter, inputs and options of what was built."""
    key = built[1]["built"][0]["key"]

    document = json.loads(program.cachectl("inspect", key, "--json").stdout)

    assert ("npugraph_ex", True) == (document["runtime"], document["python"]["magic_ok"])
    assert "main_decode" in document["name"]
    assert "True" == document["options"]["frozen_parameter"]
    assert document["inputs"]


def _tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
