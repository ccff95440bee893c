"""What a trace under fake tensors shows: each planted violation at its line, and nothing where there is none.

One rank process reads every recipe here, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachectl.build.job import CaseJob, Job
from cachectl.build.launcher import run_phase
from cachectl.runtimes.simulated import environment
from cachectl.schemas.check import RULES, Finding
from cachectl.schemas.recipe import Recipe
from tests.zoo import DYNAMIC, GOOD, ZOO

# One process compiles or traces all of it: minutes on a machine that others load.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

PLANTED = Path(__file__).parent / "checking_zoo" / "planted.py"
SOURCE = PLANTED.read_text().splitlines()
METHODS = [line.split("def ")[1].split("(")[0] for line in SOURCE if line.startswith(("    def bad_", "    def good_"))]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-decoder"

# Method: rule, severity, and what the line that is named holds.
TABLE: dict[str, tuple[str, str, str]] = {
    "bad_random_numbers": ("random-numbers", "error", "torch.randn(ROWS"),
    "bad_dropout": ("random-numbers", "error", "training=True"),
    "bad_item": ("host-sync", "error", "x.sum().item()"),
    "bad_int": ("host-sync", "error", "int(x.sum())"),
    "bad_tolist": ("host-sync", "error", "tolist()"),
    "bad_numpy": ("host-sync", "error", "x.numpy()"),
    "bad_cpu": ("host-sync", "error", "x.cpu()"),
    "bad_tensor_branch": ("tensor-branch", "error", "if x.sum() > 0"),
    "bad_tensor_loop": ("tensor-branch", "error", "while x.sum() < 3"),
    "bad_data_dependent_shape": ("data-dependent-shape", "error", "x[x > 0]"),
    "bad_print": ("print", "error", 'print("step", x.shape)'),
    "bad_logging": ("print", "error", "log.warning"),
    "bad_grown_cache": ("grown-cache", "error", "torch.cat((self.past"),
    "bad_grown_argument": ("grown-cache", "error", "torch.cat([past_key"),
    "bad_returned_cache": ("returned-cache", "warning", "return x * 2, self.kv_cache"),
    "bad_returned_argument": ("returned-cache", "warning", "return x * 2, past"),
    "bad_rebound_list": ("rebound-buffer", "error", "self.kv_list[layer] ="),
    "bad_rebound_buffer": ("rebound-buffer", "error", "self.steps = self.steps + x"),
    "bad_parameter_written": ("parameter-written", "error", "self.weight.add_(1.0)"),
    "bad_changed_attribute": ("changed-attribute", "error", "self.count += 1"),
    "bad_computed_positions": ("computed-positions", "warning", "torch.arange(x.size(1))"),
    "bad_computed_rotary": ("computed-rotary", "warning", "torch.cos(x)"),
    "bad_large_mask": ("large-mask", "warning", "torch.ones(1024"),
    "bad_non_contiguous": ("non-contiguous", "warning", "npu_rms_norm(x.t(), self"),
    "bad_stream_sync": ("stream-sync", "error", "torch.npu.synchronize()"),
    "bad_backward": ("backward", "error", ".backward()"),
    "bad_gradients": ("backward", "warning", "return self.linear(x)"),
    "bad_fia_lengths": ("fia-lengths", "error", "npu_fused_infer_attention_score"),
    "bad_fia_tensor": ("fia-lengths", "error", "npu_fused_infer_attention_score"),
    "bad_fia_air": ("fia-lengths", "error", "torch.ops.air"),
    "bad_recompile": ("recompile", "warning", "def bad_recompile"),
    "bad_simulated_operator": ("simulated-operator", "error", "npu_silu"),
    "bad_no_meta_kernel": ("no-meta-kernel", "error", "without_meta(x)"),
    "bad_does_not_run": ("does-not-run", "error", "x @ x"),
    "bad_raises": ("does-not-run", "error", 'ValueError("no such layout")'),
    "bad_graph_break": ("graph-break", "error", "graph_break()"),
    "bad_input_type": ("input-type", "error", "def bad_input_type"),
    "bad_shared_input": ("shared-input", "error", "view.add_(1.0)"),
    "bad_no_graph": ("no-graph", "error", "def bad_no_graph"),
    "bad_several_traces": ("several-traces", "warning", "def bad_several_traces"),
}
# Where the rule's own would not help.
REWRITES = {
    "bad_fia_tensor": "lengths as list[int], one number a row, with dynamic: true",
    "bad_fia_air": "call torch_npu.npu_fused_infer_attention_score, with list[int] lengths and dynamic: true",
}
# Planted for another recipe than the static one.
ELSEWHERE = {"bad_collectives", "bad_static_graph", "bad_graph_breaks_twice"}

RUN_ALL = """
import os, sys
from cachectl.build import worker
for path in sys.argv[1:]:
    os.environ.pop("CACHECTL_CHECK_REAL", None)
    if "broken" in path:
        os.environ["CACHECTL_CHECK_REAL"] = "1"
    worker.main(["check", path])
