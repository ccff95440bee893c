"""What every benchmark measures with: samples taken in interleaved pairs, rows for the table, and child processes.

Nothing here asserts: a row outside its budget is still a row. Standard library and cachectl only.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cachectl

__all__ = [
    "CHILDREN",
    "EXAMPLE",
    "SIMULATED",
    "THIS_CPU",
    "BenchmarkError",
    "Row",
    "Run",
    "Samples",
    "cachectl_command",
    "child_environ",
    "interleaved",
    "run_child",
    "run_together",
    "scratch",
]

# The evidence marks.
SIMULATED = "simulated"
THIS_CPU = "this CPU"

HERE = Path(__file__).resolve().parent
CHILDREN = HERE / "children"
EXAMPLE = HERE.parent / "examples" / "tiny-decoder"


class BenchmarkError(Exception):
    """What was to be measured did not happen: a cold hook, a child that died, other bytes than were published."""


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        what: what was measured, and at which size.
        measured: the samples, in `unit`.
        evidence: SIMULATED for whatever ran on the simulated CANN, else THIS_CPU.
        against_what: what `against` is, in a few words.
        against: the floor of the same run, pair by pair with `measured` where the counts are equal.
        unit: `s` or `bytes`.
        budget: the budget in words; empty for a row that explains another.
        ratio_max: the budget for measured / against.
        ratio_min: the budget for a ratio that has to be large.
        value_max: the budget for the measured median, in `unit`.
        at_scale: False where a quick run measures a smaller size than the budget speaks of.
    """

    what: str
    measured: Samples
    evidence: str
    against_what: str = ""
    against: Samples | None = None
    unit: str = "s"
    budget: str = ""
    ratio_max: float | None = None
    ratio_min: float | None = None
    value_max: float | None = None
    at_scale: bool = True

    @property
    def ratio(self) -> float | None:
        """The median of the pairs' ratios: load that comes and goes hits both sides of a pair."""
        if self.against is None:
            return None
        if len(self.against.values) != len(self.measured.values):
            return self.measured.median / self.against.median
        pairs = zip(self.measured.values, self.against.values, strict=True)
        return statistics.median(one / other for one, other in pairs)

    @property
    def within(self) -> bool | None:
        """Whether the budget was kept; None where there is none, or where this size is not the budget's."""
        if not self.at_scale:
            return None
        ratio = self.ratio
        found = [
            *([self.measured.median <= self.value_max] if self.value_max is not None else []),
            *([ratio <= self.ratio_max] if self.ratio_max is not None and ratio is not None else []),
            *([ratio >= self.ratio_min] if self.ratio_min is not None and ratio is not None else []),
        ]
        return all(found) if found else None


@dataclass(frozen=True)
class Run:
    """One finished child process: wall and CPU seconds, and its standard output."""

    wall_s: float
    cpu_s: float
    stdout: str


def interleaved(rounds: int, *measures: Callable[[], Any], warm_up: bool = True) -> list[tuple[Any, ...]]:
    """Return what each of `measures` gave, over `rounds` rounds in which each is called once.

    The order turns from round to round, so that none always finds what another left in a cache. The warm-up round's
    results are thrown away.
    """
    found: list[list[Any]] = [[] for _ in measures]
    if warm_up:
        for measure in measures:
            measure()
    for turn in range(rounds):
        for place in range(len(measures)):
            index = (place + turn) % len(measures)
            found[index].append(measures[index]())
    return [tuple(results) for results in found]


def run_child(command: Sequence[str], *, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Run:
    """Run a child process to its end and time it whole; its standard error is shown only when it fails.

    Raises:
        BenchmarkError: it did not exit with 0.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode()
        if process.returncode:
            err.seek(0)
            said = err.read().decode(errors="replace")[-2000:]
            raise BenchmarkError(f"{' '.join(command)[:300]} exited with {process.returncode}\n{said or text[-2000:]}")
    return Run(wall_s, usage.ru_utime + usage.ru_stime, text)


def run_together(
    commands: Sequence[Sequence[str]], *, environ: dict[str, str] | None = None
) -> tuple[float, list[str]]:
    """Start all commands at once; return the seconds until the last has ended, and their outputs.

    Raises:
        BenchmarkError: one did not exit with 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(number) for number in range(len(commands))]
        files = [open(path, "wb") for path in outputs]  # noqa: SIM115 - closed below, all at once
        try:
            started = time.perf_counter()
            processes = [
                subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL)
                for command, file in zip(commands, files, strict=True)
            ]
            codes = [process.wait() for process in processes]
            wall_s = time.perf_counter() - started
        finally:
            for file in files:
                file.close()
        if any(codes):
            raise BenchmarkError(f"of {len(codes)} processes {sum(map(bool, codes))} failed, exit codes {set(codes)}")
        return wall_s, [path.read_text() for path in outputs]


def cachectl_command() -> list[str]:
    """Return the command that starts this cachectl isolated (`python -I`): the installed script where it is installed.

    A checkout on PYTHONPATH is not seen under -I, so it is named on the command line.
    """
    package = Path(cachectl.__file__).resolve().parents[1]
    script = Path(sys.executable).with_name("cachectl")
    if package == Path(sysconfig.get_path("purelib")).resolve() and script.is_file():
        return [sys.executable, "-I", str(script)]
    start = "import sys; sys.path.insert(0, {!r}); from cachectl.__main__ import main; sys.exit(main())"
    return [sys.executable, "-I", "-c", start.format(str(package))]


def child_environ(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, and without what would steer cachectl in a child."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CACHECTL_")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **changes}


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for stores and copies, on the file system that TMPDIR names, and delete it."""
    folder = Path(tempfile.mkdtemp(prefix="cachectl-bench."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
