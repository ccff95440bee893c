"""`cachectl exec --record` on the real runtime: what a plain program compiles is published once it is proved."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Program, RankedProgram, lay_program, lay_ranked

pytestmark = [pytest.mark.real, pytest.mark.slow]

# Reads a variable when it is made, has a state that a step writes, and a helper with a constant.
MODEL = """\
import os
import torch

BIAS = 0.5

def shifted(x):
    return x + BIAS

class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale * float(os.environ.get("GAIN", "1"))
        self.register_buffer("seen", torch.zeros(8))

    def main_decode(self, x):
        self.seen.add_(x.sum(0))
        return torch.relu(shifted(x) * self.scale) + self.seen

def build(scale):
    return Model(scale)
"""
# The recipe's alone: the program has no need of it and doesn't import it.
INPUTS = """\
import torch

def decode(model, rank, batch):
    return {"x": torch.arange(batch * 8, dtype=torch.float32).reshape(batch, 8) - 9}
"""
# A program that knows nothing of cachectl: python serve.py SCALE EXIT BATCH...
SERVE = """\
import json, os, sys
import torch, torch_npu
from model import build

scale, code, batches = float(sys.argv[1]), sys.argv[2], [int(word) for word in sys.argv[3:]]
model = build(scale)
gaps = []
with torch.no_grad():
    decode = torch.npu.npugraph_ex.inference.cache_compile(
        model.main_decode, cache_dir="mine", dynamic=False, options={"frozen_parameter": True}
    )
    for batch in batches:
        x = torch.arange(batch * 8, dtype=torch.float32).reshape(batch, 8) - 9
        model.seen.zero_()
        got = decode(x=x).clone()
        model.seen.zero_()
        gaps.append(float((model.main_decode(x=x) - got).abs().max()))
print(json.dumps(gaps), flush=True)
if code == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(code))
"""


# The tiny decoder likewise: python decode.py BATCH...
DECODE = """\
import json, sys
import torch, torch_npu
from tiny_decoder.inputs import step_inputs
from tiny_decoder.model import build

model = build(layers=1, hidden=64, max_batch=8, max_seq=64, attention="torch", device="cpu")
gaps = []
with torch.no_grad():
    decode = torch.npu.npugraph_ex.inference.cache_compile(
        model.main_decode, cache_dir="mine", dynamic=False, options={"frozen_parameter": True}
    )
    for batch in map(int, sys.argv[1:]):
        inputs = step_inputs(torch.full((batch, 1), 3), [5] * batch, False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        got = decode(**inputs).clone()
        model.load_state_dict(before)
        gaps.append(float((model.main_decode(**inputs) - got).abs().max()))
        model.load_state_dict(before)
print(json.dumps(gaps))
"""


class Recorded:
    """The program in a folder, with a store of its own."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, *words: str, code: int = 0, script: str = "serve.py", **environ: str) -> dict[str, Any]:
        """Run a script under `exec --record`; its values have to be right; return the report."""
        command = ("exec", "recipe.yaml", "--record", "--report", "report.json", "--", sys.executable, script)
        done = self.program.cachectl(*command, *words, environ=environ)
        assert code == done.returncode, done.stderr
        assert max(json.loads(done.stdout)) < 1e-3
        report: dict[str, Any] = json.loads((self.program.folder / "report.json").read_text())
        return report

    def listed(self) -> list[tuple[str, str]]:
        """Return key and case of each stored entry."""
        done = self.program.cachectl("ls", "--json")
        return [(entry["key"], entry["case"]) for entry in json.loads(done.stdout)["entries"]]


@pytest.fixture
def lay(write_recipe: Callable[..., Path], tmp_path: Path) -> Callable[..., Recorded]:
    """Lay down model, inputs, program and a recipe with two cases, beside an empty store."""

    def make() -> Recorded:
        folder = tmp_path / "own"
        cases = [{"name": f"b{batch}", "inputs": "case_inputs:decode", "args": {"batch": batch}} for batch in (4, 2)]
        model = {"factory": "model:build", "config": {"scale": 2.0}, "path": [".", "recipe_only"]}
        write_recipe(folder, MODEL, model=model, functions=[{"method": "main_decode", "cases": cases}])
        (folder / "recipe_only").mkdir()
        (folder / "recipe_only" / "case_inputs.py").write_text(INPUTS)
        (folder / "serve.py").write_text(SERVE)
        return Recorded(Program(folder, tmp_path / "store", tmp_path / "warm"))

    return make


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, dict[str, Any]]:
    """The tiny decoder, gone cold on an empty store for both of its cases, and the report. Change nothing in it."""
    base = tmp_path_factory.mktemp("recorded")
    made = Recorded(lay_program(base / "tiny-decoder", base / "store"))
    (made.program.folder / "decode.py").write_text(DECODE)
    return made, made.run("4", "2", "4", script="decode.py")


