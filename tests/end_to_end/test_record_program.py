"""`cachectl record` on the real runtime: what it writes of a program is built, and the program starts warm from it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.conftest import Program, RankedProgram, lay_program, lay_ranked

# Several starts of torch each, one after the other.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

EXECUTOR = Path(__file__).resolve().parents[2] / "examples" / "executor"

# A program that knows nothing of cachectl, and whose model stands in the script itself: python serve.py BATCH...
SERVE = """\
import argparse, json, os
os.environ.setdefault("TASK_QUEUE_ENABLE", "1")
import torch, torch_npu
from helpers import scaled

LAYERS = 2

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))

class Model(torch.nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.register_buffer("seen", torch.zeros(8))

    def prefill(self, x):
        return x * 2

    def main_decode(self, x, cache):
        self.seen.add_(x.sum(0))
        cache[0].add_(1)
        for layer in self.layers:
            x = layer(x)
        return scaled(x, self.gain) + self.seen + cache[0]

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lift", action="store_true")
    parser.add_argument("batches", type=int, nargs="+")
    args = parser.parse_args()
    torch.manual_seed(3)
    model = Model(float(os.environ.get("GAIN", "2")))
    cache = [torch.zeros(8)]
    options = {"frozen_parameter": True}
    if args.lift:
        decode = torch.compile(model.main_decode, backend="npugraph_ex", fullgraph=True, dynamic=False, options=options)
    else:
        decode = torch.npu.npugraph_ex.inference.cache_compile(
            model.main_decode, cache_dir="mine", dynamic=False, options=options
        )
    outputs = []
    with torch.no_grad():
        for step, batch in enumerate(args.batches):
            x = model.prefill(torch.arange(batch * 8, dtype=torch.float32).reshape(batch, 8) / 9 + step)
            outputs.append(decode(x, cache).sum().item())
    print(json.dumps([round(value, 3) for value in outputs]))

if __name__ == "__main__":
    main()
"""
HELPERS = "BIAS = 0.5\n\ndef scaled(x, gain):\n    return (x + BIAS) * gain\n"


def record(program: Program, *command: str, options: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """Record a Python command on the simulated CANN; return record's document and what CMD wrote to stdout."""
    simulated = (sys.executable, "-m", "cachectl", "simulate", "--", sys.executable)
    done = program.cachectl("record", "--json", *options, "--", *simulated, *command)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("[", "{"))]
    document: dict[str, Any] = json.loads(done.stdout)
    return document, lines[-1]


