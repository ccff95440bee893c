"""Unchanged programs in nothing but the environment that a hook handed out: no exec, no call of cachectl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import BOUND_S, Program

pytestmark = [pytest.mark.real, pytest.mark.slow]

# Runs a program as it is, then says on stderr what the process made of its hand-out.
TELLING = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
from cachectl.program import process_start
start = process_start()
print("outcome:", start.outcome if start is not None else None, file=sys.stderr)
"""
PLAIN = ("generate.py", "--steps", "4", "--json", "--plain", "--cache-dir", "mine")

# A model whose graph depends on a variable that it reads while it is traced.
MODULE = """
import os, torch

class Model(torch.nn.Module):
    def main_decode(self, x):
        return x * 2 if os.environ.get("MODE") == "double" else x + 1

def build():
    return Model()

def inputs(model, rank):
    return {"x": torch.ones(2, 4)}
"""
CALLS = """
import json
import torch, torch_npu
from model import build
model = build()
with torch.no_grad():
    compiled = torch.npu.npugraph_ex.inference.cache_compile(
        model.main_decode, cache_dir="mine", dynamic=False, options={"frozen_parameter": True}
    )
    values = [compiled(x=torch.full((2, 4), value)).tolist() for value in (3.0, 5.0)]
from cachectl.program import process_start
start = process_start()
print(json.dumps({"values": values, "outcome": start.outcome, "reasons": [str(reason) for reason in start.reasons],
                  "keys": [proof["key"] for proof in start.report()["proofs"]]}))
"""


def in_shell(program: Program, source: str, *words: str, environ: Mapping[str, str] | None = None) -> Any:
    """Run Python words on the simulated CANN behind a line of shell, as a program's container would."""
    script = f'{source}\nexec "{sys.executable}" -m cachectl simulate -- "{sys.executable}" "$@"'
    return subprocess.run(
        ["/bin/sh", "-euc", script, "sh", *words],
        cwd=program.folder,
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


def test_unchanged_program_behind_the_env_file_is_warm_and_right(program: Program, tmp_path: Path) -> None:
    """An init container's hook, then a shell that sources its file: warm, right, and the user's start-up module ran."""
    eager = program.generate("--eager")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.users_own = True\n")
    assert "warm" == program.hook()["outcome"]
    telling = TELLING + "print('own:', sys.users_own, file=sys.stderr)"
    behind = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])

    done = in_shell(
        program, f". '{program.warm_dir}/cachectl.env'", "-c", telling, *PLAIN, environ={"PYTHONPATH": behind}
    )

    assert (0, ["outcome: warm", "own: True"]) == (done.returncode, done.stderr.splitlines()), done.stderr
    assert eager["tokens"] == json.loads(done.stdout)["tokens"]
    assert not (program.folder / "mine").exists()


def test_unchanged_program_that_changed_is_cold_right_and_says_so_once(program: Program) -> None:
    """In the lines of --format shell: what was edited after the hook is cold, with one line on stderr."""
    lines = program.cachectl("hook", "recipe.yaml", "--format", "shell").stdout
    program.edit("nn.functional.silu(self.gate(hidden))", "nn.functional.relu(self.gate(hidden))")
    eager = program.generate("--eager")

    done = in_shell(program, lines, "-c", TELLING, *PLAIN)

    (said,) = [line for line in done.stderr.splitlines() if line.startswith("cachectl")]
    assert (0, "outcome: cold") == (done.returncode, done.stderr.splitlines()[-1])
    assert said.startswith("cachectl: cold: sources: tiny_decoder/model.py: SwiGLU.forward: ")
    assert eager["tokens"] == json.loads(done.stdout)["tokens"]
    assert not (program.folder / "mine").exists()


def test_program_under_exec_takes_what_the_init_containers_hook_left(program: Program) -> None:
    """exec in the program's container needs no store where a hook left a hand-out of the same recipe."""
    hooked = program.hook()
    command = ("exec", "recipe.yaml", "--report", "report.json", "--", sys.executable, *PLAIN)

    done = program.cachectl(*command, environ={**hooked["env"], "CACHECTL_STORE": "/nowhere"})

    report = json.loads((program.folder / "report.json").read_text())
    assert ("warm", []) == (report["outcome"], report["reasons"]), done.stderr
    assert hooked["cache_dir"] == report["cache_dir"]
    assert 1 == len(list((program.warm_dir / "handouts").iterdir()))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_of_two_sets_the_program_takes_the_one_of_its_own_environment(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """Built under two values of a variable, handed out without it: each program runs its own graph, others are cold."""
    program = Program(tmp_path / "own", tmp_path / "store", tmp_path / "warm")
    write_recipe(program.folder, MODULE)
    for mode in ("double", "other"):
        assert 0 == program.cachectl("build", "recipe.yaml", environ={"MODE": mode}).returncode
    lines = program.cachectl("hook", "recipe.yaml", "--format", "shell").stdout

    told = {}
    for mode in ("double", "other", "third"):
        done = in_shell(program, lines, "-c", CALLS, environ={"MODE": mode})
        assert 0 == done.returncode, done.stderr
        told[mode] = json.loads(done.stdout)

    assert {"double": "warm", "other": "warm", "third": "cold"} == {mode: told[mode]["outcome"] for mode in told}
    assert [[[6.0] * 4] * 2, [[10.0] * 4] * 2] == told["double"]["values"]
    assert [[[4.0] * 4] * 2, [[6.0] * 4] * 2] == told["other"]["values"] == told["third"]["values"]
    assert 2 == len({*told["double"]["keys"], *told["other"]["keys"]})
    stored = [reason for reason in told["third"]["reasons"] if reason.startswith("environment: MODE: stored ")]
    assert ["double", "other"] == sorted(reason.split("stored ")[1].split(",")[0] for reason in stored)
    assert [] == told["double"]["reasons"] == told["other"]["reasons"]
