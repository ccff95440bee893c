"""The example decoder: right in eager mode, one graph under Dynamo, and equal through the runtime's own cache."""

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

from cachectl.runtimes.simulated import environment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-decoder"

pytestmark = pytest.mark.real


def run(*command: str, environ: Mapping[str, str], folder: Path = EXAMPLE) -> Any:
    """Run this interpreter in the example's folder and return the JSON of the last line that it printed."""
    finished = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=1000, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


def without_npu() -> dict[str, str]:
    """Return an environment in which torch is imported alone, torch_npu installed or not."""
    return {**os.environ, "PYTHONPATH": str(EXAMPLE), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def simulated() -> dict[str, str]:
    """Return an environment in which torch_npu is imported on the simulated CANN."""
    base = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    paths = [str(EXAMPLE), str(EXAMPLE.parents[1]), base.get("PYTHONPATH", "")]
    return environment({**base, "PYTHONPATH": os.pathsep.join(path for path in paths if path)})


# Written another way on purpose: complex rotation, expanded heads, torch's own attention, and no cache.
REFERENCE = """
import json, torch
from torch.nn import functional as F
from tiny_decoder import inputs
from tiny_decoder.model import build

def norm(x, layer):
    return F.rms_norm(x, (x.size(-1),), layer.weight, 1e-6)

def heads(x, linear, count, turn=None):
    x = linear(x).view(len(x), count, -1)
    if turn is not None:
        half = x.size(-1) // 2
        x = torch.view_as_real(torch.complex(x[..., :half], x[..., half:]) * turn[:, None])
        x = torch.cat((x[..., 0], x[..., 1]), -1)
    return x.transpose(0, 1)

def forward(model, tokens):
    x = model.embedding(torch.tensor(tokens))
    half = model.layers[0].attention.head_dim // 2
    angles = torch.outer(torch.arange(len(tokens)), 10000.0 ** (-torch.arange(half) / half))
    turn = torch.polar(torch.ones_like(angles), angles)
    for layer in model.layers:
        a, n = layer.attention, norm(x, layer.attention_norm)
        group = a.heads // a.kv_heads
        q, k, v = heads(n, a.query, a.heads, turn), heads(n, a.key, a.kv_heads, turn), heads(n, a.value, a.kv_heads)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.output(y.transpose(0, 1).flatten(1))
        f, n = layer.feed_forward, norm(x, layer.feed_forward_norm)
        x = x + f.down(F.silu(f.gate(n)) * f.up(n))
    return model.head(norm(x[-1], model.norm))

model = build(layers=3)
texts = inputs.prompts(4, start=5, vocab=128)
first = inputs.decode(model, 0, batch=4, start=5)
lengths, tokens, worst = first["kv_len"].tolist(), first["input_ids"], 0.0
for text, token in zip(texts, tokens.view(-1).tolist()):
    assert token == forward(model, text).argmax().item()
    text.append(token)
for _ in range(16):
    logits = model.main_decode(**inputs.step_inputs(tokens, lengths, host_lengths=False))
    worst = max(worst, (logits - torch.stack([forward(model, text) for text in texts])).abs().max().item())
    tokens = logits.argmax(-1, keepdim=True)
    lengths = [length + 1 for length in lengths]
    for text, token in zip(texts, tokens.view(-1).tolist()):
        text.append(token)
print(json.dumps(worst))
"""


def test_main_decode_sixteen_steps_after_prefill_equals_recomputation() -> None:
    """Prompts of four lengths, and at each step the logits of a whole forward over all tokens so far."""
    assert run("-c", REFERENCE, environ=without_npu()) < 1e-4


WEIGHTS = """
import hashlib, json, sys, torch
from tiny_decoder.model import build
torch.manual_seed(int(sys.argv[1]))
before = torch.get_rng_state()
model = build(seed=int(sys.argv[2]))
state = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
learning = any(parameter.requires_grad for parameter in model.parameters()) or model.training
print(json.dumps([hashlib.sha256(state).hexdigest(), learning]))
"""


def test_build_same_seed_in_two_processes_gives_equal_weights() -> None:
    """The seed alone decides the weights; the process's own random state does not; nothing is left to train."""
    first, second, other = (run("-c", WEIGHTS, *seeds, environ=without_npu()) for seeds in ("17", "27", "18"))
    assert first == second
    assert first != other
    assert first[1] is False


INPUTS = """
import json, torch
from tiny_decoder import inputs
from tiny_decoder.model import build
model = build(layers=2)
first, second = inputs.decode(model, 0), inputs.decode(model, 0)
other = inputs.decode(model, 1)
pointers = [{tensor.untyped_storage().data_ptr() for tensor in value.values()} for value in (first, second)]
print(json.dumps({
    "equal": all(torch.equal(first[name], second[name]) for name in first),
    "fresh": len(pointers[0]) == len(first) and not pointers[0] & pointers[1],
    "other_rank": torch.equal(first["input_ids"], other["input_ids"]),
    "shapes": {name: list(value.shape) for name, value in first.items()},
}))
"""


def test_decode_called_twice_gives_equal_values_in_fresh_tensors() -> None:
    """Inputs are deterministic, share no memory with each other or with the call before, and differ between ranks."""
    expected = {
        "equal": True,
        "fresh": True,
        "other_rank": False,
        "shapes": {"input_ids": [4, 1], "position_ids": [4, 1], "kv_len": [4], "actual_seq_lengths_kv": [4]},
    }
    assert expected == run("-c", INPUTS, environ=without_npu())


TRACE = """
import json, sys, torch
from torch._dynamo.utils import counters
from tiny_decoder import inputs
from tiny_decoder.model import build
attention = sys.argv[1]
host_lengths = attention == "fia"
model, eager = build(attention=attention, max_batch=4), build()
example = (inputs.decode_fia if host_lengths else inputs.decode)(model, 0)
inputs.decode(eager, 0)
caches = [buffer.data_ptr() for buffer in model.buffers()]
decode = torch.compile(model.main_decode, backend="eager", fullgraph=True, dynamic=host_lengths)
lengths, tokens, worst = example["kv_len"].tolist(), example["input_ids"], 0.0
with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
    for step in range(16):
        logits = decode(**inputs.step_inputs(tokens, lengths, host_lengths))
        wanted = eager.main_decode(**inputs.step_inputs(tokens, lengths, host_lengths=False))
        worst = max(worst, (logits - wanted).abs().max().item())
        tokens = logits.argmax(-1, keepdim=True)
        # Rows that advance by different amounts, so that no two lengths stay in step.
        lengths = [length + 1 + (row + step) % 2 for row, length in enumerate(lengths)]
print(json.dumps({
    "graphs": counters["stats"]["unique_graphs"],
    "breaks": sum(counters["graph_break"].values()),
    "worst": worst,
    "in_place": caches == [buffer.data_ptr() for buffer in model.buffers()],
}))
"""


@pytest.mark.parametrize("attention", ["torch", pytest.param("fia", marks=pytest.mark.slow)])
def test_main_decode_sixteen_steps_traced_is_one_graph(attention: str) -> None:
    """Whole, unbroken, never retraced while lengths change, equal to eager, and in buffers that stay where they are.

    The fused operator takes the lengths as a host list under dynamic=True, and is compared with the plain one.
    """
    traced = run("-c", TRACE, attention, environ=simulated() if attention == "fia" else without_npu())
    assert traced.pop("worst") < 1e-4
    expected = {"graphs": 1, "breaks": 0, "in_place": True}
    assert expected == traced


RECIPE = """
import importlib, json, sys, torch, yaml

def named(text):
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)

recipe = yaml.safe_load(open(sys.argv[1]))
shapes = {}
for function in recipe["functions"]:
    for case in function["cases"]:
        model = named(recipe["model"]["factory"])(**recipe["model"]["config"])
        with torch.no_grad():
            logits = getattr(model, function["method"])(**named(case["inputs"])(model, 0, **case["args"]))
        shapes[case["name"]] = list(logits.shape)
print(json.dumps([recipe["name"], shapes]))
"""


@pytest.mark.parametrize(
    ("recipe", "name", "shapes"),
    [
        ("recipe.yaml", "tiny-decoder", {"b4": [4, 128], "b2": [2, 128]}),
        ("recipe-dynamic.yaml", "tiny-decoder-dynamic", {"b4": [4, 128]}),
        ("recipe-32.yaml", "tiny-decoder-32", {"b4": [4, 128]}),
    ],
)
def test_recipe_factory_and_inputs_fit_the_method(recipe: str, name: str, shapes: dict[str, list[int]]) -> None:
    """Each recipe of the example names a factory, a method and inputs that go together."""
    assert [name, shapes] == run("-c", RECIPE, recipe, environ=simulated())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["recipe.yaml", pytest.param("recipe-dynamic.yaml", marks=pytest.mark.nightly)])
