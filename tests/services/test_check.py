"""What `check` puts together: the recipe's rules, models that are good, the trace, words and documents."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cachectl.errors import BuildError, ConfigError, DocumentError, EnvironmentFault
from cachectl.schemas.check import RULES, Finding, rule_finding
from cachectl.services import check as service
from cachectl.services.check import check
from cachectl.services.checks.recipe import reference_operators
from cachectl.services.checks.tracing import Traced
from tests.services.checked import EXAMPLE, MODEL, ROOT, document, told, wheel, written


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe-dynamic.yaml", "recipe-32.yaml"])
def test_tiny_decoder_has_no_finding(name: str) -> None:
    """The example follows every rule, with either attention."""
    report = check(EXAMPLE / name, traces=False)

    assert ["ladder", "mode"] == sorted(item.rule for item in report.findings)
    assert 0 == report.exit_code


@pytest.mark.parametrize(("dynamic", "methods"), [(False, "GOOD"), (True, "DYNAMIC")])
def test_zoo_methods_that_build_have_no_finding(tmp_path: Path, dynamic: bool, methods: str) -> None:
    """What builds is not complained of: states of all kinds, inputs of all kinds, outputs of all kinds."""
    from tests import zoo

    shutil.copy(zoo.ZOO / "model.py", tmp_path)
    functions = [
        {"method": name, "cases": [{"name": "one", "inputs": "model:inputs", "args": {"method": name}}]}
        for name in getattr(zoo, methods)
    ]
    recipe = document(functions=functions, compile={"options": {"frozen_parameter": True}, "dynamic": dynamic})

    assert [] == told(written(tmp_path, recipe, (tmp_path / "model.py").read_text()))


def test_zoo_methods_that_do_not_build_are_found(tmp_path: Path) -> None:
    """Of those that a build refuses the text shows all but a view that is written and a method without a graph."""
    from tests import zoo

    functions = [
        {"method": name, "cases": [{"name": "one", "inputs": "model:inputs", "args": {"method": name}}]}
        for name in zoo.BAD
    ]
    recipe = written(tmp_path, document(functions=functions), (zoo.ZOO / "model.py").read_text())

    found = {rule for rule, _, _ in told(recipe)}

    assert {"parameter-written", "input-type", "changed-attribute", "rebound-buffer"} == found


def test_ranked_zoo_has_no_finding(tmp_path: Path) -> None:
    """Collectives, process groups and a method that some ranks lack are no findings."""
    model = (ROOT / "tests" / "rank_zoo" / "model.py").read_text()
    functions = [
        {"method": name, "cases": [{"name": "one", "inputs": "model:inputs"}]} for name in ("main_decode", "mtp_decode")
    ]

    assert [] == told(written(tmp_path, document(functions=functions, topology={"world_size": 4}), model))


def test_pair_of_models_of_one_class_is_advised_methods_of_their_own(tmp_path: Path) -> None:
    """cachectl keeps the two apart, and the runtime's own cache need not: to be known, and no finding."""
    model = (ROOT / "tests" / "rank_zoo" / "model.py").read_text()
    functions = [
        {"method": name, "cases": [{"name": "one", "inputs": "model:pair_inputs"}]}
        for name in ("main.main_decode", "draft.main_decode")
    ]
    recipe = document(
        functions=functions, topology={"world_size": 4}, model={"factory": "model:build_pair", "path": ["."]}
    )

    assert [("several-traces", "advice")] == [found[:2] for found in told(written(tmp_path, recipe, model))]


# The recipe.


def test_wrong_options_are_found_at_their_line_with_the_nearest_name(tmp_path: Path) -> None:
    """An unknown name, a value of another kind, a value that is no choice, and a handle."""
    options = {"frozen_parameters": True, "capture_limit": "many", "frozen_parameter": "yes", "use_graph_pool": 1}
    recipe = written(tmp_path, document(compile={"options": options}))
    lines = {
        name: number
        for number, line in enumerate(recipe.read_text().splitlines(), 1)
        for name in options
        if f'"{name}"' in line
    }

    report = check(recipe, traces=False, search_path=wheel(tmp_path / "site"))

    found = {(item.rule, item.line): item for item in report.findings if item.line in lines.values()}
    assert "did you mean frozen_parameter?" == found["unknown-option", lines["frozen_parameters"]].rewrite
    assert "it takes a int, as 64" == found["option-value", lines["capture_limit"]].rewrite
    assert "it takes: True, False" == found["option-value", lines["frozen_parameter"]].rewrite
    assert ("option-value", lines["use_graph_pool"]) in found


def test_old_torch_is_found(tmp_path: Path) -> None:
    """npugraph_ex needs PyTorch 2.6."""
    recipe = written(tmp_path, document())

    found = told(recipe, search_path=wheel(tmp_path / "site"))

    assert ("torch-version", "error", None) in found


