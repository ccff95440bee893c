"""`exec --lift`: programs that call torch.compile, unchanged, on the real runtime; and torch's stances under exec."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.test_exec import named, run

pytestmark = [pytest.mark.real, pytest.mark.slow]

LIFT = ("recipe.yaml", "--lift")

# What the methods are compiled with, then one call a batch; prints by how much each differs from eager.
PROGRAM = """\
import json, sys
import torch, torch_npu
import npugraph_ex
import yaml
from tiny_decoder.inputs import decode
from tiny_decoder.model import build

recipe = yaml.safe_load(open("recipe.yaml"))
model = build(**recipe["model"]["config"])
options = recipe["compile"]["options"]

def by_call(method):
    return torch.compile(method, backend="npugraph_ex", fullgraph=True, options=options)

def by_decorator(method):
    return torch.compile(backend="npugraph_ex", fullgraph=True, dynamic=False, options=options)(method)

def by_object(method):
    config = npugraph_ex.CompilerConfig()
    config.frozen_parameter = True
    return torch.compile(method, backend=npugraph_ex.get_npu_backend(compiler_config=config), fullgraph=True)

def gap(compiled, batch):
    inputs = decode(model, 0, batch=batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    got = compiled(**inputs).clone()
    model.load_state_dict(before)
    return float((model.main_decode(**inputs) - got).abs().max())

model.layers[0].attention.scale *= float(sys.argv[1])
with torch.no_grad():
    made = [how(model.main_decode) for how in (by_call, by_decorator, by_object)[: int(sys.argv[2])]]
    gaps = [gap(compiled, batch) for compiled, batch in zip(made, (4, 2, 4))]
    gaps.append(gap(made[0], 4))
print(json.dumps(gaps))
"""

# Compiles of all kinds within one process; nothing is compiled in earnest, since the stance says so.
OTHERS = """\
import functools, json
import torch, torch_npu, npugraph_ex

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return x * self.weight
    def main_decode(self, x):
        return x * self.weight

def function(x):
    return x * 1

model, relu = Model(), torch.ops.aten.relu.default
given = functools.partial(torch.compile, backend="npugraph_ex", fullgraph=True)
torch.compiler.set_stance("force_eager")
made = [
    given(function),
    given(model),
    torch.compile(model.main_decode, backend="npugraph_ex"),
    given(model.main_decode, mode="reduce-overhead"),
    given(model.main_decode, disable=True),
    given(model.main_decode, options={"frozen": True}),
    given(model.main_decode, backend=npugraph_ex.get_npu_backend(custom_decompositions={relu: function})),
    torch.compile(function),
    given(model.main_decode, backend="eager"),
    given(model.main_decode, backend=torch.npu.npugraph_ex.compile_fx),
    given(model.main_decode, backend=torch._dynamo.lookup_backend("npugraph_ex")),
]
model.compile(backend="npugraph_ex", fullgraph=True)
values = [compiled(torch.tensor([1.0, 2.0])).tolist() for compiled in (*made, model)]
errors = []
for call in (
    lambda: torch.compile(function, backend="nothing"),
    lambda: torch.compile()(None),
    lambda: torch.compile(function, nonsense=1),
    lambda: given(model.main_decode, mode="default", options={"frozen_parameter": True}),
):
    try:
        call()
    except Exception as error:
        errors.append(type(error).__name__)
print(json.dumps([values, errors, type(made[1]).__name__]))
"""

# A steady state that vouches for its calls, after a call that is not compiled at all.
STANCES = """\
import json
import torch, torch_npu
import yaml
from tiny_decoder.inputs import decode
from tiny_decoder.model import build

recipe = yaml.safe_load(open("recipe.yaml"))
model = build(**recipe["model"]["config"])
cached = torch.npu.npugraph_ex.inference.cache_compile(
    model.main_decode, dynamic=False, options=recipe["compile"]["options"]
)

def gap():
    inputs = decode(model, 0, batch=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    got = cached(**inputs).clone()
    model.load_state_dict(before)
    return float((model.main_decode(**inputs) - got).abs().max())

def compared(*args, **kwargs):
    raise AssertionError("a call was compared")

with torch.no_grad():
    with torch.compiler.set_stance("force_eager"):
        gaps, outcomes = [gap()], [cached.outcome]
    gaps.append(gap())
    outcomes.append(cached.outcome)
    for case in cached.cases:
        case.fits = case.ambient_holds = compared
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        gaps += [gap(), gap()]
print(json.dumps([gaps, outcomes]))
"""


def test_lift_each_form_of_torch_compile_is_warm_and_right(program: Any) -> None:
    """torch.compile of a bound method, called, as a decorator, with the backend as an object: loaded, not compiled."""
    (program.folder / "serve.py").write_text(PROGRAM)

    report, gaps, stderr = run(program, LIFT, "serve.py", "1.0", "3")

    assert ("warm", [], 3) == (report["outcome"], report["reasons"], len(report["proofs"])), stderr
    assert max(gaps) < 1e-3


def test_lift_changed_part_is_cold_and_right(program: Any) -> None:
    """What does not hold is torch.compile's, as without us, and the reason is told."""
    (program.folder / "serve.py").write_text(PROGRAM)

    report, gaps, _ = run(program, LIFT, "serve.py", "2.0", "1")

    assert ("cold", [("guards", "self.layers[0].attention.scale")]) == (report["outcome"], named(report))
    assert max(gaps) < 1e-3


def test_lift_attribute_changed_between_calls_is_cold_and_right(program: Any) -> None:
    """torch.compile guards each call, so a lifted one does: what was warm goes back to torch when the model changes."""
    change = "    gaps.append(gap(made[0], 4))\n"
    assert PROGRAM.count(change) == 1
    serve = PROGRAM.replace(change, change + "    model.layers[0].attention.scale *= 3.0\n" + change)
    (program.folder / "serve.py").write_text(serve)

    report, gaps, stderr = run(program, LIFT, "serve.py", "1.0", "1")

    assert ("cold", [("guards", "self.layers[0].attention.scale")]) == (report["outcome"], named(report)), stderr
    assert 1 == len(report["proofs"])
    assert [] == report["proofs"][0]["failed"]
    assert max(gaps) < 1e-3


def test_lift_compile_it_cannot_prove_is_left_to_torch_with_the_reason(program: Any) -> None:
    """Functions, whole modules, other modes and backends: torch's own objects, values and errors."""
    (program.folder / "serve.py").write_text(OTHERS)

    report, (values, errors, module), stderr = run(program, LIFT, "serve.py")

    assert [[1.0, 2.0]] * 12 == values
    # As torch raises them without us.
    assert ["InvalidBackend", "RuntimeError", "TypeError", "RuntimeError"] == errors
    assert "OptimizedModule" == module
    said = [(reason["part"], reason["name"], reason["wanted"]) for reason in report["reasons"]]
    assert [
        ("model", "torch.compile", "function, which is no bound method"),
        ("model", "torch.compile", "a whole module"),
        ("options", "fullgraph", False),
        ("options", "mode", "reduce-overhead"),
        ("options", "disable", "given as disable="),
        ("options", "torch.compile", "compile.options: this torch_npu has no option 'frozen'"),
        ("options", "custom_decompositions", "given to get_npu_backend"),
        # The one that was lifted was called where gradients are made.
        ("guards", "grad_mode", True),
        ("options", "backend", "inductor"),
        ("options", "backend", "eager"),
        ("options", "backend", "torch_npu.npu.npugraph_ex.compile_fx"),
    ] == said, stderr


def test_without_lift_torch_compile_is_left_alone_and_the_option_named(program: Any) -> None:
    """The report says what would have used the hand-out."""
    serve = (
        "import json, torch; torch.compile(len, backend='npugraph_ex'); print(json.dumps([torch.compile.__module__]))"
    )

    report, found, _ = run(program, ("recipe.yaml",), "-c", serve)

    assert ("unused", ["torch"]) == (report["outcome"], found)
    assert [("policy", "cache_compile")] == named(report)
    assert "--lift" in report["reasons"][0]["hint"]


def test_compile_switched_off_is_cold_with_the_switch_named(program: Any) -> None:
    """torch compiles nothing, so nothing handed out is used; the setting is told."""
    (program.folder / "serve.py").write_text(PROGRAM)

    report, gaps, _ = run(program, LIFT, "serve.py", "1.0", "1", TORCHDYNAMO_DISABLE="1")

    assert ("cold", [("environment", "TORCHDYNAMO_DISABLE")]) == (report["outcome"], named(report))
    assert max(gaps) < 1e-3


def test_stances_of_the_program_are_obeyed(program: Any) -> None:
    """force_eager bars what was handed out; inside skip_guard_eval_unsafe a call is not compared, and is right."""
    (program.folder / "serve.py").write_text(STANCES)

    report, (gaps, outcomes), _ = run(program, ("recipe.yaml",), "serve.py")

    assert ["inert", "warm"] == outcomes
    assert max(gaps) < 1e-3
    assert ("warm", [("policy", "torch.compiler.set_stance")]) == (report["outcome"], named(report))
