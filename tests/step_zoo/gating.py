"""A process that runs the gates' steps over methods of the zoo, with the runtime's options both ways; says what it saw.

    python gating.py

Prints one document: a name each, with what is overwritten, what was captured, or what was refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import model as zoo
import torch

from cachectl.build import gates
from cachectl.build.job import CaseJob
from cachectl.build.recording import eager_run, forget_traces
from cachectl.build.shown import captured
from cachectl.build.state import Snapshot
from cachectl.build.steps import StepInputs, run_steps
from cachectl.errors import BuildError
from cachectl.runtimes.artifact import inspect_artifact
from cachectl.runtimes.npugraph_ex import NpuGraphEx

# name: method, options, whether dynamic.
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("submodule", {}, False),
    "clone_output": ("submodule", {"clone_output": True}, False),
    "clone_input off": ("submodule", {"clone_input": False}, False),
    "both": ("submodule", {"clone_output": True, "clone_input": False}, False),
    "forced eager": ("submodule", {"force_eager": True}, False),
    "written argument": ("argument_written", {}, False),
    "its input returned": ("returns_its_input", {"clone_output": True}, False),
    "its cache returned": ("returns_its_cache", {"clone_output": True}, False),
    "one capture only": ("argument_written", {"capture_limit": 1}, False),
    "integer of each step": ("counted", {}, True),
}


class Counting(zoo.Model):
    """The zoo with a method whose argument is another number at each step."""

    def counted(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """Return x times a number that a dynamic graph keeps as a symbol."""
        return x * n


def inputs(model: zoo.Model, method: str) -> dict[str, Any]:
    """Return a call of a method."""
    return {"x": zoo.rows(), "n": 5} if method == "counted" else zoo.inputs(model, 0, method)


def run(runtime: Any, name: str) -> dict[str, Any]:
    """Compile one method in a folder of its own, run all steps, and hold them against eager's."""
    forget_traces()
    torch.manual_seed(0)
    receiver = Counting().requires_grad_(False).eval()
    method_name, given, dynamic = RUNS[name]
    options: Mapping[str, Any] = {"frozen_parameter": True, **given}
    method = getattr(receiver, method_name)
    case = CaseJob(0, method_name, {"name": "one"})
    first = inputs(receiver, method_name)
    snapshot = Snapshot(receiver, first)
    calls = StepInputs(first, snapshot, lambda: inputs(receiver, method_name), 4)
    eager, _ = eager_run(method, calls, snapshot)
    folder = Path("gating") / name
    compiled: Callable[..., Any] = runtime.compile(method, dynamic=dynamic, options=options, cache_dir=folder)
    before = runtime.captures()
    with torch.no_grad():
        ran = run_steps(compiled, calls, snapshot)
    snapshot.restore()
    made = captured(runtime, before)
    assert made is not None
    try:
        gates.compare_runs(case, calls, snapshot, eager, ran, rtol=1e-4, atol=1e-4)
        held = gates.held_values(case, eager, ran, runtime.effective_options(options))
    except BuildError as error:
        return {"refused": error.message}
    (saved,) = folder.rglob("compiled_module")
    loaded = runtime.load(method, saved.parent)
    with runtime.call_context():
        again = run_steps(loaded, calls, snapshot)
    snapshot.restore()
    gates.compare_runs(case, calls, snapshot, eager, again, rtol=1e-4, atol=1e-4, found_by="reloaded")
    held_loaded = gates.held_values(case, eager, again, runtime.effective_options(options), found_by="reloaded")
    gates.refuse_other_held(case, held, held_loaded)
    part = {"L['n']": {"integer": {"range": [2, None]}}} if method_name == "counted" else {}
    keys = runtime.graph_keys(inspect_artifact(saved.read_bytes()), part)
    return {
        "held": held,
        "held by the loaded one": held_loaded,
        "repeats": calls.repeats,
        "captured": [made.captured, made.recaptured, made.fell_back],
        "keys": [keys.limit, keys.keys, keys.values],
        "written": len(keys.written),
        "warning": keys.warning,
    }


if __name__ == "__main__":
    adapter = NpuGraphEx()
    json.dump({name: run(adapter, name) for name in sys.argv[1:] or RUNS}, sys.stdout)
