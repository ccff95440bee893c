"""The model of many methods (step_zoo/), built with its own store, and programs that run on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ZOO = Path(__file__).parent / "step_zoo"
# As in step_zoo/model.py, which can't be imported without torch.
METHODS = [
    line.split("def ")[1].split("(")[0]
    for line in (ZOO / "model.py").read_text().partition("class Model")[2].partition("\ndef build")[0].splitlines()
    if line.startswith("    def ") and "__" not in line
]
GOOD = [name for name in METHODS if not name.startswith("bad_")]
BAD = [name for name in METHODS if name.startswith("bad_")]
# Where sizes that are symbols make a difference: views, strides, aliases, what is written.
DYNAMIC = [
    "buffer",
    "caches_of_one_block",
    "cache_of_the_model_passed_in",
    "argument_written",
    "plain_values",
    "integers",
    "strided",
    "expanded",
    "view_of_another",
    "same_twice",
    "extra_keywords",
    "defaults",
    "returns_its_input",
]


class Built:
    """The zoo with its store, and what runs on it."""

    def __init__(self, folder: Path, *, dynamic: bool) -> None:
        self.folder = folder
        self.environ = {
            **os.environ,
            "CACHECTL_STORE": str(folder / "store"),
            "CACHECTL_WARM_DIR": str(folder / "warm"),
            "DYNAMIC": "1" if dynamic else "0",
        }
        shutil.copytree(ZOO, folder, ignore=shutil.ignore_patterns("__pycache__"))
        self.recipe("recipe.yaml", "zoo", DYNAMIC if dynamic else GOOD, dynamic=dynamic)

    def recipe(self, file: str, name: str, methods: list[str], *, dynamic: bool = False) -> None:
        """Write a recipe with one case of each method."""
        document = {
            "schema": "cachectl/recipe/v1",
            "name": name,
            "device": "simulated",
            "model": {"factory": "model:build", "path": ["."]},
            "compile": {"dynamic": dynamic, "options": {"frozen_parameter": True}},
            "functions": [
                {"method": method, "cases": [{"name": "one", "inputs": "model:inputs", "args": {"method": method}}]}
                for method in methods
            ],
        }
        (self.folder / file).write_text(json.dumps(document))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m cachectl WORDS...` in the zoo's folder."""
        return subprocess.run(
            [sys.executable, "-m", "cachectl", *words],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )

    def program(self, file: str, *words: str) -> dict[str, Any]:
        """Run a program on the simulated CANN; return its document."""
        done = self.run("simulate", "--", sys.executable, file, *words)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def build(folder: Path, *, dynamic: bool) -> Built:
    """Build the zoo in a folder; every case has to be published."""
    zoo = Built(folder, dynamic=dynamic)
    done = zoo.run("build", "recipe.yaml", "--json")
    assert done.returncode == 0, done.stderr
    return zoo
