"""FP8 codes as kernels make and read them, number by number."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

import triton
import triton.language as tl

from lean_laguna.kernels.triton.layer_cache import from_cache, to_cache
from support.kernel_twins import encode_values


@triton.jit
def _there_and_back(x_ptr, code_ptr, back_ptr, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(code_ptr + i, to_cache(x, scale, code_ptr.dtype.element_ty))
    tl.debug_barrier()
    tl.store(back_ptr + i, from_cache(tl.load(code_ptr + i), scale, back_ptr.dtype.element_ty))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("scale", [1.0, 0.03, 700.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_and_are_read_as_what_they_stand_for(device, scale, kind, stored):
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    levels = levels[levels.isfinite()]
    # Every level, every midpoint, and what lies around and beyond.
    middles = (levels.sort().values[1:] + levels.sort().values[:-1]) / 2
    x = torch.cat((levels, middles, middles * 1.01, torch.randn(200) * 0.01, torch.tensor([1e9, -1e9])))
    x = torch.cat((x, x.new_zeros(1024 - len(x)))).mul(scale).to(kind).to(device)
    codes = torch.empty(1024, dtype=stored, device=device)
    back = torch.empty(1024, dtype=kind, device=device)
    _there_and_back[(1,)](x, codes, back, scale, N=1024)
    expected = encode_values(x, scale)
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), expected.float())
    # Triton's interpreter cuts off where it makes BF16.
    slack = 2.0**-7 if kind == torch.bfloat16 else 0.0
    torch.testing.assert_close(back.float(), expected.float() * scale, rtol=slack, atol=0.0)
    if stored == torch.uint8:
        others, again = codes.view(torch.float8_e4m3fn).clone(), torch.empty_like(back)
        _there_and_back[(1,)](x, others, again, scale, N=1024)
        assert torch.equal(others.view(torch.uint8), codes)
        assert torch.equal(again, back)
