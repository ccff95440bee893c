"""The example executor in a folder of a test's own, and the ways of running it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "executor"
FIRST_CALLS = ("first_main_decode", "first_mtp_decode")


@dataclass(frozen=True)
class Executor:
    """A copy of the example, a store, and the environment of whoever runs it."""

    folder: Path
    store: Path
    torchrun: bool = False

    def run(self, config: str, *options: str, **changes: Any) -> list[dict[str, Any]]:
        """Run the program alone on the simulated CANN; return each rank's document. `changes` are model_config's."""
        done = self.call("simulate", "--", *self.command(config, changes), *options)
        assert done.returncode == 0, done.stderr
        return documents(done.stdout)

    def execute(
        self, config: str, *options: str, recipe: str = "", **changes: Any
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Run the program under exec of a recipe, the config's own unless named; return what ranks and exec say."""
        report = self.folder / "report.json"
        # The hook's deadline is also how long its ranks wait for each other: no rank may come too late.
        command = ("exec", recipe or recipe_of(config), *options, "--deadline", "600", "--report", str(report))
        done = self.call(*command, "--", *self.command(config, changes), "--steps", "32")
        assert done.returncode == 0, done.stderr
        return documents(done.stdout), json.loads(report.read_text())

    def command(self, config: str, changes: Mapping[str, Any]) -> list[str]:
        """Return how the program is started: by itself; several ranks by its launcher, or by torchrun."""
        name = self.edit_config(config, f"{config}_edited", **changes) if changes else config
        world = self.read_config(config)["parallel_config"]["world_size"]
        words = ["infer.py" if world == 1 or self.torchrun else "launch.py", "--config", f"config/{name}.yaml"]
        if world > 1 and self.torchrun:
            words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *words]
        return [sys.executable, *words]

    def call(self, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `cachectl WORDS...` in the program's folder."""
        mine = {"CACHECTL_STORE": str(self.store), "CACHECTL_WARM_DIR": str(self.store.with_name("warm"))}
        return subprocess.run(
            [sys.executable, "-m", "cachectl", *words],
            cwd=self.folder,
            env={**os.environ, **mine, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )

    def read_config(self, config: str) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load((self.folder / "config" / f"{config}.yaml").read_text())
        return document

    def edit_config(self, config: str, name: str, **changes: Any) -> str:
        """Write a config under another name, with fields of its model_config changed; return the name."""
        document = self.read_config(config)
        document["model_config"].update(changes)
        (self.folder / "config" / f"{name}.yaml").write_text(yaml.safe_dump(document))
        return name

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace the one place where `old` stands in a file of the program."""
        path = self.folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))

    def cachectl(self, *words: str) -> dict[str, Any]:
        """Run a verb that has to succeed; return its document."""
        done = self.call(*words, "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def recipe_of(config: str) -> str:
    """Return the recipe that stands beside a config in the example."""
    return f"recipe-{config.replace('_', '-')}.yaml"


def lay_executor(base: Path, *, torchrun: bool = False) -> Executor:
    """Copy the example into a folder below `base`, with one layer: it compiles in less time and shows the same."""
    folder = base / "program" / "executor"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*", "res"))
    made = Executor(folder, base / "store", torchrun)
    made.edit("weights/config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1')
    return made


def documents(stdout: str) -> list[dict[str, Any]]:
    """Return what each rank printed, by rank."""
    found = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"rank"')]
    return sorted(found, key=lambda document: document["rank"])


def reason_names(report: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return part and name of each reason of a report."""
    return {(reason["part"], reason["name"]) for reason in report["reasons"]}
