"""Parts of a check's trace: Dynamo's words, stacks, bindings, and graphs that no machine without an NPU can trace."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from cachectl.build.checking_graph import GraphReading, read_graph
from cachectl.build.checking_places import Findings, Places
from cachectl.build.checking_rules import Owner, Rules
from cachectl.build.checking_state import State
from cachectl.build.checking_trace import CaseTrace, rule_of_break


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Data-dependent branching\n  Explanation: Detected data-dependent branching", "tensor-branch"),
        ("Failed to trace builtin operator\n  builtin `print` with argument types ['str']", "print"),
        ("logging.Logger method not supported for non-export cases", "print"),
        ("Cannot compare GetAttrVariable(LoggingLoggerVariable(), name)", "print"),
        ("Unsupported Tensor.backward() call", "backward"),
        ("Tensor.tolist() with non-integer tensor", "host-sync"),
        ("Could not guard on data-dependent expression u0 > 3", "host-sync"),
        ("Dynamic shape operator (no meta kernel)\n aten.nonzero.default", "data-dependent-shape"),
        ("Operator does not support running with fake tensors", "no-meta-kernel"),
        ("Observed exception\n  Explanation: Dynamo found no exception handler", "does-not-run"),
        ("Attempted to call torch.npu.synchronize", "stream-sync"),
        ("Call to `torch._dynamo.graph_break()`", "graph-break"),
        ("reading an upstream file", "graph-break"),
    ],
)
def test_reason_of_dynamo_names_the_rule(text: str, rule: str) -> None:
    """In the words of torch 2.13."""
    assert rule == rule_of_break(text)


def test_place_is_the_innermost_frame_below_the_recipes_roots(tmp_path: Path) -> None:
    """Not the library it calls, not torch; without one of its own, the innermost that is no library of ours."""
    own, other = tmp_path / "model.py", Path(os.path.realpath(__file__))
    inner = f'  File "{torch.__file__}", line 5, in f\n'
    text = f'  File "{own}", line 3, in decode\n    x\n  File "{other}", line 7, in helper\n{inner}'
    places = Places({"recipe": tmp_path})

    assert (os.path.realpath(own), 3) == places.of_text(text)
    assert (str(other), 7) == Places({"recipe": tmp_path / "elsewhere"}).of_text(text)
    assert None is places.of_text(inner)
    assert None is places.of_text(None)


def test_place_of_a_store_tells_binding_from_writing_in_place(tmp_path: Path) -> None:
    """`self.cache[0] = x` writes a buffer and binds a list's member; a tuple of targets is looked into."""
    path = tmp_path / "stores.py"
    path.write_text(
        "def step(self, x):\n    self.cache[0] = x\n    self.other = x\n    x, self.cache = x, x + 1\n    return x\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    code, places = namespace["step"].__code__, Places({"recipe": tmp_path})

    assert (str(path), 4) == places.of_store("layers.0.cache", (), code)
    assert (str(path), 2) == places.of_store("cache[0]", (), code)
    assert None is places.of_store("gone", (), code)


def test_finding_is_kept_once_for_its_place_and_method(tmp_path: Path) -> None:
    """Layers and cases repeat it; another method is another finding. Paths below the recipe are relative."""
    findings = Findings(tmp_path)
    for method in ("a", "a", "b"):
        findings.add("print", "error", "words", place=(str(tmp_path / "m" / "x.py"), 4), method=method)

    assert [("m/x.py", 4, "a"), ("m/x.py", 4, "b")] == [
        (found["path"], found["line"], found["method"]) for found in findings.documents()
    ]
    assert findings.has("print", method="a")
    assert not findings.has("print", method="c")
    assert findings.stand_at((str(tmp_path / "m" / "x.py"), 4))


def test_state_sees_and_undoes_what_is_bound_anew() -> None:
    """Attributes, buffers, and members of lists and dicts at any depth."""
    model = torch.nn.Module()
    model.register_buffer("steps", torch.zeros(2))
    model.caches = {"k": [torch.zeros(2)]}
    model.count = 1
    kept = (model.steps, model.caches["k"][0])
    state = State(model, {})
    model.steps = model.steps + 1
    model.caches["k"][0] = torch.ones(2)
    model.count += 1
    model.late = 3

    assert {"steps", "caches['k'][0]", "count"} == {name for name, _, _ in state.bound_anew()}
    state.restore()
    assert [] == state.bound_anew()
    assert (True, True) == (kept[0] is model.steps, kept[1] is model.caches["k"][0])
    assert not hasattr(model, "late")


def test_state_names_a_tensor_by_what_owns_it_first() -> None:
    """An argument that is the model's cache is the model's."""
    model = torch.nn.Linear(2, 2)
    model.cache = torch.zeros(2)
    state = State(model, {"x": torch.ones(2), "past": model.cache})

    assert [
        Owner("parameter", "weight"),
        Owner("parameter", "bias"),
        Owner("state", "cache"),
        Owner("argument", "x"),
    ] == [owner for _, owner in state.tensors()]


def test_triton_kernel_in_a_graph_is_found(tmp_path: Path) -> None:
    """By the name of Dynamo's operator for one: there is no triton for CPUs to trace."""

    def triton_kernel_wrapper_mutation(x: Any) -> Any:
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(triton_kernel_wrapper_mutation, (x,)))
    found = _read(fx.GraphModule(torch.nn.Module(), graph), tmp_path)

    assert ["triton-kernel"] == [item["rule"] for item in found]


