"""A model that is split over ranks: tensor-parallel sums and an exchange between experts, in the graph of each step.

The world is cut into groups of `tensor_parallel` neighbours, and across them into groups of the ranks that hold the
same part. What a rank holds can differ: a draft head stands where `draft_ranks` says. A pair is a main and a draft
model of one class.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Rows are exchanged in equal parts between the ranks that share a part: in a world of eight there may be eight of them.
SLOTS = ROWS = 8


class Ranked(nn.Module):
    """One linear layer in row-parallel parts, a cache, and an exchange of rows between the ranks that share a part."""

    def __init__(self, width: int, tensor_parallel: int, experts: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.tensor_parallel, self.experts = tensor_parallel, experts
        self.tp_group, self.dp_group = cut(tensor_parallel)
        part = width // tensor_parallel
        self.first = dist.get_rank() % tensor_parallel * part
        self.last = self.first + part
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(width, width, generator=generator) * width**-0.5
        self.weight = nn.Parameter(whole[:, self.first : self.last].clone(), requires_grad=False)
        self.register_buffer("cache", torch.zeros(SLOTS, width))

    def main_decode(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [rows, width] plus what the cache holds, and write it there."""
        y = self.layer(x)
        if self.experts:
            received = torch.empty_like(y)
            dist.all_to_all_single(received, y.contiguous(), group=self.dp_group)
            y = y + received
        self.cache[slots] = y
        return torch.relu(y) * self.scale + self.cache.sum(0)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x[:, self.first : self.last], self.weight)
        if self.tensor_parallel > 1:
            dist.all_reduce(y, group=self.tp_group)
        return y


class Pair(nn.Module):
    """A main and a draft model of one class, called with equal inputs."""

    def __init__(self, main: Ranked, draft: Ranked) -> None:
        super().__init__()
        self.main, self.draft = main, draft


class WithDraft(Ranked):
    """The same with a draft head."""

    def mtp_decode(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return the draft's output [rows, width]; reads the cache only, and talks to nobody."""
        return torch.tanh(x) + self.cache[slots]


def cut(size: int) -> tuple[Any, Any]:
    """Return this rank's group of `size` neighbours, and the one of those at its place in the other groups."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine: list[Any] = []
    rows = [range(start, start + size) for start in range(0, world, size)]
    columns = [range(start, world, size) for start in range(size)]
    for ranks in (*rows, *columns):
        # In every process, in the same order, whoever is a member.
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine.append(group)
    return mine[0], mine[1]


def build(width: int = 8, tensor_parallel: int = 2, experts: bool = True, draft_ranks: Sequence[int] = ()) -> Ranked:
    """Return this rank's part of the model."""
    kind = WithDraft if dist.get_rank() in draft_ranks else Ranked
    return kind(width, tensor_parallel, experts).eval()


def build_pair(width: int = 8, tensor_parallel: int = 2, draft_ranks: Sequence[int] = (0,)) -> Pair:
    """Return this rank's parts of both models; a draft head stands beside the main model of some ranks."""
    main = build(width, tensor_parallel, draft_ranks=draft_ranks)
    return Pair(main, Ranked(width, tensor_parallel, experts=False, scale=3.0)).eval()


def pair_inputs(model: Pair, rank: int) -> dict[str, Any]:
    """Return the arguments of a step of either model."""
    return inputs(model.main, rank)


def inputs(model: Ranked, rank: int, rows: int = ROWS, trouble: str = "", at: int = -1) -> dict[str, Any]:
    """Return a step's arguments: rows that differ from rank to rank outside of its tensor-parallel group.

    Args:
        trouble: what happens to rank `at`, for tests of failures; nothing once a file `mended` lies beside.
    """
    if rank == at and not os.path.exists(os.path.join(os.path.dirname(__file__), "mended")):
        _suffer(trouble)
    generator = torch.Generator().manual_seed(rank // model.tensor_parallel)
    return {"x": torch.randn(rows, model.cache.size(1), generator=generator), "slots": torch.arange(rows)}


def _suffer(trouble: str) -> None:
    if trouble == "raise":
        raise ValueError("this rank has no such file")
    if trouble == "die":
        os.kill(os.getpid(), 9)
    if trouble == "hang":
        time.sleep(600)
