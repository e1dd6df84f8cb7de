"""Weights kept as codes and scales, and how a kernel reads a tile of any weight, packed or plain.

A packed tile is the decoded weight's: ``code * scale`` in float32 (NVFP4: ``code * (scale / divisor)``;
integers: ``(code - zero) * scale``), rounded once to the model's dtype. So a product differs from that of the
weight decoded at load by the order of its sums at most, and under the interpreter by nothing.

Codes become numbers without tables: a sign and the few bits of exponent and mantissa are moved to where
float16 has its own, which is the number but for a power of two that goes into the scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Kind = Literal["fp4", "fp8", "int4", "int8"]


@dataclass(frozen=True)
class Packed:
    """A weight [N, K], or a bank of experts' [E, N, K], as kernels read it.

    Attributes:
        kind: ``fp4`` is e2m1, ``fp8`` e4m3; integers are unsigned, ``2^(bits - 1)`` above their value.
        shape: (N, K) or (E, N, K).
        dtype: What tiles are rounded to: the model's.
        codes: [..., N, K] uint8, or [..., N, ceil(K / 2)] for 4 bits, the even column in the low half.
        scales: [..., N / tall, C]; e4m3 as uint8 for ``fp4``, else a float dtype.
        tall: Rows that share scales; 1, or what divides N.
        wide: Columns that share a scale; K for one a row.
        divisors: [..., N] float32 of each row's linear, ``fp4`` only.
        zeros: int8 in the shape of ``scales``, or None.
        columns: [..., K] int32 group of each column where they were reordered, or None.
        order: Of the codes in memory: ``rows``, or as ``quant.lane_order`` describes.
        derived: What the CUDA C++ kernels made of it, once.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor
    tall: int
    wide: int
    divisors: Tensor | None = None
    zeros: Tensor | None = None
    columns: Tensor | None = None
    order: Literal["rows", "lanes", "bytes", "pairs"] = "rows"
    derived: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a kernel is given."""
        codes = self.codes if self.order == "rows" else self.codes.view(torch.int32)
        return codes, self.scales, self.divisors, self.zeros, self.columns

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    @property
    def format(self) -> tuple[Any, ...]:
        """What a kernel must know beforehand: kind, N, rows and columns a scale, scales a row, order."""
        return self.kind, self.shape[-2], self.tall, self.wide, self.scales.shape[-1], self.order


Weight = Tensor | Packed
"""What every product takes."""

PLAIN = ("plain", 0, 0, 0, 0, "rows")


def operand(weight: Weight) -> tuple[Tensor | None, ...]:
    """Return a weight's tensors as kernels take them."""
    return weight.tensors if isinstance(weight, Packed) else (weight, None, None, None, None)


def format_of(weight: Weight) -> tuple[Any, ...]:
    """Return what a kernel must know of a weight beforehand."""
    return weight.format if isinstance(weight, Packed) else PLAIN


def plain(weight: Weight) -> Tensor:
    """Return a weight that is known to be plain.

    Raises:
        TypeError: It is packed.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"a weight kept as {weight.kind} where only plain ones fit")
    return weight


def row_elements(weight: Weight) -> int:
    """Return the elements from one row's codes or values to the next row's."""
    stored = weight.tensors[0] if isinstance(weight, Packed) else weight
    assert stored is not None
    return stored.shape[-1]


def row_bytes(weight: Weight) -> int:
    """Return the bytes of one row's codes or values."""
    stored = weight.codes if isinstance(weight, Packed) else weight
    return stored.shape[-1] * stored.element_size()


@triton.jit
def _float_bits(code, MAGNITUDE: tl.constexpr, UP: tl.constexpr):
    """Return float16 of small floats [uint8]: a sign above MAGNITUDE bits that go UP to float16's place."""
    wide = code.to(tl.uint16)
    sign = (wide >> MAGNITUDE) << 15
    size = (wide & ((1 << MAGNITUDE) - 1)) << UP
    return (sign | size).to(tl.float16, bitcast=True)


@triton.jit
def e4m3(code):
    """Return float32 values of e4m3 codes [uint8]."""
    return _float_bits(code, 7, 7).to(tl.float32) * 256.0


@triton.jit
def _scale_at(weight, scale_at, row, FORMAT: tl.constexpr):
    """Return the float32 factor of raw code values, and their zero point (or 0), at scale offsets."""
    scales, divisors, zeros = weight[1], weight[2], weight[3]
    if FORMAT[0] == "fp4":
        scale = e4m3(tl.load(scales + scale_at))
        # 2^14 is what the codes' bits leave out.
        factor = tl.math.div_rn(scale, tl.load(divisors + row) + tl.zeros_like(scale)) * 16384.0
    else:
        factor = tl.load(scales + scale_at).to(tl.float32)
        if FORMAT[0] == "fp8":
            factor = factor * 256.0
    zero = tl.zeros_like(factor)
    if zeros is not None:
        zero = tl.load(zeros + scale_at).to(tl.float32)
    return factor, zero


