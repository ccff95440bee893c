"""Runs programs on the simulated CANN in child processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cachectl.runtimes.simulated import environment

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Finished:
    """A child that ended well: the JSON value of its last line of output, and its stderr."""

    value: Any
    stderr: str


@pytest.fixture(scope="session")
def simulated_environment() -> dict[str, str]:
    """The environment of a simulated child, without what the test run itself put on PYTHONPATH."""
    ours = ("PYTHONPATH", "CACHECTL_SIMULATED", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    base = {name: value for name, value in os.environ.items() if name not in ours}
    # One thread: the machines that run tests are shared, and tiny tensors gain nothing from more.
    return environment({**base, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="session")
def run_simulated(simulated_environment: dict[str, str]) -> Callable[..., Finished]:
    """Runs a file of programs/, or `-c` source, under the real torch_npu."""

    def run(program: str, *arguments: object, env: dict[str, str] | None = None) -> Finished:
        command = [str(PROGRAMS / program)] if program.endswith(".py") else ["-c", program]
        done = subprocess.run(
            [sys.executable, *command, *map(str, arguments)],
            env={**simulated_environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=1000,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        lines = done.stdout.splitlines()
        return Finished(json.loads(lines[-1]) if lines else None, done.stderr)

    return run
