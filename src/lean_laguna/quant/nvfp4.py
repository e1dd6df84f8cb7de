"""NVFP4: e2m1 codes, two a byte, an e4m3 scale per 16 of them, and one float32 divisor per tensor.

A weight is ``e2m1(code) * (scale / global_scale)``. Encoding follows compressed-tensors step by step, each
in the dtype it has there: the bits are the same for bfloat16, float16 and float32 weights.

Source: compressed-tensors 0.20, quantization/utils/helpers.py (calculate_qparams, generate_gparam),
fp4_utils.py, compressors/nvfp4/helpers.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.quant.halves import pack_halves, unpack_halves
from lean_laguna.quant.scaling import magnitude_bits, over
from lean_laguna.quant.scheme import NVFP4_GROUP
from lean_laguna.quant.scratch import Scratch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# What a scale that rounds to zero becomes, so that nothing is divided by it.
_ROUNDS_TO_ZERO, _LEAST_SCALE = 2.0**-10, 0.125
# A table is faster than torch's conversion.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_SIGN, _LARGEST_CODE = 8, 7
# What 1 is turned into before it is rounded.
_UNIT = 2.0**-23
# Divisors from which on no quotient of a weight is too small for float32: the largest factor is
# 448 / divisor, the least quotient that float32 has 2^-149, the least weights are these.
_LEAST_WEIGHTS = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
_LEAST_DIVISORS = {dtype: E4M3_MAX * 2.0**-149 / least for dtype, least in _LEAST_WEIGHTS.items()}


def global_scale(largest: Tensor) -> Tensor:
    """Return the divisor [1] float32 for weights whose largest magnitude is ``largest``.

    Args:
        largest: A scalar in the weights' dtype, over all linears that a serving engine fuses: it keeps one
            divisor for them.
    """
    largest = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    divisor = E4M3_MAX * E2M1_MAX / largest
    return torch.nan_to_num(divisor, nan=1.0, posinf=1.0, neginf=1.0).float().reshape(1)


def encode(weight: Tensor, divisor: Tensor, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
    """Quantise a weight.

    Args:
        weight: [N, K], K a multiple of 16, finite, contiguous.
        divisor: [1] float32, of ``global_scale``.
        scratch: The thread's, where there are many weights.

    Returns:
        Codes [N, K / 2] uint8, the even column in the low half of a byte; scales [N, K / 16] float8_e4m3fn.
    """
    scratch = scratch or Scratch()
    magnitudes = magnitude_bits(weight, scratch).view(-1, NVFP4_GROUP)
    largest = magnitudes.amax(-1).view(weight.dtype)
    wanted = (divisor * over(largest, E2M1_MAX)).clamp_(max=E4M3_MAX)
    scales = F.threshold(wanted, _ROUNDS_TO_ZERO, _LEAST_SCALE).to(torch.float8_e4m3fn)
    table = _E4M3_VALUES.to(weight.device) / divisor
    factors = table.index_select(0, scales.view(torch.uint8).int()).unsqueeze(-1)
    values = scratch.take("values", magnitudes.shape, weight, torch.float32)
    values.copy_(magnitudes.view(weight.dtype))
    if divisor.item() < _LEAST_DIVISORS[weight.dtype]:
        # So large are some weights that quotients of others vanish; what vanishes has no sign either.
        magnitudes.masked_fill_(values.div_(factors) == 0, 0)
        values.mul_(_UNIT)
    else:
        values.div_(factors.div_(_UNIT))
    codes = round_to_e2m1(values, scratch)
    codes.bitwise_or_(_signs(magnitudes, weight))
    return pack_halves(codes.view(weight.shape)), scales.view(weight.shape[0], -1)


def round_to_e2m1(values: Tensor, scratch: Scratch) -> Tensor:
    """Return the codes (int16) of float32 values from 0 on, ties to the even code; beyond 6 is 6.

    The values come times ``2^-23``, so that float16's subnormal numbers round them: those are multiples of
    ``2^-24``, and their bits are the multiple. The values are lost: operations in place take half the time of
    others.
    """
    codes = scratch.take("codes", values.shape, values, torch.float16)
    rounded = scratch.take("other codes", values.shape, values, torch.float16)
    bits, other = codes.view(torch.int16), rounded.view(torch.int16)
    # Steps are 0.5 up to 2, 1 up to 4, 2 from there: the grid that a value lies on gives the least code.
    codes.copy_(values)
    for offset in (2, 4):
        rounded.copy_(values.mul_(0.5))
        torch.minimum(bits, other.add_(offset), out=bits)
    return bits.clamp_(max=_LARGEST_CODE)


def _signs(magnitudes: Tensor, weight: Tensor) -> Tensor:
    """Return the sign's bit of the code of each weight that is not zero; the magnitudes are lost."""
    kind = magnitudes.dtype
    # A carry into the sign's bit tells magnitudes from zeros.
    signed = magnitudes.add_(torch.iinfo(kind).max).bitwise_and_(weight.view(kind).view(magnitudes.shape))
    return signed.bitwise_right_shift_(torch.iinfo(kind).bits - 4).bitwise_and_(_SIGN)


def code_values(codes: Tensor) -> Tensor:
    """Return the float32 values [N, K] of codes [N, K / 2]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    pairs = unpack_halves(codes)
    return table.index_select(0, pairs.flatten().int()).view(pairs.shape)
