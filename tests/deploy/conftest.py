"""The manifests under deploy/, parsed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.conftest import built, ranked  # noqa: F401 - fixtures: one real build serves the whole run

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder where every user may come; pytest's own are this user's only."""
    path = Path(tempfile.mkdtemp(prefix="cachectl-deploy."))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def manifests() -> dict[str, dict[str, Any]]:
    """Each manifest by its file's stem; one document a file."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted(DEPLOY.glob("*.yaml"))}
