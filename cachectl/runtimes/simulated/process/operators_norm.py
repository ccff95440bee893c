"""Reference operators: normalisation, rotary embedding and gated activations, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators_cache import write_rows
from .reference import Reference, SimulationUnsupportedError

__all__ = ["REFERENCES", "rms_norm"]


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) * gamma over gamma's dimensions in float32, and 1 / rms(x) with those dimensions kept as 1."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(dim=tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    return wide * rstd * gamma.float(), rstd


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    normed, rstd = rms_norm(input, gamma, epsilon)
    return normed.to(input.dtype), rstd


def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    normed, rstd = rms_norm(input, gamma.float() + 1, epsilon)
    return normed.to(input.dtype), rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    normed, rstd = rms_norm(total, gamma, epsilon)
    return normed.to(x1.dtype), rstd, total


def npu_add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    total = x1 + x2
    normed, rstd = rms_norm(total, gamma, epsilon)
    return normed, normed.to(x1.dtype), rstd, total


def rotate(x: Tensor, mode: str) -> Tensor:
    """Return x with each pair (a, b) turned to (-b, a); pairs lie half a row apart ("half") or side by side."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    if mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    raise SimulationUnsupportedError(f"rotary mode {mode!r}: the simulation covers half and interleave")


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    wide = x.float()
    return (wide * cos.float() + rotate(wide, mode) * sin.float()).to(x.dtype)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    if rotate is None:
        return _rotary(input, r1, r2, rotary_mode)
    wide = input.float()
    return (wide * r1.float() + wide @ rotate.float() * r2.float()).to(input.dtype)


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    # The device turns its inputs in place and returns them.
    return query.copy_(_rotary(query, cos, sin, rotary_mode)), key.copy_(_rotary(key, cos, sin, rotary_mode))


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Pairs side by side are first laid half a row apart, as DeepSeek's rotary code does, and stay so.
    return _rotary(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin, "half")


def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    latent, rope = kv.split([gamma.numel(), cos.shape[-1]], -1)
    normed = rms_norm(latent, gamma, epsilon)[0].to(kv.dtype)
    turned = npu_interleave_rope(rope, cos, sin)
    if cache_mode == "Norm":
        for cache, rows in ((k_cache, turned), (ckv_cache, normed)):
            for batch in range(kv.shape[0]):
                cache[batch].index_copy_(1, index[batch].long(), rows[batch].to(cache.dtype))
    elif cache_mode in ("PA", "PA_BNSD"):
        for cache, rows in ((k_cache, turned), (ckv_cache, normed)):
            write_rows(cache, rows.transpose(1, 2).flatten(0, 1), index)
    else:
        raise SimulationUnsupportedError(
            f"npu::npu_kv_rmsnorm_rope_cache with cache_mode={cache_mode!r}: the simulation covers Norm, PA and PA_BNSD"
        )
    return k_cache, ckv_cache, turned, normed


def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def npu_gelu(input: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(input, approximate=approximate)


def npu_fast_gelu(input: Tensor) -> Tensor:
    wide = input.float()
    size = wide.abs()
    return (wide / (1 + torch.exp(-1.702 * size)) * torch.exp(0.851 * (wide - size))).to(input.dtype)


REFERENCES = (
    Reference("npu_rms_norm", npu_rms_norm, "everything"),
    Reference("npu_gemma_rms_norm", npu_gemma_rms_norm, "everything"),
    Reference("npu_add_rms_norm", npu_add_rms_norm, "everything"),
    Reference("npu_add_rms_norm_cast", npu_add_rms_norm_cast, "everything"),
    Reference("npu_rotary_mul", npu_rotary_mul, "half, interleave and a rotation matrix"),
    Reference("npu_apply_rotary_pos_emb", npu_apply_rotary_pos_emb, "half and interleave, any layout", ("layout",)),
    Reference("npu_interleave_rope", npu_interleave_rope, "everything"),
    Reference(
        "npu_kv_rmsnorm_rope_cache", npu_kv_rmsnorm_rope_cache, "cache modes Norm, PA and PA_BNSD, no quantisation"
    ),
    Reference("npu_swiglu", npu_swiglu, "everything"),
    Reference("npu_gelu", npu_gelu, "none and tanh"),
    Reference("npu_fast_gelu", npu_fast_gelu, "everything"),
)
