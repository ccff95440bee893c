"""What main and draft model are made of: cut linear layers, attention over a paged KV cache, and a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  -- registers torch.ops.npu
from executor.forward_metadata import ForwardMetaData
from torch import Tensor, nn

__all__ = ["DecoderLayer", "Linear", "RMSNorm", "Rotary", "Step"]

# The fused operator's causal mask in its compressed form has this size, whatever the lengths.
COMPRESSED_MASK = 2048


class Linear(nn.Module):
    """A linear layer, whole or this rank's part of it; a part along the inputs is summed over the group."""

    def __init__(
        self, inputs: int, outputs: int, cut: int | None = None, comm: Any = None, spread: float = 2.0
    ) -> None:
        super().__init__()
        self.cut, self.spread = cut, spread
        self.group = comm.tp_group if cut == 1 else None
        parts = comm.tp_size if cut is not None else 1
        shape = (outputs // parts, inputs) if cut == 0 else (outputs, inputs // parts)
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        # A configuration's `if` is decided while tracing. One rank has no group.
        if self.group is not None:
            dist.all_reduce(y, group=self.group)
        return y


class RMSNorm(nn.Module):
    """Division by the root mean square, in float32 whatever the model's dtype."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(hidden.dtype) * self.weight


class Rotary(nn.Module):
    """cos and sin of every position, worked out once and looked up: a slice in prefill, index_select in decode."""

    def __init__(self, head_dim: int, positions: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(positions), frequencies)
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)

    def prefill(self, tokens: int) -> tuple[Tensor, Tensor]:
        return self.cos_cached[:tokens, None], self.sin_cached[:tokens, None]

    def decode(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos = torch.index_select(self.cos_cached, 0, position_ids)
        return cos[:, None], torch.index_select(self.sin_cached, 0, position_ids)[:, None]


@dataclass
class Step:
    """What every layer of one decode step needs, worked out once before the first of them."""

    cos: Tensor
    sin: Tensor
    metadata: ForwardMetaData
    mask: Tensor


class Attention(nn.Module):
    """Grouped-query attention; k_cache and v_cache are bound by the worker, once, at their largest."""

    def __init__(self, config: Any, comm: Any, block_size: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads // comm.tp_size
        self.kv_heads = config.num_key_value_heads // comm.tp_size
        self.head_dim, self.block_size = config.head_dim, block_size
        self.scale = self.head_dim**-0.5
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, wide, 0, comm)
        self.k_proj = Linear(config.hidden_size, narrow, 0, comm)
        self.v_proj = Linear(config.hidden_size, narrow, 0, comm)
        self.o_proj = Linear(wide, config.hidden_size, 1, comm)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as [..., heads or kv_heads, head_dim], the first two rotated."""
        query = self.q_proj(hidden).unflatten(-1, (self.heads, self.head_dim))
        key = self.k_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store [tokens, kv_heads, head_dim] at their slots, in place."""
        torch.ops.npu.npu_scatter_nd_update_(self.k_cache, slots.view(-1, 1), key)
        torch.ops.npu.npu_scatter_nd_update_(self.v_cache, slots.view(-1, 1), value)

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        query, key, value = self.project(hidden, cos, sin)
        self.write(slots, key.flatten(0, 1), value.flatten(0, 1))
        tokens = hidden.size(1)
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).tril()
        return self.o_proj(self.attend(query, key, value, seen))

    def decode(self, hidden: Tensor, step: Step) -> Tensor:
        query, key, value = self.project(hidden, step.cos, step.sin)
        self.write(step.metadata.slot_mapping, key, value)
        # Which of the two is configuration: a run passes lists always, or never.
        if step.metadata.actual_seq_lengths_list_kv is None:
            return self.o_proj(self.decode_with_tensors(query, step))
        return self.o_proj(self.decode_with_lists(query, step))

    def decode_with_tensors(self, query: Tensor, step: Step) -> Tensor:
        """Plain operators over all slots of a row; the mask says which of them count."""
        table = step.metadata.block_table
        batch = table.size(0)
        key, value = (self.blocks(cache)[table].flatten(1, 2) for cache in (self.k_cache, self.v_cache))
        query = query.unflatten(0, (batch, -1))
        return self.attend(query, key, value, step.mask).flatten(0, 1)

    def decode_with_lists(self, query: Tensor, step: Step) -> Tensor:
        """The fused operator: it is told the lengths on the host, and reads no slot past them."""
        attended, _ = torch.ops.npu.npu_fused_infer_attention_score(
            query,
            self.blocks(self.k_cache).flatten(2),
            self.blocks(self.v_cache).flatten(2),
            atten_mask=step.mask,
            actual_seq_lengths=step.metadata.actual_seq_lengths_cu_list_q,
            actual_seq_lengths_kv=step.metadata.actual_seq_lengths_list_kv,
            block_table=step.metadata.block_table,
            block_size=self.block_size,
            num_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            input_layout="TND",
            scale=self.scale,
            sparse_mode=3,
        )
        return attended.flatten(1)

    def blocks(self, cache: Tensor) -> Tensor:
        """Return a cache [slots, kv_heads, head_dim] as [blocks, block size, kv_heads, head_dim]."""
        return cache.unflatten(0, (-1, self.block_size))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """Attend [batch, tokens, heads, d] to [batch, slots, kv_heads, d]; `seen` is True where a key counts.

        Args:
            query: [batch, tokens, heads, head_dim].
            key: [batch, slots, kv_heads, head_dim].
            value: as key.
            seen: bool, [tokens, slots] or [batch, tokens, slots].

        Returns:
            [batch, tokens, heads * head_dim].
        """
        grouped = query.unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)
        key, value = key.transpose(1, 2).unsqueeze(2), value.transpose(1, 2).unsqueeze(2)
        scores = (grouped @ key.transpose(-1, -2)).float() * self.scale
        seen = seen if seen.dim() == 2 else seen[:, None, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(value.dtype)
        return (weights @ value).permute(0, 3, 1, 2, 4).flatten(2)


class SwiGLU(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, config: Any, comm: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, 0, comm)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, 0, comm)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, 1, comm)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: Any, comm: Any, block_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, comm, block_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config, comm)

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.prefill(self.input_layernorm(hidden), cos, sin, slots)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def decode(self, hidden: Tensor, step: Step) -> Tensor:
        hidden = hidden + self.self_attn.decode(self.input_layernorm(hidden), step)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of the last dimension by its position's angle."""
    first, second = heads.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2).flatten(-2)
