"""An artifact that kills its program, on the real runtime: the third start is cold and runs, until it is released."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

# The unchanged program, on a runtime whose loaded code ends the process as a broken kernel does.
POISONED = """\
import os, runpy, signal, sys
from cachectl.runtimes.npugraph_ex import NpuGraphEx

HOW = getattr(signal, sys.argv[1])

def load(self, method, folder):
    def crash(*args, **kwargs):
        os.kill(os.getpid(), HOW)
    return crash

NpuGraphEx.load = load
sys.argv = ["generate.py", "--steps", "4", "--json", "--plain", "--cache-dir", "mine"]
runpy.run_path("generate.py", run_name="__main__")
"""
PLAIN = ("generate.py", "--steps", "4", "--json", "--plain", "--cache-dir", "mine")


def execute(program: Any, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run Python words under exec; return exit code, report and stdout."""
    done = program.cachectl("exec", "recipe.yaml", "--report", "report.json", "-q", "--", sys.executable, *words)
    return done.returncode, json.loads((program.folder / "report.json").read_text()), done.stdout


def test_exec_two_crashes_in_the_loaded_code_make_the_third_start_cold(program: Any) -> None:
    """It runs and is right, and says why it is cold; once released, the next hook hands out again."""
    eager = program.generate("--eager")
    crashed = [execute(program, "-c", POISONED, how)[0] for how in ("SIGSEGV", "SIGABRT")]

    code, report, printed = execute(program, *PLAIN)

    assert [139, 134] == crashed
    assert (0, "cold") == (code, report["outcome"])
    (reason,) = report["reasons"]
    assert ("policy", "quarantine", "policy") == (reason["part"], reason["name"], reason["kind"])
    keys = {entry["key"] for entry in json.loads(program.cachectl("ls", "--json").stdout)["entries"]}
    assert reason["hint"].partition(": ")[0] in keys
    assert eager["tokens"] == json.loads(printed)["tokens"]
    released = program.cachectl(*reason["hint"].partition("run: cachectl ")[2].split())
    assert 0 == released.returncode, released.stderr
    assert ("warm", []) == ((hooked := program.hook())["outcome"], hooked["reasons"])
