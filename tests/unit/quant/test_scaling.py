"""Tiles of weights that share a scale."""

from __future__ import annotations

import dataclasses

import torch

from lean_laguna.quant.scaling import apply_by_tile, largest_by_tile, tile_size
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, packed_integer

BLOCK = dataclasses.replace(FP8_BLOCK, block=(2, 3))


def test_tiles_follow_the_strategy() -> None:
    assert tile_size(6, 8, FP8_TENSOR) == (6, 8)
    assert tile_size(6, 8, FP8_CHANNEL) == (1, 8)
    assert tile_size(6, 8, packed_integer(4, 4)) == (1, 4)
    assert tile_size(6, 8, BLOCK) == (2, 3)


def test_blocks_that_stick_out_are_as_large_as_what_is_in_them() -> None:
    weight = torch.arange(20.0).view(4, 5) - 10
    assert largest_by_tile(weight, BLOCK).tolist() == [[10, 7], [7, 9]]


def test_each_weight_meets_its_tiles_scale() -> None:
    weight, scales = torch.ones(4, 5), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = apply_by_tile(torch.mul, weight, scales, BLOCK)
    assert found.tolist() == [[1, 1, 1, 2, 2]] * 2 + [[3, 3, 3, 4, 4]] * 2
