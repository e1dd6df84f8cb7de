"""How prefill decodes packed weights: words of four or eight codes at a time, in whatever order they lie.

Values are those of ``formats`` to the bit. Shifts and masks leave two codes as float16 in the halves of a
word; a thread reads words next to each other in memory, and what is in other rows or columns than its
neighbours is turned in registers. NVFP4's scales are divided by multiplying with the divisor's reciprocal and
correcting twice, which rounds as division does: so for every mantissa, of divisors from 2^-90 to 2^90.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.formats import Packed, Weight, decode


def takes_words(weight: Weight, cols: int, block_k: int) -> bool:
    """Say whether tiles of a weight [., N, K] of ``cols`` rows and ``block_k`` columns can be decoded so."""
    if not isinstance(weight, Packed) or weight.zeros is not None or weight.columns is not None:
        return False
    rows, columns = weight.shape[-2:]
    wide = weight.wide
    fits_scale = weight.scales.shape[-1] == 1 or wide % block_k == 0 or block_k % wide == 0
    return (
        rows % cols == 0 and columns % block_k == 0 and fits_scale and cols % 16 == 0 and block_k % 128 == 0
    )


def words_of(weight: Packed) -> tuple[Any, ...]:
    """Return a weight's tensors as the kernels here take them: codes as words."""
    codes: Tensor = weight.codes.view(torch.int32)
    return codes, weight.scales, weight.divisors


@triton.jit
def _pairs(w, p: tl.constexpr, FORMAT: tl.constexpr):
    """Return two codes of each word [uint32] as float16 in its halves; integers are 1024 above their code."""
    ORDERED: tl.constexpr = FORMAT[5] != "rows" and FORMAT[5] != "bytes"
    SIGNS: tl.constexpr = 0x80008000
    if FORMAT[0] == "fp4" and ORDERED:
        if p == 0:
            return (w & SIGNS) | ((w << 3) & 0x0C000C00) | ((w >> 5) & 0x02000200)
        elif p == 1:
            return ((w << 2) & SIGNS) | ((w << 5) & 0x0E000E00)
        elif p == 2:
            return ((w << 6) & SIGNS) | ((w << 9) & 0x0E000E00)
        else:
            return ((w << 12) & SIGNS) | (((w << 15) | (w >> 17)) & 0x0E000E00)
    elif FORMAT[0] == "fp4":
        if p == 3:
            return (w & SIGNS) | ((w >> 3) & 0x0E000E00)
        else:
            return ((w << (12 - 4 * p)) & SIGNS) | ((w << (9 - 4 * p)) & 0x0E000E00)
    elif FORMAT[0] == "fp8" and ORDERED:
        if p == 0:
            return (w & SIGNS) | ((w << 3) & 0x3F803F80)
        else:
            return ((w << 4) & SIGNS) | ((w << 7) & 0x07800780) | ((w >> 1) & 0x38003800)
    elif FORMAT[0] == "fp8":
        if p == 0:
            return ((w << 8) & SIGNS) | ((w << 7) & 0x3F803F80)
        else:
            return (w & SIGNS) | ((w >> 1) & 0x3F803F80)
    elif FORMAT[0] == "int4":
        return ((w >> (4 * p)) & 0x000F000F) | 0x64006400
    else:
        return ((w >> (8 * p)) & 0x00FF00FF) | 0x64006400


