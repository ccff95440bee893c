"""Triage's steps and what Dynamo says of them, in this process: the zoo under eager and aot_eager on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
import torch._dynamo
from torch._dynamo.exc import TorchDynamoException

from cachectl.build.job import CaseJob
from cachectl.build.triage_compiled import compiled_findings, run_compiled
from cachectl.build.triage_eager import eager_findings
from cachectl.build.triage_steps import Run, Steps

ZOO = Path(__file__).resolve().parents[1] / "triage_zoo"
MODULE = "triage_zoo_model"


class Program:
    """What Steps asks of a rank's program, on one model."""

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        self.model, self._inputs = model, inputs
        self.rtol = self.atol = 1e-3

    def method(self, case: CaseJob) -> MethodType:
        method: MethodType = getattr(self.model, case.method)
        return method

    def inputs(self, case: CaseJob) -> dict[str, Any]:
        made: dict[str, Any] = self._inputs(self.model, 0, **(case.case.get("args") or {}))
        return made


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    """The zoo's module, under a name of its own."""
    spec = spec_from_file_location(MODULE, ZOO / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    config = torch._dynamo.config
    limit = config.recompile_limit
    yield module
    config.recompile_limit = limit
    torch._logging.set_logs()
    torch._dynamo.reset()
    del sys.modules[MODULE]


def steps_of(zoo: Any, method: str, *, inputs: str = "inputs", count: int = 3, **args: Any) -> Steps:
    """Return the steps of one method."""
    arguments = args or ({"method": method} if inputs == "inputs" else {})
    case = CaseJob(0, method, {"name": "one", "inputs": f"{MODULE}:{inputs}", "args": arguments})
    return Steps(Program(zoo.build(), getattr(zoo, inputs)), case, count)  # type: ignore[arg-type]


def judged(zoo: Any, method: str, **named: Any) -> tuple[str, list[dict[str, Any]]]:
    """Run a method under aot_eager; return the verdict and the findings."""
    steps = steps_of(zoo, method, **named)
    eager = steps.run(steps.method)
    assert eager.error is None
    compiled = run_compiled(
        steps, lambda: torch.compile(steps.method, backend="aot_eager", fullgraph=True, dynamic=False)
    )
    case = CaseJob(0, method, {"name": "one"})
    return compiled_findings("aot_eager", steps, case, eager, compiled, {"recipe": ZOO}, dynamic=False)


def line_of(zoo: Any, text: str) -> int:
    """Return the number of the line on which a text stands in the zoo."""
    return 1 + next(number for number, line in enumerate((ZOO / "model.py").read_text().splitlines()) if text in line)


def found_in_eager(zoo: Any, method: str) -> list[dict[str, Any]]:
    """Return what the eager stage finds."""
    steps = steps_of(zoo, method)
    return eager_findings(steps, steps.run(steps.method), {"recipe": ZOO}, dynamic=False)


def test_good_steps_are_right_in_eager_and_compiled(zoo: Any) -> None:
    """Nothing is said of a method that is as it should be, its cache put back between the runs."""
    assert [] == found_in_eager(zoo, "good")
    assert ("ok", []) == judged(zoo, "good")


def test_eager_that_raises_names_the_line(zoo: Any) -> None:
    """The model's own line, not torch's."""
    (found,) = found_in_eager(zoo, "raises")

    assert ("raises", f"model.py:{line_of(zoo, 'x[:, :3]')} in raises") == (found["kind"], found["where"])
    assert found["what"].startswith("step 1 raises RuntimeError: mat1 and mat2")


def test_eager_with_nan_names_the_operator_it_begins_in(zoo: Any) -> None:
    """The first one that makes NaN of numbers."""
    (found,) = found_in_eager(zoo, "not_a_number")

    assert "not-finite" == found["kind"]
    assert found["what"].endswith("gives NaN in output; it begins in aten._softmax.default")
    assert f"model.py:{line_of(zoo, 'torch.softmax(empty')} in not_a_number" == found["where"]


def test_eager_with_nan_from_before_names_the_tensor(zoo: Any) -> None:
    """A weight that was never loaded is no operator's fault."""
    steps = steps_of(zoo, "good")
    model: Any = steps.method.__self__
    model.linear.bias.fill_(float("nan"))

    (found,) = eager_findings(steps, steps.run(steps.method), {}, dynamic=False)

    assert "linear.bias holds NaN before the first step" in found["what"]


def test_eager_that_draws_is_not_repeatable(zoo: Any) -> None:
    """Two runs from one state have to be equal."""
    (found,) = found_in_eager(zoo, "draws")

    assert "not-repeatable" == found["kind"]
    assert found["difference"] > 0


def test_every_graph_break_is_named_with_its_line(zoo: Any) -> None:
    """A full graph ends at the first; the others are found by letting Dynamo break."""
    verdict, found = judged(zoo, "prints")

    assert "failed" == verdict
    assert [
        ("graph-break", "print", f"model.py:{line_of(zoo, 'print(')} in prints"),
        ("graph-break", "branch", f"model.py:{line_of(zoo, 'if y.sum()')} in prints"),
    ] == [(item["kind"], item["cause"], item["where"]) for item in found]


@pytest.mark.parametrize(
    ("method", "kind", "guard", "text"),
    [
        ("counts", "recompile-attribute", "self.steps == ", "self.steps += 1"),
        ("grows", "recompile-container", "self.history", "self.history.append(1)"),
        ("concatenates", "recompile-shape", "size mismatch", "def concatenates("),
    ],
)
def test_recompiles_are_told_once_with_guard_and_line(zoo: Any, method: str, kind: str, guard: str, text: str) -> None:
    """However many steps recompile, one finding a guard."""
    verdict, found = judged(zoo, method)

    assert ("failed", kind, 2) == (verdict, found[0]["kind"], found[0]["times"])
    assert guard in found[0]["what"]
    assert f"model.py:{line_of(zoo, text)} in {method}" == found[0]["where"]


def test_inputs_that_take_a_step_get_its_number(zoo: Any) -> None:
    """Serving's own inputs: here another width at each step."""
    verdict, found = judged(zoo, "widens", inputs="by_step")

    assert ("failed", "recompile-shape") == (verdict, found[0]["kind"])


def test_item_is_refused_where_dynamo_lets_it_pass(zoo: Any) -> None:
    """In the words of the build's gate, with the line."""
    verdict, found = judged(zoo, "reads")

    assert ("failed", ["host-read"]) == (verdict, [item["kind"] for item in found])
    assert f"model.py:{line_of(zoo, '.max().item()')} in reads" == found[0]["where"]
    assert "calls .item(), which reads a tensor back to the host" in found[0]["what"]


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (TorchDynamoException("Dynamic shape operator: aten.nonzero.default"), "not-traced", "dynamic-shape"),
        (TorchDynamoException("something new in the next torch"), "not-traced", None),
        (TorchDynamoException("aten._local_scalar_dense.default"), "host-read", None),
        (RuntimeError("torch.npu.synchronize() can't be captured"), "capture", "stream"),
        (RuntimeError("not while capturing"), "capture", None),
        (RuntimeError("mat1 and mat2"), "raises", None),
    ],
)
def test_error_of_a_compiled_step_is_of_a_documented_kind_with_its_cause(
    zoo: Any, error: Exception, kind: str, cause: str | None
) -> None:
    """The kind says who refused, the cause what; both stand in docs/triage.md."""

    def step(**_: Any) -> Any:
        raise error

    steps = steps_of(zoo, "good")
    compiled = run_compiled(steps, lambda: step)
    verdict, (found,) = compiled_findings(
        "npugraph_ex", steps, CaseJob(0, "good", {"name": "one"}), Run(), compiled, {}, dynamic=False
    )

    assert ("failed", kind, cause) == (verdict, found["kind"], found.get("cause"))
    document = (ZOO.parents[1] / "docs" / "triage.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in document for name in (kind, cause) if name is not None)


def test_lengths_grow_by_one_a_step(zoo: Any) -> None:
    """Host lists change from step to step in serving; with dynamic: false each value is another graph."""
    verdict, found = judged(zoo, "scaled_by", lengths=True)

    assert ("failed", "attention-lengths", 2) == (verdict, found[0]["kind"], found[0]["times"])


def test_run_puts_back_lists_tensors_and_what_is_bound_anew(zoo: Any) -> None:
    """Each run starts where the first one did."""
    for method in ("counts", "grows", "concatenates", "good"):
        steps = steps_of(zoo, method)
        assert steps.difference(steps.run(steps.method), steps.run(steps.method)) is None
        model: Any = steps.method.__self__
        assert (1, [], (2, 1), 0.0) == (model.steps, model.history, tuple(model.past.shape), float(model.cache.sum()))


def test_difference_says_step_and_state(zoo: Any) -> None:
    """The first place counts, the state after the outputs."""
    steps = steps_of(zoo, "good")
    one, two = torch.ones(2), torch.ones(2) * 2
    before = steps.snapshot.state()
    steps.snapshot.tensors[0][1].add_(1.0)
    after = steps.snapshot.state()

    assert "step 2: output: largest difference 1" == str(steps.difference(Run([one, one]), Run([one, two])))
    found = steps.difference(Run([one], before), Run([one], after))
    assert "the state after the last step: cache: largest difference 1" == str(found)
    assert steps.difference(Run([one], after), Run([one], after)) is None
