"""Attention of one call, computed in float32 over whole, grouped and paged key/value caches.

Layouts: B batch, S sequence, N heads, D head size, H = N * D, T tokens of all batches one after another. Everything is
brought to one [N, S, D] per batch, attended, and laid out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .reference import SimulationUnsupportedError

__all__ = ["Attention"]

_ALL_TOKENS = 2147483647


@dataclass
class Attention:
    """One call, under names that the versions of the operator share."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    mask: Tensor | None
    query_lengths: Sequence[int] | None
    kv_lengths: Sequence[int] | None
    block_table: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    layout: str
    sparse_mode: int
    block_size: int
    pre_tokens: int = _ALL_TOKENS
    next_tokens: int = _ALL_TOKENS
    sink: Tensor | None = None

    def run(self, out: Tensor, lse: Tensor | None) -> None:
        """Write the attention into `out`, and log-sum-exp into `lse` when it has room for it."""
        given, _, wanted = self.layout.partition("_")
        queries = self._queries(given)
        results, sums = [], []
        for batch, query in enumerate(queries):
            key, value = self._keys_and_values(batch, given)
            result, logsum = self._attend(batch, query, key, value)
            results.append(result)
            sums.append(logsum)
        out.copy_(_laid_out(results, wanted or given, out.shape))
        if lse is not None and lse.numel() == sum(part.numel() for part in sums):
            lse.copy_(
                _laid_out(
                    [part.unsqueeze(-1) for part in sums], "TND" if given in ("TND", "NTD") else "BNSD", lse.shape
                )
            )

    def _queries(self, layout: str) -> list[Tensor]:
        query = _joined(self.query, self.query_rope, layout, self.heads)
        if layout in ("TND", "NTD"):
            return _cut(query if layout == "TND" else query.transpose(0, 1), self._need(self.query_lengths))
        return list(_by_head(query, layout, self.heads))

    def _need(self, lengths: Sequence[int] | None) -> Sequence[int]:
        if lengths is None:
            raise SimulationUnsupportedError(f"attention in layout {self.layout} needs the lengths of its sequences")
        return lengths

    def _keys_and_values(self, batch: int, layout: str) -> tuple[Tensor, Tensor]:
        length = self._kv_length(batch)
        if self.block_table is not None:
            # A paged length is each batch's own, in every layout.
            blocks = self.block_table[batch, : -(-self._need_int(length) // self.block_size)].long()
            key, value, rope = (self._paged(cache, blocks) for cache in (self.key, self.value, self.key_rope))
        elif layout in ("TND", "NTD"):
            ends = [0, *self._need(self.kv_lengths)]
            part = slice(ends[batch], ends[batch + 1])
            key, value, rope = (
                None
                if tensor is None
                else (tensor if layout == "TND" else tensor.transpose(0, 1))[part].transpose(0, 1)
                for tensor in (self.key, self.value, self.key_rope)
            )
            length = None
        else:
            key, value, rope = (
                None if tensor is None else _by_head(tensor, layout, self.kv_heads)[batch]
                for tensor in (self.key, self.value, self.key_rope)
            )
        if rope is not None:
            key = torch.cat((key, rope), -1)
        if length is not None:
            key, value = key[:, :length], value[:, :length]
        return key, value

    def _kv_length(self, batch: int) -> int | None:
        lengths = self.kv_lengths
        if lengths is None:
            return None
        return lengths[0] if len(lengths) == 1 else lengths[batch]

    def _need_int(self, length: int | None) -> int:
        if length is None:
            raise SimulationUnsupportedError("attention over a paged cache needs the key lengths")
        return length

    def _paged(self, cache: Tensor | None, blocks: Tensor) -> Any:
        """Return [N, S, D] of the named blocks of a cache laid out in any of the four ways there are."""
        if cache is None:
            return None
        pages = cache[blocks]
        if cache.dim() == 3:  # [blocks, block size, H]
            return pages.reshape(-1, self.kv_heads, cache.shape[2] // self.kv_heads).transpose(0, 1)
        if cache.dim() == 5:  # [blocks, N, D / tile, block size, tile]
            return pages.permute(1, 0, 3, 2, 4).reshape(self.kv_heads, -1, cache.shape[2] * cache.shape[4])
        if cache.shape[1] == self.kv_heads and cache.shape[2] == self.block_size:  # [blocks, N, block size, D]
            return pages.transpose(0, 1).flatten(1, 2)
        return pages.flatten(0, 1).transpose(0, 1)  # [blocks, block size, N, D]

    def _attend(self, batch: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        group = self.heads // self.kv_heads
        wide_key = key.float().repeat_interleave(group, 0)
        wide_value = value.float().repeat_interleave(group, 0)
        scores = query.float() @ wide_key.transpose(1, 2) * self.scale
        hidden = self._hidden(batch, query.shape[1], key.shape[1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        if self.sink is not None:
            column = self.sink.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, column), -1)
        weights = torch.softmax(scores, -1).nan_to_num()  # a row that sees nothing gives zeros
        result = weights[..., : key.shape[1]] @ wide_value
        if self.query_lengths is not None and "TND" not in self.layout and "NTD" not in self.layout:
            lengths = self.query_lengths
            result[:, lengths[0] if len(lengths) == 1 else lengths[batch] :] = 0
        return result, torch.logsumexp(scores, -1)

    def _hidden(self, batch: int, rows: int, columns: int) -> Tensor | None:
        """Return True where a query row must not see a key, for the sparse modes 0 to 3."""
        if self.mask is None:
            return None
        row, column = torch.arange(rows).unsqueeze(1), torch.arange(columns)
        if self.sparse_mode == 2:
            return column > row
        if self.sparse_mode == 3:
            return column > row + (columns - rows)
        if self.sparse_mode not in (0, 1):
            raise SimulationUnsupportedError(
                f"attention with sparse_mode={self.sparse_mode}: the simulation covers 0 to 3"
            )
        mask = self.mask
        if mask.dim() == 2 and rows == 1 and mask.shape[0] == self.query.shape[0]:
            mask = mask[batch : batch + 1]
        elif mask.dim() >= 3:
            mask = mask[batch if mask.shape[0] > 1 else 0]
            mask = mask[0] if mask.dim() == 3 else mask
        hidden = mask[:rows, :columns].bool()
        if self.sparse_mode == 0 and rows > 1:
            hidden = hidden | (column > row + self.next_tokens) | (column < row - self.pre_tokens)
        return hidden


def _joined(tensor: Tensor, rope: Tensor | None, layout: str, heads: int) -> Tensor:
    if rope is None:
        return tensor
    if layout == "BSH":
        batch, length, _ = tensor.shape
        joined = torch.cat((tensor.view(batch, length, heads, -1), rope.view(batch, length, heads, -1)), -1)
        return joined.flatten(2)
    return torch.cat((tensor, rope), -1)


def _by_head(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """Return [B, N, S, D]."""
    if layout == "BSH":
        return tensor.view(tensor.shape[0], tensor.shape[1], heads, -1).transpose(1, 2)
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "BNSD":
        return tensor
    raise SimulationUnsupportedError(
        f"attention in layout {layout}: the simulation covers BSH, BSND, BNSD, TND and NTD"
    )


def _cut(tokens: Tensor, ends: Sequence[int]) -> list[Tensor]:
    """Cut [T, N, D] at cumulative lengths into [N, S, D] each."""
    starts = [0, *ends[:-1]]
    return [tokens[start:end].transpose(0, 1) for start, end in zip(starts, ends, strict=True)]


def _laid_out(parts: list[Tensor], layout: str, shape: torch.Size) -> Tensor:
    """Put [N, S, D] per batch into the layout of a result."""
    if layout in ("TND", "NTD"):
        tokens = torch.cat([part.transpose(0, 1) for part in parts])
        return (tokens if layout == "TND" else tokens.transpose(0, 1)).reshape(shape)
    whole = torch.stack(parts)  # [B, N, S, D]
    if layout in ("BSH", "BSND"):
        whole = whole.transpose(1, 2)
    elif layout == "NBSD":
        whole = whole.transpose(0, 1)
    elif layout != "BNSD":
        raise SimulationUnsupportedError(f"attention result in layout {layout} is not covered by the simulation")
    return whole.reshape(shape)
