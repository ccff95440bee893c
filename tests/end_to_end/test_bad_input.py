"""Bad input: one line that names the value and the way out, the contract's exit code, nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import BOUND_S

pytestmark = [pytest.mark.real, pytest.mark.slow]

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def main_decode(self, x):
        return self.linear(x)

def build():
    torch.manual_seed(0)
    return Model().requires_grad_(False)

def inputs(model, rank):
    return {"x": torch.ones(2, 4)}
"""


def _model(**edits: str) -> str:
    text = MODEL
    for old, new in edits.items():
        text = text.replace(BODY[old], new)
    return text


BODY = {
    "step": "return self.linear(x)",
    "inputs": 'return {"x": torch.ones(2, 4)}',
    "build": "torch.manual_seed(0)",
    "imports": "import torch\n",
}

CASES = {
    "typo": ({}, {"functons": []}, 2, "functons: unknown field; did you mean 'functions'?"),
    "factory-module": (
        {},
        {"model": {"factory": "nowhere:build", "path": ["."]}},
        2,
        "model.factory nowhere:build: importing nowhere raised ModuleNotFoundError",
    ),
    "factory-name": ({}, {"model": {"factory": "model:bild", "path": ["."]}}, 2, "model has no function 'bild'"),
    "factory-raises": ({"build": "raise KeyError('weights')"}, {}, 2, "model.factory model:build raised KeyError"),
    "factory-config": (
        {},
        {"model": {"factory": "model:build", "config": {"layer": 4}, "path": ["."]}},
        2,
        "got an unexpected keyword argument 'layer'",
    ),
    "import-error": ({"imports": "import torch\nimport missing_dependency\n"}, {}, 2, "missing_dependency"),
    "method": (
        {},
        {"functions": [{"method": "decode", "cases": [{"name": "b2", "inputs": "model:inputs"}]}]},
        2,
        "Model has no method 'decode'; it has: main_decode",
    ),
    "arity": ({"inputs": 'return {"x": torch.ones(2, 4), "y": 1}'}, {}, 2, "do not fit main_decode"),
    "inputs-type": ({"inputs": "return [1]"}, {}, 2, "returned a list"),
    "item": ({"step": "return self.linear(x) * x.sum().item()"}, {}, 1, "model.py:10 main_decode calls .item()"),
    "branch": (
        {"step": "return self.linear(x) if x.sum() > 0 else x"},
        {},
        1,
        "could not trace one whole graph: Data-dependent branching",
    ),
    "random": ({"step": "return self.linear(x) + torch.randn(2, 4)"}, {}, 1, "draws random numbers"),
    "option": (
        {},
        {"compile": {"options": {"frozen_paramter": True}}},
        2,
        "no option 'frozen_paramter'",
    ),
    "opaque-input": ({"inputs": 'return {"x": torch.Generator()}', "step": "return x"}, {}, 1, "L['x'] is a"),
}


# Said without a build in tests/build/test_program.py.
SAID_ELSEWHERE = (
    "factory-module",
    "factory-name",
    "factory-config",
    "import-error",
    "method",
    "inputs-type",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in SAID_ELSEWHERE else ()) for name in CASES]
)
def test_build_of_a_wrong_recipe_says_one_line_and_publishes_nothing(
    name: str, empty_program: Any, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """Each mistake: its exit code, its words on one line, no traceback, no entry in the store."""
    edits, fields, code, words = CASES[name]
    recipe = write_recipe(tmp_path / "own-model", _model(**edits), **fields)

    done = empty_program.cachectl("build", str(recipe))

    assert (code, True) == (done.returncode, words in done.stdout + done.stderr), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    if code == 2:
        assert 1 == sum(line.startswith("cachectl: ") for line in done.stderr.splitlines()), done.stderr
    assert [] == list(empty_program.store.glob("entries/*/*/*.json"))
    assert [] == list(empty_program.store.glob("boot/recipes/*"))


def test_build_into_a_store_that_is_a_file_exits_3(empty_program: Any) -> None:
    """The store's path is a file: one line that says so."""
    empty_program.store.write_text("")

    done = empty_program.cachectl("build", "recipe.yaml")

    assert (3, True) == (done.returncode, "is a file, not a folder" in done.stderr)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_build_on_a_full_disk_exits_3_and_publishes_nothing(empty_program: Any, tmp_path: Path) -> None:
    """A store on a file system without room: one line, exit 3, and a hook that is cold, not broken."""
    mount = tmp_path / "small"
    mount.mkdir()
    script = (
        f"mount -t tmpfs -o size=300k tmpfs {mount} && "
        f"{sys.executable} -m cachectl build recipe.yaml --store {mount}/store; "
        f"code=$?; {sys.executable} -m cachectl hook recipe.yaml --store {mount}/store; exit $code"
    )

    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        cwd=empty_program.folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )

    assert (3, True) == (done.returncode, "o space left" in done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert '"outcome": "cold"' in done.stdout