def test_forgotten_options_are_advice(tmp_path: Path) -> None:
    """A recipe without frozen_parameter and TASK_QUEUE_ENABLE is told, and passes."""
    recipe = document(environment={"TASK_QUEUE_ENABLE": "1"})
    recipe["compile"], recipe["environment"] = {}, {}

    report = check(written(tmp_path, recipe), traces=False)

    assert 2 == [item.rule for item in report.findings].count("forgotten-option")
    assert 0 == report.exit_code


def test_options_as_the_guide_writes_them_are_right(tmp_path: Path) -> None:
    """Its whole table, with defaults and None; input tensors that are not cloned are told of."""
    options = {
        "force_eager": False, "inplace_pass": True, "input_inplace_pass": True, "pattern_fusion_pass": True,
        "reuse_graph_pool_in_same_fx": True, "clone_input": True, "clone_output": False, "use_graph_pool": None,
        "static_kernel_compile": False, "remove_noop_ops": True, "frozen_parameter": True, "capture_limit": 64,
    }  # fmt: skip
    recipe = written(tmp_path, document(compile={"options": options}))
    assert [] == told(recipe)

    written(tmp_path, document(compile={"options": {**options, "clone_input": False}}))
    assert [("option-value", "advice")] == [found[:2] for found in told(recipe)]


@pytest.mark.parametrize(("method", "rules"), [("prefill", ["compiled-prefill"]), ("decode_no_prefill", [])])
def test_recipe_of_a_prefill_is_found(tmp_path: Path, method: str, rules: list[str]) -> None:
    """Prefill stays eager: each prompt's length would be another graph."""
    functions = [{"method": method, "cases": [{"name": "one", "inputs": "model:inputs"}]}]
    recipe = written(tmp_path, document(functions=functions), MODEL.replace("main_decode", method))

    assert rules == [rule for rule, _, _ in told(recipe)]


def test_task_queue_of_two_is_an_error(tmp_path: Path) -> None:
    """The runtime takes 0 and 1, and frameworks set 2 for eager."""
    recipe = written(tmp_path, document(environment={"TASK_QUEUE_ENABLE": "2"}))

    assert "option-value" in [rule for rule, severity, _ in told(recipe) if severity == "error"]


def test_advice_is_given_to_every_recipe_and_is_no_finding(tmp_path: Path) -> None:
    """The mode's maturity and the ladder stand last."""
    report = check(written(tmp_path, document()), traces=False)

    assert ["mode", "ladder"] == [item.rule for item in report.findings[-2:]]
    assert "not for commercial use" in next(item.what for item in report.findings if item.rule == "mode")
    assert 0 == report.exit_code


def test_dynamic_without_numbers_is_advised_static(tmp_path: Path) -> None:
    """Tensors alone need no dynamic graph."""
    compiled = {"options": {"frozen_parameter": True}, "dynamic": True}
    recipe = written(tmp_path, document(compile=compiled))

    assert [("static-graph", "advice", None)] == told(recipe)


@pytest.mark.parametrize(("dynamic", "severity"), [(True, "warning"), (False, "error")])
def test_ge_with_list_lengths_of_torch_npu_is_found(tmp_path: Path, dynamic: bool, severity: str) -> None:
    """GE wants torchair's operator and a Tensor; where the list stays, mark_static is named."""
    model = MODEL.replace("import torch\n", "import torch\nimport torch_npu\n").replace(
        "x: torch.Tensor):\n        return x * 2",
        "x, lens: list[int]):\n"
        "        return torch_npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=lens)[0]",
    )
    model = model.replace('{"x": torch.ones(2)}', '{"x": torch.ones(2), "lens": [3, 4]}')
    recipe = document()
    recipe["compile"] = {"mode": "ge_graph", "dynamic": dynamic}

    report = check(written(tmp_path, recipe, model), traces=False)

    found = next(item for item in report.findings if item.rule == "fia-lengths")
    assert (severity, 7) == (found.severity, found.line)
    assert "mark_static" in found.rewrite


def test_ge_with_list_lengths_and_marked_shapes_is_good(tmp_path: Path) -> None:
    """The form that is not recommended holds where mark_static is called for what is fixed."""
    model = MODEL.replace("import torch\n", "import torch\nimport torch_npu\n").replace(
        "x: torch.Tensor):\n        return x * 2",
        "x, lens: list[int]):\n"
        "        return torch_npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=lens)[0]",
    )
    model = model.replace(
        'return {"x": torch.ones(2)}',
        'x = torch.ones(2)\n    torch._dynamo.mark_static(x)\n    return {"x": x, "lens": [3, 4]}',
    )
    recipe = document()
    recipe["compile"] = {"mode": "ge_graph", "dynamic": True}

    assert [] == told(written(tmp_path, recipe, model))


