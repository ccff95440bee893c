"""The device part: which SoC, and whether it is a real one.

Owns the canonical SoC name. The simulated CANN reports SoC names of real devices, so `simulated` stands beside the name
and an artifact built in the simulation is never served to a device.

Facts: `torch.npu.get_device_name()` gives Ascend910B1, Ascend910_9391, Ascend310P3; the environment variable
SOC_VERSION gives ascend910b1; npu-smi and node labels give 910B1 (facts: torch_npu 2.13, CANN documents).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cachectl.identity.node_labels import SOC_LABELS, only, read_labels
from cachectl.schemas.boot import Reason

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "DEFAULT_SIM_SOC",
    "SIMULATED_FLAG",
    "canonical_soc",
    "device_part",
    "in_simulation",
    "one_soc",
    "simulated_soc",
]

SIMULATED_FLAG = "CACHECTL_SIMULATED"
DEFAULT_SIM_SOC = "Ascend910B1"

# Names of several SoCs: 910B1 to 910B4 are each an ascend910b, 910_9391 and its like an ascend910_93 or ascend910c.
FAMILIES = frozenset(
    f"ascend{name}"
    for name in ("310p", "310b", "910", "910b", "910c", "910d", "910_93", "910_95", "950", "950pr", "950dt")
)
_SOC = r"ascend\d{3}[0-9a-z_]*\Z"


def canonical_soc(name: str) -> str:
    """Return the one spelling of a SoC name: lower case, with its `ascend` prefix. Aliases of one SoC are equal."""
    text = name.strip().lower().replace("-", "_").replace(" ", "")
    return text if text.startswith("ascend") or not text else f"ascend{text}"


def one_soc(name: str) -> str | None:
    """Return the canonical name of one SoC; None for a family's name, and for what is no SoC's.

    What is not known is pending, never another device.
    """
    canonical = canonical_soc(name.strip().lower().removeprefix("huawei-"))
    return canonical if re.match(_SOC, canonical) and canonical not in FAMILIES else None


def in_simulation(environ: Mapping[str, str]) -> bool:
    """Say whether these variables are those of a process on the simulated CANN."""
    return environ.get(SIMULATED_FLAG) == "1"


def simulated_soc(environ: Mapping[str, str]) -> str:
    """Return the SoC that the simulation reports, canonical."""
    return canonical_soc(environ.get("CACHECTL_SIM_SOC", "")) or canonical_soc(DEFAULT_SIM_SOC)


def device_part(device: str, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Reason]]:
    """Return the device document for a recipe's `device`, as far as it can be known without a runtime.

    The node's labels come before SOC_VERSION, which images carry from where they were built.

    Args:
        device: `npu` or `simulated`, as the recipe says.
        environ: the environment the program will have.

    Returns:
        The document, `soc` None where nothing here names the device, and the reasons why it is incomplete.
    """
    if device == "simulated" or in_simulation(environ):
        return {"simulated": True, "soc": simulated_soc(environ)}, []
    labels = read_labels(environ)
    labelled = only(one_soc(labels[name]) or "" for name in SOC_LABELS if name in labels)
    if named := labelled or one_soc(environ.get("SOC_VERSION", "")):
        return {"simulated": False, "soc": named}, []
    reason = Reason(
        part="device",
        name="soc",
        kind="absent",
        hint="no NPU is named here: set SOC_VERSION to its exact name, "
        "or set `device: simulated` in the recipe to build without one",
    )
    return {"simulated": False, "soc": None}, [reason]
