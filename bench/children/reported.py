"""Run a program that uses cachectl, and keep cachectl's report: `python reported.py REPORT PROGRAM ARGUMENTS...`."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import cachectl

started: list[Any] = []
warm_start = cachectl.warm_start


def remembered(*arguments: Any, **named: Any) -> Any:
    warm = warm_start(*arguments, **named)
    started.append(warm)
    return warm


report, program = Path(sys.argv[1]), Path(sys.argv[2])
cachectl.warm_start = remembered
del sys.argv[:2]
# As where the program is run itself.
sys.path[0] = str(program.parent)
runpy.run_path(str(program), run_name="__main__")
if started:
    guards = [
        {"guards": case.proof.guards, "seconds": case.proof.seconds}
        for method in started[0].methods
        for case in method.cases
        if case.proof is not None
    ]
    report.write_text(json.dumps({"report": started[0].report(), "guards": guards}))
