"""Settings: each one's value and where it came from: an option, the environment, or the default.

Owns the names of the environment variables that steer cachectl. Standard library only; reads the environment when
asked, never at import, and touches no file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["SETTINGS", "Setting", "SettingSpec", "Source", "is_on", "resolve"]

Source = Literal["option", "environment", "default"]

_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class SettingSpec:
    """What can be set, by which option and variable, and what holds when nothing is set (None: described in `help`)."""

    name: str
    env: str
    help: str
    option: str | None = None
    default: str | None = None


@dataclass(frozen=True)
class Setting:
    """One setting's value and where it came from; `origin` is the option's or variable's name."""

    name: str
    value: str | None
    source: Source
    origin: str


SETTINGS: Mapping[str, SettingSpec] = {
    spec.name: spec
    for spec in (
        SettingSpec(
            "store", "CACHECTL_STORE", "folder or URL of the store; default the user data dir", option="--store"
        ),
        SettingSpec("warm-dir", "CACHECTL_WARM_DIR", "where warm copies are laid out", option="--warm-dir"),
        SettingSpec("trust", "CACHECTL_TRUST", "trust policy; default /etc/cachectl/trust"),
        SettingSpec("disable", "CACHECTL_DISABLE", "1: hook and exec do nothing", default="0"),
        SettingSpec("debug", "CACHECTL_DEBUG", "1: errors come with a traceback", default="0"),
        SettingSpec("sim-soc", "CACHECTL_SIM_SOC", "SoC that the simulated CANN reports"),
        SettingSpec("sim-cann", "CACHECTL_SIM_CANN", "CANN version that the simulated CANN reports"),
        SettingSpec("sim-devices", "CACHECTL_SIM_DEVICES", "number of devices that the simulated CANN reports"),
    )
}


def resolve(name: str, option: str | None = None, environ: Mapping[str, str] | None = None) -> Setting:
    """Return a setting: the option if given, else the variable if set and not empty, else the default.

    Args:
        name: a key of SETTINGS.
        option: what stands on the command line; None when the option was not given.
        environ: os.environ when None.

    Raises:
        KeyError: no such setting.
    """
    spec = SETTINGS[name]
    if option is not None:
        return Setting(name, option, "option", spec.option or "")
    value = (os.environ if environ is None else environ).get(spec.env)
    if value:
        return Setting(name, value, "environment", spec.env)
    return Setting(name, spec.default, "default", "")


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Say whether a switch among the settings is on (1, true, yes, on)."""
    return (resolve(name, environ=environ).value or "").strip().lower() in _ON
