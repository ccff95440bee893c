"""Values as an entry's manifest says them: exact by digest, and a few numbers for a comparison by tolerance.

Owns that form. No tensor's contents go into a manifest but these. Rank processes only: imports torch.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cachectl.schemas.canonical import digest_bytes, digest_of

__all__ = ["described"]

# A manifest is read at every boot: so many leaves of one output are said, and so many numbers of each.
_LEAVES = 8
_NUMBERS = 4
# Larger ones are told by their numbers alone: a whole cache may be among the outputs.
_HASHED_BYTES = 1 << 28


def described(value: Any) -> dict[str, Any]:
    """Return a value's digest and its leaves.

    Args:
        value: tensors in containers, as `state.copied` gives them.

    Returns:
        `{"digest", "values": [{"place", "dtype", "shape", "digest", "numbers"} or {"place", "value"}]}`. `numbers` are
        elements at equal distances, the first and the last among them; of the leaves past the eighth only the whole
        value's digest tells.
    """
    leaves, _ = pytree.tree_flatten_with_path(value)
    said = [_leaf(f"output{pytree.keystr(path)}", leaf) for path, leaf in leaves]
    return {"digest": digest_of(said), "values": said[:_LEAVES]}


def _leaf(place: str, leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, torch.Tensor):
        return {"place": place, "value": _plain(leaf)}
    whole = leaf.detach().cpu().contiguous().reshape(-1)
    small = whole.numel() * whole.element_size() <= _HASHED_BYTES
    if whole.numel() > 1:
        places = torch.linspace(0, whole.numel() - 1, min(_NUMBERS, whole.numel()), dtype=torch.float64).long()
    else:
        places = torch.arange(whole.numel())
    wide = torch.complex128 if whole.is_complex() else torch.float64 if whole.is_floating_point() else torch.int64
    return {
        "place": place,
        "dtype": str(leaf.dtype).removeprefix("torch."),
        "shape": list(leaf.shape),
        "digest": digest_bytes(whole.view(torch.uint8).numpy().tobytes()) if small else None,
        "numbers": [_number(number) for number in whole[places].to(wide).tolist()],
    }


def _plain(leaf: Any) -> Any:
    """Return a plain value as JSON has it; of anything else its class, since a repr may hold an address."""
    if type(leaf) in (float, complex):
        return _number(leaf)
    if leaf is None or type(leaf) in (bool, int, str):
        return leaf
    return str(leaf) if isinstance(leaf, Enum) else f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def _number(number: Any) -> Any:
    """Return a number as JSON has it: what is not finite as text, a complex one as its two parts."""
    if isinstance(number, complex):
        return [_number(number.real), _number(number.imag)]
    return number if isinstance(number, int) or math.isfinite(number) else repr(number)
