"""First calls of the example decoder, each in a fresh process: cold, the runtime's own warm load, and cachectl's warm.

The real torch_npu on the simulated CANN: what an NPU adds at each start (capture, warm-up) is small here.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from measure import (
    CHILDREN,
    EXAMPLE,
    SIMULATED,
    BenchmarkError,
    Row,
    Samples,
    child_environ,
    interleaved,
    run_child,
    scratch,
)

NAME = "compile"
BUDGET = "32 layers: warm first call ≤ 1.25× of the runtime's own warm load; cold / warm ≥ 40×"
LAYERS = 32
QUICK_LAYERS = 4


def run(quick: bool) -> list[Row]:
    layers = QUICK_LAYERS if quick else LAYERS
    with scratch() as folder:
        decoder = Decoder(folder, layers)
        decoder.cachectl("build", decoder.recipe.name)
        # Filled once; loading leaves it as it is.
        decoder.first_start("--plain", "--cache-dir", str(folder / "filled"))
        cold, own, warm = interleaved(
            2 if quick else 5,
            decoder.cold,
            lambda: decoder.first_start("--plain", "--cache-dir", str(folder / "filled")),
            decoder.warm,
            warm_up=False,
        )
    first = {name: _seconds(runs, "first_call") for name, runs in (("cold", cold), ("own", own), ("warm", warm))}
    of_layers = f"{layers} layers"
    rows = [
        Row(
            f"warm first call (checks, proof, load, run), {of_layers}",
            first["warm"],
            SIMULATED,
            against_what="the runtime's own warm load and run",
            against=first["own"],
            budget="≤ 1.25× (32 layers)",
            ratio_max=1.25,
            at_scale=layers == LAYERS,
        ),
        Row(
            f"cold first call, {of_layers}",
            first["cold"],
            SIMULATED,
            against_what="cachectl's warm first call",
            against=first["warm"],
            budget="≥ 40× (32 layers)",
            ratio_min=40,
            at_scale=layers == LAYERS,
        ),
    ]
    for stage, text in (("proof", "checks and proof"), ("load", "load"), ("first_call", "run (with capture)")):
        values = Samples(tuple(run["report"]["stages"][stage] for run in warm))
        rows.append(Row(f"  of the warm first call: {text}", values, SIMULATED))
    proof_only = Samples(tuple(sum(proof["seconds"] for proof in run["guards"]) for run in warm))
    rows.append(Row("  of the checks: the guard sheet alone", proof_only, SIMULATED))
    rows.append(Row("  before it: the hook, in the program's process", _seconds(warm, "warm_start"), SIMULATED))
    whole = [Samples(tuple(run["process_s"] for run in runs)) for runs in (warm, own)]
    rows.append(
        Row(
            "  the whole warm process, imports too",
            whole[0],
            SIMULATED,
            against_what="with the runtime's own warm load",
            against=whole[1],
        )
    )
    return rows


class Decoder:
    """A copy of the example with a recipe of one case, and a store of its own."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.folder = folder
        self.example = folder / "tiny-decoder"
        shutil.copytree(EXAMPLE, self.example, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        self.recipe = self.example / "recipe-measured.yaml"
        text = (self.example / "recipe-32.yaml").read_text()
        self.recipe.write_text(text.replace(f"layers: {LAYERS}", f"layers: {layers}"))
        self.environ = child_environ(
            CACHECTL_STORE=str(folder / "store"), CACHECTL_WARM_DIR=str(folder / "warm"), TASK_QUEUE_ENABLE="1"
        )
        # One thread: on a shared machine the waiting for the others is longer than what is measured.
        self.environ["OMP_NUM_THREADS"] = "1"
        # Bytecode is written once and read by all, as in an image.
        del self.environ["PYTHONDONTWRITEBYTECODE"]
        self.numbers = itertools.count()
        self.cachectl("init")

    def cachectl(self, *arguments: str) -> None:
        run_child([sys.executable, "-m", "cachectl", *arguments], environ=self.environ, cwd=self.example)

    def cold(self) -> dict[str, Any]:
        cache = self.folder / f"empty{next(self.numbers)}"
        found = self.first_start("--plain", "--cache-dir", str(cache))
        shutil.rmtree(cache)
        return found

    def warm(self) -> dict[str, Any]:
        found = self.first_start()
        if found["outcome"] != "warm":
            raise BenchmarkError(f"the start after `cachectl build` was {found['outcome']}: {found['reasons']}")
        return found

    def first_start(self, *options: str) -> dict[str, Any]:
        """Run generate.py in a fresh process; return its document, with cachectl's report where it took part."""
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        program = [sys.executable, str(CHILDREN / "reported.py"), str(report), str(self.example / "generate.py")]
        arguments = ["--recipe", str(self.recipe), "--steps", "2", "--json", *options]
        command = [sys.executable, "-m", "cachectl", "simulate", "--", *program, *arguments]
        run = run_child(command, environ=self.environ, cwd=self.example)
        found: dict[str, Any] = {**json.loads(run.stdout), "process_s": run.wall_s}
        return {**found, **json.loads(report.read_text())} if report.exists() else found


def _seconds(runs: tuple[dict[str, Any], ...], stage: str) -> Samples:
    return Samples(tuple(run["seconds"][stage] for run in runs))
