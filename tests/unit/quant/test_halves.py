"""Two codes a byte."""

from __future__ import annotations

import pytest
import torch

from lean_laguna.quant.halves import pack_halves, unpack_halves


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_the_even_column_is_the_low_half_and_all_pairs_come_back(dtype: torch.dtype) -> None:
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(dtype).view(16, 32)
    packed = pack_halves(codes)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed.int(), codes[:, 0::2].int() + 16 * codes[:, 1::2].int())
    assert torch.equal(unpack_halves(packed), codes.to(torch.uint8))
