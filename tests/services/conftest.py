"""A site to build at and a store with made-up entries, both without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

# A maker of artifacts with contents of the test's own; shared as a fixture by its name.
from tests.runtimes.artifact.conftest import pack
from tests.services.standin import Site, make_site
from tests.stores import MadeStore, make_store

__all__ = ["pack"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A folder with an empty store and a stand-in torch."""
    return make_site(tmp_path / "site")


@pytest.fixture
def made(tmp_path: Path) -> MadeStore:
    """An empty store with its recipe, source file and toolchain."""
    return make_store(tmp_path / "made")
