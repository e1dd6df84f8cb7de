"""Random quantised weights, drawn as codes and scales where they will be used: for timing only."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.quant.nvfp4 import E2M1
from lean_laguna.quant.packed import PackedWeight
from lean_laguna.quant.scheme import WeightScheme

_SCALE_BYTES = (0x40, 0x48)
"""e4m3 bytes from 2.0 up to 3.75: scales of NVFP4's groups."""
_SMALL = 0xBF
"""Clears the top exponent bit of e4m3: no code is NaN, none above 1.875."""


def random_weight(
    scheme: WeightScheme,
    shape: tuple[int, ...],
    heights: tuple[int, ...],
    std: float,
    generator: torch.Generator,
) -> PackedWeight:
    """Draw a weight whose values have about a given deviation.

    Args:
        scheme: How it is stored; symmetric.
        shape: [N, K] or [E, N, K].
        heights: Rows of each linear stacked along N.
        std: Of the values.
        generator: On the device where the weight goes.

    Raises:
        ConfigError: The shape does not fit the scheme.
    """
    device, columns = generator.device, shape[-1]
    tiles = [scheme.scale_shape(height, columns) for height in heights]
    across = tiles[0][1] if len(tiles[0]) == 2 else 1
    scale_shape = (*shape[:-2], sum(tile[0] for tile in tiles), across)
    width = -(-columns // 2) if scheme.num_bits == 4 else columns

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, device=device, generator=generator)

    codes = draw(0, 256, *shape[:-1], width)
    if scheme.number == "fp4":
        scales = draw(*_SCALE_BYTES, *scale_shape).view(torch.float8_e4m3fn)
        size = float(
            torch.arange(*_SCALE_BYTES, dtype=torch.uint8).view(torch.float8_e4m3fn).float().square().mean()
        )
        divisor = (_mean_square(torch.tensor(E2M1)) * size) ** 0.5 / std
        divisors = torch.full((*shape[:-2], len(heights)), divisor, device=device)
        return PackedWeight(scheme, shape, codes, scales, divisors, heights=heights)
    if scheme.number == "fp8":
        codes &= _SMALL
        values = torch.arange(0, 64, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = codes.view(torch.float8_e4m3fn)
    else:
        values = torch.arange(-(2 ** (scheme.num_bits - 1)), 2 ** (scheme.num_bits - 1)).float()
    spread = torch.rand(scale_shape, device=device, generator=generator) * 0.5 + 0.75
    scales = (spread * (std / _mean_square(values) ** 0.5)).to(torch.bfloat16)
    return PackedWeight(scheme, shape, codes, scales, heights=heights)


def _mean_square(values: Tensor) -> float:
    return float(values.square().mean())
