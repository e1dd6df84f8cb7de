"""FP8 codes: nearest e4m3 of the scaled weight, a scale per tile."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lean_laguna.quant import fp8
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, WeightScheme

SMALL_BLOCK = dataclasses.replace(FP8_BLOCK, block=(4, 8))
# Every finite e4m3 value, as torch decodes it.
LEVELS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
LEVELS = LEVELS[LEVELS.isfinite()]


@pytest.mark.parametrize("scheme", [FP8_TENSOR, FP8_CHANNEL, SMALL_BLOCK], ids=lambda scheme: scheme.strategy)
def test_codes_are_the_nearest_values_of_the_scaled_weights(scheme: WeightScheme) -> None:
    weight = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    codes, scales = fp8.encode(weight, scheme)
    assert tuple(scales.shape) == scheme.scale_shape(10, 20)
    height, width = {"tensor": (10, 20), "channel": (1, 20), "block": (4, 8)}[scheme.strategy]
    for row in range(10):
        for column in range(20):
            flat = scales if scales.ndim == 2 else scales.view(1, 1)
            scale = flat[row // height, column // width]
            scaled = weight[row, column] / scale
            nearest = (LEVELS - scaled).abs().min()
            assert (codes[row, column].float() - scaled).abs() == nearest
            tile = weight[row // height * height :][:height, column // width * width :][:, :width]
            assert scale == tile.abs().max() / 448


def test_a_tile_of_zeros_has_a_usable_scale() -> None:
    codes, scales = fp8.encode(torch.zeros(4, 8), SMALL_BLOCK)
    assert not codes.float().any()
    assert (scales > 0).all()
