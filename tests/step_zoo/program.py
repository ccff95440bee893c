"""A program that makes a few calls of each method named, through the hand-out, and holds them against eager ones."""

from __future__ import annotations

import functools
import json
import os
import sys

import model as zoo

import cachectl
from cachectl.build.gates import compare_runs
from cachectl.build.job import CaseJob
from cachectl.build.recording import eager_run
from cachectl.build.state import Snapshot
from cachectl.build.steps import StepInputs, run_steps
from cachectl.errors import BuildError


def main() -> None:
    """Print one document: what each method's calls came to."""
    warm = cachectl.warm_start("recipe.yaml")
    found = {}
    for name in sys.argv[1:]:
        receiver = zoo.build()
        method = getattr(receiver, name)
        inputs = zoo.inputs(receiver, 0, name)
        snapshot = Snapshot(receiver, inputs)
        calls = StepInputs(inputs, snapshot, functools.partial(zoo.inputs, receiver, 0, name), 4)
        eager, _ = eager_run(method, calls, snapshot)
        cached = cachectl.cache_compile(
            method, warm=warm, dynamic=os.environ.get("DYNAMIC") == "1", options={"frozen_parameter": True}
        )
        ran = run_steps(cached, calls, snapshot)
        different = ""
        try:
            compare_runs(CaseJob(0, name, {"name": "one"}), calls, snapshot, eager, ran, rtol=1e-3, atol=1e-3)
        except BuildError as error:
            different = error.message
        found[name] = {
            "outcome": cached.outcome,
            "reasons": [str(reason) for reason in cached.reasons],
            "equal": not different,
            "place": different,
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
