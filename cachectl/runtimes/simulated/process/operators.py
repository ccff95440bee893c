"""Registers the reference operators for CPU tensors, and a refusal for every other npu operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import operators_attention, operators_cache, operators_matmul, operators_moe, operators_norm, operators_quant
from .reference import Reference, SimulationUnsupportedError, adapter, operator

__all__ = ["SUPPORTED", "install"]

# Every reference operator, with what of it is covered.
SUPPORTED: dict[str, Reference] = {
    reference.name: reference
    for module in (
        operators_attention,
        operators_cache,
        operators_matmul,
        operators_moe,
        operators_norm,
        operators_quant,
    )
    for reference in module.REFERENCES
}

# A library unregisters what it registered when it is freed.
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register for the CPU key; to be called once, after torch_npu. Kernels that torch_npu has for it are kept."""
    library = torch.library.Library("npu", "IMPL")
    _libraries.append(library)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for reference in SUPPORTED.values():
        if operator(reference.name) is not None and not has_kernel(f"npu::{reference.name}", "CPU"):
            library.impl(reference.name, adapter(reference), "CPU")
    composite = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "BackendSelect")
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("npu::") and not any(has_kernel(full, key) for key in composite):
            name = full.partition("::")[2]
            library.impl(name, _refusal(name), "CPU")


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise SimulationUnsupportedError(
            f"npu::{name} on CPU tensors: the simulation has no reference implementation of this operator; "
            "run it on an NPU, or guard its use when CACHECTL_SIMULATED=1"
        )

    return refuse
