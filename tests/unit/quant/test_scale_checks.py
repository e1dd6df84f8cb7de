"""Which scales are taken and which are refused."""

from __future__ import annotations

import pytest
import torch

from lean_laguna.core.errors import CheckpointError
from lean_laguna.quant.scale_checks import check_codes, check_scale
from lean_laguna.quant.scheme import FP8_CHANNEL, NVFP4


@pytest.mark.parametrize(
    ("values", "part"),
    [([2688.0], "weight_global_scale"), ([1.0], "weight_global_scale"), ([0.001, 3.0], "weight_scale")],
)
def test_usable_scales_pass(values: list[float], part: str) -> None:
    check_scale(torch.tensor(values), part, NVFP4, "x")


def test_input_scales_may_lie_on_either_side_of_one() -> None:
    check_scale(torch.tensor([0.01]), "input_scale", FP8_CHANNEL, "x")
    check_scale(torch.tensor([900.0]), "input_global_scale", NVFP4, "x")


@pytest.mark.parametrize(
    ("values", "part", "message"),
    [
        ([1.0, 0.0], "weight_scale", "x: scales must be above 0, found 0 among 1 of 2"),
        ([1.0, -2.0], "weight_scale", "found -2 among 1 of 2"),
        ([float("nan")], "input_scale", "must be finite, found nan"),
        ([0.5], "weight_global_scale", "its reciprocal"),
        ([1.5, 20.0], "weight_scale", "the reciprocals"),
    ],
)
def test_others_are_refused(values: list[float], part: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_scale(torch.tensor(values), part, FP8_CHANNEL, "x")


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_codes_that_are_no_numbers_are_refused(byte: int) -> None:
    codes = torch.arange(0, 254, dtype=torch.uint8)[torch.arange(254) != 0x7F].reshape(11, 23)
    check_codes(codes.view(torch.float8_e4m3fn), "x")
    codes[3, 5] = byte
    with pytest.raises(CheckpointError, match="x: 1 of 253 codes are NaN"):
        check_codes(codes.view(torch.float8_e4m3fn), "x")
