"""The gates' steps on the real runtime, with its options both ways: what is overwritten, captured and predicted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import ZOO

# One process compiles or traces all of it: minutes on a machine that others load.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

OUTPUT, INPUT = ["output"], ["inputs['x']"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process saw of ten compiled methods."""
    folder = tmp_path_factory.mktemp("gating") / "zoo"
    shutil.copytree(ZOO, folder, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "cachectl", "simulate", "--", sys.executable, "gating.py"],
        cwd=folder,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize(
    ("name", "outputs", "inputs"),
    [
        ("plain", OUTPUT, []),
        ("clone_output", [], []),
        ("clone_input off", OUTPUT, INPUT),
        ("both", [], INPUT),
        ("forced eager", [], []),
        ("written argument", OUTPUT, []),
        ("its input returned", ["output[0]", "output[1]"], INPUT),
        ("its cache returned", [], []),
    ],
)
def test_what_later_calls_overwrite_is_told(
    seen: dict[str, Any], name: str, outputs: list[str], inputs: list[str]
) -> None:
    """By option: an output that is kept, the first call's inputs; what is the model's own changes in eager, too.

    The artifact, loaded and held against eager in the same way, overwrites no more and no less.
    """
    assert {"outputs": outputs, "inputs": inputs} == seen[name]["held"] == seen[name]["held by the loaded one"]
    assert seen[name]["repeats"]


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        ("plain", [1, 0, 0]),
        ("forced eager", [0, 0, 0]),
        # The last step's argument stands at another address.
        ("written argument", [2, 1, 0]),
        ("its cache returned", [1, 0, 0]),
        # The second capture is one too many: eager for good, and right.
        ("one capture only", [1, 0, 1]),
    ],
)
def test_captures_at_changed_addresses_are_counted(seen: dict[str, Any], name: str, captured: list[int]) -> None:
    """All captures, those of a known key, and graphs that fell back to eager."""
    assert captured == seen[name]["captured"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("plain", [64, 1, []]),
        ("forced eager", [64, 0, []]),
        ("written argument", [64, 1, []]),
        ("one capture only", [1, 1, []]),
        ("integer of each step", [64, None, ["L['n']"]]),
    ],
)
def test_graph_keys_are_predicted_from_the_artifact(seen: dict[str, Any], name: str, keys: list[Any]) -> None:
    """The limit, how many keys, and which integers make one each."""
    assert keys == seen[name]["keys"]
    assert (name == "integer of each step") == bool(seen[name]["warning"])


BY_HASH = """
import os
import torch


class Model(torch.nn.Module):
    def main_decode(self, x):
        return x * 2


def build():
    return Model().eval()


def inputs(model, rank):
    os.environ.get(next(iter({f"CHOICE_{letter}" for letter in "abcdefgh"})))
    return {"x": torch.ones(2, 4)}
"""


@pytest.mark.nightly
def test_key_that_differs_from_process_to_process_is_refused(tmp_path: Path) -> None:
    """Which variable is read follows the order of a set of texts: two processes would look for two entries."""
    (tmp_path / "model.py").write_text(BY_HASH)
    recipe = {
        "schema": "cachectl/recipe/v1",
        "name": "by-hash",
        "device": "simulated",
        "model": {"factory": "model:build", "path": ["."]},
        "functions": [{"method": "main_decode", "cases": [{"name": "b2", "inputs": "model:inputs"}]}],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))

    done = subprocess.run(
        [sys.executable, "-m", "cachectl", "build", "recipe.yaml", "--json"],
        cwd=tmp_path,
        env={**os.environ, "CACHECTL_STORE": str(tmp_path / "store")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )

    (failure,) = json.loads(done.stdout)["failed"]
    assert 1 == done.returncode
    words = "main_decode [b2]: a fresh process has another key: environment: observed.CHOICE_"
    assert failure["error"].startswith(words), failure["error"]
