"""What the method takes from another module: a constant that stands in no repr."""

from __future__ import annotations

import torch

try:
    import fastpath
except ImportError:
    fastpath = None
HALF = 0.5
HAS_FASTPATH = fastpath is not None


def halved(x: torch.Tensor) -> torch.Tensor:
    """Return the product with the constant."""
    return x * HALF