"""


def recipe_of(methods: list[str], **fields: Any) -> dict[str, Any]:
    """Return the recipe of some planted methods."""
    document = {
        "schema": "cachectl/recipe/v1",
        "name": "planted",
        "device": "simulated",
        "model": {"factory": "planted:build", "path": ["."]},
        "functions": [
            {
                "method": method,
                "cases": [{"name": "one", "inputs": "planted:inputs", "args": {"method": method.split(".")[-1]}}],
            }
            for method in methods
        ],
        **fields,
    }
    return Recipe.model_validate(document).to_document()


def job_of(recipe: Mapping[str, Any], folder: Path, workspace: Path) -> Job:
    """Return a job of all cases of a recipe, written."""
    workspace.mkdir()
    pairs = [(function["method"], case) for function in recipe["functions"] for case in function["cases"]]
    cases = tuple(CaseJob(index, method, case) for index, (method, case) in enumerate(pairs))
    job = Job(dict(recipe), folder, workspace, {}, cases, int(recipe["topology"]["world_size"]))
    job.write()
    return job


def step_zoo(methods: list[str], *, dynamic: bool) -> dict[str, Any]:
    """Return the recipe of methods of tests/step_zoo that build."""
    functions = [
        {"method": method, "cases": [{"name": "one", "inputs": "model:inputs", "args": {"method": method}}]}
        for method in methods
    ]
    model = {"factory": "model:build", "path": ["."]}
    return recipe_of([], model=model, functions=functions, compile={"dynamic": dynamic})


def example(name: str, folder: Path) -> dict[str, Any]:
    """Return one of the example's recipes, with one layer, and lay the example into `folder`."""
    if not folder.exists():
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    path = folder / name
    document = yaml.safe_load(path.read_text().replace("layers: 4", "layers: 1"))
    return Recipe.model_validate(document).to_document()


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The check's documents of every recipe of this file, by name."""
    base = tmp_path_factory.mktemp("check")
    planted = base / "planted"
    planted.mkdir()
    shutil.copy(PLANTED, planted)
    static = [*(name for name in METHODS if name not in ELSEWHERE), "draft.bad_several_traces"]
    recipes = {
        "static": (recipe_of(static), planted),
        "dynamic": (
            recipe_of(["bad_fia_lengths", "bad_static_graph", "good_fia_lengths"], compile={"dynamic": True}),
            planted,
        ),
        "breaks": (recipe_of(["bad_graph_breaks_twice"]), planted),
        "npu": (recipe_of(["good_item"], device="npu"), planted),
        "broken": (recipe_of(["good_item"], model={"factory": "planted:build", "config": {"broken": True}}), planted),
        "zoo": (step_zoo(GOOD, dynamic=False), ZOO),
        "zoo-dynamic": (step_zoo(DYNAMIC, dynamic=True), ZOO),
        "tiny": (example("recipe.yaml", base / "tiny"), base / "tiny"),
        "tiny-dynamic": (example("recipe-dynamic.yaml", base / "tiny"), base / "tiny"),
        "ge": (recipe_of(["bad_fia_air", "bad_fia_lengths"], compile={"mode": "ge_graph"}), planted),
        "ge-dynamic": (
            recipe_of(["bad_fia_air", "bad_fia_lengths"], compile={"mode": "ge_graph", "dynamic": True}),
            planted,
        ),
        # It joins a world.
        "ranks": (recipe_of(["bad_collectives"], compile={"mode": "ge_graph"}, topology={"world_size": 2}), planted),
        # Last: a process in which a program ran ends at once.
        "program": (
            recipe_of(["good_item"], device="npu", model={"factory": "cachectl.programs:model", "config": {}}),
            planted,
        ),
    }
    jobs = {name: job_of(recipe, folder, base / f"job-{name}") for name, (recipe, folder) in recipes.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *(str(job.workspace / "job.json") for job in jobs.values())],
        env=environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    return {name: json.loads((job.rank_folder(0) / "check.json").read_bytes()) for name, job in jobs.items()}


