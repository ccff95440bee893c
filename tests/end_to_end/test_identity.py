"""Options, registrations and environment on the real runtime: what the runtime loads stale, cachectl names and refuses.

One build, one process that plays every change beside the runtime's own cache, so that each costs a compile of a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import BOUND_S

pytestmark = [pytest.mark.real, pytest.mark.slow]

MODEL = """\
import os

import torch


class Model(torch.nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.factor = factor

    def main_decode(self, x):
        x = torch.sin(self.linear(x)) * self.factor
        if os.environ.get("SHIFT"):
            x = x + 1
        if "FLAG" in os.environ:
            x = x - 2
        return x * float(os.getenv("GAIN", "1"))


def build():
    factor = float(os.environ.get("FACTOR", "1"))
    return Model(factor if os.environ.get("MODE") == "on" else 5.0)


def inputs(model, rank):
    return {"x": torch.arange(16.0).reshape(2, 8) / 16}


def scale_products(graph_module, *rest, by):
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.mul.Tensor and node.args[1:] == (1.0,):
            node.args = (node.args[0], by)


def no_pass(graph_module, *rest):
    scale_products(graph_module, by=1.0)


def sin(x):
    return torch.sin(x)


def by_cos(x):
    return torch.cos(x - 1.5707963267948966)


def setup(replacement=by_cos):
    torch.npu.npugraph_ex.register_replacement(sin, replacement, [torch.ones(2, 8)])
"""
PROGRAM = """\
import functools, json, os, sys

import torch, torch_npu
import torch._dynamo
import cachectl, model
from cachectl.runtimes.npugraph_ex import NpuGraphEx

plain_dir = sys.argv[1]
runtime = NpuGraphEx()
OPTIONS = {"frozen_parameter": True, "post_grad_custom_pre_pass": model.no_pass}


def wrongly(x):
    return torch.cos(x)


def play(options=OPTIONS, environ={}, registered=model.by_cos, pointers=5, limit=5, said=(None, "", None)):
    torch._dynamo.reset()
    torch._dynamo.utils.orig_code_map.clear()
    before = dict(os.environ)
    for name, value in environ.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    if (patterns := sys.modules.get("npugraph_ex.patterns.pattern_pass_manager")) is not None:
        patterns._pattern_manager().pass_dict.patterns.clear()
        patterns._pattern_manager().pass_dict.seen_patterns.clear()
    if registered is not None:
        model.setup(registered)
    torch._dynamo.config.max_saved_pointers_for_recursive_dict_tags_check = pointers
    torch._dynamo.config.recompile_limit = limit
    place, name, value = said
    usual = getattr(place, name, None)
    if place is not None:
        setattr(place, name, value)
    try:
        decoder = model.build()
        x = model.inputs(decoder, 0)["x"]
        with torch.no_grad():
            expected = decoder.main_decode(x)
        start = cachectl.warm_start("recipe.yaml")
        ours = cachectl.cache_compile(decoder.main_decode, warm=start, dynamic=False, options=options)
        error = (ours(x=x) - expected).abs().max().item()
        torch._dynamo.reset()
        torch._dynamo.utils.orig_code_map.clear()
        plain = torch.npu.npugraph_ex.inference.cache_compile(
            decoder.main_decode, cache_dir=plain_dir, dynamic=False, options=dict(options)
        )
        plain_error = (plain(x=x) - expected).abs().max().item()
        return {
            "outcome": start.outcome,
            "reasons": [f"{reason.part} {reason.name}" for reason in start.reasons],
            "error": error,
            "plain_loaded": runtime.was_loaded(plain),
            "plain_error": plain_error,
        }
    finally:
        if place is not None:
            setattr(place, name, usual)
        os.environ.clear()
        os.environ.update(before)


other = {**OPTIONS, "inplace_pass": False}
partial = {**OPTIONS, "post_grad_custom_pre_pass": functools.partial(model.scale_products, by=3.0)}
print(json.dumps({
    "first": play(),
    "same": play(),
    "defaults": play(options={**OPTIONS, "capture_limit": 64, "clone_input": True}),
    "noise": play(environ={"HCCL_IF_IP": "10.0.0.9", "HOME": "/x", "POD_IP": "10.0.0.8", "TORCH_LOGS": "",
                           "VLLM_PORT": "1", "HCCL_CONNECT_TIMEOUT": "9", "ASCEND_RT_VISIBLE_DEVICES": "3"}, limit=6),
    "option": play(options=other),
    "pass": play(options=partial),
    "pattern": play(registered=wrongly),
    "no setup": play(registered=None),
    "dynamo": play(pointers=6),
    "init": play(environ={"FACTOR": "3"}),
    "get": play(environ={"SHIFT": "1"}),
    "in": play(environ={"FLAG": ""}),
    "float": play(environ={"GAIN": "3"}),
    "unset": play(environ={"MODE": None}),
    "family": play(environ={"ASCEND_FOO": "1"}),
    "declared": play(environ={"TASK_QUEUE_ENABLE": "0"}),
    "handle": play(options={**OPTIONS, "use_graph_pool": (0, 1)}),
    "module's version": play(said=(torch_npu, "__version__", "2.12.0")),
    "module's revision": play(said=(torch.version, "git_version", "e" * 40)),
    "unreadable CANN": play(said=(torch_npu.npu.utils, "get_cann_version", lambda module="CANN": "")),
    "SoC": play(said=(torch.npu, "get_device_name", lambda *_: "Ascend910_9391")),
    "spelling of the SoC": play(said=(torch.npu, "get_device_name", lambda *_: "910B1")),
    "again": play(),
}))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each change: ours and the runtime's own, by the change's name."""
    folder = tmp_path_factory.mktemp("identity")
    (folder / "model.py").write_text(MODEL)
    (folder / "program.py").write_text(PROGRAM)
    recipe = {
        "schema": "cachectl/recipe/v1",
        "name": "identity",
        "device": "simulated",
        "model": {"factory": "model:build", "config": {}, "path": ["."]},
        "compile": {
            "options": {"frozen_parameter": True, "post_grad_custom_pre_pass": "model:no_pass"},
            "dynamo": {"max_saved_pointers_for_recursive_dict_tags_check": 5, "recompile_limit": 5},
            "setup": "model:setup",
        },
        "functions": [{"method": "main_decode", "cases": [{"name": "b2", "inputs": "model:inputs", "args": {}}]}],
        "environment": {"TASK_QUEUE_ENABLE": "1"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    environ = {
        **os.environ,
        "CACHECTL_STORE": str(folder / "store"),
        "CACHECTL_WARM_DIR": str(folder / "warm"),
        "MODE": "on",
        "TASK_QUEUE_ENABLE": "1",
    }
    words = [sys.executable, "-m", "cachectl"]
    built = run([*words, "build", "recipe.yaml", "--json"], folder, environ)
    assert built.returncode == 0, built.stderr
    plain = str(folder / "plain")
    done = run([*words, "simulate", "--", sys.executable, "program.py", plain], folder, environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(words: list[str], folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        words,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


@pytest.mark.parametrize("name", ["first", "same", "defaults", "noise", "spelling of the SoC", "again"])
def test_what_means_the_same_is_warm(played: dict[str, Any], name: str) -> None:
    """Equal options, defaults written out, and placement: warm, and right."""
    found = played[name]

    assert ("warm", []) == (found["outcome"], found["reasons"])
    assert found["error"] < 1e-5


CHANGES = {
    # Loaded by the runtime as if nothing had changed: where that shows in the answer, it is wrong.
    "option": ("options inplace_pass", True, False),
    "pattern": ("options patterns.0 sin", True, False),
    "no setup": ("options patterns.0 sin", True, False),
    "dynamo": ("options dynamo.max_saved_pointers_for_recursive_dict_tags_check", True, False),
    "init": ("environment FACTOR", True, True),
    "get": ("environment SHIFT", True, True),
    "in": ("environment FLAG", True, True),
    "float": ("environment GAIN", True, True),
    "unset": ("environment MODE", True, True),
    "family": ("environment ASCEND_FOO", True, False),
    "declared": ("environment TASK_QUEUE_ENABLE", True, False),
    "handle": ("options use_graph_pool", True, False),
    # What the imported modules say is the truth, whatever their files say.
    "module's version": ("toolchain torch_npu.version", True, False),
    "module's revision": ("toolchain torch.git", True, False),
    "SoC": ("device soc", True, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_runtime_loads_stale_is_cold_with_one_reason(played: dict[str, Any], name: str) -> None:
    """The runtime alone loads what was compiled otherwise, and answers wrongly; ours is cold, named and right."""
    reason, loaded, wrong = CHANGES[name]
    found = played[name]

    assert ("cold", [reason]) == (found["outcome"], found["reasons"])
    assert (loaded, wrong) == (found["plain_loaded"], found["plain_error"] > 0.1)
    if name == "pattern":
        # The program's own is wrong on purpose: cold does what was registered, the runtime's stale artifact does not.
        assert found["plain_error"] < 1e-5
        assert found["error"] > 0.1
    else:
        assert found["error"] < 1e-5


def test_another_custom_pass_is_cold(played: dict[str, Any]) -> None:
    """A partial with another constant is another pass; the runtime digests its disassembly, which is empty."""
    found = played["pass"]

    assert ("cold", ["options passes.post_grad_custom_pre_pass"]) == (found["outcome"], found["reasons"])


def test_cann_version_that_cannot_be_read_is_cold(played: dict[str, Any]) -> None:
    """torch_npu says "" where it fails, and "" equals ""; here it equals nothing (V9)."""
    found = played["unreadable CANN"]

    assert "cold" == found["outcome"]
    assert "toolchain cann.CANN" == found["reasons"][0]
