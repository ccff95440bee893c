"""Triage on the real runtime: a model broken at each stage lands on that stage, and the thing is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import BOUND_S, lay_ranked

pytestmark = [pytest.mark.real, pytest.mark.slow]

ZOO = Path(__file__).resolve().parents[1] / "triage_zoo"


@dataclass(frozen=True)
class Triaged:
    """How a triage ended."""

    returncode: int
    report: dict[str, Any]
    folder: Path

    @property
    def stage(self) -> str | None:
        found: str | None = self.report["stage"]
        return found

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The findings of the stage that stopped it."""
        return [found for stage in self.report["stages"] if stage["stage"] == self.stage for found in stage["findings"]]

    @property
    def kinds(self) -> list[str]:
        return [found["kind"] for found in self.findings]


@pytest.fixture
def triage(tmp_path: Path) -> Callable[..., Triaged]:
    """Triage one method of the zoo; `options` are of the command, the rest edits the recipe."""

    def run(
        method: str,
        *options: str,
        config: dict[str, Any] | None = None,
        inputs: str = "inputs",
        args: dict[str, Any] | None = None,
        factory: str = "build",
        **compile_section: Any,
    ) -> Triaged:
        folder = tmp_path / "zoo"
        shutil.copytree(ZOO, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        arguments = args if args is not None else {"method": method} if inputs == "inputs" else {}
        document = {
            "schema": "cachectl/recipe/v1",
            "name": "zoo",
            "device": "simulated",
            "model": {"factory": f"model:{factory}", "config": config or {}, "path": ["."]},
            "compile": {"options": {"frozen_parameter": True}, **compile_section},
            "functions": [
                {"method": method, "cases": [{"name": "one", "inputs": f"model:{inputs}", "args": arguments}]}
            ],
        }
        (folder / "recipe.yaml").write_text(json.dumps(document))
        done = subprocess.run(
            [sys.executable, "-m", "cachectl", "triage", "recipe.yaml", "--json", *options],
            cwd=folder,
            env={**os.environ, "CACHECTL_STORE": str(tmp_path / "store"), "LAUNCH_TOKEN": "sesame-open-up"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        assert "stages" in report, report
        return Triaged(done.returncode, report, folder)

    return run


def line_of(text: str) -> int:
    """Return the number of the line on which a text stands in the zoo."""
    return 1 + next(number for number, line in enumerate((ZOO / "model.py").read_text().splitlines()) if text in line)


def test_graph_break_lands_on_aot_eager_with_a_page(triage: Callable[..., Triaged], tmp_path: Path) -> None:
    """Two processes: every break with its line, the page without secrets and paths."""
    found = triage("prints", "--report", "triage.md")

    assert (1, "aot_eager", ["graph-break", "graph-break"]) == (found.returncode, found.stage, found.kinds)
    assert [f"model.py:{line_of('print(')} in prints", f"model.py:{line_of('if y.sum()')} in prints"] == [
        item["where"] for item in found.findings
    ]
    assert "simulated" == found.report["evidence"]
    page = (found.folder / "triage.md").read_text()
    assert "on the simulated CANN, on no NPU" in page
    assert not any(word in page for word in (str(tmp_path), "sesame-open-up", os.environ["HOME"]))
    assert not (tmp_path / "store").exists()


def test_custom_pass_lands_on_npugraph_ex_and_is_named(triage: Callable[..., Triaged]) -> None:
    """The four stages before are right; of the options restored one by one only the pass differs."""
    found = triage("good", options={"post_grad_custom_pre_pass": "model:wrong_pass"})

    assert (1, "npugraph_ex") == (found.returncode, found.stage)
    assert ["post_grad_custom_pre_pass"] == [item["option"] for item in found.findings if item["kind"] == "option"]
    assert next(item["difference"] for item in found.findings if item["kind"] == "option") > 1e-3
    tried = next(item["what"] for item in found.findings if item["kind"] == "tried")
    assert "inplace_pass: equal" in tried
    assert "remove_noop_ops: equal" in tried


@pytest.mark.nightly
def test_good_method_is_right_at_every_stage(triage: Callable[..., Triaged], tmp_path: Path) -> None:
    """Up to the cache that a second process loads; nothing is published."""
    found = triage("good")

    assert (0, None, ["ok"] * 5) == (
        found.returncode,
        found.stage,
        [item["verdict"] for item in found.report["stages"]],
    )
    assert ["every stage is right; run: cachectl build recipe.yaml"] == found.report["advice"]
    assert not (tmp_path / "store").exists()


# Method, recipe, stage, kind of the first finding, and words of it or of its place.
BROKEN: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "factory": ("good", {"factory": "fails"}, "eager", "raises", "FileNotFoundError: no checkpoint"),
    "raises": ("raises", {}, "eager", "raises", "mat1 and mat2 shapes"),
    "nan": ("not_a_number", {}, "eager", "not-finite", "aten._softmax.default"),
    "random": ("draws", {}, "eager", "not-repeatable", "two eager runs"),
    "attribute": ("counts", {}, "aot_eager", "recompile-attribute", "self.steps == "),
    "list grows": ("grows", {}, "aot_eager", "recompile-container", "self.history"),
    "cache grows": ("concatenates", {}, "aot_eager", "recompile-shape", "size mismatch"),
    "shape by step": ("widens", {"inputs": "by_step"}, "aot_eager", "recompile-shape", "size mismatch"),
    "item": ("reads", {}, "aot_eager", "host-read", ".item()"),
    "lengths as a tensor": (
        "lengths",
        {"args": {"method": "lengths", "tensor": True}},
        "aot_eager",
        "attention-lengths",
        "PendingUnbackedSymbolNotFound",
    ),
    "lengths as a list, static": ("lengths", {}, "aot_eager", "attention-lengths", "actual_seq_lengths_kv[0] == "),
    "decomposition": ("decomposed", {"setup": "model:wrong_decomposition"}, "force_eager", "differs", "step 1"),
    "pattern": (
        "fused",
        {"setup": "model:wrong_pattern", "options": {}},
        "npugraph_ex",
        "differs",
        "step 1",
    ),
    "nothing saved": ("nothing", {}, "cache", "not-saved", "found 0 saved graphs"),
    "reload": ("writes_a_view", {}, "cache", "not-loaded", "a fresh process can't run what was saved"),
    "address in the repr": ("good", {"config": {"address": "fixed"}}, "cache", "inert", "str(model) differs between"),
    "address each time": ("good", {"config": {"address": "each time"}}, "cache", "inert", "another text each time"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BROKEN)
def test_broken_model_lands_on_its_stage(triage: Callable[..., Triaged], name: str) -> None:
    """Stage, kind, and the thing itself; what comes after is skipped."""
    method, recipe, stage, kind, words = BROKEN[name]

    found = triage(method, **recipe)

    verdicts = [item["verdict"] for item in found.report["stages"]]
    assert (1, stage, kind) == (found.returncode, found.stage, found.kinds[0])
    assert words in found.findings[0]["what"]
    steps = [item["next"] for item in found.findings if item["next"]]
    assert steps
    assert set(steps) <= set(found.report["advice"])
    assert {"skipped"} >= set(verdicts[[item["stage"] for item in found.report["stages"]].index(stage) + 1 :])


@pytest.mark.nightly
def test_wrong_pattern_is_found_by_its_option(triage: Callable[..., Triaged]) -> None:
    """A default of the wheel's, not the recipe's: pattern_fusion_pass."""
    found = triage("fused", setup="model:wrong_pattern", options={})

    assert ["pattern_fusion_pass"] == [item["option"] for item in found.findings if item["kind"] == "option"]


@pytest.mark.nightly
def test_static_kernels_that_run_the_step_twice_are_found(triage: Callable[..., Triaged]) -> None:
    """A real option: to find its kernels the runtime runs the first step once more, and this one adds to its cache."""
    found = triage("good", options={"static_kernel_compile": True})

    (option,) = [item for item in found.findings if item["kind"] == "option"]
    assert ("npugraph_ex", "static_kernel_compile") == (found.stage, option["option"])
    assert "adds twice" in option["next"]


@pytest.mark.nightly
def test_lengths_as_a_list_are_right_when_dynamic(triage: Callable[..., Triaged]) -> None:
    """The guide's own pair: list[int] and dynamic: true."""
    found = triage("lengths", dynamic=True)

    assert (0, None) == (found.returncode, found.stage), found.report


@pytest.mark.nightly
def test_graph_engine_stops_after_aot_eager(triage: Callable[..., Triaged]) -> None:
    """Eager and Dynamo are shown; GE is not compiled."""
    found = triage("good", mode="ge_graph", options={})

    assert (0, ["ok", "ok", "skipped", "skipped", "skipped"]) == (
        found.returncode,
        [item["verdict"] for item in found.report["stages"]],
    )


@pytest.mark.nightly
def test_world_of_two_ranks_is_right(tmp_path: Path) -> None:
    """Collectives in the graph: every stage in as many processes, over gloo."""
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    program.write_recipe(2)

    done = program.cachectl("triage", "recipe.yaml", "--json", "--keep", "logs")

    report = json.loads(done.stdout)
    assert (0, None) == (done.returncode, report["stage"]), report
    assert {"triage-eager.rank0.log", "triage-eager.rank1.log"} <= {
        path.name for path in (program.folder / "logs").iterdir()
    }
