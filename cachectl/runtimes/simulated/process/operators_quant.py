"""Reference operators: int8 quantisation and products of int8 matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators_norm import rms_norm
from .reference import Reference, SimulationUnsupportedError, output_dtype_of

__all__ = ["REFERENCES", "dynamic_quant"]


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and one float32 scale per row: scale = max(|row|) / 127."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    # A row of zeros has scale 0 and stays zeros.
    return (wide / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).round().to(torch.int8), scale


def npu_dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None, dst_type: int | None
) -> tuple[Tensor, Tensor]:
    if output_dtype_of(dst_type, torch.int8) is not torch.int8:
        raise SimulationUnsupportedError(f"npu::npu_dynamic_quant with dst_type={dst_type}: the simulation makes int8")
    wide = input.float()
    if smooth_scales is not None and group_index is not None:
        rows = torch.arange(wide.shape[:-1].numel())
        group = torch.searchsorted(group_index.long(), rows, right=True).clamp_max(smooth_scales.shape[0] - 1)
        wide = wide * smooth_scales.float()[group].view_as(wide)
    elif smooth_scales is not None:
        wide = wide * smooth_scales.float()
    return dynamic_quant(wide)


def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    smooth_scale1: Tensor | None,
    smooth_scale2: Tensor | None,
    epsilon: float,
    output_mask: list[bool] | None,
) -> tuple[Tensor, ...]:
    total = x1 + x2
    normed, _ = rms_norm(total, gamma, epsilon)
    both = smooth_scale1 is not None and smooth_scale2 is not None
    wanted = tuple(output_mask) if output_mask else (True, both)
    # A result that isn't wanted has no elements: the operator's own shape inference.
    pairs = [(torch.empty(0, dtype=torch.int8), torch.empty(0))] * 2
    for place, smooth in enumerate((smooth_scale1, smooth_scale2)):
        if wanted[place]:
            pairs[place] = dynamic_quant(normed if smooth is None else normed * smooth.float())
    return pairs[0][0], pairs[1][0], total, pairs[0][1], pairs[1][1]


def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    target = output_dtype_of(dtype, torch.int8)
    shape = [1] * input.dim()
    shape[axis] = -1
    scale = scales.float().view(shape) if scales.numel() > 1 else scales.float()
    offset: Tensor | float = 0.0
    if zero_points is not None:
        offset = zero_points.float().view(shape) if zero_points.numel() > 1 else zero_points.float()
    value = (input.float() / scale if div_mode else input.float() * scale) + offset
    bounds = torch.iinfo(target)
    return value.round().clamp(bounds.min, bounds.max).to(target)


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
) -> Tensor:
    if x1.dtype is not torch.int8 or x2.dtype is not torch.int8 or scale.dtype is torch.int64:
        raise SimulationUnsupportedError("npu::npu_quant_matmul: the simulation covers int8 matrices and float scales")
    target = output_dtype_of(output_dtype, torch.int8)
    # float64 holds every sum of products of int8 exactly.
    total = x1.double() @ x2.double()
    if bias is not None and bias.dtype is torch.int32:
        total = total + bias.double()
    if target is torch.int32:
        return total.to(torch.int32)
    value = total.float() * scale.float()
    if pertoken_scale is not None:
        value = value * pertoken_scale.float().unsqueeze(-1)
    if bias is not None and bias.dtype is not torch.int32:
        value = value + bias.float()
    if offset is not None:
        value = value + offset.float()
    return value.round().clamp(-128, 127).to(torch.int8) if target is torch.int8 else value.to(target)


def npu_weight_quant_batchmatmul(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_offset: Tensor | None, bias: Tensor | None
) -> Tensor:
    if weight.dtype is not torch.int8:
        raise SimulationUnsupportedError("npu::npu_weight_quant_batchmatmul: the simulation covers int8 weights")
    wide = weight.float()
    if antiquant_offset is not None:
        wide = wide + antiquant_offset.float()
    out = x.float() @ (wide * antiquant_scale.float())
    return (out if bias is None else out + bias.float()).to(x.dtype)


def npu_dequant_swiglu_quant(
    x: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    group_index: Tensor | None,
    activate_left: bool,
    quant_mode: int,
) -> tuple[Tensor, Tensor]:
    if quant_mode != 1:
        raise SimulationUnsupportedError("npu::npu_dequant_swiglu_quant: the simulation covers dynamic quantisation")
    value = x.float() if bias is None else x.float() + bias.float()
    rows = torch.arange(x.shape[0])
    ends = None if group_index is None else group_index.long().cumsum(0)
    groups = None if ends is None else torch.searchsorted(ends, rows, right=True).clamp_max(len(ends) - 1)
    if weight_scale is not None:
        value = value * _of_rows(weight_scale, groups)
    if activation_scale is not None:
        value = value * activation_scale.float().view(-1, 1)
    left, right = value.chunk(2, -1)
    gate, up = (left, right) if activate_left else (right, left)
    value = torch.nn.functional.silu(gate) * up
    if quant_scale is not None:
        value = value * _of_rows(quant_scale, groups)
    return dynamic_quant(value)


def _of_rows(scales: Tensor, groups: Tensor | None) -> Tensor:
    return scales.float() if groups is None or scales.dim() == 1 else scales.float()[groups]


REFERENCES = (
    Reference("npu_dynamic_quant", npu_dynamic_quant, "int8 per token, smoothing, groups"),
    Reference("npu_add_rms_norm_dynamic_quant", npu_add_rms_norm_dynamic_quant, "int8, without beta"),
    Reference("npu_quantize", npu_quantize, "int8 and int32"),
    Reference("npu_quant_matmul", npu_quant_matmul, "int8 matrices with float scales"),
    Reference(
        "npu_weight_quant_batchmatmul",
        npu_weight_quant_batchmatmul,
        "int8 weights with per-channel scales",
        ("inner_precise",),
    ),
    Reference("npu_dequant_swiglu_quant", npu_dequant_swiglu_quant, "dynamic int8, plain swiglu, groups by count"),
)
