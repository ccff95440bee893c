"""Reference operators: writing to caches by index, and what only moves or relabels data."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import Reference, output_dtype_of

__all__ = ["REFERENCES", "write_rows"]


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows [tokens, heads, d] into a paged cache [blocks, block size, heads, d] at their slots; negative is none.

    A slot counts tokens: block = slot // block size, place in the block = slot % block size.
    """
    slots = slots.flatten().long()
    kept = slots >= 0
    blocks, places = slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]
    cache[blocks, places] = rows[kept].reshape(-1, *cache.shape[2:]).to(cache.dtype)


def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    axis %= input.dim()
    if indices.dim() == 1:
        # One start per batch row: the updates' whole extent along the axis goes in from there.
        for batch, start in enumerate(indices.tolist()):
            source = updates[batch]
            input[batch].narrow(axis - 1, start, source.shape[axis - 1]).copy_(source)
    else:
        for (batch, start), source in zip(indices.tolist(), updates, strict=True):
            input[batch].narrow(axis - 1, start, source.shape[axis - 1]).copy_(source)
    return input


def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return scatter_update_(input.clone(), indices, updates, axis)


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    places = tuple(indices.long().unbind(-1))
    input[places] = updates.to(input.dtype)
    return input


def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return npu_scatter_nd_update_(input.clone(), indices, updates)


def npu_scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None
) -> None:
    if cache_mode == "PA_NZ":
        _write_tiled(key_cache, key, slot_mapping)
        _write_tiled(value_cache, value, slot_mapping)
        return
    write_rows(key_cache, key, slot_mapping)
    write_rows(value_cache, value, slot_mapping)


def _write_tiled(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows [tokens, heads, d] into [blocks, heads * d // tile, block size, tile]."""
    slots = slots.flatten().long()
    kept = slots >= 0
    blocks, places = slots[kept] // cache.shape[2], slots[kept] % cache.shape[2]
    cache[blocks, :, places] = rows[kept].reshape(-1, cache.shape[1], cache.shape[3]).to(cache.dtype)


def npu_gather_pa_kv_cache(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor
) -> None:
    for cache, out in ((key_cache, key), (value_cache, value)):
        done = 0
        for row, length in enumerate(seq_lens.tolist()):
            taken = cache[block_tables[row].long()].flatten(0, 1)[:length]
            out[done : done + length] = taken.reshape(length, *out.shape[1:])
            done += length


def npu_format_cast(input: Tensor) -> Tensor:
    # The format is how a device lays data out; values and logical shape stay. A cast gives a tensor of its own.
    return input.clone()


def npu_format_cast_(input: Tensor) -> Tensor:
    return input


def npu_dtype_cast(input: Tensor, dtype: torch.dtype | int) -> Tensor:
    return input.to(output_dtype_of(dtype, input.dtype))


def npu_prefetch(input: Tensor) -> None:
    return None


def npu_transpose(input: Tensor, perm: list[int]) -> Tensor:
    return input.permute(perm).contiguous()


_NO_EFFECT = ("acl_format", "customize_dtype", "input_dtype", "dst", "src")

REFERENCES = (
    Reference("scatter_update_", scatter_update_, "one start per batch row, or (batch, start) pairs"),
    Reference("scatter_update", scatter_update, "as scatter_update_"),
    Reference("npu_scatter_nd_update_", npu_scatter_nd_update_, "everything"),
    Reference("npu_scatter_nd_update", npu_scatter_nd_update, "everything"),
    Reference("npu_scatter_pa_kv_cache", npu_scatter_pa_kv_cache, "cache modes PA_NZ and Norm, no compression"),
    Reference("npu_gather_pa_kv_cache", npu_gather_pa_kv_cache, "ND caches, lengths that are not cumulative"),
    Reference("npu_format_cast", npu_format_cast, "a copy: a format is not a value", _NO_EFFECT),
    Reference("npu_format_cast.Tensor", npu_format_cast, "a copy", _NO_EFFECT),
    Reference("npu_format_cast_", npu_format_cast_, "nothing to do", _NO_EFFECT),
    Reference("npu_format_cast_.acl_format", npu_format_cast_, "nothing to do", _NO_EFFECT),
    Reference("_npu_format_cast", npu_format_cast, "a copy", _NO_EFFECT),
    Reference("_npu_format_cast.aclnn", npu_format_cast, "a copy", _NO_EFFECT),
    Reference("npu_dtype_cast", npu_dtype_cast, "int8, int32 and floats"),
    Reference("_npu_dtype_cast", npu_dtype_cast, "int8, int32 and floats"),
    Reference("npu_prefetch", npu_prefetch, "nothing to do", ("dependency", "max_size", "offset")),
    Reference("npu_transpose", npu_transpose, "everything", ("require_contiguous",)),
)
