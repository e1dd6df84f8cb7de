"""Reordered codes: where an element lies, and the way back."""

import pytest
import torch

from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.lane_order import bits_of, fits, reordered, restored
from lean_laguna.quant.scheme import FP8_CHANNEL, NVFP4

KINDS = ("fp4", "int4", "fp8", "int8")
ORDERS = pytest.mark.parametrize(
    ("kind", "order"),
    [*((kind, "lanes") for kind in KINDS), ("fp8", "bytes"), ("fp4", "pairs"), ("int4", "pairs")],
)
ROWS, COLUMNS = 32, 1024


def codes_of(kind):
    generator = torch.Generator().manual_seed(len(kind))
    return torch.randint(0, 256, (ROWS, COLUMNS * bits_of(kind) // 8), dtype=torch.uint8, generator=generator)


def natural(codes, bits, byte, e):
    """The code of element e of the four bytes from ``byte`` on."""
    value = int(codes.flatten()[byte + e * bits // 8])
    return value if bits == 8 else value >> 4 * (e % 2) & 15


def placed(codes, kind, order, byte, e):
    """The code of element e of a word, read as the kernels read it."""
    word = int.from_bytes(bytes(codes.flatten()[byte : byte + 4].tolist()), "little")
    if order == "bytes":
        return word >> 8 * e & 255
    pair, half = e // 2, e % 2 * 16
    if kind == "int8":
        return word >> (8 * pair + half) & 255
    if kind == "int4":
        return word >> (4 * pair + half) & 15
    if kind == "fp8":
        two = word & 0x87F087F0 if pair == 0 else (word << 4 & 0x80F080F0) | (word >> 4 & 0x07000700)
        return two >> half + 8 & 0x80 | two >> half + 4 & 0x7F
    turned = (word << 12 | word >> 20) & 0xFFFFFFFF
    whole = ((word & 0x81808180) | (word >> 8 & 0x00400040), word << 2, word << 6, turned)[pair]
    return whole >> half + 12 & 8 | whole >> half + 6 & 7


@ORDERS
def test_the_way_back_gives_the_codes(kind, order):
    codes = codes_of(kind)
    assert not torch.equal(reordered(codes, kind, order), codes)
    assert torch.equal(restored(reordered(codes, kind, order), kind, order), codes)
    assert torch.equal(reordered(codes, kind, "rows"), codes)


@ORDERS
def test_a_lane_finds_its_columns_in_its_bytes(kind, order):
    codes, bits = codes_of(kind), bits_of(kind)
    found, step = reordered(codes, kind, order), 32 // bits
    for row in (0, 5, 13, 30):
        for column in range(0, COLUMNS, 37):
            wanted = natural(codes, bits, row * codes.shape[1] + column * bits // 8 // 4 * 4, column % step)
            lane, eight = column // 8 % 4, column // 32
            warp, eight = divmod(eight, COLUMNS // 256)
            if order == "pairs":
                item = (row // 16 * 8 + warp) * (COLUMNS // 512) + eight // 2
                byte = ((item * 8 + row % 8) * 4 + lane) * 16 + (row % 16 // 8) * 8 + eight % 2 * 4
            else:
                chunks = 4 if bits == 4 else 2
                item = (row // 8 * 8 + warp) * (COLUMNS // 256 // chunks) + eight // chunks
                byte = ((item * 8 + row % 8) * 4 + lane) * 16 + eight % chunks * (16 // chunks)
                byte += column % 8 // step * 4
            assert placed(found, kind, order, byte, column % step) == wanted, (row, column)


def test_only_whole_blocks_fit():
    assert fits("fp4", "lanes", 8, 1024)
    assert not fits("int4", "lanes", 8, 512)
    assert not fits("fp8", "lanes", 12, 512)
    assert fits("int8", "lanes", 8, 512)
    assert fits("fp8", "bytes", 8, 512)
    assert not fits("int8", "bytes", 8, 512)
    assert fits("int4", "pairs", 16, 512)
    assert not fits("fp4", "pairs", 24, 512)
    assert not fits("int8", "pairs", 16, 512)


@pytest.mark.parametrize(
    ("scheme", "order"),
    [(NVFP4, "pairs"), (NVFP4, "lanes"), (FP8_CHANNEL, "lanes"), (FP8_CHANNEL, "bytes")],
)
def test_a_reordered_weight_decodes_to_the_same(scheme, order):
    import dataclasses

    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    stored = to_packed(encode(weight, scheme), scheme, (ROWS, COLUMNS))
    codes = reordered(stored.codes.view(torch.uint8), scheme.kind, order).view(stored.codes.dtype)
    assert torch.equal(dataclasses.replace(stored, codes=codes, order=order).decode(), stored.decode())