@triton.jit
def _placed_code(word, pair, half, FORMAT: tl.constexpr):
    """Return codes whose bits lie in words from ``half`` on, as ``quant.lane_order`` says."""
    if FORMAT[0] == "fp4":
        sign = tl.where(pair == 0, 15, tl.where(pair == 1, 13, tl.where(pair == 2, 9, 3))) + half
        half = tl.where(pair == 3, 16 - half, half)
        low = tl.where(pair == 0, 14, tl.where(pair == 1, 4, tl.where(pair == 2, 0, 10))) + half
        high = tl.where(pair == 0, 7, tl.where(pair == 1, 5, tl.where(pair == 2, 1, 11))) + half
        return ((word >> sign) & 1) << 3 | ((word >> high) & 3) << 1 | ((word >> low) & 1)
    elif FORMAT[5] == "bytes":
        return (word >> (pair * 16 + half // 2)) & 255
    elif FORMAT[0] == "fp8":
        own = word >> half
        second = ((own >> 4) & 0x80) | ((own >> 8) & 0x70) | (own & 15)
        return tl.where(pair == 0, ((own >> 8) & 0x80) | ((own >> 4) & 0x7F), second)
    elif FORMAT[0] == "int4":
        return (word >> (pair * 4 + half)) & 15
    else:
        return (word >> (pair * 8 + half)) & 255


@triton.jit
def _ordered_codes(
    words,
    rows,
    start,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return codes [SPLIT, BLOCK_N, BLOCK_K] that lie in words as the lanes of a warp take them."""
    IS_SMALL: tl.constexpr = FORMAT[0] == "fp4" or FORMAT[0] == "int4"
    BITS: tl.constexpr = 4 if IS_SMALL else 8
    CODES: tl.constexpr = 32 // BITS
    first = start + tl.arange(0, SPLIT)[:, None, None] * BLOCK_K
    k = first + tl.arange(0, BLOCK_K // CODES)[None, None, :] * CODES
    row = rows[None, :, None]
    PART: tl.constexpr = K // 8
    own = k % PART
    if FORMAT[5] == "pairs":
        at = (row // 16 * 8 + k // PART) * (PART // 64) + own // 64
        at = (at * 32 + row % 8 * 4 + k // 8 % 4) * 4 + row // 8 % 2 * 2 + own // 32 % 2
    else:
        WIDE: tl.constexpr = 128 if IS_SMALL else 64
        at = (row // 8 * 8 + k // PART) * (PART // WIDE) + own // WIDE
        at = (at * 32 + row % 8 * 4 + k // 8 % 4) * 4 + own % WIDE // 32 * (8 // CODES) + k % 8 // CODES
    word = tl.load(words + at) if EVEN else tl.load(words + at, mask=k < K, other=0)
    e = tl.arange(0, CODES)[None, None, None, :]
    code = _placed_code(word[:, :, :, None], e // 2, e % 2 * 16, FORMAT)
    return tl.reshape(code, (SPLIT, BLOCK_N, BLOCK_K)).to(tl.uint8)


@triton.jit
def _codes(weight, row, k, half, K: tl.constexpr, EVEN: tl.constexpr, FORMAT: tl.constexpr):
    """Return the codes at rows and columns; ``half`` are the byte columns of 4-bit codes."""
    codes = weight[0]
    if FORMAT[0] == "fp4" or FORMAT[0] == "int4":
        at = row * ((K + 1) // 2) + half
        if EVEN:
            both = tl.load(codes + at, eviction_policy="evict_first")
        else:
            both = tl.load(codes + at, mask=(half * 2 < K), other=0, eviction_policy="evict_first")
        return tl.interleave(both & 15, both >> 4)
    else:
        at = row * K + k
        if EVEN:
            return tl.load(codes + at, eviction_policy="evict_first")
        else:
            return tl.load(codes + at, mask=(k < K), other=0, eviction_policy="evict_first")


@triton.jit
def _raw_values(code, FORMAT: tl.constexpr):
    """Return float32 of codes [uint8], but for what goes into the scale."""
    if FORMAT[0] == "fp4":
        return _float_bits(code, 3, 9).to(tl.float32)
    elif FORMAT[0] == "fp8":
        return _float_bits(code, 7, 7).to(tl.float32)
    elif FORMAT[0] == "int4":
        return code.to(tl.float32) - 8.0
    else:
        return code.to(tl.float32) - 128.0


@triton.jit
def load_packed_tile(
    weight,
    rows,
    start,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decode a tile of a packed weight.

    Args:
        weight: ``Packed.tensors``.
        rows: [BLOCK_N] int64 rows, counted through a bank, inside the weight.
        start: First column, a multiple of BLOCK_K.
        K: Columns of the weight; those from K on are zeros.
        BLOCK_N: Rows.
        BLOCK_K: Columns of each part, a power of two.
        SPLIT: Parts, side by side.
        EVEN: No column reaches past K.
        FORMAT: ``Packed.format``.
        DTYPE: What values are rounded to.

    Returns:
        [SPLIT, BLOCK_N, BLOCK_K].
    """
    N: tl.constexpr = FORMAT[1]
    TALL: tl.constexpr = FORMAT[2]
    WIDE: tl.constexpr = FORMAT[3]
    C: tl.constexpr = FORMAT[4]
    first = start + tl.arange(0, SPLIT)[:, None, None] * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)[None, None, :]
    half = first // 2 + tl.arange(0, BLOCK_K // 2)[None, None, :]
    row = rows[None, :, None]
    if FORMAT[5] == "rows":
        code = _codes(weight, row, k, half, K, EVEN, FORMAT)
    else:
        code = _ordered_codes(weight[0], rows, start, K, BLOCK_N, BLOCK_K, SPLIT, EVEN, FORMAT)
    raw = _raw_values(code, FORMAT)
    scale_row = row // TALL * C
    if weight[4] is not None:
        group = tl.load(weight[4] + row // N * K + tl.minimum(k, K - 1))
        factor, zero = _scale_at(weight, scale_row + group, row, FORMAT)
        value = (raw - zero) * factor
    elif C == 1:
        factor, zero = _scale_at(weight, scale_row, row, FORMAT)
        value = (raw - zero) * factor
    elif WIDE % BLOCK_K == 0:
        factor, zero = _scale_at(weight, scale_row + tl.minimum(first // WIDE, C - 1), row, FORMAT)
        value = (raw - zero) * factor
    elif BLOCK_K % WIDE == 0:
        PER: tl.constexpr = BLOCK_K // WIDE
        group = first // WIDE + tl.arange(0, PER)[None, None, :]
        factor, zero = _scale_at(weight, scale_row + tl.minimum(group, C - 1), row, FORMAT)
        grouped = tl.reshape(raw, (SPLIT, BLOCK_N, PER, WIDE))
        value = tl.reshape((grouped - zero[:, :, :, None]) * factor[:, :, :, None], (SPLIT, BLOCK_N, BLOCK_K))
    else:
        factor, zero = _scale_at(weight, scale_row + tl.minimum(k // WIDE, C - 1), row, FORMAT)
        value = (raw - zero) * factor
    if not EVEN:
        value = tl.where(k < K, value, 0.0)
    return value.to(DTYPE)


@triton.jit
def _decode_kernel(
    weight,
    out_ptr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = K % BLOCK_K == 0
    rows = tl.minimum(n, ROWS - 1)
    tile = load_packed_tile(weight, rows, start, K, BLOCK_N, BLOCK_K, 1, EVEN, FORMAT, DTYPE)
    k = start + tl.arange(0, BLOCK_K)
    at = n[:, None] * K + k[None, :]
    tl.store(out_ptr + at, tl.reshape(tile, (BLOCK_N, BLOCK_K)), mask=(n < ROWS)[:, None] & (k < K)[None, :])


def as_plain(weight: Weight) -> Tensor:
    """Return a weight [N, K] plain: itself, or decoded into memory of its own."""
    if isinstance(weight, Tensor):
        return weight
    rows, columns = weight.shape
    return decode(weight, torch.empty(rows * columns, dtype=weight.dtype, device=weight.device))


def decode(weight: Packed, out: Tensor) -> Tensor:
    """Write a packed weight [N, K], decoded, to the start of a flat buffer of the model's dtype.

    Args:
        weight: Of any kind.
        out: [N * K] at least.

    Returns:
        The start of ``out`` as [N, K].
    """
    rows, K = weight.shape
    whole = out[: rows * K].view(rows, K)
    block_n, block_k = 16, 128
    _decode_kernel[(triton.cdiv(rows, block_n), triton.cdiv(K, block_k))](
        weight.tensors,
        whole,
        ROWS=rows,
        K=K,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        FORMAT=weight.format,
        num_warps=4,
    )
    return whole
