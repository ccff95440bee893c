"""The program in which one thing at a time changes (change_zoo/), its recipe, and what runs on it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from filelock import FileLock

ZOO = Path(__file__).parent / "change_zoo"
# What the program's model reads; SHIFT is not set.
ENVIRON = {"FACTOR": "1", "GAIN": "1"}
CASE = {"batch": 4, "dtype": "int32", "strided": False}
CONFIG = {"scale": 1.0, "amount": 0.5, "layers": 1}


class Changing:
    """A folder of programs with one store, and the plain runtime's cache folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.environ = {
            **os.environ,
            **ENVIRON,
            "CACHECTL_STORE": str(self.store),
            "CACHECTL_WARM_DIR": str(folder / "warm"),
        }

    def lay(
        self,
        name: str,
        edits: Sequence[tuple[str, str, str]] = (),
        *,
        config: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        cases: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Path:
        """Lay the program into a folder of its own, with edits (file, old, new) and a recipe; return the folder."""
        folder = self.folder / name
        shutil.copytree(ZOO, folder, ignore=shutil.ignore_patterns("__pycache__", "play.py"))
        for file, old, new in edits:
            text = (folder / file).read_text()
            assert 1 == text.count(old), (file, old)
            (folder / file).write_text(text.replace(old, new))
        recipe = {
            "schema": "cachectl/recipe/v1",
            "name": "changing",
            "device": "simulated",
            "model": {"factory": "model:build", "config": {**CONFIG, **(config or {})}, "path": ["."]},
            "compile": {"options": {"frozen_parameter": True, **(options or {})}},
            "functions": [
                {
                    "method": "main_decode",
                    "cases": [
                        {"name": case, "inputs": "model:inputs", "args": {**CASE, **args}}
                        for case, args in (cases or {"usual": {}}).items()
                    ],
                }
            ],
        }
        # JSON is YAML.
        (folder / "recipe.yaml").write_text(json.dumps(recipe, indent=1))
        return folder

    def run(
        self,
        *words: str,
        environ: Mapping[str, str] | None = None,
        stdin: str = "",
        before: Sequence[str] = (),
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run `BEFORE... python -m cachectl WORDS...`."""
        return subprocess.run(
            [*before, sys.executable, "-m", "cachectl", *words],
            cwd=self.folder,
            env={**self.environ, **(environ or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
            **options,
        )

    def play(
        self, starts: Sequence[Mapping[str, Any]], *, inside: Mapping[str, str] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Play starts on the simulated CANN, each in a process of its own; see change_zoo/play.py.

        Args:
            starts: what play.py reads.
            inside: variables of the program's processes alone, and not of `simulate`.
            options: as for `run`.
        """
        setting = [f"{name}={value}" for name, value in (inside or {}).items()]
        words = ("simulate", "--", "env", *setting, sys.executable, str(ZOO / "play.py"))
        done = self.run(*words, stdin=json.dumps(list(starts)), **options)
        assert 0 == done.returncode, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        assert not [item["fault"] for item in found if "fault" in item]
        return found

    def build(self, *recipes: Path, force: bool = False, **options: Any) -> dict[str, Any]:
        """Build recipes; each has to succeed. Return the report."""
        done = self.run("build", *map(str, recipes), "--json", *(["--force"] if force else []), **options)
        assert 0 == done.returncode, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report


def built_once(shared_folder: Path) -> Changing:
    """Return the unchanged program with its store, built once in a run of the tests: change nothing in it."""
    folder = shared_folder / "changing"
    folder.mkdir(exist_ok=True)
    base = Changing(folder)
    with FileLock(folder / "lock"):
        if not (folder / "built").is_file():
            base.build(base.lay("usual") / "recipe.yaml")
            (folder / "built").touch()
    return base


def copy_of(base: Changing, folder: Path) -> Changing:
    """Return a copy of the unchanged program and its store, in another folder."""
    shutil.copytree(base.store, folder / "store", symlinks=True)
    copy = Changing(folder)
    copy.lay("usual")
    return copy


def other_torch_npu(folder: Path, version: str) -> Path:
    """Make an installation of torch_npu that is the installed one but for its version; return its site folder.

    Every file is a link to the installed one, but for `version.py` and the distribution's metadata.
    """
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    (found,) = package.parent.glob("torch_npu-*.dist-info")
    for source, target in (
        (package, folder / "torch_npu"),
        (found, folder / f"torch_npu-{version}.dist-info"),
    ):
        target.mkdir(parents=True)
        for item in source.iterdir():
            if item.name not in {"version.py", "METADATA", "RECORD", "__pycache__"}:
                (target / item.name).symlink_to(item)
    usual = next(line for line in (package / "version.py").read_text().splitlines() if line.startswith("__version__"))
    for source, target, line in (
        (package / "version.py", folder / "torch_npu" / "version.py", (usual, f"__version__ = {version!r}")),
        (
            found / "METADATA",
            folder / f"torch_npu-{version}.dist-info" / "METADATA",
            (f"Version: {installed('torch_npu')}", f"Version: {version}"),
        ),
    ):
        text = source.read_text()
        assert 1 == text.count(line[0])
        target.write_text(text.replace(*line))
    return folder