def findings(document: Mapping[str, Any], method: str | None = None) -> list[Finding]:
    """Return a document's findings, of a method or of all."""
    assert document["failure"] is None, document["failure"]
    found = [Finding.from_document(item) for item in document["findings"]]
    return [item for item in found if method is None or item.method == method]


@pytest.mark.parametrize("method", TABLE)
def test_planted_violation_is_found_at_its_line(checked: dict[str, Any], method: str) -> None:
    """Rule, severity, file, line and how to rewrite it; and no other rule in the same method."""
    rule, severity, text = TABLE[method]
    found = findings(checked["static"], method)

    assert {rule} == {item.rule for item in found}, found
    first = found[0]
    assert (severity, "planted.py") == (first.severity, first.path)
    assert first.rewrite == REWRITES.get(method, RULES[rule][1])
    assert first.line is not None
    assert text in SOURCE[first.line - 1]


def test_every_planted_method_has_its_rule() -> None:
    """A method that is planted and that no test expects would be found by nobody."""
    assert {name for name in METHODS if name.startswith("bad_")} == TABLE.keys() | ELSEWHERE


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith("good_")])
def test_rewritten_method_is_clean(checked: dict[str, Any], method: str) -> None:
    """What the rewrite says is not found again."""
    assert [] == findings(checked["static"], method)
    assert [method, "one"] in checked["static"]["traced"]


@pytest.mark.parametrize("name", ["tiny", "tiny-dynamic"])
def test_example_is_clean(checked: dict[str, Any], name: str) -> None:
    """Both recipes of the example, which follows every rule."""
    assert [] == findings(checked[name])
    assert checked[name]["traced"]


def test_models_that_build_have_no_findings(checked: dict[str, Any]) -> None:
    """But for one that returns its cache, which is slow; and a static graph is advised where nothing varies."""
    found = {(item.method, item.rule, item.severity) for item in findings(checked["zoo"])}

    assert {("returns_its_cache", "returned-cache", "warning")} == found
    assert len(GOOD) == len(checked["zoo"]["traced"])
    assert {"static-graph"} == {item.rule for item in findings(checked["zoo-dynamic"])}
    # An integer among the arguments may change.
    assert [] == findings(checked["zoo-dynamic"], "plain_values")


def test_list_lengths_with_dynamic_are_clean_and_a_static_graph_is_advised_without(checked: dict[str, Any]) -> None:
    """The same method and operator as in the static recipe, where it is an error."""
    document = checked["dynamic"]

    assert [] == findings(document, "bad_fia_lengths")
    assert ["static-graph"] == [item.rule for item in findings(document, "bad_static_graph")]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("bad_tolist", "Tensor.tolist() with non-integer tensor: Dynamo currently does not support tracing"),
        ("bad_no_meta_kernel", "checking_zoo.without_meta.default has no meta kernel: it can't run on fake tensors"),
        ("bad_raises", "ValueError('no such layout')"),
        ("bad_does_not_run", "RuntimeError('a and b must have same reduction dim, but got [2, 4] X [2, 4].')"),
        ("bad_grown_cache", "past grows by torch.cat: [2, 1, 4] becomes [2, 2, 4], another graph at each step"),
        ("bad_recompile", "a call with other values in its list of integers is traced anew: sizes[0] == 3"),
        ("bad_large_mask", "a constant of [1024, 1024], 1.0 MiB, is built at every step"),
        ("bad_changed_attribute", "count changes at each step: the second call is traced anew since self.count == 1"),
    ],
)
def test_finding_says_what_was_seen(checked: dict[str, Any], method: str, words: str) -> None:
    """Names, numbers and sizes, and Dynamo's own reason in one line."""
    (found,) = findings(checked["static"], method)

    assert found.what.startswith(words)
    assert "\n" not in found.what


