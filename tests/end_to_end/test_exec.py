"""The unchanged program under `cachectl exec`, on the real runtime: warm, or cold, right and explained."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

PLAIN = ("generate.py", "--steps", "4", "--json", "--plain", "--cache-dir", "mine")
STAGES = {"import", "hook", "proof", "load", "capture", "first_call"}

# Calls the runtime's cache_compile by a name of the caller's choice, twice with other batches, and a second method.
CALLS = """\
import importlib, json, sys
import torch, torch_npu
import yaml
from tiny_decoder.inputs import decode
from tiny_decoder.model import build

recipe = yaml.safe_load(open("recipe.yaml"))
model = build(**recipe["model"]["config"])
options = recipe["compile"]["options"]
how, batches = sys.argv[1], [int(word) for word in sys.argv[2:]]

def config(package):
    made = importlib.import_module(package).CompilerConfig()
    made.mode = "npugraph_ex"
    for name, value in options.items():
        setattr(made, name, value)
    return made

def cache_compile(method):
    if how == "public":
        inference = torch.npu.npugraph_ex.inference
        return inference.cache_compile(method, cache_dir="mine", dynamic=False, options=options)
    if how == "decompositions":
        import npugraph_ex
        return npugraph_ex.inference.cache_compile(
            method, config=config("npugraph_ex"), cache_dir="mine", dynamic=False, custom_decompositions={1: 2}
        )
    inference = importlib.import_module(how + ".inference")
    return inference.cache_compile(method, config=config(how), cache_dir="mine", dynamic=False, global_rank=0)

with torch.no_grad():
    compiled = cache_compile(model.main_decode)
    gaps = []
    for batch in batches:
        inputs = decode(model, 0, batch=batch)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        got = compiled(**inputs).clone()
        model.load_state_dict(before)
        gaps.append(float((model.main_decode(**inputs) - got).abs().max()))
print(json.dumps(gaps))
"""


def execute(program: Any, *words: str, **environ: str) -> tuple[dict[str, Any], Any, str]:
    """Run Python words under exec; return the report, what the program printed, and stderr."""
    return run(program, ("recipe.yaml",), *words, **environ)


def run(program: Any, options: tuple[str, ...], *words: str, **environ: str) -> tuple[dict[str, Any], Any, str]:
    """Run exec with options of its own."""
    command = ("exec", *options, "--report", "report.json", "--", sys.executable, *words)
    done = program.cachectl(*command, environ=environ)
    assert done.returncode == 0, done.stderr
    report = json.loads((program.folder / "report.json").read_text())
    return report, json.loads(done.stdout), done.stderr


def named(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return part and name of each reason."""
    return [(reason["part"], reason["name"]) for reason in report["reasons"]]


def test_exec_unchanged_program_is_warm_and_right(program: Any) -> None:
    """The program that knows nothing of cachectl starts warm; its own cache directory is not even made."""
    eager = program.generate("--eager")

    report, printed, stderr = execute(program, *PLAIN)

    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert eager["tokens"] == printed["tokens"]
    assert not (program.folder / "mine").exists()
    (proof,) = report["proofs"]
    assert ([], 0) == (proof["failed"], proof["rank"])
    assert proof["guards"] > 100
    assert STAGES == report["stages"].keys()
    assert all(report["stages"][name] > 0 for name in STAGES)
    assert report["stages"]["capture"] < report["stages"]["first_call"]
    assert "cachectl exec: warm\n" in stderr


def test_exec_stale_cache_dir_of_the_program_is_neither_read_nor_written(program: Any) -> None:
    """Where the plain runtime loads its stale artifact and is wrong, exec is right, and the directory as it was."""
    program.generate("--plain", "--cache-dir", "mine")
    before = _tree(program.folder / "mine")
    program.edit("nn.functional.silu(self.gate(hidden))", "nn.functional.relu(self.gate(hidden))")
    eager = program.generate("--eager")

    report, printed, _ = execute(program, *PLAIN)

    assert "cold" == report["outcome"]
    assert ("sources", "tiny_decoder/model.py: SwiGLU.forward") in named(report)
    assert eager["tokens"] == printed["tokens"]
    assert before == _tree(program.folder / "mine")


