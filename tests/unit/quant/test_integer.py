"""Integer codes and their packing against arithmetic on single bits."""

from __future__ import annotations

import pytest
import torch

from lean_laguna.quant import integer
from lean_laguna.quant.scheme import packed_integer


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    return torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [8, 32, 13])
def test_element_j_lies_at_bits_j_times_b_of_its_row(bits: int, columns: int) -> None:
    codes = random_codes(3, columns, bits)
    words = integer.pack(codes, bits)
    assert words.shape == (3, -(-columns * bits // 32))
    for row in range(3):
        value = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words[row]))
        for column in range(columns):
            code = value >> column * bits & ((1 << bits) - 1)
            assert code - (1 << (bits - 1)) == codes[row, column]
    found = integer.from_bytes(integer.word_bytes(words, bits, columns), bits, columns)
    assert torch.equal(found, codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 3), (16, 1), (11, 2)])
def test_zero_points_are_packed_down_the_rows(bits: int, shape: tuple[int, int]) -> None:
    zero = random_codes(*shape, bits)
    words = integer.pack_zero_points(zero, bits)
    assert words.shape == (-(-shape[0] * bits // 32), shape[1])
    assert torch.equal(words, integer.pack(zero.t().contiguous(), bits).t())
    assert torch.equal(integer.unpack_zero_points(words, bits, shape[0]), zero)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 8])
def test_the_error_is_at_most_half_a_step(symmetric: bool, group: int | None) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)) + 0.3
    codes, scales, zero = integer.encode(weight, packed_integer(4, group, symmetric))
    spread = scales.repeat_interleave(32 // scales.shape[1], 1)
    offset = 0 if zero is None else zero.float().repeat_interleave(32 // scales.shape[1], 1)
    error = ((codes.float() - offset) * spread - weight).abs()
    # The zero point is rounded too, which clips at most half a step at one end.
    assert (error <= spread * (1.0 if zero is not None else 0.5) + 1e-6).all()
    assert (zero is None) == symmetric


def test_groups_of_zeros_decode_to_zeros() -> None:
    for symmetric in (True, False):
        codes, scales, zero = integer.encode(torch.zeros(2, 16), packed_integer(4, 8, symmetric))
        values = codes.float() if zero is None else codes.float() - zero.float().repeat_interleave(8, 1)
        assert not values.any()
        assert (scales > 0).all()