def test_lengths_in_the_ge_mode_are_tensors_of_torchairs_operator(checked: dict[str, Any]) -> None:
    """With dynamic false; a list is one graph a length, and under dynamic true each of both is warned of."""
    (static,), dynamic = findings(checked["ge"]), findings(checked["ge-dynamic"])

    assert ("bad_fia_lengths", "fia-lengths", "error") == (static.method, static.rule, static.severity)
    wanted = {("bad_fia_air", "static-graph"), ("bad_fia_air", "fia-lengths"), ("bad_fia_lengths", "fia-lengths")}
    assert wanted == {(item.method, item.rule) for item in dynamic}
    assert "error" not in {item.severity for item in dynamic}


def test_program_that_would_run_on_the_npu_is_not_run(checked: dict[str, Any]) -> None:
    """Its text is read elsewhere."""
    assert ["not traced: a program that compiles by itself would run on the NPU"] == checked["program"]["notes"]
    assert ([], []) == (checked["program"]["findings"], checked["program"]["traced"])


def test_second_break_is_found_behind_the_first(checked: dict[str, Any]) -> None:
    """And what the pieces between them do."""
    rules = [item.rule for item in findings(checked["breaks"])]

    assert ["graph-break", "random-numbers", "print"] == rules


def test_model_on_the_host_is_found_where_the_recipe_says_npu(checked: dict[str, Any]) -> None:
    """The model's own tensors once, whatever the methods, and the call's."""
    model, argument = sorted(findings(checked["npu"]), key=lambda found: found.method or "")

    assert ("not-on-npu", "error", None) == (model.rule, model.severity, model.method)
    assert model.what.startswith("parameter weight and ")
    assert model.what.endswith(" more on cpu, not on the NPU")
    assert ("good_item", "argument x on cpu, not on the NPU") == (argument.method, argument.what)


def test_factory_that_raises_is_a_failure_and_no_finding(checked: dict[str, Any]) -> None:
    """The words of a ConfigError, which the launcher raises."""
    failure = checked["broken"]["failure"]

    assert "config" == failure["kind"]
    assert "model.factory planted:build raised RuntimeError: no such checkpoint" == failure["message"]


def test_one_process_is_a_rank_of_two_and_finds_collectives_without_setup(checked: dict[str, Any]) -> None:
    """No other rank runs, and the GE mode wants collectives patched."""
    (found,) = findings(checked["ranks"])

    assert ("collectives", "error") == (found.rule, found.severity)
    assert "traced as rank 0 of 2; the other ranks were not run" in checked["ranks"]["notes"]


def test_graph_is_described_in_notes(checked: dict[str, Any]) -> None:
    """Inputs, operators, and what is written in place."""
    notes = [note for note in checked["static"]["notes"] if note.startswith("good_rebound_buffer [one]: ")]

    assert ["good_rebound_buffer [one]: 2 graph inputs, 2 operators, 1 written in place: steps"] == notes


def test_factory_that_reads_values_is_made_for_real(tmp_path: Path) -> None:
    """In the same process, begun anew; the trace is of fakes all the same."""
    shutil.copy(PLANTED, tmp_path)
    recipe = recipe_of(["good_item", "bad_item"], model={"factory": "planted:build", "config": {"values": True}})
    job = job_of(recipe, tmp_path, tmp_path / "job")

    documents = run_phase(
        job,
        "check",
        environ=environment(os.environ),
        log_path=tmp_path / "log",
        timeout_s=1500,
        progress=lambda phase: None,
        rank=0,
    )

    assert [("host-sync", "bad_item")] == [(item.rule, item.method) for item in findings(documents[0])]
    assert "the model was made for real, then faked" in documents[0]["notes"][0]