def test_exec_changed_attribute_is_cold_right_and_explained(program: Any) -> None:
    """A failed proof turns the outcome to cold and names the attribute."""
    eager = program.generate("--eager", "--scale", "2.0")

    report, printed, _ = execute(program, *PLAIN, "--scale", "2.0")

    assert "cold" == report["outcome"]
    assert [("guards", "self.layers[0].attention.scale")] == named(report)
    assert 1 == len(report["proofs"][0]["failed"])
    assert (eager["tokens"], 0.0) == (printed["tokens"], report["stages"]["load"])


def test_exec_without_store_is_cold_and_right(empty_program: Any) -> None:
    """With no store the program runs as ever, in a private folder, and the report says why."""
    eager = empty_program.generate("--eager")

    report, printed, _ = execute(empty_program, *PLAIN)

    assert "cold" == report["outcome"]
    assert "store" == report["reasons"][0]["part"]
    assert eager["tokens"] == printed["tokens"]
    assert not (empty_program.folder / "mine").exists()
    assert [] == list((empty_program.warm_dir / "cold").iterdir())


def test_exec_observe_proves_and_runs_cold(program: Any) -> None:
    """--observe: the proof is in the report, nothing was loaded, and the answer is right."""
    eager = program.generate("--eager")

    report, printed, _ = run(program, ("recipe.yaml", "--observe"), *PLAIN)

    assert ("observed", []) == (report["outcome"], report["reasons"])
    assert (1, []) == (len(report["proofs"]), report["proofs"][0]["failed"])
    assert 0.0 == report["stages"]["load"]
    assert eager["tokens"] == printed["tokens"]


def test_exec_observe_of_a_changed_program_is_cold(program: Any) -> None:
    """--observe of what would have gone cold says so."""
    report, _, _ = run(program, ("recipe.yaml", "--observe"), *PLAIN, "--scale", "2.0")

    assert ("cold", 1) == (report["outcome"], len(report["proofs"][0]["failed"]))


@pytest.mark.parametrize("how", ["public", "npugraph_ex", "torch_npu.dynamo.npugraph_ex"])
def test_exec_npugraph_ex_by_each_name_is_warm(program: Any, how: str) -> None:
    """The public function, and the runtime's own with a config, by the names it can be imported by."""
    (program.folder / "calls.py").write_text(CALLS)

    report, gaps, stderr = execute(program, "calls.py", how, "4", "2")

    assert ("warm", 2) == (report["outcome"], len(report["proofs"])), stderr
    assert max(gaps) < 1e-3


def test_exec_second_call_without_a_case_is_cold_and_right(program: Any) -> None:
    """A batch that no case has, after a warm one in the same process: cold, right, and the input is named."""
    (program.folder / "calls.py").write_text(CALLS)

    report, gaps, _ = execute(program, "calls.py", "public", "4", "3", "4")

    assert "cold" == report["outcome"]
    assert ("inputs", "L['input_ids']") in named(report)
    assert [] == report["proofs"][0]["failed"]
    assert max(gaps) < 1e-3


def test_exec_call_it_cannot_prove_is_left_to_the_runtime(program: Any) -> None:
    """Decompositions of the program's are in no key: compiled by the runtime in a private folder, and reported."""
    (program.folder / "calls.py").write_text(CALLS)

    report, gaps, _ = execute(program, "calls.py", "decompositions", "4")

    assert ("cold", [("options", "custom_decompositions")]) == (report["outcome"], named(report))
    assert max(gaps) < 1e-3
    assert not (program.folder / "mine").exists()


def test_exec_program_that_uses_cachectl_is_one_start(program: Any) -> None:
    """warm_start of a program under exec is exec's own: one hand-out, and the report is about it."""
    report, printed, _ = execute(program, "generate.py", "--steps", "4", "--json")

    assert ("warm", "warm", 1) == (report["outcome"], printed["outcome"], len(report["proofs"]))
    assert 1 == len(list((program.warm_dir / "handouts").iterdir()))


def test_exec_changed_options_are_cold_with_the_option_named(program: Any) -> None:
    """A program that compiles with other options than the recipe's is not given the recipe's artifact."""
    (program.folder / "calls.py").write_text(CALLS.replace('["options"]', '["options"] | {"inplace_pass": False}'))

    report, gaps, _ = execute(program, "calls.py", "public", "4")

    assert ("cold", [("options", "inplace_pass")]) == (report["outcome"], named(report))
    assert max(gaps) < 1e-3


