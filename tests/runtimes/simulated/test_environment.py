"""The toolkit tree and the environment of a simulated child."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cachectl.errors import ConfigError
from cachectl.runtimes.simulated import (
    DEFAULT_CANN,
    SimulatedDevice,
    ensure,
    environment,
    is_simulated,
    loaded_is_simulated,
)
from cachectl.runtimes.simulated.toolkit import PACKAGES


def test_ensure_lays_out_the_version_that_was_asked_for() -> None:
    """Every package's version.info carries it in the form that is read without torch."""
    toolkit = ensure("9.1.0")
    for package in PACKAGES:
        text = (toolkit.home / "share" / "info" / package / "version.info").read_text()
        assert "9.1.0" == re.search(r"^Version=(.*)$", text, re.MULTILINE)[1]  # type: ignore[index]
    assert (toolkit.libraries / "libascendcl.so").is_file()


def test_ensure_takes_the_version_from_the_environment() -> None:
    """CACHECTL_SIM_CANN decides where no version is given, else the default does."""
    assert "8.3.RC1" == ensure(environ={**os.environ, "CACHECTL_SIM_CANN": "8.3.RC1"}).cann
    assert DEFAULT_CANN == ensure(environ=os.environ).cann


def test_environment_keeps_what_the_base_has_behind_its_own() -> None:
    """Search paths are prepended to, and the rest of the base stays."""
    base = {**os.environ, "LD_LIBRARY_PATH": "/lib/one:/lib/two", "PYTHONPATH": "/py", "COLOUR": "blue"}
    made = environment(base, soc="Ascend310P3", devices=2)
    assert made["LD_LIBRARY_PATH"].endswith(":/lib/one:/lib/two")
    assert made["PYTHONPATH"].endswith("startup:/py")
    assert ("blue", "Ascend310P3", "2") == (made["COLOUR"], made["CACHECTL_SIM_SOC"], made["CACHECTL_SIM_DEVICES"])
    assert Path(made["ASCEND_OPP_PATH"]).is_dir()
    assert is_simulated(made)
    assert not is_simulated(base)


def test_environment_of_its_own_result_changes_nothing() -> None:
    """Applying it twice is applying it once."""
    once = environment(os.environ, cann="8.2.RC1")
    assert once == environment(once)


@pytest.mark.parametrize(
    "values",
    [{"cann": "../8"}, {"cann": "latest"}, {"soc": "a b"}, {"devices": 0}, {"devices": 65}],
    ids=lambda values: "-".join(f"{name}={value}" for name, value in values.items()),
)
def test_environment_of_what_cannot_be_simulated_is_refused(values: dict[str, str | int]) -> None:
    """A value that is no name, version or number of devices is the caller's mistake, named in the message."""
    with pytest.raises(ConfigError, match=re.escape(str(next(iter(values.values()))))):
        environment(os.environ, **values)  # type: ignore[arg-type]


def test_chosen_device_with_a_word_for_a_number_is_refused() -> None:
    """CACHECTL_SIM_DEVICES has to be a number."""
    with pytest.raises(ConfigError, match="CACHECTL_SIM_DEVICES='many' is not a number"):
        SimulatedDevice.chosen({"CACHECTL_SIM_DEVICES": "many"})


def test_loaded_is_simulated_without_a_libascendcl_is_unknown() -> None:
    """This process has loaded none, real or simulated."""
    assert loaded_is_simulated() is None
