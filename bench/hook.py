"""The hook as a whole process beside the bare work, alone and many at once; and its decision by the artifact's size.

Both sides read the same blobs and write to the same file system, the page cache as it is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from made_up_store import MadeUpStore
from measure import (
    CHILDREN,
    THIS_CPU,
    BenchmarkError,
    Row,
    Run,
    Samples,
    cachectl_command,
    child_environ,
    interleaved,
    run_child,
    run_together,
    scratch,
)

NAME = "hook"
BUDGET = "16 × 4 MiB ≤ 1.3× of the bare work; the decision flat in the size; many at once ≤ 1.5×"
ENTRIES = 16


def run(quick: bool) -> list[Row]:
    with scratch() as folder:
        return [*_alone(folder, quick), *_decision(folder, quick), *_many(folder, quick)]


class Pair:
    """One hook and its floor over one store, each into a new folder that is deleted outside of the measurement."""

    def __init__(self, store: MadeUpStore, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.numbers = itertools.count()
        self.environ = child_environ()

    def hook_command(self, *options: str) -> list[str]:
        recipe, store = str(self.store.job.recipe), str(self.store.layout.root)
        return [*cachectl_command(), "hook", recipe, "--store", store, "--quiet", *options]

    def floor_command(self, target: Path) -> list[str]:
        return [sys.executable, "-I", str(CHILDREN / "floor.py"), str(target), *map(str, self.store.blobs)]

    def hook(self) -> tuple[Run, dict[str, Any]]:
        target = self._new()
        result = run_child(self.hook_command("--warm-dir", str(target)), environ=self.environ)
        report = warm_report(result.stdout)
        shutil.rmtree(target)
        return result, report

    def floor(self) -> Run:
        target = self._new()
        result = run_child(self.floor_command(target), environ=self.environ)
        shutil.rmtree(target)
        return result

    def hooks_at_once(self, count: int) -> float:
        """Hand out to one warm dir `count` times at once; check every byte afterwards, outside of the measurement."""
        target = self._new()
        command = self.hook_command("--warm-dir", str(target))
        seconds, outputs = run_together([command] * count, environ=self.environ)
        wanted = sorted(blob.name for blob in self.store.blobs)
        for text in outputs:
            found = sorted(_digests(Path(entry["path"]) for entry in warm_report(text)["entries"]))
            if found != wanted:
                raise BenchmarkError("a hand-out holds other bytes than were published")
        shutil.rmtree(target)
        return seconds

    def floors_at_once(self, count: int) -> float:
        target = self._new()
        target.mkdir()
        commands = [self.floor_command(target / str(number)) for number in range(count)]
        seconds, _ = run_together(commands, environ=self.environ)
        shutil.rmtree(target)
        return seconds

    def _new(self) -> Path:
        return self.folder / f"{self.store.layout.root.parent.name}-{next(self.numbers)}"


def warm_report(text: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(text)
    if report["outcome"] != "warm":
        raise BenchmarkError(f"the hook was {report['outcome']}: {report['reasons']}")
    return report


def _digests(folders: Iterator[Path]) -> Iterator[str]:
    for folder in folders:
        yield hashlib.sha256((folder / "compiled_module").read_bytes()).hexdigest()


def _alone(folder: Path, quick: bool) -> list[Row]:
    pair = Pair(MadeUpStore.make(folder / "alone", entries=ENTRIES, entry_bytes=4 << 20), folder)
    hooks, floors = interleaved(3 if quick else 15, pair.hook, pair.floor)
    runs = [result for result, _ in hooks]
    bare = interleaved(3 if quick else 15, lambda: run_child([sys.executable, "-I", "-c", "pass"]).wall_s)[0]
    rows = [
        Row(
            f"hook, {ENTRIES} × 4 MiB, whole process",
            Samples(tuple(result.wall_s for result in runs)),
            THIS_CPU,
            against_what="python -I: read, sha256, write",
            against=Samples(tuple(result.wall_s for result in floors)),
            budget="≤ 1.3×",
            ratio_max=1.3,
        ),
        Row(
            "  the same in CPU seconds",
            Samples(tuple(result.cpu_s for result in runs)),
            THIS_CPU,
            against_what="the same",
            against=Samples(tuple(result.cpu_s for result in floors)),
        ),
    ]
    for stage in ("resolve", "verify", "materialize"):
        values = tuple(float(report["seconds"][stage]) for _, report in hooks)
        rows.append(Row(f"  of that, its own clock: {stage}", Samples(values), THIS_CPU))
    outside = tuple(result.wall_s - float(report["seconds"]["total"]) for result, report in hooks)
    rows.append(
        Row(
            "  outside its clock: start, imports, exit",
            Samples(outside),
            THIS_CPU,
            against_what="bare python -I start",
            against=Samples(bare),
        )
    )
    return rows


def _decision(folder: Path, quick: bool) -> list[Row]:
    small = Pair(MadeUpStore.make(folder / "small", entries=1, entry_bytes=1 << 20, sparse=True), folder)
    large = Pair(MadeUpStore.make(folder / "large", entries=1, entry_bytes=1 << 30, sparse=True), folder)

    def decide(pair: Pair) -> float:
        report = warm_report(run_child(pair.hook_command("--read-only"), environ=pair.environ).stdout)
        return float(report["seconds"]["resolve"])

    at_large, at_small = interleaved(5 if quick else 31, lambda: decide(large), lambda: decide(small))
    return [
        Row(
            "decision alone (--read-only), artifact of 1 GiB",
            Samples(at_large),
            THIS_CPU,
            against_what="artifact of 1 MiB",
            against=Samples(at_small),
            budget="flat: ≤ 1.1×",
            ratio_max=1.1,
        )
    ]


def _many(folder: Path, quick: bool) -> list[Row]:
    pair = Pair(MadeUpStore.make(folder / "many", entries=ENTRIES, entry_bytes=450_000), folder)
    rows = []
    for count, rounds in [(16, 2)] if quick else [(64, 5), (256, 5)]:
        hooks, floors = interleaved(
            rounds, partial(pair.hooks_at_once, count), partial(pair.floors_at_once, count), warm_up=False
        )
        rows.append(
            Row(
                f"{count} hooks at once, {ENTRIES} × 450 KB each, none torn",
                Samples(hooks),
                THIS_CPU,
                against_what=f"{count} × the bare work at once",
                against=Samples(floors),
                budget="≤ 1.5× (256 at once)",
                ratio_max=1.5,
                at_scale=count == 256,
            )
        )
    return rows
