"""What a forward pass is told about its sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["ForwardMetaData"]


@dataclass
class ForwardMetaData:
    """Lengths and places of one decode step, made anew by the host for each.

    Attributes:
        kv_len: [batch], slots filled before the step.
        slot_mapping: [batch * query_len], the slot that each token is written to.
        block_table: [batch, blocks per row], the blocks of each row; the same tensor at every step.
        actual_seq_lengths_kv: [batch], slots that count for a row's last token; with static graphs, else None.
        actual_seq_lengths_list_kv: the same on the host; with dynamic graphs, else None.
        actual_seq_lengths_cu_list_q: end of each row's tokens in the packed ones; with dynamic graphs, else None.
    """

    kv_len: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    actual_seq_lengths_kv: Tensor | None = None
    actual_seq_lengths_list_kv: list[int] | None = None
    actual_seq_lengths_cu_list_q: list[int] | None = None
