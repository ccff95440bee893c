"""What every test can count on: an environment of its own, and skips for what this machine lacks.

Fixtures used in one room only stand in that room's conftest.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# With torch_npu installed and no CANN, a plain `import torch` would try to load torch_npu and fail.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# A shell starts what it puts into the background with SIGINT ignored, and children inherit that: the tests that send it
# would wait for ever. A handler of Python's own is back to the default in a child.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

# Shared machines are slow at times; a property is no measurement.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

ROOT = Path(__file__).resolve().parents[1]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs torch_npu where it isn't installed. What needs PostgreSQL is in tests/postgres.py."""
    if item.get_closest_marker("real") and (find_spec("torch") is None or find_spec("torch_npu") is None):
        pytest.skip("needs torch and torch_npu: make venv")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of this run, the same for all its worker processes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True, scope="session")
def _own_environment(shared_folder: Path) -> Iterator[None]:
    """Keep tests away from the user's store, caches and settings.

    One home for the run, so that the simulated CANN is compiled once; a test that looks into the home or the default
    store sets its own.
    """
    home = shared_folder / "home"
    home.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("CACHECTL_", "XDG_")) and not name.startswith("CACHECTL_TEST_"):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        # Where it is set, torch raises what it warns of elsewhere; a test that wants that sets it.
        patch.delenv("CI", raising=False)
        # Workers share the cores, and tiny tensors gain nothing from more threads.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that the tests stand in."""
    return ROOT