def names(recorded: dict[str, Any]) -> list[tuple[str, str]]:
    """Return part and name of each reason of what was recorded."""
    return [(reason["part"], reason["name"]) for reason in recorded["reasons"]]


def test_record_cold_program_publishes_what_it_compiled(recorded: tuple[Recorded, dict[str, Any]]) -> None:
    """Cold and right on an empty store; then both cases are published as one warm set."""
    report = recorded[1]

    assert "cold" == report["outcome"]
    assert ["b4", "b2"] == [entry["case"] for entry in report["recorded"]["entries"]]
    assert [] == report["recorded"]["reasons"]
    assert report["recorded"]["warm_set"].startswith("sha256:")
    assert all(min(entry["warm_seconds"], entry["cold_seconds"]) > 0 for entry in report["recorded"]["entries"])


def test_record_keys_are_those_of_a_build(
    recorded: tuple[Recorded, dict[str, Any]], built: tuple[Program, dict[str, Any]]
) -> None:
    """What a program recorded has the keys that a build gives, and a build after it has nothing to do."""
    found = recorded[1]["recorded"]

    after = recorded[0].program.build()

    keys = {entry["case"]: entry["key"] for entry in built[1]["built"]}
    assert keys == {entry["case"]: entry["key"] for entry in found["entries"]}
    assert built[1]["warm_set"] == found["warm_set"] == after["warm_set"]
    assert ([], sorted(keys.values())) == (after["built"], sorted(after["reused"]))


def test_record_next_start_is_warm(recorded: tuple[Recorded, dict[str, Any]]) -> None:
    """The second start of the same program is warm and right, and has nothing to record."""
    report = recorded[0].run("4", "2", "4", script="decode.py")

    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert ([], []) == (report["recorded"]["entries"], report["recorded"]["reasons"])


@pytest.mark.nightly
def test_record_edited_model_is_recorded_anew(lay: Callable[..., Recorded]) -> None:
    """A constant of a helper changes: cold and right, published, and the next start is warm."""
    made = lay()
    made.run("2", "0", "4", "2")
    made.program.edit("BIAS = 0.5", "BIAS = 0.25", "model.py")

    first, second = made.run("2", "0", "4", "2"), made.run("2", "0", "4", "2")

    assert ("cold", ("sources", "model.py: BIAS")) == (
        first["outcome"],
        (first["reasons"][0]["part"], first["reasons"][0]["name"]),
    )
    assert ("warm", ["b4", "b2"]) == (
        second["outcome"],
        [entry["case"] for entry in first["recorded"]["entries"]],
    )


@pytest.mark.nightly
def test_record_one_case_of_two_is_kept_until_the_set_is_whole(lay: Callable[..., Recorded]) -> None:
    """What was proved is kept; the run that brings the other case makes the set whole, with the keys of a build.

    The model reads a variable when it is made, and the program doesn't import what the recipe takes its inputs from.
    """
    made = lay()

    first, second = made.run("2", "0", "4"), made.run("2", "0", "2")

    built = Program(made.program.folder, made.program.store.with_name("other"), made.program.warm_dir).build()
    assert (["b4"], None, [("store", "warm set")]) == (
        [entry["case"] for entry in first["recorded"]["entries"]],
        first["recorded"]["warm_set"],
        names(first["recorded"]),
    )
    assert (["b2"], built["warm_set"]) == (
        [entry["case"] for entry in second["recorded"]["entries"]],
        second["recorded"]["warm_set"],
    )


