"""The whole of cachectl on one page: build, verify, cold start, warm start, and what the plain runtime gets wrong.

    make demo

Runs the tiny decoder on the real torch_npu over a simulated CANN: every figure it prints is simulated. Works in a
folder of its own, which it deletes. The exit code says whether each answer was right, never how long anything took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# One line of the model, as an engineer would tune it. The runtime's key has nothing of the source in it.
EDITED_LINE = "nn.functional.silu(self.gate(hidden))"
EDITED_TO = "nn.functional.relu(self.gate(hidden))"
# Cold and eager logits of one model may differ in the last bits.
TOLERANCE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, choices=(4, 32), default=32, help="depth of the timed decoder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cachectl-demo.") as folder:
        demo = Demo(Path(folder))
        timed = "recipe-32.yaml" if args.layers == 32 else "recipe.yaml"
        demo.build(timed)
        rows = demo.cold_and_warm(timed)
        demo.build("recipe.yaml")
        demo.fill_plain_cache("recipe.yaml")
        demo.scene_edited_line()
        demo.scene_changed_attribute()
        print_table(rows, args.layers)
        return demo.verdict()


class Demo:
    """The commands a user would type, in a copy of the example."""

    def __init__(self, folder: Path) -> None:
        self.example = folder / "tiny-decoder"
        shutil.copytree(HERE / "tiny-decoder", self.example, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        self.environ = {
            **os.environ,
            "CACHECTL_STORE": str(folder / "store"),
            "CACHECTL_WARM_DIR": str(folder / "warm"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.wrong: list[str] = []

    def build(self, recipe: str) -> None:
        """Prebuild a recipe offline, look at the store, and run the hook once."""
        if recipe != "recipe.yaml" or not (self.example.parent / "store").exists():
            self.cachectl("init")
        self.cachectl("build", recipe)
        self.cachectl("verify")
        self.cachectl("plan", recipe, "--require-ready")

    def cold_and_warm(self, recipe: str) -> list[tuple[str, dict[str, Any]]]:
        """Start three times: eager, the runtime alone with an empty cache, and warm from the store."""
        say("Three starts of one program, each a process of its own")
        eager = self.generate(recipe, "--eager")
        cold = self.generate(recipe, "--plain", "--cache-dir", "plain-cache")
        warm = self.generate(recipe)
        self.expect("the cold start's answer is eager's", difference(cold, eager) < TOLERANCE)
        self.expect("the warm start's answer is eager's", difference(warm, eager) < TOLERANCE)
        self.expect("the start after `cachectl build` is warm", warm["outcome"] == "warm", warm["reasons"])
        for run in (cold, warm):
            run["difference"] = difference(run, eager)
        return [("cold", cold), ("warm", warm)]

    def fill_plain_cache(self, recipe: str) -> None:
        """Let the runtime fill a cache of its own from the model as it is now."""
        self.generate(recipe, "--plain", "--cache-dir", "stale-cache")

    def scene_edited_line(self) -> None:
        say(f"One line of the model is edited: {EDITED_LINE} -> {EDITED_TO}")
        source = self.example / "tiny_decoder" / "model.py"
        text = source.read_text()
        if text.count(EDITED_LINE) != 1:
            raise SystemExit(f"{source.name} has no single {EDITED_LINE!r} to edit")
        source.write_text(text.replace(EDITED_LINE, EDITED_TO))
        self.scene("an edited line")
        source.write_text(text)

    def scene_changed_attribute(self) -> None:
        say("An attribute is changed, no line of code: every attention's scale is doubled")
        self.scene("a changed attribute", "--scale", "2.0")

    def scene(self, what: str, *change: str) -> None:
        """Run the changed program eagerly, on the runtime's old cache, and through cachectl."""
        eager = self.generate("recipe.yaml", "--eager", *change)
        plain = self.generate("recipe.yaml", "--plain", "--cache-dir", "stale-cache", *change)
        ours = self.generate("recipe.yaml", *change)
        print(f"  the runtime alone: largest error {difference(plain, eager):.3g}, said nothing")
        print(f"  cachectl:          largest error {difference(ours, eager):.3g}, outcome {ours['outcome']}, because")
        for reason in ours["reasons"]:
            print(f"    {reason}")
        self.expect(f"{what}: the runtime alone answers wrongly", difference(plain, eager) > TOLERANCE)
        self.expect(f"{what}: cachectl goes cold", ours["outcome"] == "cold")
        self.expect(f"{what}: cachectl says why", bool(ours["reasons"]))
        self.expect(f"{what}: cachectl answers right", difference(ours, eager) < TOLERANCE)

    def generate(self, recipe: str, *options: str) -> dict[str, Any]:
        """Run generate.py in a fresh process on the simulated CANN; return its document."""
        command = [
            "simulate",
            "--",
            sys.executable,
            "generate.py",
            "--recipe",
            recipe,
            "--steps",
            "4",
            "--json",
            *options,
        ]
        result: dict[str, Any] = json.loads(self.cachectl(*command, *options, capture=True))
        return result

    def cachectl(self, *arguments: str, capture: bool = False) -> str:
        command = [sys.executable, "-m", "cachectl", *arguments]
        if not capture:
            print(f"$ cachectl {' '.join(arguments)}", flush=True)
        done = subprocess.run(
            command, cwd=self.example, env=self.environ, text=True, stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None, check=False,
        )  # fmt: skip
        if done.returncode:
            print(done.stderr or "", file=sys.stderr)
            raise SystemExit(f"cachectl {' '.join(arguments)} exited with {done.returncode}")
        return done.stdout or ""

    def expect(self, what: str, held: bool, detail: object = "") -> None:
        print(f"  {'ok   ' if held else 'WRONG'} {what}{f': {detail}' if not held and detail else ''}")
        if not held:
            self.wrong.append(what)

    def verdict(self) -> int:
        for what in self.wrong:
            print(f"WRONG: {what}", file=sys.stderr)
        return 1 if self.wrong else 0


def difference(run: dict[str, Any], eager: dict[str, Any]) -> float:
    """Return the largest absolute difference of the last step's logits."""
    pairs = zip(run["logits"], eager["logits"], strict=True)
    return max(abs(one - other) for row, other_row in pairs for one, other in zip(row, other_row, strict=True))


def print_table(rows: Sequence[tuple[str, dict[str, Any]]], layers: int) -> None:
    """Print cold and warm by stage. Every figure was measured on the simulated CANN."""
    (_, cold), (_, warm) = rows
    say(f"Cold and warm, {layers} layers, seconds (simulated: a CPU under the real torch_npu, no NPU)")
    print(f"  {'stage':<34}{'cold':>10}{'warm':>10}{'ratio':>9}")
    stages = [
        ("hook: find, verify, lay down", "warm_start"),
        ("first call: compile, or prove+load", "first_call"),
        ("three more calls", "other_calls"),
    ]
    for label, stage in stages:
        one, other = cold["seconds"].get(stage, 0.0), warm["seconds"].get(stage, 0.0)
        ratio = f"{one / other:8.1f}x" if one and other and stage == "first_call" else ""
        print(f"  {label:<34}{one:>10.3f}{other:>10.3f}{ratio:>9}")
    print(f"  {'largest difference to eager':<34}{cold['difference']:>10.2g}{warm['difference']:>10.2g}")


def say(title: str) -> None:
    print(f"\n== {title}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
