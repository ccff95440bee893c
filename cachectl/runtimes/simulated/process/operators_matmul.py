"""Reference operators: matrix products without quantisation, accumulated in float32."""

from __future__ import annotations

from torch import Tensor

from .reference import Reference

__all__ = ["REFERENCES"]


def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = input.float() @ weight.float().transpose(-1, -2)
    return (out if bias is None else out + bias.float()).to(input.dtype)


def npu_bmmV2(input: Tensor, mat2: Tensor, output_sizes: list[int]) -> Tensor:
    out = (input.float() @ mat2.float()).to(input.dtype)
    return out.reshape(output_sizes) if output_sizes else out


def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    perm_x1: list[int] | None,
    perm_x2: list[int] | None,
    perm_y: list[int] | None,
    batch_split_factor: int | None,
) -> Tensor:
    left = input.permute(perm_x1 or [0, 1, 2]).float()
    right = weight.permute(perm_x2 or [0, 1, 2]).float()
    product = left @ right  # [batch, m, n]
    if bias is not None:
        product = product + bias.float()
    product = product.permute(perm_y or [1, 0, 2]).to(input.dtype)
    factor = batch_split_factor or 1
    if factor == 1:
        return product.contiguous()
    # With [m, batch, n] the batch axis is cut into `factor` pieces, each flattened with n.
    m, batch, n = product.shape
    return product.reshape(m, factor, batch // factor * n).transpose(0, 1).contiguous()


REFERENCES = (
    Reference("npu_linear", npu_linear, "everything"),
    Reference("npu_bmmV2", npu_bmmV2, "everything"),
    Reference("npu_transpose_batchmatmul", npu_transpose_batchmatmul, "products without scale"),
)