@triton.jit
def _half(pair, h: tl.constexpr, FORMAT: tl.constexpr):
    """Return float32 of one half of words of float16."""
    value = (pair >> (16 * h)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    if FORMAT[0] == "int4":
        value -= 1032.0
    elif FORMAT[0] == "int8":
        value -= 1152.0
    return value


@triton.jit
def _four(a, b, c, d):
    """Return [..., 2, 2] that read in a row are a, b, c and d."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _values(w, FORMAT: tl.constexpr):
    """Return float32 [..., n] of the n codes of each word, in order of columns, but for the scale."""
    IN_ROWS: tl.constexpr = (
        FORMAT[5] == "rows" or FORMAT[5] == "bytes"
    )  # a pair's halves are four (or two) codes apart, else neighbours
    p0, p1 = _pairs(w, 0, FORMAT), _pairs(w, 1, FORMAT)
    low0, high0 = _half(p0, 0, FORMAT), _half(p0, 1, FORMAT)
    low1, high1 = _half(p1, 0, FORMAT), _half(p1, 1, FORMAT)
    if FORMAT[0] == "fp4" or FORMAT[0] == "int4":
        p2, p3 = _pairs(w, 2, FORMAT), _pairs(w, 3, FORMAT)
        low2, high2 = _half(p2, 0, FORMAT), _half(p2, 1, FORMAT)
        low3, high3 = _half(p3, 0, FORMAT), _half(p3, 1, FORMAT)
        if IN_ROWS:
            return tl.join(_four(low0, low2, high0, high2), _four(low1, low3, high1, high3))
        else:
            return tl.join(_four(low0, low1, low2, low3), _four(high0, high1, high2, high3))
    elif IN_ROWS:
        return _four(low0, low1, high0, high1)
    else:
        return _four(low0, high0, low1, high1)


@triton.jit
def _raw_tile(
    words, row, start, K: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr
):
    """Return float32 [COLS, BLOCK_K] of a tile's codes, but for the scale."""
    IS_SMALL: tl.constexpr = FORMAT[0] == "fp4" or FORMAT[0] == "int4"
    CODES: tl.constexpr = 8 if IS_SMALL else 4
    if FORMAT[5] == "rows":
        i = tl.arange(0, COLS)[:, None]
        j = tl.arange(0, BLOCK_K // CODES)[None, :]
        w = tl.load(words + row * (K // CODES) + start // CODES + i * (K // CODES) + j)
        return tl.reshape(_values(w.to(tl.uint32, bitcast=True), FORMAT), (COLS, BLOCK_K))
    else:
        # Items of 128 words: of so many rows together, and of so many columns.
        TALL: tl.constexpr = 16 if FORMAT[5] == "pairs" else 8
        WIDE: tl.constexpr = 128 * CODES // TALL
        ITEMS: tl.constexpr = BLOCK_K // WIDE
        i = tl.arange(0, COLS // TALL)[:, None]
        j = tl.arange(0, ITEMS * 128)[None, :]
        first = row // TALL * (K // WIDE * 128) + start // WIDE * 128
        w = tl.load(words + first + i * (K // WIDE * 128) + j).to(tl.uint32, bitcast=True)
        if FORMAT[5] == "pairs":  # row, eight columns, row eight below, 32 columns
            w = tl.permute(tl.reshape(w, (COLS // 16, ITEMS, 8, 4, 2, 2)), (0, 4, 2, 1, 5, 3))
        elif IS_SMALL:  # row, eight columns, 32 columns
            w = tl.permute(tl.reshape(w, (COLS // 8, ITEMS, 8, 4, 4)), (0, 2, 1, 4, 3))
        else:  # row, eight columns, 32 columns, four columns
            w = tl.permute(tl.reshape(w, (COLS // 8, ITEMS, 8, 4, 2, 2)), (0, 2, 1, 4, 3, 5))
        return tl.reshape(_values(w, FORMAT), (COLS, BLOCK_K))


@triton.jit
def row_factors(weight, row, COLS: tl.constexpr, FORMAT: tl.constexpr):
    """Return what a tile's factors need of each of its rows [COLS], twice: read once for all columns.

    Args:
        weight: ``words_of``.
        row: First row, counted through a bank.
        COLS: Rows.
        FORMAT: ``Packed.format``.
    """
    rows = row + tl.arange(0, COLS)
    if FORMAT[0] == "fp4":
        divisor = tl.load(weight[2] + rows)
        return divisor, tl.math.div_rn(tl.full((COLS,), 1.0, tl.float32), divisor)
    else:
        scale = tl.load(weight[1] + rows // FORMAT[2] * FORMAT[4]).to(tl.float32)
        scale = scale * 256.0 if FORMAT[0] == "fp8" else scale
        return scale, scale


@triton.jit
def _factors(weight, row, own, start, COLS: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Return float32 factors of a tile's codes: [COLS, 1] or one for each group of columns."""
    TALL: tl.constexpr = FORMAT[2]
    WIDE: tl.constexpr = FORMAT[3]
    C: tl.constexpr = FORMAT[4]
    PER: tl.constexpr = BLOCK_K // WIDE if C > 1 and BLOCK_K % WIDE == 0 else 1
    rows = (row + tl.arange(0, COLS))[:, None]
    group = start // WIDE + tl.arange(0, PER)[None, :]
    if FORMAT[0] == "fp4":
        wide = tl.load(weight[1] + rows // TALL * C + group).to(tl.uint16)
        scale = (wide << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        divisor = own[0][:, None]
        inverse = own[1][:, None]
        near = scale * inverse
        near = tl.fma(tl.fma(-near, divisor, scale), inverse, near)
        # 2^14 is what the codes' bits leave out.
        return tl.fma(tl.fma(-near, divisor, scale), inverse, near) * 16384.0
    elif C == 1:
        return own[0][:, None]
    else:
        factor = tl.load(weight[1] + rows // TALL * C + group).to(tl.float32)
        return factor * 256.0 if FORMAT[0] == "fp8" else factor


@triton.jit
def decode_tile(
    weight,
    row,
    own,
    start,
    K: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decode a tile of a weight that ``takes_words``.

    Args:
        weight: ``words_of``.
        row: First row, counted through a bank, int64; a multiple of 16.
        own: ``row_factors``.
        start: First column, a multiple of BLOCK_K.
        K: Columns of the weight.
        COLS: Rows of the tile.
        BLOCK_K: Its columns, a power of two from 128 on.
        FORMAT: ``Packed.format``.
        DTYPE: What values are rounded to.

    Returns:
        [COLS, BLOCK_K].
    """
    raw = _raw_tile(weight[0], row, start, K, COLS, BLOCK_K, FORMAT)
    factor = _factors(weight, row, own, start, COLS, BLOCK_K, FORMAT)
    PER: tl.constexpr = factor.shape[1]
    grouped = tl.reshape(raw, (COLS, PER, BLOCK_K // PER))
    return tl.reshape(grouped * factor[:, :, None], (COLS, BLOCK_K)).to(DTYPE)


@triton.jit
def _decode_kernel(
    weight, out_ptr, K: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * COLS
    start = tl.program_id(1) * BLOCK_K
    own = row_factors(weight, row, COLS, FORMAT)
    tile = decode_tile(weight, row, own, start, K, COLS, BLOCK_K, FORMAT, out_ptr.dtype.element_ty)
    at = (row + tl.arange(0, COLS))[:, None] * K + start + tl.arange(0, BLOCK_K)[None, :]
    tl.store(out_ptr + at, tile)


def decode_linear(weight: Packed, out: Tensor) -> Tensor:
    """Write a packed weight [N, K], decoded, to the start of a flat buffer of the model's dtype.

    Args:
        weight: Of any kind.
        out: [N * K] at least.

    Returns:
        The start of ``out`` as [N, K].
    """
    cols, block_k = 16, 256
    if not takes_words(weight, cols, block_k):
        return decode(weight, out)
    rows, K = weight.shape
    whole = out[: rows * K].view(rows, K)
    _decode_kernel[(rows // cols, K // block_k)](
        words_of(weight), whole, K=K, COLS=cols, BLOCK_K=block_k, FORMAT=weight.format, num_warps=4
    )
    return whole
