"""Settings and where they come from."""

from __future__ import annotations

import pytest

from cachectl import config


def test_resolve_option_wins_over_environment() -> None:
    """What stands on the command line holds."""
    setting = config.resolve("store", "/a", {"CACHECTL_STORE": "/b"})

    assert config.Setting("store", "/a", "option", "--store") == setting


def test_resolve_environment_wins_over_default() -> None:
    """Without an option the variable holds, and is named as the origin."""
    setting = config.resolve("store", None, {"CACHECTL_STORE": "/b"})

    assert config.Setting("store", "/b", "environment", "CACHECTL_STORE") == setting


@pytest.mark.parametrize("environ", [{}, {"CACHECTL_DEBUG": ""}])
def test_resolve_nothing_set_gives_the_default(environ: dict[str, str]) -> None:
    """An empty variable is no setting."""
    assert config.Setting("debug", "0", "default", "") == config.resolve("debug", environ=environ)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_is_on_reads_switches(value: str, on: bool) -> None:
    """Switches are on with 1, true, yes, on."""
    assert config.is_on("disable", {"CACHECTL_DISABLE": value}) is on