def execute(
    program: Program, recipe: str, *command: str, options: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """Run a Python command under exec; return the report and what it wrote to stdout."""
    words = ("exec", recipe, "--report", "report.json", *options, "--", sys.executable, *command)
    done = program.cachectl(*words, environ=environ)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((program.folder / "report.json").read_text())
    return report, done.stdout.splitlines()[-1]


@pytest.fixture
def own(tmp_path: Path) -> Program:
    """A program of one script and a module beside it, and no store."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "serve.py").write_text(SERVE)
    (folder / "helpers.py").write_text(HELPERS)
    program = Program(folder, tmp_path / "store", tmp_path / "warm")
    assert program.cachectl("init").returncode == 0
    return program


def states(program: Program, recipe: str) -> list[tuple[str, list[str]]]:
    """Return each line's state, and what it is about."""
    done = program.cachectl("plan", recipe, "--json")
    return [
        (entry["state"], sorted({reason["name"] for reason in entry["reasons"]}))
        for entry in json.loads(done.stdout)["entries"]
    ]


def test_recorded_script_is_planned_built_and_warm(own: Program) -> None:
    """record, plan, build, exec of one script: warm with equal values; and its own cache folder is not touched."""
    document, cold = record(own, "serve.py", "4", "4")
    shutil.rmtree(own.folder / "mine")

    planned = states(own, "serve.recipe.yaml")
    built = own.build("serve.recipe.yaml")
    report, warm = execute(own, "serve.recipe.yaml", "serve.py", "4", "4")

    assert (["main_decode"], []) == (document["methods"], document["warnings"])
    assert ["missing"] == [state for state, _ in planned]
    assert 1 == len(built["built"])
    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert cold == warm
    assert not (own.folder / "mine").exists()


@pytest.mark.nightly
def test_recorded_script_changed_is_stale_where_it_counts(own: Program) -> None:
    """The script and what is traced count; a module that is read by nothing traced does not. Several kinds of calls."""
    record(own, "serve.py", "4", "2", "4")
    assert 2 == len(own.build("serve.recipe.yaml")["built"])
    (own.folder / "helpers.py").write_text(HELPERS + "\ndef unused():\n    return 1\n")
    noise = states(own, "serve.recipe.yaml")
    own.edit("LAYERS = 2", "LAYERS = 3", "serve.py")
    script = states(own, "serve.recipe.yaml")
    report, changed = execute(own, "serve.recipe.yaml", "serve.py", "4", "2", "4")
    own.build("serve.recipe.yaml")
    after, again = execute(own, "serve.recipe.yaml", "serve.py", "4", "2", "4")

    assert ["ready", "ready"] == [state for state, _ in noise]
    assert [("stale", ["serve.py"])] * 2 == script
    assert ("cold", "warm") == (report["outcome"], after["outcome"])
    assert changed == again


@pytest.mark.nightly
def test_recorded_script_other_environment_is_cold_and_right(own: Program) -> None:
    """A variable that the script reads is part of the key: another value is cold, and the values are those of it."""
    record(own, "serve.py", "4")
    own.build("serve.recipe.yaml")

    report, other = execute(own, "serve.recipe.yaml", "serve.py", "4", environ={"GAIN": "5"})
    noise, same = execute(own, "serve.recipe.yaml", "serve.py", "4", environ={"HOME": "/", "RUN_ID": "7"})

    assert ("cold", "GAIN") == (report["outcome"], report["reasons"][0]["name"])
    assert "warm" == noise["outcome"]
    assert other != same


@pytest.mark.nightly
def test_recorded_torch_compile_is_warm_when_lifted(own: Program) -> None:
    """A full-graph torch.compile of a bound method: recorded, built, and warm under exec --lift."""
    document, cold = record(own, "serve.py", "--lift", "4")
    own.build("serve.recipe.yaml")

    report, warm = execute(own, "serve.recipe.yaml", "serve.py", "--lift", "4", options=("--lift",))

    assert any("exec --lift" in warning for warning in document["warnings"])
    assert ("warm", cold) == (report["outcome"], warm)


@pytest.mark.nightly
def test_recorded_recipe_moves_with_its_program(own: Program, tmp_path: Path) -> None:
    """The recipe holds no path of this machine: in another folder the same store serves it."""
    record(own, "serve.py", "4")
    own.build("serve.recipe.yaml")
    shutil.copytree(own.folder, tmp_path / "moved")
    moved = Program(tmp_path / "moved", own.store, own.warm_dir)

    report, _ = execute(moved, "serve.recipe.yaml", "serve.py", "4")

    assert "warm" == report["outcome"]


@pytest.mark.nightly
def test_recorded_cold_start_publishes_back(own: Program) -> None:
    """exec --record of a recorded recipe on an empty store: what it publishes has the keys of a build."""
    record(own, "serve.py", "4")

    first, cold = execute(own, "serve.recipe.yaml", "serve.py", "4", options=("--record",))
    second, warm = execute(own, "serve.recipe.yaml", "serve.py", "4")

    assert [] == first["recorded"]["reasons"]
    assert ("warm", cold) == (second["outcome"], warm)
    assert [] == own.build("serve.recipe.yaml")["built"]


@pytest.mark.nightly
def test_recorded_tiny_decoder_is_warm(tmp_path: Path) -> None:
    """The example's program, as it is, with the runtime's own cache_compile."""
    program = lay_program(tmp_path / "tiny-decoder", tmp_path / "store")
    command = ("generate.py", "--plain", "--cache-dir", "mine", "--steps", "4", "--json")
    _, cold = record(program, *command)
    program.build("generate.recipe.yaml")

    report, warm = execute(program, "generate.recipe.yaml", *command)

    assert "warm" == report["outcome"]
    assert json.loads(cold)["tokens"] == json.loads(warm)["tokens"]


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["static", "dynamic"])
def test_recorded_executor_is_warm(tmp_path: Path, config: str) -> None:
    """The executor example, main and draft model: recorded, built and warm, with equal tokens."""
    if not (EXECUTOR / "infer.py").is_file():
        pytest.skip("needs examples/executor")
    folder = tmp_path / "executor"
    shutil.copytree(EXECUTOR, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    program = Program(folder, tmp_path / "store", tmp_path / "warm")
    command = ("infer.py", "--config", f"config/{config}.yaml", "--steps", "6")
    document, cold = record(program, *command)
    program.build("infer.recipe.yaml")

    report, warm = execute(program, "infer.recipe.yaml", *command)

    assert ["main_decode", "mtp_decode"] == document["methods"]
    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert json.loads(cold)["tokens"] == json.loads(warm)["tokens"]


@pytest.mark.nightly
def test_recorded_world_of_two_is_warm(tmp_path: Path) -> None:
    """Two ranks under torchrun, with a process group of the program's own: one recipe, built and warm."""
    program: RankedProgram = lay_ranked(tmp_path / "program", tmp_path / "store")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    config = '{"tensor_parallel": 2}'
    document, _ = record(program, *launcher, "serve.py", config)
    recipe = yaml.safe_load((program.folder / "serve.recipe.yaml").read_text())
    built = program.build("serve.recipe.yaml")

    run = program.torchrun(2, "serve.py", config, recipe="serve.recipe.yaml")

    assert (["main_decode"], {"world_size": 2}) == (document["methods"], recipe["topology"])
    assert [0, 1] == sorted(entry["rank"] for entry in built["built"])
    assert (0, "warm") == (run.returncode, run.report["outcome"])
    assert [(0, True), (1, True)] == [(said["rank"], said["equal"]) for said in run.ranks]


@pytest.mark.nightly
def test_recorded_program_that_compiles_elsewhere_says_what_was_seen(own: Program) -> None:
    """No fullgraph, another backend: no recipe, exit code 1, and both are named."""
    own.edit('backend="npugraph_ex", fullgraph=True', 'backend="npugraph_ex"', "serve.py")
    own.edit("    outputs = []", '    torch.compile(model.prefill, backend="eager")\n    outputs = []', "serve.py")
    words = (sys.executable, "-m", "cachectl", "simulate", "--", sys.executable, "serve.py", "--lift", "4")

    done = own.cachectl("record", "--", *words)

    assert 1 == done.returncode
    assert "fullgraph" in done.stderr
    assert "with backend eager" in done.stderr
    assert ["helpers.py", "serve.py"] == [
        name for name in sorted(os.listdir(own.folder)) if name.endswith(("py", "yaml"))
    ]