def test_exec_two_processes_are_two_ranks_of_one_report(program: Any) -> None:
    """Every process that CMD starts adds its part; the report is the worst of them."""
    (program.folder / "calls.py").write_text(CALLS)
    script = f"{sys.executable} calls.py public 4 >one & RANK=0 {sys.executable} calls.py public 3 >two; wait; echo 1"

    done = program.cachectl("exec", "recipe.yaml", "--report", "report.json", "--", "sh", "-c", script)

    report = json.loads((program.folder / "report.json").read_text())
    assert 0 == done.returncode, done.stderr
    assert ("cold", [(0, "cold"), (None, "warm")]) == (
        report["outcome"],
        [(rank["rank"], rank["outcome"]) for rank in report["ranks"]],
    )


def test_exec_other_rank_than_the_entrys_is_cold(program: Any) -> None:
    """A process of another rank than the recipe has is given no other rank's artifact."""
    report, _, _ = execute(program, *PLAIN, RANK="1", CACHECTL_HANDOUT=program.hook()["env"]["CACHECTL_HANDOUT"])

    assert ("cold", [("topology", "rank")]) == (report["outcome"], named(report))


def test_exec_killed_program_leaves_its_report(program: Any) -> None:
    """The report is written after the first call, so that a program killed later is told as warm."""
    script = (program.folder / "generate.py").read_text()
    (program.folder / "serve.py").write_text(script + "\n    import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")

    command = ("exec", "recipe.yaml", "--report", "report.json", "--", sys.executable, "serve.py", *PLAIN[1:])
    done = program.cachectl(*command)

    report = json.loads((program.folder / "report.json").read_text())
    assert (128 + signal.SIGKILL, "warm") == (done.returncode, report["outcome"]), done.stderr


def test_exec_artifact_that_cannot_be_loaded_is_inert_and_right(program: Any) -> None:
    """Handed out and proved, and then the runtime can't load it: compiled, and told apart from a failed check."""
    handed = program.hook()
    for path in program.warm_dir.rglob("compiled_module"):
        path.write_bytes(path.read_bytes()[:1000])

    report, printed, _ = execute(program, *PLAIN, **handed["env"])

    assert ("inert", [("artifact", "load")]) == (report["outcome"], named(report))
    assert program.generate("--eager")["tokens"] == printed["tokens"]


def test_exec_two_methods_are_both_warm(tmp_path: Path, empty_program: Any, write_recipe: Any) -> None:
    """Two methods of one model, each with its own artifact, through two calls of cache_compile."""
    path = write_recipe(
        tmp_path / "two",
        MODEL,
        functions=[
            {"method": method, "cases": [{"name": "b2", "inputs": "model:inputs", "args": {}}]}
            for method in ("main_decode", "mtp_decode")
        ],
    )
    assert 0 == empty_program.cachectl("build", str(path)).returncode
    (path.parent / "serve.py").write_text(SERVE)
    command = ("exec", str(path), "--report", "report.json", "--", sys.executable, "serve.py")

    done: subprocess.CompletedProcess[str] = empty_program.cachectl(*command, cwd=path.parent)

    report = json.loads((path.parent / "report.json").read_text())
    assert ("warm", 2, []) == (report["outcome"], len(report["proofs"]), report["reasons"]), done.stderr
    assert [[2.0, 2.0], [4.0, 4.0]] == json.loads(done.stdout)


MODEL = """\
import torch

class Model(torch.nn.Module):
    def main_decode(self, x):
        return x * 2
    def mtp_decode(self, x):
        return x * 2 + x * 2

def build():
    return Model()

def inputs(model, rank):
    return {"x": torch.ones(2)}
"""
SERVE = """\
import json
import torch, torch_npu
from model import build, inputs

model = build()
with torch.no_grad():
    print(json.dumps([
        torch.npu.npugraph_ex.inference.cache_compile(
            method, cache_dir="mine", dynamic=False, options={"frozen_parameter": True}
        )(**inputs(model, 0)).tolist()
        for method in (model.main_decode, model.mtp_decode)
    ]))
"""


def _tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