def test_graph_that_can_not_be_run_again_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """The fault is kept, and the names of the nodes are read all the same."""

    def fails(x: Any) -> Any:
        raise NotImplementedError("once only")

    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(fails, (x,))
    graph.output(graph.call_method("cpu", (y,)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    reading = read_graph(module)

    assert isinstance(reading.fault, NotImplementedError)
    assert ["host-sync"] == [item["rule"] for item in _read(module, tmp_path, reading)]


class _Sized(torch.nn.Module):
    def main_decode(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return x * torch.ones(lengths[0] * 4096, 256).tril()[:, :1]


def test_reading_of_a_size_that_changes_adds_no_guard_of_its_own(tmp_path: Path) -> None:
    """How large the mask is depends on a length: asking for it must not tie the trace to that length."""
    fakes, findings, model = FakeTensorMode(allow_non_fake_inputs=True), Findings(tmp_path), _Sized()
    with fakes:
        inputs = {"x": torch.ones(4), "lengths": [5, 7]}
    recipe = {"compile": {"mode": "npugraph_ex", "dynamic": True}, "device": "npu"}
    places = Places({"recipe": tmp_path})
    CaseTrace(
        model,
        model.main_decode,
        inputs,
        name="main_decode",
        fakes=fakes,
        places=places,
        findings=findings,
        recipe=recipe,
    ).run()

    assert ["large-mask"] == [item["rule"] for item in findings.documents()]


class _Layers(torch.nn.Module):
    """Two layers that look their tables up by themselves, and attend in three operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.register_buffer("cos_cached", torch.zeros(8, 4))
        self.gate = torch.nn.Linear(4, 4)

    def each(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x * torch.index_select(layer.cos_cached, 0, positions.view(-1))
        return x

    def once(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos = torch.index_select(self.layers[0].cos_cached, 0, positions.view(-1))
        for _ in self.layers:
            x = x * cos
        return x

    def parts(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads = x[:, None]
        weights = (heads @ heads.transpose(1, 2)).masked_fill(positions[:, None] > 8, -1.0).softmax(-1)
        return weights.to(x.dtype) @ heads

    def fused(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])

    def gated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return (self.gate(x).softmax(-1)[:, None] @ x[:, :, None]).squeeze(1)


@pytest.mark.parametrize(
    ("method", "rules"),
    [
        ("each", ["computed-rotary"]),
        ("once", []),
        ("parts", ["fused-attention"]),
        ("fused", []),
        ("gated", []),
    ],
)
def test_work_that_each_layer_repeats_or_does_in_parts_is_advised_against(
    tmp_path: Path, method: str, rules: list[str]
) -> None:
    """One lookup for all layers, one operator for attention; a gate's softmax is no attention."""
    fakes, findings = FakeTensorMode(allow_non_fake_inputs=True), Findings(tmp_path)
    with fakes:
        model = _Layers()
        inputs = {"x": torch.ones(2, 4), "positions": torch.zeros(2, dtype=torch.long)}
    CaseTrace(
        model,
        getattr(model, method),
        inputs,
        name=method,
        fakes=fakes,
        places=Places({"recipe": tmp_path}),
        findings=findings,
        recipe={"compile": {"mode": "npugraph_ex", "dynamic": False}, "device": "npu"},
    ).run()

    advised = [item for item in findings.documents() if item["severity"] == "advice"]
    assert rules == [item["rule"] for item in advised]


def _read(module: fx.GraphModule, folder: Path, reading: GraphReading | None = None) -> list[dict[str, Any]]:
    """Return the findings of a graph that no model made."""
    findings = Findings(folder)
    rules = Rules(
        places=Places({"recipe": folder}),
        findings=findings,
        method="main_decode",
        mode="npugraph_ex",
        dynamic=False,
        simulated=False,
        listed=False,
        marked=False,
        owner_of=lambda index: None,
    )
    rules.read(reading or read_graph(module), whole=True)
    return findings.documents()
