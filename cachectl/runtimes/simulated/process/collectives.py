"""Lets the hccl backend carry CPU tensors between the ranks of a simulated run: gloo does the work under its name.

A program that says `init_process_group("hccl")` then runs unchanged, and get_backend() still answers hccl.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed

__all__ = ["install"]


def install() -> None:
    """Put gloo behind the hccl backend that torch_npu registered; to be called once, after torch_npu."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        return
    backend = distributed.Backend
    plugin = getattr(backend, "_plugins", {}).get("HCCL")
    if plugin is None:
        return
    backend._plugins["HCCL"] = type(plugin)(_gloo, True)
    backend.backend_capability["hccl"] = ["npu", "cpu"]
    _give_cpu_kernels()


def _give_cpu_kernels() -> None:
    """Register for the CPU too what npugraph_ex and torchair register as collectives of npu tensors.

    Their npu_define operators call torch.distributed and would work on any device; they are defined when first needed.
    """
    impl = torch.library.Library.impl

    def impl_for_cpu_too(self: Any, name: Any, function: Any, dispatch_key: str = "", **options: Any) -> Any:
        if self.ns == "npu_define" and dispatch_key == "PrivateUse1":
            for_cpu = function if "all_to_all_single_npu" not in str(name) else _all_to_all_single
            impl(self, name, for_cpu, "CPU", **options)
        return impl(self, name, function, dispatch_key, **options)

    torch.library.Library.impl = impl_for_cpu_too


def _gloo(options: Any, _: Any) -> Any:
    return distributed.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)


def _all_to_all_single(
    input: torch.Tensor,
    send_counts: list[int],
    send_displacements: list[int],
    recv_counts: list[int],
    recv_displacements: list[int],
    tag: str,
    ranks: list[int],
    group_size: int,
) -> torch.Tensor:
    """Exchange with counts of elements, as the operator's meta kernel reads them; torch.distributed wants rows."""
    group = distributed.distributed_c10d._find_or_create_pg_by_ranks_and_tag(tag, ranks, group_size)
    counts = list(recv_counts) or [input.numel() // group_size] * group_size
    received = input.new_empty(sum(counts))
    distributed.all_to_all_single(received, input.flatten(), counts, list(send_counts) or None, group=group)
    return received.view(-1, *input.shape[1:])
