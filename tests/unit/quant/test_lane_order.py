"""Reordered codes: where an element lies, and the way back."""

import pytest
import torch

from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.lane_order import fits, reordered, restored
from lean_laguna.quant.scheme import FP8_CHANNEL, NVFP4

ORDERS = pytest.mark.parametrize(("bits", "order"), [(4, "lanes"), (8, "lanes"), (4, "pairs")])
ROWS, COLUMNS = 32, 1024


def codes_of(bits):
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 256, (ROWS, COLUMNS * bits // 8), dtype=torch.uint8, generator=generator)


def element(codes, bits, byte, place):
    """The code at a place of the four bytes from ``byte`` on."""
    value = int(codes.flatten()[byte + place * bits // 8])
    return value if bits == 8 else value >> 4 * (place % 2) & 15


@ORDERS
def test_the_way_back_gives_the_codes(bits, order):
    codes = codes_of(bits)
    assert not torch.equal(reordered(codes, bits, order), codes)
    assert torch.equal(restored(reordered(codes, bits, order), bits, order), codes)
    assert torch.equal(reordered(codes, bits, "rows"), codes)


@ORDERS
def test_a_lane_finds_its_columns_in_its_bytes(bits, order):
    codes = codes_of(bits)
    found, step = reordered(codes, bits, order), 32 // bits
    for row in (0, 5, 13, 30):
        for column in range(0, COLUMNS, 37):
            natural = element(codes, bits, row * codes.shape[1] + column * bits // 8 // 4 * 4, column % step)
            lane, eight, e = column // 8 % 4, column // 32, column % step
            place = e // 2 + e % 2 * (step // 2)
            if order == "pairs":
                warp, eight = divmod(eight, COLUMNS // 256)
                item = (row // 16 * 8 + warp) * (COLUMNS // 512) + eight // 2
                byte = ((item * 8 + row % 8) * 4 + lane) * 16 + (row % 16 // 8) * 8 + eight % 2 * 4
            else:
                chunks, size = (4, 4) if bits == 4 else (2, 8)
                byte = row * codes.shape[1] + (eight // chunks * 4 + lane) * 16 + eight % chunks * size
                byte += column % 8 // step * 4
            assert element(found, bits, byte, place) == natural, (row, column)


def test_only_whole_blocks_fit():
    assert fits(4, "lanes", 3, 256)
    assert not fits(4, "lanes", 3, 192)
    assert fits(8, "lanes", 3, 192)
    assert fits(4, "pairs", 16, 512)
    assert not fits(4, "pairs", 24, 512)
    assert not fits(8, "pairs", 16, 512)


@pytest.mark.parametrize(("scheme", "order"), [(NVFP4, "pairs"), (NVFP4, "lanes"), (FP8_CHANNEL, "lanes")])
def test_a_reordered_weight_decodes_to_the_same(scheme, order):
    import dataclasses

    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    stored = to_packed(encode(weight, scheme), scheme, (ROWS, COLUMNS))
    codes = reordered(stored.codes.view(torch.uint8), scheme.num_bits, order).view(stored.codes.dtype)
    assert torch.equal(dataclasses.replace(stored, codes=codes, order=order).decode(), stored.decode())