@pytest.mark.parametrize(("code", "exits"), [("3", 3), pytest.param("kill", 137, marks=pytest.mark.nightly)])
def test_record_failing_program_publishes_nothing(lay: Callable[..., Recorded], code: str, exits: int) -> None:
    """A program that ends with another code than 0, or is killed, leaves nothing in the store, and its own code."""
    made = lay()

    report = made.run("2", code, "4", code=exits)

    assert ("cold", [], [("policy", "exit code")]) == (
        report["outcome"],
        report["recorded"]["entries"],
        names(report["recorded"]),
    )
    assert not made.program.store.exists()


def test_record_call_that_is_no_case_is_not_published(lay: Callable[..., Recorded]) -> None:
    """A batch of 3, which the recipe doesn't have: told with the call's shapes, and nothing is in the store."""
    made = lay()

    report = made.run("2", "0", "3")

    (no_case, no_set) = report["recorded"]["reasons"]
    assert ("inputs", "main_decode", {"L['x']": [3, 8]}) == (no_case["part"], no_case["name"], no_case["wanted"])
    assert ("store", "warm set") == (no_set["part"], no_set["name"])
    assert [] == made.listed()


def test_record_another_model_than_the_recipes_is_not_published(lay: Callable[..., Recorded]) -> None:
    """The program's model has another scale than the recipe's factory gives it: the fresh process refuses it."""
    made = lay()

    report = made.run("3", "0", "4")

    assert "self.scale" in str(report["recorded"]["reasons"][0]["wanted"])
    assert [] == report["recorded"]["entries"] == made.listed()


@pytest.mark.nightly
def test_record_environment_that_the_program_sets_is_part_of_it(lay: Callable[..., Recorded]) -> None:
    """A variable that the program itself sets before it builds its model is proved with, and the next start is warm."""
    made = lay()
    made.program.edit("import torch, torch_npu\n", 'os.environ["GAIN"] = "2"\nimport torch, torch_npu\n', "serve.py")

    first, second = made.run("2", "0", "4", "2"), made.run("2", "0", "4", "2")

    assert ([], "warm") == (first["recorded"]["reasons"], second["outcome"])


@pytest.mark.nightly
def test_record_two_pods_at_once_publish_one_set(lay: Callable[..., Recorded]) -> None:
    """Both are right and end as their program does; the set is there once, and both are warm the next time."""
    made = lay()
    command = ("exec", "recipe.yaml", "--record", "--report")

    def run(number: int) -> tuple[int, dict[str, Any]]:
        report = made.program.folder / f"report-{number}.json"
        words = (*command, report.name, "--", sys.executable, "serve.py", "2", "0", "4", "2")
        done = made.program.cachectl(*words, environ={"CACHECTL_WARM_DIR": str(made.program.folder / f"warm-{number}")})
        assert max(json.loads(done.stdout)) < 1e-3
        return done.returncode, json.loads(report.read_text())

    with ThreadPoolExecutor(2) as pods:
        first = list(pods.map(run, range(2)))
        second = list(pods.map(run, range(2)))

    listed = made.listed()
    assert [0, 0, 0, 0] == [code for code, _ in (*first, *second)]
    assert ["cold", "cold", "warm", "warm"] == [report["outcome"] for _, report in (*first, *second)]
    assert ["b2", "b4"] == sorted(case for _, case in listed)
    recorded = {report["recorded"]["warm_set"] for _, report in first}
    assert 1 == len(recorded - {None})


@pytest.mark.nightly
def test_record_ranks_of_a_world_are_proved_together(ranked: Callable[[int], RankedProgram], tmp_path: Path) -> None:
    """A program of two ranks under torchrun: both are recorded, proved in a world of their own, and warm the next time.

    The keys are those of a build.
    """
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    program.write_recipe(2)
    config = '{"tensor_parallel": 2}'

    first = program.torchrun(2, "serve.py", config, options=("--record",))
    second = program.torchrun(2, "serve.py", config)

    built = ranked(2).build()
    assert (0, [0, 1], []) == (
        first.returncode,
        [entry["rank"] for entry in first.report["recorded"]["entries"]],
        first.report["recorded"]["reasons"],
    )
    assert built["warm_set"] == first.report["recorded"]["warm_set"]
    assert sorted(built["reused"]) == sorted(entry["key"] for entry in first.report["recorded"]["entries"])
    assert ("warm", [True, True]) == (second.report["outcome"], [said["equal"] for said in second.ranks])
