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
_SIGN = 8


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
    groups = magnitude_bits(weight, scratch).unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.amax(-1).view(weight.dtype)
    wanted = (divisor * over(largest, E2M1_MAX)).clamp_(max=E4M3_MAX)
    scales = F.threshold(wanted, _ROUNDS_TO_ZERO, _LEAST_SCALE).to(torch.float8_e4m3fn)
    codes = scales.view(torch.uint8).int().view(-1)
    factors = _E4M3_VALUES.to(weight.device).index_select(0, codes).view(scales.shape) / divisor
    values = scratch.take("values", weight.shape, weight, torch.float32).copy_(weight)
    values.unflatten(-1, (-1, NVFP4_GROUP)).div_(factors.unsqueeze(-1))
    return pack_halves(round_to_e2m1(values, scratch)), scales


def round_to_e2m1(values: Tensor, scratch: Scratch) -> Tensor:
    """Return the codes (int8) of float32 values, ties to the even code; beyond 6 is 6.

    A negative value that rounds to zero keeps its sign, a zero has none. The values are lost: operations in
    place take half the time of others.
    """
    steps = scratch.take("steps", values.shape, values, torch.float32)
    codes = scratch.take("codes", values.shape, values, torch.int8)
    other = scratch.take("other codes", values.shape, values, torch.int8)
    signs = scratch.take("signs", values.shape, values, torch.int8)
    # -1 has the sign's bit, 0 and 1 do not.
    signs.copy_(torch.sign(values, out=steps)).bitwise_and_(_SIGN)
    size = values.abs_().clamp_(max=E2M1_MAX)
    # Steps are 0.5 up to 2, 1 up to 4, 2 from there: the grid that a value lies on gives the least code.
    codes.copy_(torch.mul(size, 2, out=steps).round_())
    other.copy_(torch.round(size, out=steps)).add_(2)
    torch.minimum(codes, other, out=codes)
    other.copy_(size.mul_(0.5).round_()).add_(4)
    return torch.minimum(codes, other, out=codes).bitwise_or_(signs)


def code_values(codes: Tensor) -> Tensor:
    """Return the float32 values [N, K] of codes [N, K / 2]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    pairs = unpack_halves(codes)
    return table.index_select(0, pairs.flatten().int()).view(pairs.shape)
