"""Weights drawn from their names: equal in every process and on every rank, whatever else was drawn."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models.layers import Linear
from torch import nn

__all__ = ["load_model", "read_hf_config"]


def read_hf_config(folder: Path) -> SimpleNamespace:
    """Return the model's config.json."""
    return SimpleNamespace(**json.loads((folder / "config.json").read_text()))


def load_model(model: nn.Module, tp_size: int, tp_rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """Fill a model's weights, this rank's part of each, and move it to its device.

    The draft model's layer has the name of the main model's first one, and so its weights: it agrees at times.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            whole = list(module.weight.shape)
            if module.cut is not None:
                whole[module.cut] *= tp_size
            drawn = draw(f"{name}.weight", whole) * (module.spread * whole[1] ** -0.5)
            if module.cut is not None:
                drawn = drawn.chunk(tp_size, module.cut)[tp_rank]
            module.weight.data.copy_(drawn)
        elif isinstance(module, nn.Embedding):
            module.weight.data.copy_(draw(f"{name}.weight", list(module.weight.shape)))
    model.requires_grad_(False).eval().to(device=device, dtype=dtype)


def draw(name: str, shape: list[int]) -> Any:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)
