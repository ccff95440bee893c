"""A build's folder: gone with it, and known as a killed build's at whatever moment that was killed."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachectl.build.workspace import forget_workspaces, private_workspace

HALF_DELETED = """
import os, shutil, sys
from cachectl.build import workspace

with workspace.private_workspace() as folder:
    (folder / "0").mkdir()
    (folder / "0" / "artifact").write_text("x")
    shutil.rmtree = lambda *arguments, **options: os._exit(9)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of the test's own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_workspace_is_locked_while_it_is_used_and_gone_afterwards(temporary: Path) -> None:
    """A living build's is left alone by every other one."""
    with private_workspace() as folder:
        (folder / "0").mkdir()
        (folder / "file").touch()
        (folder / "link").symlink_to("/")
        forget_workspaces()
        assert (folder / "0").is_dir()
        with open(folder / "lock", "rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert [] == list(temporary.iterdir())


def test_workspace_whose_build_was_killed_while_it_deleted_it_is_forgotten(temporary: Path) -> None:
    """The lock goes last: without it nobody would know whose the rest is."""
    done = subprocess.run([sys.executable, "-c", HALF_DELETED], check=False)
    (folder,) = temporary.iterdir()

    assert (9, True, True) == (done.returncode, (folder / "lock").exists(), (folder / "0").exists())
    forget_workspaces()
    assert [] == list(temporary.iterdir())


def test_workspace_that_somebody_else_deleted_is_no_error(temporary: Path) -> None:
    """A clean-up of the folder for temporary files comes at any moment."""
    with private_workspace() as folder:
        shutil.rmtree(folder)

    assert [] == list(temporary.iterdir())
