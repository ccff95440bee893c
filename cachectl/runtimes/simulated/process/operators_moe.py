"""Reference operators: mixture-of-experts routing and grouped matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators_quant import dynamic_quant
from .reference import Reference, SimulationUnsupportedError, output_dtype_of

__all__ = ["REFERENCES"]


def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    weights, experts = torch.softmax(x.float(), -1).topk(k, -1)
    count = x.shape[-1]
    if finished is not None:
        # A finished row goes to the expert that does not exist.
        experts = experts.masked_fill(finished.bool().unsqueeze(-1), count)
    rows = x.shape[:-1].numel()
    # Column-major numbering: row r's choice j is token number j * rows + r.
    source = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().contiguous().view(*x.shape[:-1], k)
    return weights.to(x.dtype), experts.to(torch.int32), source


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if renorm != 0:
        raise SimulationUnsupportedError("npu::npu_moe_gating_top_k with renorm: the operator itself takes only 0")
    normed = torch.sigmoid(x.float()) if norm_type == 1 else torch.softmax(x.float(), -1)
    ranked = normed if bias is None else normed + bias.float()
    if group_count > 1:
        grouped = ranked.unflatten(-1, (group_count, -1))
        scores = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(k_group, -1).indices, True)
        ranked = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = ranked.topk(k, -1).indices
    weights = normed.gather(-1, experts)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), normed


def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    experts, order = expert_idx.flatten().sort(stable=True)
    sources = row_idx.flatten()[order].long()
    places = torch.empty(sources.numel(), dtype=torch.int32)
    places[sources] = torch.arange(sources.numel(), dtype=torch.int32)
    rows = min(x.shape[0], active_num) * expert_idx.shape[1]
    return x[sources[:rows] % x.shape[0]], places, experts


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    active_num: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    quant_mode: int,
    active_expert_range: list[int],
    row_idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if drop_pad_mode != 0 or quant_mode not in (-1, 1) or expert_tokens_num_type == 0 or active_num > 0:
        raise SimulationUnsupportedError(
            "npu::npu_moe_init_routing_v2: the simulation covers all tokens without drop, quant_mode -1 and 1, and "
            "expert_tokens_num_type 1 and 2"
        )
    first, end = active_expert_range or (0, expert_num)
    total, k = expert_idx.numel(), expert_idx.shape[1]
    flat = expert_idx.flatten().long()
    active = (flat >= first) & (flat < end)
    order = torch.where(active, flat, torch.iinfo(torch.int64).max).sort(stable=True).indices
    used = int(active.sum())
    order = order[:used]
    rows = x[order // k]
    # The rest of each result is undefined on a device; here it is zero.
    scales = torch.zeros(total, dtype=torch.float32)
    if quant_mode == 1:
        wide = rows.float() if scale is None else rows.float() * scale.float()[flat[order] - first]
        rows, scales[:used] = dynamic_quant(wide)
    elif scale is not None:
        scales[:used] = scale.float()[order // k]
    expanded = torch.zeros(total, x.shape[1], dtype=rows.dtype)
    expanded[:used] = rows
    places = torch.full((total,), -1, dtype=torch.int32)
    if row_idx_type == 0:
        places[order] = torch.arange(used, dtype=torch.int32)
    else:
        places[:used] = order.to(torch.int32)
    counts = torch.bincount(flat[active] - first, minlength=end - first)
    if expert_tokens_num_type == 2:
        pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
        found = counts.nonzero().flatten()
        pairs[: found.numel()] = torch.stack((found + first, counts[found]), 1)
        counts = pairs
    return expanded, places, counts, scales


def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    experts = torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype)
    return torch.searchsorted(sorted_expert_for_source_row, experts, right=True).to(sorted_expert_for_source_row.dtype)


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None,
    k: int | None,
) -> Tensor:
    if drop_pad_mode not in (0, None, 2):
        raise SimulationUnsupportedError("npu::npu_moe_finalize_routing: the simulation covers modes without drop")
    choices = scales.shape[1] if scales is not None else k or 1
    rows = expanded_src_to_dst_row.numel() // choices
    # Mode 0 numbers a row's choices column-major, mode 2 row-major.
    places = expanded_src_to_dst_row.long()
    places = places.view(choices, rows) if drop_pad_mode != 2 else places.view(rows, choices).t()
    out = torch.zeros(rows, expanded_permuted_rows.shape[-1])
    for choice in range(choices):
        part = expanded_permuted_rows.float()[places[choice].clamp_min(0)]
        part = part.masked_fill(places[choice].lt(0).unsqueeze(1), 0)
        if bias is not None and export_for_source_row is not None:
            part = part + bias.float()[export_for_source_row[:, choice].long()]
        out += part if scales is None else part * scales[:, choice : choice + 1].float()
    for skip in (skip1, skip2):
        if skip is not None:
            out += skip.float()
    return out.to(expanded_permuted_rows.dtype)


def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    per_token_scales: Tensor | None,
    expert_token_num_type: int,
    idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if expert_token_num_type != 1 or idx_type != 0:
        raise SimulationUnsupportedError("npu::npu_moe_re_routing: the simulation covers counts and gather indices")
    ranks, experts = expert_token_num_per_rank.shape
    counts = expert_token_num_per_rank.flatten().long()
    starts = counts.cumsum(0) - counts
    order = torch.cat(
        [
            torch.arange(
                int(starts[rank * experts + expert]),
                int(starts[rank * experts + expert] + counts[rank * experts + expert]),
            )
            for expert in range(experts)
            for rank in range(ranks)
        ]
    )
    permuted, used = torch.zeros_like(tokens), order.numel()
    permuted[:used] = tokens[order]
    source = per_token_scales if per_token_scales is not None else torch.zeros(tokens.shape[0])
    scales = torch.zeros_like(source)
    scales[:used] = source[order]
    index = torch.zeros(tokens.shape[0], dtype=torch.int32)
    index[:used] = order.to(torch.int32)
    return permuted, scales, index, expert_token_num_per_rank.sum(0).to(expert_token_num_per_rank.dtype)


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    group_list: Tensor | list[int] | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    act_type: int | None,
    output_dtype: int | torch.dtype | None,
) -> list[Tensor]:
    if act_type or group_type not in (None, -1, 0) or any(tensor.dtype is torch.int32 for tensor in weight):
        raise SimulationUnsupportedError(
            "npu::npu_grouped_matmul: the simulation covers groups along rows, without activation, no int4 weights"
        )
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    inputs = x if len(x) > 1 or group_list is None else list(_row_groups(x[0], group_list, group_list_type or 0))
    target = output_dtype_of(output_dtype, x[0].dtype if x[0].dtype is not torch.int8 else torch.float16)
    tokens = None if not per_token_scale else torch.cat([part.flatten() for part in per_token_scale]).float()
    results, done = [], 0
    for group, part in enumerate(inputs):
        product = (
            part.double() @ weights[group].double()
            if part.dtype is torch.int8
            else part.float() @ weights[group].float()
        )
        if bias and part.dtype is torch.int8:
            product = product + _of_group(bias, group).double()
        value = product.float()
        if scale:
            value = value * _of_group(scale, group).float()
        if tokens is not None:
            value = value * tokens[done : done + part.shape[0]].unsqueeze(1)
        if bias and part.dtype is not torch.int8:
            value = value + _of_group(bias, group).float()
        results.append((product if target is torch.int32 else value).to(target))
        done += part.shape[0]
    if split_item not in (2, 3):
        return results
    whole = torch.cat(results)
    rows = sum(tensor.shape[0] for tensor in x)
    if whole.shape[0] < rows:  # rows behind the last group are undefined on a device; here they are zero
        whole = torch.cat((whole, whole.new_zeros(rows - whole.shape[0], whole.shape[1])))
    return [whole]


def _row_groups(rows: Tensor, group_list: Tensor | list[int], kind: int) -> tuple[Tensor, ...]:
    sizes = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    if kind == 0:
        sizes = [end - start for start, end in zip([0, *sizes[:-1]], sizes, strict=True)]
    elif kind != 1:
        raise SimulationUnsupportedError(f"npu::npu_grouped_matmul with group_list_type={kind}: 0 and 1 are covered")
    return tuple(rows[: sum(sizes)].split(sizes))


def _of_group(tensors: list[Tensor], group: int) -> Tensor:
    return tensors[0][group] if len(tensors) == 1 and tensors[0].dim() == 2 else tensors[group]


def _grouped_matmul_list(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: list[int] | None,
    split_item: int | None,
    output_dtype: torch.dtype | None,
) -> list[Tensor]:
    return grouped_matmul(x, weight, bias, None, None, group_list, split_item, None, 0, 0, output_dtype)


_GROUPED = "groups along rows in floats, or int8 with float scales; no activation, no int4"

REFERENCES = (
    Reference("npu_moe_gating_top_k_softmax", npu_moe_gating_top_k_softmax, "everything"),
    Reference(
        "npu_moe_gating_top_k", npu_moe_gating_top_k, "softmax and sigmoid, bias, groups; no hash mode", ("out_flag",)
    ),
    Reference("npu_moe_init_routing", npu_moe_init_routing, "everything"),
    Reference(
        "npu_moe_init_routing_v2",
        npu_moe_init_routing_v2,
        "no drop, without or with dynamic quantisation, counts or key-value pairs",
        ("expert_capacity", "expert_tokens_num_flag"),
    ),
    Reference("npu_moe_compute_expert_tokens", npu_moe_compute_expert_tokens, "everything"),
    Reference("npu_moe_finalize_routing", npu_moe_finalize_routing, "modes 0 and 2"),
    Reference("npu_moe_re_routing", npu_moe_re_routing, "counts, gather indices"),
    Reference("npu_grouped_matmul", grouped_matmul, _GROUPED, ("tuning_config",)),
    Reference("npu_grouped_matmul.List", _grouped_matmul_list, "groups along rows in floats"),
)