def test_operator_of_torchair_under_npugraph_ex_is_found(tmp_path: Path) -> None:
    """torchair's attention is what GE can run."""
    model = MODEL.replace("import torch\n", "import torch\nimport torchair as tng\n").replace(
        "x * 2", "tng.ops.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=x)[0]"
    )

    assert [("fia-lengths", "error", 7)] == told(written(tmp_path, document(), model))


# The trace.


def test_findings_of_the_trace_are_merged_by_rule_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One finding stands for both readers; what only the trace sees comes beside it."""
    recipe = written(tmp_path, document(), MODEL.replace("x * 2", "x * x.sum().item()"))
    both = rule_finding("host-sync", "error", "read while tracing", path="model.py", line=6)
    placeless = rule_finding("host-sync", "error", "somewhere", method="main_decode")
    alone = rule_finding("recompile", "error", "the second step is traced again", path="model.py", line=5)
    found = Traced((both, placeless, alone), (("main_decode", "one"),), ("a note",))
    monkeypatch.setattr(service, "trace", lambda *args, **options: found)

    report = check(recipe)

    assert [("recompile", 5), ("host-sync", 6)] == [
        (item.rule, item.line) for item in report.findings if item.severity == "error"
    ]
    assert (("main_decode", "one"),) == report.traced
    assert ("a note",) == report.notes


def test_sine_that_the_trace_sees_is_a_finding_where_the_source_is_another_package_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.sin is an activation, too: where the text was read and shows no positions it is advice."""
    recipe = written(tmp_path, document(), MODEL.replace("x * 2", "torch.sin(x)"))
    sine = [
        rule_finding("computed-rotary", "warning", "sin in the graph", path=path, line=6, method="main_decode")
        for path in ("model.py", "/opt/site-packages/other/rope.py")
    ]
    monkeypatch.setattr(service, "trace", lambda *args, **options: Traced(tuple(sine)))

    found = [(item.path, item.severity) for item in check(recipe).findings if item.rule == "computed-rotary"]

    assert [("/opt/site-packages/other/rope.py", "warning"), ("model.py", "advice")] == found


def test_without_torch_the_source_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without torch says so in one line."""
    monkeypatch.setattr("cachectl.services.checks.tracing.package_folder", lambda name: None)

    report = check(written(tmp_path, document(), MODEL.replace("x * 2", "x * x.sum().item()")))

    assert ("not traced: torch is not installed here",) == report.notes
    assert 1 == report.exit_code


def failing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process that traces end with an error, on a machine that has torch."""

    def end(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("cachectl.services.checks.tracing.package_folder", lambda name: Path())
    monkeypatch.setattr("cachectl.services.checks.tracing.run_phase", end)


def test_trace_that_dies_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ran out of time, or was killed, has not said that the model is good."""
    failing(BuildError("rank 0 did not finish check within 1 s"), monkeypatch)

    report = check(written(tmp_path, document()))

    assert ["does-not-run"] == [item.rule for item in report.findings if item.severity == "error"]
    assert 1 == report.exit_code


def test_trace_without_a_runtime_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is installed and can't be imported: the source was read all the same."""
    failing(EnvironmentFault("torch can't be imported: ImportError: libascendcl.so"), monkeypatch)

    report = check(written(tmp_path, document()))

    assert ("not traced: torch can't be imported: ImportError: libascendcl.so",) == report.notes
    assert 0 == report.exit_code


def test_trace_whose_code_raises_names_the_way_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recipe's code raises is the recipe's fault; the source can be read nevertheless."""
    failing(ConfigError("model.factory model:build raised FileNotFoundError", hint="look there"), monkeypatch)

    with pytest.raises(ConfigError, match="look there; check --no-trace reads the source alone") as raised:
        check(written(tmp_path, document()))

    assert 2 == raised.value.exit_code


# Words and documents.


def test_finding_is_the_same_after_its_document() -> None:
    """Findings travel between processes as JSON."""
    finding = rule_finding("print", "error", "`print(x)`", path="model.py", line=3, method="main_decode")

    assert finding == Finding.from_document(json.loads(json.dumps(finding.as_document())))


@pytest.mark.parametrize("change", [{"severity": "fatal"}, {"line": "3"}, {"rule": None}, {"more": 1}])
def test_document_that_is_no_finding_is_refused(change: dict[str, Any]) -> None:
    """What a rank process writes is read strictly."""
    document = {**rule_finding("print", "error", "`print(x)`").as_document(), **change}

    with pytest.raises(DocumentError, match="no finding"):
        Finding.from_document(document)


def test_document_describes_every_rule() -> None:
    """docs/check.md and the table of rules name the same rules."""
    text = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", text))

    assert set() == RULES.keys() - named


def test_reference_operators_are_those_of_the_simulation() -> None:
    """They are read as text, since importing them imports torch."""
    _, _, text = (
        (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8").partition("## Operators with a CPU reference")
    )
    listed = {name.partition(".")[0] for name in re.findall(r"^\| `(\w[\w.]*)` \|", text, re.MULTILINE)}

    assert listed == set(reference_operators())
