"""One store, built once a run on the real runtime, and the programs that use it.

A test that changes model code or the store works on a copy: `program()` and `built.copy_store()`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-decoder"
RANK_ZOO = Path(__file__).resolve().parents[1] / "rank_zoo"
# For what hangs, and no measure: real compiles take ten times as long where machines are slow and shared.
BOUND_S = 1000
# A hook's deadline is also how long its ranks wait for each other. Where a test is not about it, nobody comes too late.
DEADLINE = ("--deadline", "600")
# One layer compiles in a third of the time of four, and shows the same.
RECIPE_EDITS = {"layers: 4": "layers: 1"}


@dataclass(frozen=True)
class Program:
    """A folder with the tiny decoder in it, a store, and the environment of whoever runs it."""

    folder: Path
    store: Path
    warm_dir: Path

    def cachectl(
        self, *arguments: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `cachectl ARGS...` in the program's folder, a hook with time for all."""
        if arguments[0] in ("hook", "exec"):
            arguments = (arguments[0], *DEADLINE, *arguments[1:])
        return subprocess.run(
            [sys.executable, "-m", "cachectl", *arguments],
            cwd=cwd or self.folder,
            env={
                **os.environ,
                "CACHECTL_STORE": str(self.store),
                "CACHECTL_WARM_DIR": str(self.warm_dir),
                **(environ or {}),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )

    def build(self, recipe: str = "recipe.yaml", *options: str) -> dict[str, Any]:
        """Build and return the report; the build has to succeed."""
        done = self.cachectl("build", recipe, "--json", *options)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def generate(self, *options: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Run generate.py on the simulated CANN in a fresh process; return its document."""
        words = ["simulate", "--", sys.executable, "generate.py", "--steps", "4", "--json", *options]
        done = self.cachectl(*words, environ=environ)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def hook(self, *options: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Run the hook and return its document."""
        done = self.cachectl("hook", "recipe.yaml", *options, environ=environ)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def edit(self, old: str, new: str, file: str = "tiny_decoder/model.py") -> None:
        """Replace the one place where `old` stands in a file of the program."""
        path = self.folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))


def lay_program(folder: Path, store: Path) -> Program:
    """Copy the example into `folder`."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    program = Program(folder, store, folder.parent / "warm")
    for recipe in ("recipe.yaml", "recipe-dynamic.yaml"):
        for old, new in RECIPE_EDITS.items():
            program.edit(old, new, recipe)
    return program


@pytest.fixture(scope="session")
def built(shared_folder: Path) -> tuple[Program, dict[str, Any]]:
    """A program whose recipe is built, and the build's report. Shared by all of the run: change nothing in it."""
    base = shared_folder / "built"
    base.mkdir(exist_ok=True)
    report = base / "report.json"
    with FileLock(base / "lock"):
        if not report.is_file():
            report.write_text(json.dumps(lay_program(base / "tiny-decoder", base / "store").build()))
    return Program(base / "tiny-decoder", base / "store", base / "warm"), json.loads(report.read_text())