def test_generate_plain_cold_and_warm_gives_the_tokens_of_eager(recipe: str, tmp_path: Path) -> None:
    """The script through the runtime's own cache, compiled and then loaded, prints what it prints without a graph."""
    folder = tmp_path / "tiny-decoder"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    # One layer compiles in a third of the time of four, and shows the same.
    text = (folder / recipe).read_text()
    assert "layers: 4" in text
    (folder / recipe).write_text(text.replace("layers: 4", "layers: 1"))
    command = ["generate.py", "--recipe", recipe, "--steps", "12", "--json"]
    plain = [*command, "--plain", "--cache-dir", str(tmp_path / "cache")]

    eager = run(*command, "--eager", environ=simulated(), folder=folder)
    cold = run(*plain, environ=simulated(), folder=folder)
    (artifact,) = (tmp_path / "cache").rglob("compiled_module")
    saved = (artifact.read_bytes(), artifact.stat().st_mtime_ns)
    warm = run(*plain, environ=simulated(), folder=folder)

    assert eager["tokens"] == cold["tokens"] == warm["tokens"]
    assert [artifact] == list((tmp_path / "cache").rglob("compiled_module"))
    # What is compiled is saved anew.
    assert saved == (artifact.read_bytes(), artifact.stat().st_mtime_ns)
