"""A stand-in for CANN: the real torch_npu imports, reports a device and runs cache_compile on CPU tensors with it.

    settings      names and defaults
    library       compiles native/*.c into the user's cache
    toolkit       an $ASCEND_HOME_PATH of one CANN version
    startup/      sitecustomize of a simulated process: waits for torch_npu without importing anything
    process/      what is applied to torch_npu in that process: capture and replay, reference operators [imports torch]

This module and the first three are standard library only and never import torch. Nothing here changes compile options,
the runtime's md5 or the artifact it writes; the runtime's own capture code runs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from cachectl.runtimes.simulated.settings import (
    CANN_VARIABLE,
    DEFAULT_CANN,
    DEFAULT_DEVICES,
    DEFAULT_SOC,
    DEVICES_VARIABLE,
    SIMULATED_VARIABLE,
    SOC_VARIABLE,
    SimulatedDevice,
)
from cachectl.runtimes.simulated.toolkit import Toolkit, ensure

__all__ = [
    "DEFAULT_CANN",
    "DEFAULT_DEVICES",
    "DEFAULT_SOC",
    "SimulatedDevice",
    "Toolkit",
    "ensure",
    "environment",
    "is_simulated",
    "loaded_is_simulated",
]

STARTUP = Path(__file__).resolve().parent / "startup"


def environment(
    base: Mapping[str, str],
    *,
    soc: str | None = None,
    cann: str | None = None,
    devices: int | None = None,
) -> dict[str, str]:
    """Return the whole environment for a child that runs on the simulated CANN; `base` is left alone.

    It keeps all of `base` but a real toolkit's ASCEND_* locations; what LD_LIBRARY_PATH and PYTHONPATH held comes
    after what is put in front. Applying it to its own result changes nothing.

    Args:
        base: environment to start from, usually os.environ.
        soc: SoC name to report; None takes CACHECTL_SIM_SOC of `base`, else Ascend910B1.
        cann: CANN version to report; None takes CACHECTL_SIM_CANN, else 8.5.0.
        devices: number of devices to report; None takes CACHECTL_SIM_DEVICES, else 8.

    Raises:
        ConfigError: a value can't be simulated.
        SimulationError: the libraries could not be made.
    """
    device = SimulatedDevice.chosen(base, soc=soc, cann=cann, devices=devices)
    toolkit = ensure(device.cann, environ=base)
    home = str(toolkit.home)
    return {
        **base,
        "LD_LIBRARY_PATH": _in_front(str(toolkit.libraries), base.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _in_front(str(STARTUP), base.get("PYTHONPATH")),
        "ASCEND_HOME_PATH": home,
        "ASCEND_TOOLKIT_HOME": home,
        "ASCEND_OPP_PATH": str(toolkit.operators),
        SIMULATED_VARIABLE: "1",
        SOC_VARIABLE: device.soc,
        CANN_VARIABLE: device.cann,
        DEVICES_VARIABLE: str(device.devices),
    }


def _in_front(first: str, rest: str | None) -> str:
    if not rest:
        return first
    # An empty part means the current directory to both loaders, so it is kept.
    return os.pathsep.join([first, *(part for part in rest.split(os.pathsep) if part != first)])


def is_simulated(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether the environment asks for the simulated CANN; cheap, and right before torch_npu is loaded too."""
    return (os.environ if environ is None else environ).get(SIMULATED_VARIABLE) == "1"


def loaded_is_simulated() -> bool | None:
    """Say whether the libascendcl in this process is the simulated one; None when none is loaded. Loads nothing."""
    try:
        library = ctypes.CDLL("libascendcl.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    try:
        ctypes.c_char_p.in_dll(library, "cachectl_simulated_cann")
    except ValueError:
        return False
    return True