@dataclass(frozen=True)
class RankedProgram(Program):
    """A folder with the model that is split over ranks, its recipe for one world, and a store."""

    def write_recipe(
        self, world_size: int, *, name: str = "recipe.yaml", topology: Mapping[str, int] | None = None, **fields: Any
    ) -> Path:
        """Write a recipe for a world; tensor parallel over pairs of neighbours. `fields` replace the recipe's."""
        sizes = {"tensor_parallel": 2, "data_parallel": world_size // 2, **(topology or {})}
        document = {
            "schema": "cachectl/recipe/v1",
            "name": "ranked",
            "device": "simulated",
            "model": {"factory": "model:build", "config": {"tensor_parallel": sizes["tensor_parallel"]}, "path": ["."]},
            "compile": {"options": {"frozen_parameter": True}},
            "functions": [{"method": "main_decode", "cases": [{"name": "b2", "inputs": "model:inputs"}]}],
            "topology": {"world_size": world_size, **sizes},
            **fields,
        }
        path = self.folder / name
        # JSON is YAML.
        path.write_text(json.dumps(document))
        return path

    def torchrun(
        self,
        world_size: int,
        *command: str,
        recipe: str | None = "recipe.yaml",
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> RankedRun:
        """Run CMD once a rank, under exec of a recipe or, with None, on the simulated CANN alone."""
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        before = ["exec", recipe, "--report", str(report), *options] if recipe is not None else ["simulate"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        done = self.cachectl(*before, "--", *launcher, *command, environ=environ)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
        return RankedRun(
            done.returncode,
            sorted(found, key=lambda document: document["rank"]),
            json.loads(report.read_text()) if report.exists() else {},
            done.stderr,
        )


@dataclass(frozen=True)
class RankedRun:
    """What a program's ranks said: their documents by rank, and exec's report of them all."""

    returncode: int
    ranks: list[dict[str, Any]]
    report: dict[str, Any]
    stderr: str


def lay_ranked(folder: Path, store: Path) -> RankedProgram:
    """Copy the model that is split over ranks into `folder`."""
    shutil.copytree(RANK_ZOO, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return RankedProgram(folder, store, folder.parent / "warm")


@pytest.fixture(scope="session")
def ranked(shared_folder: Path) -> Callable[[int], RankedProgram]:
    """Return, for a world size, a program of so many ranks whose recipe is built; once a run and size.

    Change nothing in it: `own_ranked` is a copy to change.
    """

    def built_for(world_size: int) -> RankedProgram:
        base = shared_folder / f"ranked{world_size}"
        base.mkdir(exist_ok=True)
        with FileLock(base / "lock"):
            if not (base / "report.json").is_file():
                program = lay_ranked(base / "program", base / "store")
                program.write_recipe(world_size)
                (base / "report.json").write_text(json.dumps(program.build()))
        return RankedProgram(base / "program", base / "store", base / "warm")

    return built_for


@pytest.fixture
def own_ranked(ranked: Callable[[int], RankedProgram], tmp_path: Path) -> Callable[[int], RankedProgram]:
    """Return, for a world size, a program of the test's own, in another folder, with a copy of the built store."""

    def copied_for(world_size: int) -> RankedProgram:
        shared = ranked(world_size)
        shutil.copytree(shared.store, tmp_path / "store", symlinks=True)
        program = lay_ranked(tmp_path / "own" / "program", tmp_path / "store")
        program.write_recipe(world_size)
        return program

    return copied_for


@pytest.fixture(scope="session")
def plain_cache(shared_folder: Path) -> Path:
    """The plain runtime's own cache folder, compiled once a run from the unchanged program. Change nothing in it."""
    base = shared_folder / "plain"
    base.mkdir(exist_ok=True)
    with FileLock(base / "lock"):
        if not (base / "done").is_file():
            program = lay_program(base / "tiny-decoder", base / "store")
            program.generate("--plain", "--cache-dir", str(base / "cache"))
            (base / "done").touch()
    return base / "cache"


@pytest.fixture
def program(built: tuple[Program, dict[str, Any]], tmp_path: Path) -> Program:
    """A program of the test's own, in another folder, with a copy of the built store."""
    store = tmp_path / "store"
    shutil.copytree(built[0].store, store, symlinks=True)
    return lay_program(tmp_path / "own" / "tiny-decoder", store)


@pytest.fixture
def empty_program(tmp_path: Path) -> Program:
    """A program with no store yet."""
    return lay_program(tmp_path / "own" / "tiny-decoder", tmp_path / "store")


@pytest.fixture
def write_recipe() -> Callable[..., Path]:
    """Write a recipe for a model of the test's own: text of a module `model.py`, with edits to the recipe's fields."""

    def write(folder: Path, module: str, **fields: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(module)
        recipe = {
            "schema": "cachectl/recipe/v1",
            "name": "own",
            "device": "simulated",
            "model": {"factory": "model:build", "config": {}, "path": ["."]},
            "compile": {"mode": "npugraph_ex", "dynamic": False, "options": {"frozen_parameter": True}},
            "functions": [{"method": "main_decode", "cases": [{"name": "b2", "inputs": "model:inputs", "args": {}}]}],
            **fields,
        }
        path = folder / "recipe.yaml"
        # JSON is YAML.
        path.write_text(json.dumps(recipe))
        return path

    return write
