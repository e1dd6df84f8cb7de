"""Quantised weights as the GPU kernels read them: scales by row, divisors by row, codes as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lean_laguna.quant.packed import PackedWeight
from lean_laguna.quant.scaling import tile_size

if TYPE_CHECKING:
    from lean_laguna.kernels.triton.formats import Packed


def to_kernels(weight: PackedWeight, dtype: torch.dtype) -> Packed:
    """Lay a packed weight out for the kernels; codes are not copied.

    One scale for a whole linear, and blocks that do not fit the linears stacked in it, become scales of
    single rows.

    Args:
        weight: [N, K] or [E, N, K].
        dtype: The model's, which kernels round decoded weights to.
    """
    from lean_laguna.kernels.triton.formats import Packed

    scheme, (rows, columns) = weight.scheme, weight.shape[-2:]
    tall, wide = tile_size(rows, columns, scheme)
    if scheme.strategy == "tensor" or any(height % tall for height in weight.heights):
        tall = 1
    scales, zeros = weight.scales, weight.zero_points
    if tall != tile_size(rows, columns, scheme)[0]:
        scales = _by_row(scales, weight)
        zeros = None if zeros is None else _by_row(zeros, weight)
    divisors = None
    if weight.global_scales is not None:
        heights = torch.tensor(weight.heights, device=scales.device)
        divisors = weight.global_scales.repeat_interleave(heights, -1, output_size=rows).contiguous()
        scales = scales.contiguous().view(torch.uint8)
    kind = {"fp4": "fp4", "fp8": "fp8", "int": f"int{scheme.num_bits}"}[scheme.number]
    return Packed(
        kind=kind,  # type: ignore[arg-type]
        shape=weight.shape,
        dtype=dtype,
        codes=weight.codes.contiguous().view(torch.uint8),
        scales=scales.contiguous(),
        tall=tall,
        wide=min(wide, columns),
        divisors=divisors,
        zeros=None if zeros is None else zeros.contiguous(),
        columns=weight.column_groups,
    )


def _by_row(scales: Tensor, weight: PackedWeight) -> Tensor:
    """Spread scales [..., S, C] of stacked linears over their rows, [..., N, C]."""
    parts = scales.split([weight.scale_rows(height) for height in weight.heights], -2)
    tall = [tile_size(height, weight.shape[-1], weight.scheme)[0] for height in weight.heights]
    spread = [
        part.repeat_interleave(size, -2)[..., :height, :]
        for part, size, height in zip(parts, tall, weight.heights, strict=True)
    ]
    return torch.cat(spread, -2)
