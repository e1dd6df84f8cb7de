"""Tiles of weights that share a scale."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lean_laguna.quant.scaling import largest_by_tile, magnitude_bits, over, quotients, tile_size
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, packed_integer
from lean_laguna.quant.scratch import Scratch

BLOCK = dataclasses.replace(FP8_BLOCK, block=(2, 3))


def test_tiles_follow_the_strategy() -> None:
    assert tile_size(6, 8, FP8_TENSOR) == (6, 8)
    assert tile_size(6, 8, FP8_CHANNEL) == (1, 8)
    assert tile_size(6, 8, packed_integer(4, 4)) == (1, 4)
    assert tile_size(6, 8, BLOCK) == (2, 3)


def test_blocks_that_stick_out_are_as_large_as_what_is_in_them() -> None:
    weight = torch.arange(20.0).view(4, 5) - 10
    assert largest_by_tile(weight, BLOCK, Scratch()).tolist() == [[10, 7], [7, 9]]


def test_each_weight_meets_its_tiles_scale() -> None:
    weight, scales = torch.full((4, 5), 12.0), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = [[12, 12, 12, 6, 6]] * 2 + [[4, 4, 4, 3, 3]] * 2
    assert quotients(weight, scales, BLOCK, Scratch()).tolist() == expected
    whole = quotients(torch.full((4, 6), 12.0), scales, BLOCK, Scratch())
    assert whole.tolist() == [[*row, row[-1]] for row in expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quotients_are_rounded_to_the_weights_type(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    scales = torch.tensor([[0.3, 0.7], [1.1, 1.3]]).to(dtype)
    expected = weight / scales.repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert torch.equal(quotients(weight, scales, BLOCK, Scratch()), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_of_magnitudes_order_as_the_magnitudes(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = magnitude_bits(weight, Scratch())
    assert torch.equal(bits.flatten().argsort(), weight.abs().flatten().argsort())
    assert torch.equal(bits.view(dtype), weight.abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_division_by_a_number_is_rounded_once(dtype: torch.dtype) -> None:
    values = torch.rand(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(over(values, 448.0), (values.double() / 448.0).to(dtype))
