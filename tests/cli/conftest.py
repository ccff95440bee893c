"""The real command line in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cachectl.runtimes.simulated import environment as simulated_environment
from tests.stores import MadeStore, make_store

# Bounds what hangs, and nothing else: what takes a second here may take a minute on a machine that others load.
LONG_S = 240.0

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    """A store with one published warm set."""
    # Compiled here: the first exec would do it within its hook's deadline.
    simulated_environment(os.environ)
    made = make_store(tmp_path_factory.mktemp("template") / "made")
    made.publish()
    return made


@pytest.fixture
def made(template: MadeStore, tmp_path: Path) -> MadeStore:
    """A published store, the test's own to break."""
    return template.copy(tmp_path / "made")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A path for a store; nothing is there yet."""
    return tmp_path / "store"


@pytest.fixture
def cachectl(tmp_path: Path, store: Path) -> Run:
    """Run `cachectl ARGS...` in an empty folder, on a store of its own; return what came out."""
    folder = tmp_path / "cwd"
    folder.mkdir()

    def run(
        *arguments: str, python: tuple[str, ...] = (), environ: Mapping[str, str] | None = None, cwd: Path = folder
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *python, "-m", "cachectl", *arguments],
            cwd=cwd,
            env={**os.environ, "CACHECTL_STORE": str(store), **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )

    return run
