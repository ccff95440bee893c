"""Run the benchmarks and print one table: what was measured, beside its floor of the same run, and its budget.

    python bench/run.py [--quick] [--only NAME] [--json FILE]

Never asserts: a missed budget is printed, and the exit code is 0 unless a benchmark itself breaks.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from measure import HERE, Row, Samples

import cachectl

_SHARED = ("run", "measure", "made_up_store")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modules = list(benchmarks())
    parser.add_argument("--quick", action="store_true", help="few repetitions and smaller sizes")
    parser.add_argument("--only", action="append", choices=[module.NAME for module in modules], metavar="NAME",
                        help=f"one of {', '.join(module.NAME for module in modules)}; may be given again")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows there too")
    args = parser.parse_args()
    machine = Machine.here()
    results: dict[str, list[Row]] = {}
    broken: dict[str, str] = {}
    for module in modules:
        if args.only and module.NAME not in args.only:
            continue
        print(f"{module.NAME}: {module.BUDGET}", file=sys.stderr, flush=True)
        try:
            results[module.NAME] = module.run(args.quick)
        except Exception as error:  # noqa: BLE001 - one broken benchmark must not hide the others' rows
            traceback.print_exc()
            broken[module.NAME] = f"{type(error).__name__}: {error}"
    print("\n".join(table(machine, results, broken, args.quick)))
    if args.json:
        args.json.write_text(json.dumps(document(machine, results, broken, args.quick), indent=1) + "\n")
    return 1 if broken else 0


def benchmarks() -> Iterator[ModuleType]:
    """Yield the benchmark modules beside this file, by name."""
    for path in sorted(HERE.glob("*.py")):
        if path.stem not in _SHARED:
            yield importlib.import_module(path.stem)


@dataclass(frozen=True)
class Machine:
    """What the figures were taken on; other work on the machine shows in the load."""

    cores: int
    load_at_start: tuple[float, float, float]
    text: str

    @classmethod
    def here(cls) -> Machine:
        cores = len(os.sched_getaffinity(0))
        load = os.getloadavg()
        words = [
            f"{cores} cores ({_cpu()})",
            f"load {load[0]:.1f} {load[1]:.1f} {load[2]:.1f} at start",
            f"{platform.python_implementation()} {platform.python_version()}",
            *(f"{name} {_version(name)}" for name in ("torch", "torch_npu")),
            f"cachectl {cachectl.__version__}",
            datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        ]
        return cls(cores, load, ", ".join(words))


def table(machine: Machine, results: dict[str, list[Row]], broken: dict[str, str], quick: bool) -> list[str]:
    """Return the table's lines: median (min-max, n) of both sides, and the median of the pairs' ratios."""
    header = ["what", "measured", "against", "", "ratio", "budget", "within?", "evidence"]
    lines = [header]
    for rows in results.values():
        for row in rows:
            against = spread(row.against, row.unit) if row.against is not None else ""
            ratio = f"{row.ratio:.2f}×" if row.ratio is not None else ""
            within = {True: "yes", False: "NO", None: ""}[row.within]
            if row.budget and row.within is None:
                within = "other size"
            lines.append(
                [
                    row.what,
                    spread(row.measured, row.unit),
                    against,
                    row.against_what,
                    ratio,
                    row.budget,
                    within,
                    row.evidence,
                ]
            )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "-" * len(text[0].ljust(sum(widths) + 2 * (len(widths) - 1))))
    text += [f"BROKEN {name}: {error.splitlines()[0]}" for name, error in broken.items()]
    load = os.getloadavg()
    text += ["", f"{'quick run: ' if quick else ''}{machine.text}; load {load[0]:.1f} at the end"]
    return text


def spread(samples: Samples, unit: str) -> str:
    """Return median, range and count as the table has them."""
    if unit == "bytes":
        return f"{samples.median:,.0f} bytes"
    scale, name, digits = next(
        (item for item in ((1.0, "s", 2), (1e-3, "ms", 1)) if samples.median >= item[0]), (1e-6, "µs", 2)
    )
    low, middle, high = (
        f"{value / scale:.{digits}f}" for value in (min(samples.values), samples.median, max(samples.values))
    )
    return f"{middle} {name} ({low}–{high}, n={len(samples.values)})"


def document(machine: Machine, results: dict[str, list[Row]], broken: dict[str, str], quick: bool) -> dict[str, Any]:
    """Return all that was measured as JSON, every sample of it."""
    return {
        "machine": machine.text,
        "load_at_start": machine.load_at_start,
        "quick": quick,
        "broken": broken,
        "rows": [
            {
                "benchmark": name,
                "what": row.what.strip(),
                "unit": row.unit,
                "measured": row.measured.values,
                "against_what": row.against_what,
                "against": row.against.values if row.against is not None else None,
                "ratio": row.ratio,
                "budget": row.budget,
                "within": row.within,
                "evidence": row.evidence,
            }
            for name, rows in results.items()
            for row in rows
        ],
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
