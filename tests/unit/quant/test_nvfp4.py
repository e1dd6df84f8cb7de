"""NVFP4 codes against a search over all codes, and the corners of its scales."""

from __future__ import annotations

import pytest
import torch

from lean_laguna.quant import nvfp4
from lean_laguna.quant.nvfp4 import E2M1
from lean_laguna.quant.scratch import Scratch


def nearest_code(value: float) -> int:
    """The nearest e2m1 code by search; of two equally near, the even one."""
    size = min(abs(value), 6.0)
    code = min(range(8), key=lambda i: (abs(E2M1[i] - size), i % 2))
    return code + 8 * (value < 0)


def test_rounding_is_to_the_nearest_value_and_ties_go_to_the_even_code() -> None:
    steps = torch.arange(-28 * 64, 28 * 64 + 1) / (4 * 64)  # every tie is among them
    values = torch.cat((steps, torch.randn(500), torch.tensor([6.5, -100.0, 1e-30, -1e-30, 0.0, -0.0])))
    found = nvfp4.round_to_e2m1(values.clone(), Scratch())
    assert found.tolist() == [nearest_code(value) for value in values.tolist()]


def test_a_negative_that_rounds_to_zero_keeps_its_sign_but_a_zero_has_none() -> None:
    assert nvfp4.round_to_e2m1(torch.tensor([-0.1, 0.1, -0.0, 0.0]), Scratch()).tolist() == [8, 0, 0, 0]


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
