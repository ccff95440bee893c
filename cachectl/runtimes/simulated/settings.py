"""Names and defaults of the simulated CANN: the one place where each is written. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cachectl.errors import ConfigError

__all__ = ["CANN_VARIABLE", "DEVICES_VARIABLE", "SIMULATED_VARIABLE", "SOC_VARIABLE", "SimulatedDevice"]

SIMULATED_VARIABLE = "CACHECTL_SIMULATED"
SOC_VARIABLE = "CACHECTL_SIM_SOC"
CANN_VARIABLE = "CACHECTL_SIM_CANN"
DEVICES_VARIABLE = "CACHECTL_SIM_DEVICES"

DEFAULT_SOC = "Ascend910B1"
DEFAULT_CANN = "8.5.0"
DEFAULT_DEVICES = 8
MOST_DEVICES = 64

# It names a directory and goes into C strings of 128 bytes, so nothing but version characters is let through.
_CANN = re.compile(r"[0-9][0-9A-Za-z.+-]{0,62}")
_SOC = re.compile(r"[A-Za-z0-9_]{1,62}")


@dataclass(frozen=True)
class SimulatedDevice:
    """What the simulated CANN reports.

    Args:
        soc: SoC name as `torch.npu.get_device_name()` gives it, such as Ascend910B1.
        cann: version of every CANN package.
        devices: number of devices, 1 to 64.
    """

    soc: str = DEFAULT_SOC
    cann: str = DEFAULT_CANN
    devices: int = DEFAULT_DEVICES

    def __post_init__(self) -> None:
        if not _SOC.fullmatch(self.soc):
            raise ConfigError(f"simulated SoC {self.soc!r} is not a name", hint="use one such as Ascend910B1")
        if not _CANN.fullmatch(self.cann):
            raise ConfigError(f"simulated CANN version {self.cann!r} is not a version", hint="use one such as 8.5.0")
        if not 1 <= self.devices <= MOST_DEVICES:
            raise ConfigError(f"{self.devices} simulated devices; 1 to {MOST_DEVICES} can be simulated")

    @classmethod
    def chosen(
        cls,
        environ: Mapping[str, str],
        *,
        soc: str | None = None,
        cann: str | None = None,
        devices: int | None = None,
    ) -> SimulatedDevice:
        """Take each value from the argument, else from the environment, else the default.

        Raises:
            ConfigError: a value is no SoC name, no version or no number of devices.
        """
        if devices is None:
            text = environ.get(DEVICES_VARIABLE) or str(DEFAULT_DEVICES)
            try:
                devices = int(text)
            except ValueError:
                raise ConfigError(f"{DEVICES_VARIABLE}={text!r} is not a number") from None
        return cls(
            soc or environ.get(SOC_VARIABLE) or DEFAULT_SOC,
            cann or environ.get(CANN_VARIABLE) or DEFAULT_CANN,
            devices,
        )
