"""Main and draft model: eager `prefill`, and one method each that is compiled, `main_decode` and `mtp_decode`."""

from __future__ import annotations

from typing import Any

import torch
from executor.forward_metadata import ForwardMetaData
from torch import Tensor, nn

from models.layers import COMPRESSED_MASK, DecoderLayer, Linear, RMSNorm, Rotary, Step

__all__ = ["DecoderForCausalLM", "DecoderMTP"]


class Decoder(nn.Module):
    """Layers, final norm and what they all look up."""

    def __init__(self, config: Any, settings: Any, comm: Any, layers: int) -> None:
        super().__init__()
        block_size = settings.scheduler_config.block_size
        self.layers = nn.ModuleList(DecoderLayer(config, comm, block_size) for _ in range(layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope_theta)
        slots = settings.blocks_per_row * block_size
        # Buffers that nobody replaces: made inside the graph they would be worked out again at every step.
        self.register_buffer("slots", torch.arange(slots), persistent=False)
        self.register_buffer("query_places", torch.arange(settings.query_len), persistent=False)
        causal = torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=torch.bool).triu(1)
        self.register_buffer("compressed_mask", causal, persistent=False)

    def prefill_layers(self, hidden: Tensor, slots: Tensor) -> Tensor:
        """Return the last layer's hidden states of the prompts, [batch, tokens, hidden]."""
        cos, sin = self.rotary.prefill(hidden.size(1))
        for layer in self.layers:
            hidden = layer.prefill(hidden, cos, sin, slots)
        return hidden

    def decode_layers(self, hidden: Tensor, position_ids: Tensor, metadata: ForwardMetaData) -> Tensor:
        """Return the last layer's hidden states of one step, [tokens, hidden]."""
        cos, sin = self.rotary.decode(position_ids)
        step = Step(cos, sin, metadata, self.mask(metadata))
        for layer in self.layers:
            hidden = layer.decode(hidden, step)
        return hidden

    def mask(self, metadata: ForwardMetaData) -> Tensor:
        """Return which slots count for each token, or the fused operator's own mask where it is told the lengths."""
        if metadata.actual_seq_lengths_kv is None:
            return self.compressed_mask
        # A comparison over all slots, not a slice up to a length: the shape never changes.
        first = metadata.actual_seq_lengths_kv - self.query_places.size(0) + 1
        return self.slots < (first[:, None] + self.query_places)[:, :, None]


class DecoderForCausalLM(nn.Module):
    """The main model."""

    def __init__(self, config: Any, settings: Any, comm: Any) -> None:
        super().__init__()
        self.model = Decoder(config, settings, comm, config.num_hidden_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def prefill(self, input_ids: Tensor, lengths: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read the prompts, fill the KV cache.

        Args:
            input_ids: [batch, tokens], padded on the right.
            lengths: [batch], real tokens of each row.
            slots: [batch * tokens], the slot of each token; padding lands behind the row's length, where nobody looks
                before decoding has overwritten it.

        Returns:
            Logits [batch, vocab] after each prompt's last token, and the hidden states [batch, tokens, hidden].
        """
        hidden = self.model.prefill_layers(self.embed_tokens(input_ids), slots)
        return self.lm_head(self.model.norm(last_of(hidden, lengths))), hidden

    def main_decode(
        self, input_ids: Tensor, position_ids: Tensor, forward_metadata: ForwardMetaData
    ) -> tuple[Tensor, Tensor]:
        """Take one step: the newest token of each row, and what was drafted after it.

        Args:
            input_ids: [batch * query_len], packed.
            position_ids: as input_ids.
            forward_metadata: lengths and places.

        Returns:
            Logits [tokens, vocab] and hidden states [tokens, hidden]. The KV cache is written in place.
        """
        hidden = self.model.decode_layers(self.embed_tokens(input_ids), position_ids, forward_metadata)
        return self.lm_head(self.model.norm(hidden)), hidden


class DecoderMTP(nn.Module):
    """The draft model: one layer over the newest token and the main model's hidden state of the one before.

    Embedding and head are the main model's own.
    """

    def __init__(self, config: Any, settings: Any, comm: Any) -> None:
        super().__init__()
        self.model = Decoder(config, settings, comm, 1)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(config.hidden_size, config.hidden_size, spread=0.1)
        self.embed_tokens: Any = None
        self.lm_head: Any = None

    def prefill(
        self, input_ids: Tensor, lengths: Tensor, slots: Tensor, prev_hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read the prompts, each token beside the hidden state of the one before; otherwise as the main model's."""
        hidden = self.model.prefill_layers(self.joined(input_ids, prev_hidden_states), slots)
        return self.lm_head(self.model.norm(last_of(hidden, lengths))), hidden

    def mtp_decode(
        self, input_ids: Tensor, position_ids: Tensor, forward_metadata: ForwardMetaData, prev_hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft the token after each of the packed ones; otherwise as main_decode.

        Args:
            prev_hidden_states: [tokens, hidden], the main model's, of the same step.
        """
        hidden = self.joined(input_ids, prev_hidden_states)
        hidden = self.model.decode_layers(hidden, position_ids, forward_metadata)
        return self.lm_head(self.model.norm(hidden)), hidden

    def joined(self, input_ids: Tensor, prev_hidden_states: Tensor) -> Tensor:
        return self.embed_tokens(input_ids) + self.eh_proj(self.hnorm(prev_hidden_states))


def last_of(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Return the hidden state of each row's last token, [batch, hidden]."""
    return hidden[torch.arange(hidden.size(0), device=hidden.device), lengths - 1]
