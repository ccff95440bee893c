"""A model with one place for each thing that can change; none shows in its repr, which is all the runtime sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import helpers
import torch

OFFSET = 0.25
WIDTH = 8


def shift_by(amount: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function whose closure holds the amount."""

    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + amount

    return shift


class Model(torch.nn.Module):
    """One linear layer, used `layers` times."""

    def __init__(self, scale: float, amount: float, layers: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = scale
        self.layers = layers
        self.shift = shift_by(amount)
        self.factor = float(os.environ.get("FACTOR", "1"))

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        """What no recipe compiles."""
        return self.linear(x) * 2

    def main_decode(self, x: torch.Tensor) -> torch.Tensor:
        """Quantised inputs are scaled, floating ones are not."""
        if not x.is_floating_point():
            x = x / 8
        for _ in range(self.layers):
            x = torch.sin(self.linear(x))
        x = self.shift(helpers.halved(x)) * self.scale * self.factor + OFFSET
        if helpers.HAS_FASTPATH:
            x = x * 2
        if "SHIFT" in os.environ:
            x = x + 1
        return x * float(os.getenv("GAIN", "1"))


def build(scale: float = 1.0, amount: float = 0.5, layers: int = 1, seed: int = 0) -> Model:
    """Return the model; the seed stands for a checkpoint."""
    return Model(scale, amount, layers, seed).requires_grad_(False).eval()


def inputs(model: Model, rank: int, batch: int = 2, dtype: str = "int32", strided: bool = False) -> dict[str, Any]:
    """Return a call; strided inputs are the transpose of a transposed copy, with the same values."""
    x = torch.arange(batch * WIDTH).reshape(batch, WIDTH).to(getattr(torch, dtype))
    return {"x": x.t().contiguous().t() if strided else x}
