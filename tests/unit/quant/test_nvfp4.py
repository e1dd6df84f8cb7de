"""NVFP4 codes against a search over all codes, and the corners of its scales."""

from __future__ import annotations

import pytest
import torch

from lean_laguna.quant import nvfp4
from lean_laguna.quant.halves import unpack_halves
from lean_laguna.quant.nvfp4 import E2M1
from lean_laguna.quant.scratch import Scratch


def nearest_code(value: float) -> int:
    """The nearest e2m1 code by search; of two equally near, the even one."""
    size = min(abs(value), 6.0)
    code = min(range(8), key=lambda i: (abs(E2M1[i] - size), i % 2))
    return code + 8 * (value < 0)


def neighbours(values: torch.Tensor) -> torch.Tensor:
    """The next float32 numbers below and above each."""
    bits = values.view(torch.int32)
    return torch.cat(((bits - 1).view(torch.float32), (bits + 1).view(torch.float32)))


def test_rounding_is_to_the_nearest_value_and_ties_go_to_the_even_code() -> None:
    steps = torch.arange(0, 28 * 64 + 1) / (4 * 64)  # every tie is among them
    rest = torch.tensor([6.5, 9.0, 1e-30, 1e-38, 0.0])
    values = torch.cat((steps, neighbours(steps[1:]), torch.randn(500).abs(), rest))
    found = nvfp4.round_to_e2m1(values * 2.0**-23, Scratch())
    assert found.tolist() == [nearest_code(value) for value in values.tolist()]


def codes_of(values: list[float], dtype: torch.dtype = torch.float32) -> list[int]:
    """Codes of a group whose scale is 1: its first weight is 6."""
    weight = torch.tensor([[6.0, *values] + [0.0] * (15 - len(values))], dtype=dtype)
    codes, scales = nvfp4.encode(weight, torch.ones(1))
    assert scales.float().tolist() == [[1.0]]
    return unpack_halves(codes)[0, 1 : 1 + len(values)].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_negative_that_rounds_to_zero_keeps_its_sign_but_a_zero_has_none(dtype: torch.dtype) -> None:
    assert codes_of([-0.1, 0.1, -0.0, 0.0, -5.0, -1e-7], dtype) == [8, 0, 0, 0, 14, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_negative_whose_quotient_vanishes_has_no_sign(dtype: torch.dtype) -> None:
    most, least = torch.finfo(dtype).max, 2.0**-133
    weight = torch.tensor([[most, -least, -most / 100, -1e-6] + [0.0] * 12], dtype=dtype)
    codes, scales = nvfp4.encode(weight, nvfp4.global_scale(weight.abs().amax()))
    quotients = weight.float() / (scales.float() / nvfp4.global_scale(weight.abs().amax()))
    assert quotients[0, 1] == 0
    assert quotients[0, 3] < 0
    assert unpack_halves(codes)[0, :5].tolist() == [7, 0, 8, 8, 0]


def test_codes_lie_two_a_byte_even_column_low() -> None:
    weight = torch.zeros(1, 16)
    weight[0, :4] = torch.tensor([6.0, 0.5, -1.0, 3.0])
    codes, scales = nvfp4.encode(weight, torch.ones(1))
    assert scales.float().tolist() == [[1.0]]
    assert codes[0, :2].tolist() == [7 | 1 << 4, 10 | 5 << 4]
    assert torch.equal(nvfp4.code_values(codes), weight)


def test_the_divisor_maps_the_largest_weight_to_the_largest_code_and_scale() -> None:
    assert nvfp4.global_scale(torch.tensor(2.0)).tolist() == [1344.0]
    weight = torch.linspace(-2, 2, 64).view(2, 32)
    codes, scales = nvfp4.encode(weight, nvfp4.global_scale(weight.abs().amax()))
    assert scales.float().max().item() == 448.0
    assert (codes & 7).max().item() == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_zero_are_stored_as_zeros_with_usable_scales(dtype: torch.dtype) -> None:
    divisor = nvfp4.global_scale(torch.zeros((), dtype=dtype))
    codes, scales = nvfp4.encode(torch.zeros(2, 32, dtype=dtype), divisor)
    assert divisor.item() > 0
    assert torch.isfinite(divisor)
    assert not codes.any()
    assert (scales.float() == 0.125).all()


def test_the_error_stays_below_half_a_step_of_each_group() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    divisor = nvfp4.global_scale(weight.abs().amax())
    codes, scales = nvfp4.encode(weight, divisor)
    factors = (scales.float() / divisor).repeat_interleave(16, 1)
    error = (nvfp4.code_values(codes) * factors - weight).abs()
    # The widest step is 2 codes' values, and a scale's own rounding moves the largest weight by 1/16.
    assert (error <= factors * (1.0 + 6.0 / 16)).all()
