"""Whole-number codes of 4 or 8 bits: ``(code - zero point) * scale``, and how they are packed into words.

Encoding follows compressed-tensors step by step, each in the weight's own dtype. In memory, here and on a
device, codes are unsigned, ``2^(bits - 1)`` above their value, in bytes: a byte holds one code of 8 bits or
two of 4, the even column in its low half. That is what the words of ``pack-quantized`` hold, byte for byte.

Source: compressed-tensors 0.20, quantization/utils/helpers.py, compressors/pack_quantized/helpers.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.quant.halves import pack_halves, unpack_halves
from lean_laguna.quant.scaling import largest_by_tile, over, quotients, tiled
from lean_laguna.quant.scheme import WeightScheme
from lean_laguna.quant.scratch import Scratch

_WORD_BYTES = 4


def encode(
    weight: Tensor, scheme: WeightScheme, scratch: Scratch | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise a weight [N, K], finite, contiguous.

    Returns:
        Codes [N, K] int8; scales in the weight's dtype and the scheme's shape; zero points int8 of that
        shape, None where the scheme is symmetric.
    """
    scratch = scratch or Scratch()
    least, most = -(2.0 ** (scheme.num_bits - 1)), 2.0 ** (scheme.num_bits - 1) - 1
    zero: Tensor | None = None
    if scheme.symmetric:
        scales = over(largest_by_tile(weight, scheme, scratch), (most - least) / 2)
    else:
        tiles = tiled(weight, scheme)
        low, high = tiles.amin((1, 3)).clamp(max=0), tiles.amax((1, 3)).clamp(min=0)
        scales = over(high - low, most - least)
        # Groups of zeros divide zero by zero; their zero point is 0.
        zero = (least - low / scales).clamp(least, most).nan_to_num(0.0)
    scales[scales == 0] = torch.finfo(scales.dtype).eps
    values = quotients(weight, scales, scheme, scratch)
    shape = scheme.scale_shape(*weight.shape)
    if zero is not None:
        zero = zero.round()
        shifted = tiled(values, scheme).add_(zero.float()[:, None, :, None])
        # The sum is rounded to the weight's type, as the quotient was.
        values = shifted.view_as(values).to(weight.dtype).float()
        zero = zero.to(torch.int8).view(shape)
    return values.clamp_(least, most).round_().to(torch.int8), scales.view(shape), zero


def to_bytes(codes: Tensor, num_bits: int) -> Tensor:
    """Return signed codes [N, K] int8 as bytes [N, K] or, for 4 bits, [N, ceil(K / 2)] uint8."""
    if num_bits == 8:
        return codes.view(torch.uint8) ^ 0x80
    # The sign's bit turned over is 8 added.
    unsigned = (codes ^ 8).bitwise_and_(15)
    return pack_halves(F.pad(unsigned, (0, 1)) if unsigned.shape[-1] % 2 else unsigned)


def from_bytes(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """Return signed codes [N, columns] int8 of bytes."""
    if num_bits == 4:
        packed = unpack_halves(packed)
    return (packed[..., :columns].to(torch.int16) - (1 << (num_bits - 1))).to(torch.int8)


def to_words(packed: Tensor) -> Tensor:
    """Return bytes [N, B] as stored words [N, ceil(B / 4)] int32; missing bytes are 0."""
    rows, columns = packed.shape
    if columns % _WORD_BYTES == 0:
        return packed.reshape(-1).view(torch.int32).view(rows, -1)
    padded = packed.new_zeros(rows, columns + -columns % _WORD_BYTES)
    padded[:, :columns] = packed
    return padded.view(torch.int32)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Return signed codes [N, K] int8 as stored words [N, ceil(K * bits / 32)] int32."""
    return to_words(to_bytes(codes, num_bits))


def word_bytes(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """Return the bytes that hold ``columns`` codes per row of stored words [N, W] int32, without a copy."""
    return words.view(torch.uint8)[..., : -(-columns * num_bits // 8)]


def pack_zero_points(zero: Tensor, num_bits: int) -> Tensor:
    """Return zero points [N, C] int8 as stored: words along N, [ceil(N * bits / 32), C] int32."""
    return _transposed(pack(_transposed(zero), num_bits))


def unpack_zero_points(words: Tensor, num_bits: int, rows: int) -> Tensor:
    """Return zero points [rows, C] int8 of stored words [ceil(rows * bits / 32), C] int32."""
    across = word_bytes(_transposed(words), num_bits, rows)
    return _transposed(from_bytes(across, num_bits, rows))


def _transposed(matrix: Tensor) -> Tensor:
    # Copied, not made contiguous: a single column counts as contiguous whatever its strides, and cannot be
    # viewed as bytes.
    return matrix.new_empty(matrix.shape[::-1]).copy_(matrix.t())
