"""How long `cachectl --help` takes, whole process, beside a Python that does nothing."""

from __future__ import annotations

import sys

from measure import THIS_CPU, Row, Samples, cachectl_command, child_environ, interleaved, run_child

NAME = "start"
BUDGET = "`cachectl --help` in 0.4 s"


def run(quick: bool) -> list[Row]:
    environ = child_environ()
    ours, bare = interleaved(
        3 if quick else 11,
        lambda: run_child([*cachectl_command(), "--help"], environ=environ).wall_s,
        lambda: run_child([sys.executable, "-I", "-c", "pass"], environ=environ).wall_s,
    )
    return [
        Row(
            "cachectl --help",
            Samples(ours),
            THIS_CPU,
            against_what="bare python -I start",
            against=Samples(bare),
            budget="≤ 0.4 s",
            value_max=0.4,
        )
    ]
