"""The process group, and the groups that the model is cut over."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  -- brings torch.npu and the hccl backend

from executor.inference_config import ParallelConfig

__all__ = ["CommManager"]


class CommManager:
    """This rank's device and groups. One rank makes no process group at all."""

    def __init__(self, config: ParallelConfig) -> None:
        self.tp_size = config.attn_tp_size
        self.tp_rank = config.global_rank % self.tp_size
        self.dp_rank = config.global_rank // self.tp_size
        self.tp_group: Any = None
        torch.npu.set_device(config.local_rank)
        if config.world_size == 1:
            return
        if not dist.is_initialized():
            # MASTER_ADDR and MASTER_PORT say where.
            dist.init_process_group("hccl", rank=config.global_rank, world_size=config.world_size)
        for first in range(0, config.world_size, self.tp_size):
            ranks = list(range(first, first + self.tp_size))
            # In every process and in the same order, whoever is a member.
            group = dist.new_group(ranks)
            if config.global_rank in ranks:
                self.tp_group = group

    def close(self) -> None:
        """Leave together: a rank that goes first would end the others' collectives."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
