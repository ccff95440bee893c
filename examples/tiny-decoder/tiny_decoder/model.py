"""The model: eager `prefill`, and `main_decode` as the one method that is compiled and cached.

The rule behind every line of `main_decode`: what changes from step to step comes in as an argument, everything else
stays where it is. Numbers in brackets, such as [4], are the rules of README.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["TinyDecoder", "build"]


def build(
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    vocab: int = 128,
    max_seq: int = 64,
    max_batch: int = 8,
    dtype: str = "float32",
    attention: str = "torch",
    device: str = "cpu",
    seed: int = 0,
) -> TinyDecoder:
    """Return the model with weights drawn from `seed`: equal in every process, whatever its dtype and device.

    `attention` is "torch" (plain operators, lengths as a tensor, for dynamic=False) or "fia" (torch_npu's fused
    operator, lengths as a host list, for dynamic=True; on an NPU with dtype float16 or bfloat16 only).
    """
    if attention == "fia":
        import torch_npu  # noqa: F401  -- registers torch.ops.npu, which FusedAttention calls
    model = TinyDecoder(layers, hidden, heads, kv_heads, intermediate, vocab, max_seq, max_batch, attention)
    # A generator of our own, on the CPU and in float32: the global one is the program's, and each device has another.
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Twice the usual spread: tokens that hardly change from step to step would hide a wrong graph.
            nn.init.normal_(parameter, std=2 * parameter.size(-1) ** -0.5, generator=generator)
    # [2] Inference only: a backward graph can't be captured.
    return model.requires_grad_(False).eval().to(device=device, dtype=getattr(torch, dtype))


class Step(NamedTuple):
    """What every layer of one decode step needs, worked out once before the first of them."""

    cos: Tensor
    sin: Tensor
    kv_len: Tensor
    rows: Tensor
    counts: Tensor | None
    lengths: Tensor | list[int]


class TinyDecoder(nn.Module):
    """Embedding, `layers` decoder layers, norm and head; grouped-query attention, rotary positions, SwiGLU."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        intermediate: int,
        vocab: int,
        max_seq: int,
        max_batch: int,
        attention: str,
    ) -> None:
        super().__init__()
        kind = {"torch": TorchAttention, "fia": FusedAttention}[attention]
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            Layer(kind(hidden, heads, kv_heads, max_batch, max_seq), hidden, intermediate) for _ in range(layers)
        )
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        # [6] cos and sin of every position, computed once. Buffers keep their addresses; not persistent, since a
        # checkpoint need not carry what the configuration already says.
        cos, sin = rotary_tables(max_seq, hidden // heads)
        self.register_buffer("cos_cached", cos, persistent=False)
        self.register_buffer("sin_cached", sin, persistent=False)
        # [7] Row and slot numbers too: inside the graph, torch.arange would be worked out again at every step.
        self.register_buffer("rows", torch.arange(max_batch), persistent=False)
        self.register_buffer("slots", torch.arange(max_seq), persistent=False)

    def prefill(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Read the prompts, fill the KV cache, and return the logits [batch, vocab] after each prompt's last token.

        [1] Always eager: every prompt has another length, so each would be another graph.

        Args:
            input_ids: [batch, tokens], prompts padded on the right. The padding's keys land in the cache, but past
                the row's length, where nothing looks before decoding has overwritten them.
            lengths: [batch], the number of real tokens in each row.
        """
        batch, tokens = input_ids.shape
        hidden = self.embedding(input_ids)
        cos, sin = self.cos_cached[:tokens], self.sin_cached[:tokens]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=input_ids.device).tril()
        for layer in self.layers:
            hidden = layer.prefill(hidden, cos, sin, causal)
        last = hidden[torch.arange(batch, device=input_ids.device), lengths - 1]
        return self.head(self.norm(last))

    # [3] A method of its own and not `forward`, undecorated, called with keywords and always with the same ones.
    def main_decode(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        kv_len: Tensor,
        actual_seq_lengths_kv: Tensor | list[int],
    ) -> Tensor:
        """Take one step: store the new token's keys and values, return the logits [batch, vocab] after it.

        The KV cache is changed in place and not returned [5].

        Args:
            input_ids: [batch, 1], the newest token of each row.
            position_ids: [batch, 1], its position in the text, for the rotary embedding.
            kv_len: [batch], the cache slot it is written to, which is how many tokens the row already has.
            actual_seq_lengths_kv: how many slots count after the write, kv_len + 1; a tensor [batch] with "torch"
                attention, a host list with "fia".
        """
        positions = position_ids.view(-1)
        step = Step(
            # [6] Looked up once out here and handed to every layer. [batch, 1, 1, head_dim / 2]
            cos=torch.index_select(self.cos_cached, 0, positions)[:, None, None],
            sin=torch.index_select(self.sin_cached, 0, positions)[:, None, None],
            kv_len=kv_len,
            rows=self.rows[: input_ids.size(0)],
            counts=self.counts(actual_seq_lengths_kv),
            lengths=actual_seq_lengths_kv,
        )
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer.decode(hidden, step)
        return self.head(self.norm(hidden)).squeeze(1)

    def counts(self, lengths: Tensor | list[int]) -> Tensor | None:
        """Return which cache slots count for each row, or None where the operator is told the lengths themselves."""
        # An `if` on a type or on configuration is decided while tracing. On a tensor's value it would break the graph.
        if isinstance(lengths, list):
            return None
        # [8] A comparison over all slots, not a slice up to a length: the shape never changes, and no .item() is used.
        return (self.slots < lengths[:, None])[:, None, None, None]


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, attention: Attention, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden)
        self.feed_forward = SwiGLU(hidden, intermediate)

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, causal: Tensor) -> Tensor:
        hidden = hidden + self.attention.prefill(self.attention_norm(hidden), cos, sin, causal)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))

    def decode(self, hidden: Tensor, step: Step) -> Tensor:
        hidden = hidden + self.attention.decode(self.attention_norm(hidden), step)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Attention(nn.Module):
    """Projections, KV cache and prefill; `decode` is what the two kinds below do differently.

    [1] Prefill and decode are two methods. One method with an `is_prefill` argument would be two graphs in one cache.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, max_batch: int, max_seq: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.scale = self.head_dim**-0.5
        self.query = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(heads * self.head_dim, hidden, bias=False)
        # [4] The whole cache, once, at its largest. It keeps its address and shape for as long as the model lives.
        shape = (max_batch, kv_heads, max_seq, self.head_dim)
        self.register_buffer("key_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("value_cache", torch.zeros(shape), persistent=False)

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, causal: Tensor) -> Tensor:
        batch, tokens, _ = hidden.shape
        query, key, value = self.project(hidden, cos, sin)
        self.key_cache[:batch, :, :tokens] = key
        self.value_cache[:batch, :, :tokens] = value
        return self.merge(attend(query, key, value, causal, self.scale))

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as [batch, heads or kv_heads, tokens, head_dim], the first two rotated."""
        query = self.query(hidden).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        key = self.key(hidden).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        value = self.value(hidden).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def merge(self, attended: Tensor) -> Tensor:
        return self.output(attended.transpose(1, 2).flatten(2))


class TorchAttention(Attention):
    """Decode with plain operators. Lengths are a tensor, so the guards hold at every step: dynamic=False."""

    def decode(self, hidden: Tensor, step: Step) -> Tensor:
        batch = hidden.size(0)
        query, key, value = self.project(hidden, step.cos, step.sin)
        # [5] In place, each row at its own slot. torch.cat((cache, key)) would be another shape, another address and
        # another graph at every step. Into the whole buffer, not into a slice of it: tracing turns in-place writes
        # into copies, and the runtime turns back those that it recognises.
        self.key_cache[step.rows, :, step.kv_len] = key.squeeze(2)
        self.value_cache[step.rows, :, step.kv_len] = value.squeeze(2)
        # [8] Always the whole cache; step.counts says which slots of it are real.
        return self.merge(attend(query, self.key_cache[:batch], self.value_cache[:batch], step.counts, self.scale))


class FusedAttention(Attention):
    """Decode with torch_npu's fused operator. It wants lengths as list[int] on the host: dynamic=True.

    The batch has to be max_batch; rows without a request carry a token that nobody reads.
    """

    def decode(self, hidden: Tensor, step: Step) -> Tensor:
        query, key, value = self.project(hidden, step.cos, step.sin)
        # [5] The fused form of the same write.
        torch.ops.npu.scatter_update_(self.key_cache, step.kv_len, key, -2)
        torch.ops.npu.scatter_update_(self.value_cache, step.kv_len, value, -2)
        # [9] No mask: the lengths say what counts. Under dynamic=True each of them is a symbol, so that the next step
        # brings new arguments to the same graph; under dynamic=False each new value would be a recompile.
        attended, _ = torch.ops.npu.npu_fused_infer_attention_score(
            query,
            self.key_cache,
            self.value_cache,
            actual_seq_lengths_kv=step.lengths,
            num_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            input_layout="BNSD",
            scale=self.scale,
        )
        return self.merge(attended)


class SwiGLU(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


class RMSNorm(nn.Module):
    """Division by the root mean square, in float32 whatever the model's dtype."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(hidden.dtype) * self.weight


def rotary_tables(max_seq: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position's angles, each [max_seq, head_dim / 2]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(max_seq), frequencies)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of the last dimension by its position's angle."""
    first, second = heads.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2).flatten(-2)


def attend(query: Tensor, key: Tensor, value: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Attend with `heads` queries to `kv_heads` keys and values; `counts` says which keys each query may see.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, kv_heads, slots, head_dim].
        value: as key.
        counts: bool, broadcast against [batch, kv_heads, heads / kv_heads, tokens, slots].
        scale: factor of the products before softmax.
    """
    grouped = query.unflatten(1, (key.size(1), -1))
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).float() * scale
    weights = scores.masked_fill(~counts, float("-inf")).softmax(-1).to(value.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)
