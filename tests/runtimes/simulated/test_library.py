"""Compiling the simulated CANN: once, whole, by several processes at once, and one clear line when it can't be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachectl.errors import SimulationError
from cachectl.runtimes.simulated.library import FACADES, cache_root, ensure_build


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The process's environment with a cache of its own."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_ensure_build_twice_compiles_once(environ: Mapping[str, str]) -> None:
    """The second call returns the same files, untouched."""
    build = ensure_build(environ)
    libraries = {path.name: path.stat().st_mtime_ns for path in (build / "lib64").iterdir()}
    assert {f"lib{name}.so" for name in FACADES} < set(libraries)
    assert build == ensure_build(environ)
    assert libraries == {path.name: path.stat().st_mtime_ns for path in (build / "lib64").iterdir()}


def test_ensure_build_by_two_processes_gives_one_whole_build(environ: Mapping[str, str]) -> None:
    """Both end well with the same directory, and no scratch directory stays behind."""
    source = "import os; from cachectl.runtimes.simulated.library import ensure_build; print(ensure_build(os.environ))"
    from_here = {**environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    children = [
        subprocess.Popen([sys.executable, "-c", source], env=from_here, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [child.communicate(timeout=1000)[0].strip() for child in children]
    assert [0, 0] == [child.returncode for child in children]
    assert told[0] == told[1]
    assert [Path(told[0])] == list(cache_root(environ).iterdir())


def test_ensure_build_with_a_lost_library_builds_again(environ: Mapping[str, str]) -> None:
    """A build that lost a file is not handed out."""
    build = ensure_build(environ)
    (build / "lib64" / "libhccl.so").unlink()
    assert (ensure_build(environ) / "lib64" / "libhccl.so").is_file()


def test_ensure_build_without_compiler_says_so(environ: Mapping[str, str], tmp_path: Path) -> None:
    """One line that names the compiler looked for, and what to do."""
    with pytest.raises(SimulationError, match=r"^no C compiler: cc is not on PATH; install gcc"):
        ensure_build({**environ, "CC": "", "PATH": str(tmp_path)})


def test_ensure_build_with_a_broken_compiler_shows_its_first_error(environ: Mapping[str, str], tmp_path: Path) -> None:
    """The message is one line with the compiler's own first error, and nothing half-written stays."""
    broken = compiler(
        tmp_path / "cc",
        'case "$1" in --version) echo 1;; *) echo "a note" >&2; echo "x.c:1: error: bad" >&2; exit 1;; esac',
    )
    with pytest.raises(SimulationError) as caught:
        ensure_build({**environ, "CC": broken})
    assert f"{broken} failed on the simulated CANN: x.c:1: error: bad; set CC to another compiler" == str(caught.value)
    assert [] == list(cache_root(environ).iterdir())


def test_cache_root_that_cannot_be_made_names_the_directory(tmp_path: Path) -> None:
    """A file in the way is an error with its path, not a traceback of mkdir."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SimulationError, match=r"can't make the cache directory .*file/cachectl"):
        cache_root({"XDG_CACHE_HOME": str(tmp_path / "file")})


def test_cache_root_prefers_xdg_then_home(tmp_path: Path) -> None:
    """XDG_CACHE_HOME, else HOME/.cache; both private to the user."""
    assert tmp_path / "x" / "cachectl" / "simulated" == cache_root({"XDG_CACHE_HOME": str(tmp_path / "x"), "HOME": "/"})
    home = cache_root({"HOME": str(tmp_path)})
    assert tmp_path / ".cache" / "cachectl" / "simulated" == home
    assert 0o700 == home.stat().st_mode & 0o777
