"""Fixtures of the boot path's tests: a published store to break, folders for other users, a disk that is full."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores import MadeStore, make_store


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    made = make_store(tmp_path_factory.mktemp("template") / "made")
    made.publish()
    return made


@pytest.fixture
def made(_template: MadeStore, tmp_path: Path) -> MadeStore:
    """A store with one published warm set of two cases, the test's own to break."""
    return _template.copy(tmp_path / "made")


@pytest.fixture
def open_made(_template: MadeStore) -> Iterator[MadeStore]:
    """The same where every user may come; pytest's own folders are this user's only."""
    folder = Path(tempfile.mkdtemp(prefix="cachectl-test."))
    folder.chmod(0o755)
    yield _template.copy(folder / "made")
    shutil.rmtree(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
