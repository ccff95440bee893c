"""Reference operators: the fused attention operators, by way of attention.py.

Shapes and types of their results come from torch_npu's own meta kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import Attention
from .reference import Reference

__all__ = ["REFERENCES"]


def _infer(name: str, *tensors: Tensor, **options: Any) -> Any:
    """Ask torch_npu's meta kernel for the results and make room for them on the CPU."""

    def to_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    made = getattr(torch.ops.npu, name)(
        *map(to_meta, tensors), **{key: to_meta(value) for key, value in options.items()}
    )
    if isinstance(made, Tensor):
        return torch.empty_like(made, device="cpu")
    return tuple(torch.zeros_like(part, device="cpu") for part in made)


def fused_infer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    num_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    block_size: int,
    softmax_lse_flag: bool,
    out: list[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    if out is None:
        out = _infer(
            "npu_fused_infer_attention_score",
            query,
            key,
            value,
            block_table=block_table,
            query_rope=query_rope,
            key_rope=key_rope,
            num_heads=num_heads,
            input_layout=input_layout,
            num_key_value_heads=num_key_value_heads,
            softmax_lse_flag=softmax_lse_flag,
        )
    Attention(
        query,
        key,
        value,
        query_rope,
        key_rope,
        atten_mask,
        actual_seq_lengths,
        actual_seq_lengths_kv,
        block_table,
        num_heads,
        num_key_value_heads or num_heads,
        scale,
        input_layout,
        sparse_mode,
        block_size,
        pre_tokens,
        next_tokens,
    ).run(out[0], out[1] if softmax_lse_flag else None)
    return tuple(out)


def fused_infer_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    block_table: Tensor | None,
    learnable_sink: Tensor | None,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    return_softmax_lse: bool,
    out: list[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    if out is None:
        out = _infer(
            "npu_fused_infer_attention_score_v2",
            query,
            key,
            value,
            block_table=block_table,
            query_rope=query_rope,
            key_rope=key_rope,
            num_query_heads=num_query_heads,
            input_layout=input_layout,
            num_key_value_heads=num_key_value_heads,
            return_softmax_lse=return_softmax_lse,
        )
    Attention(
        query,
        key,
        value,
        query_rope,
        key_rope,
        atten_mask,
        actual_seq_qlen,
        actual_seq_kvlen,
        block_table,
        num_query_heads,
        num_key_value_heads or num_query_heads,
        softmax_scale,
        input_layout,
        sparse_mode,
        block_size,
        pre_tokens,
        next_tokens,
        learnable_sink,
    ).run(out[0], out[1] if return_softmax_lse else None)
    return tuple(out)


def workspace(query: Tensor) -> Tensor:
    # A device wants scratch memory; the reference wants none, and an empty tensor has no address to be replayed at.
    return torch.empty(1, dtype=torch.uint8)


def infer_output(
    query: Tensor,
    value: Tensor,
    input_layout: str,
    block_table: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    softmax_lse_flag: bool,
    query_rope: Tensor | None,
) -> Any:
    return _infer(
        "npu_fused_infer_attention_score",
        query,
        value,
        value,
        input_layout=input_layout,
        block_table=block_table,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        softmax_lse_flag=softmax_lse_flag,
        query_rope=query_rope,
    )


def infer_output_v2(
    query: Tensor,
    value: Tensor,
    input_layout: str,
    block_table: Tensor | None,
    num_query_heads: int,
    num_key_value_heads: int,
    return_softmax_lse: bool,
    query_rope: Tensor | None,
) -> Any:
    return _infer(
        "npu_fused_infer_attention_score_v2",
        query,
        value,
        value,
        input_layout=input_layout,
        block_table=block_table,
        num_query_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        return_softmax_lse=return_softmax_lse,
        query_rope=query_rope,
    )


def incre_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    block_table: Tensor | None,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    block_size: int,
) -> Tensor:
    # Its lengths are those of the keys: a query is one token.
    result: Tensor = _infer(
        "npu_incre_flash_attention", query, key, value, num_heads=num_heads, input_layout=input_layout
    )
    Attention(
        query,
        key,
        value,
        None,
        None,
        atten_mask,
        None,
        actual_seq_lengths,
        block_table,
        num_heads,
        num_key_value_heads or num_heads,
        scale_value,
        input_layout,
        0,
        block_size,
    ).run(result, None)
    return result


def prompt_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    actual_seq_lengths_kv: list[int] | None,
    sparse_mode: int,
) -> Tensor:
    result: Tensor = _infer(
        "npu_prompt_flash_attention",
        query,
        key,
        value,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        input_layout=input_layout,
    )
    Attention(
        query,
        key,
        value,
        None,
        None,
        atten_mask,
        actual_seq_lengths,
        actual_seq_lengths_kv,
        None,
        num_heads,
        num_key_value_heads or num_heads,
        scale_value,
        input_layout,
        sparse_mode,
        0,
        pre_tokens,
        next_tokens,
    ).run(result, None)
    return result


_COVERS = (
    "layouts BSH, BSND, BNSD, TND, NTD and results BSND, NBSD, NTD, TND; grouped heads, paged caches, rope parts, list "
    "lengths, masks in sparse modes 0 to 3; no quantisation, pse_shift, padding or shared prefix"
)
_HINTS = ("inner_precise", "workspace")
_WORKSPACE_IGNORES_ALL = "returns one byte: the reference needs no workspace"

REFERENCES = (
    Reference("npu_fused_infer_attention_score", fused_infer, _COVERS, _HINTS),
    Reference("npu_fused_infer_attention_score.out", fused_infer, _COVERS, _HINTS),
    Reference("npu_fused_infer_attention_score_v2", fused_infer_v2, _COVERS + "; learnable sink", _HINTS),
    Reference("npu_fused_infer_attention_score_v2.out", fused_infer_v2, _COVERS + "; learnable sink", _HINTS),
    Reference("_npu_fused_infer_attention_score_get_max_workspace", workspace, _WORKSPACE_IGNORES_ALL, ("*",)),
    Reference("_npu_fused_infer_attention_score_v2_get_max_workspace", workspace, _WORKSPACE_IGNORES_ALL, ("*",)),
    Reference("_npu_fused_infer_attention_score_infer_output", infer_output, "without output quantisation"),
    Reference("_npu_fused_infer_attention_score_v2_infer_output", infer_output_v2, "without output quantisation"),
    Reference(
        "npu_incre_flash_attention", incre_flash, "as npu_fused_infer_attention_score for one query token", _HINTS
    ),
    Reference("npu_prompt_flash_attention", prompt_flash, "as npu_fused_infer_attention_score without pages", _HINTS),
)
