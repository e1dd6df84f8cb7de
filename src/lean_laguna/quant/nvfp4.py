"""NVFP4: e2m1 codes, two a byte, an e4m3 scale per 16 of them, and one float32 divisor per tensor.

A weight is ``e2m1(code) * (scale / global_scale)``. Encoding follows compressed-tensors step by step, each
in the dtype it has there: the bits are the same for bfloat16, float16 and float32 weights.

Source: compressed-tensors 0.20, quantization/utils/helpers.py (calculate_qparams, generate_gparam),
fp4_utils.py, compressors/nvfp4/helpers.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.quant.scheme import NVFP4_GROUP

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# What a scale that rounds to zero becomes, so that nothing is divided by it.
_LEAST_SCALE = 0.125
_SIGN_BIT = 3


def global_scale(largest: Tensor) -> Tensor:
    """Return the divisor [1] float32 for weights whose largest magnitude is ``largest``.

    Args:
        largest: A scalar in the weights' dtype, over all linears that a serving engine fuses: it keeps one
            divisor for them.
    """
    largest = largest.clamp(min=torch.finfo(largest.dtype).tiny)
    divisor = E4M3_MAX * E2M1_MAX / largest
    return torch.nan_to_num(divisor, nan=1.0, posinf=1.0, neginf=1.0).float().reshape(1)


def encode(weight: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight.

    Args:
        weight: [N, K], K a multiple of 16, finite.
        divisor: [1] float32, of ``global_scale``.

    Returns:
        Codes [N, K / 2] uint8, the even column in the low half of a byte; scales [N, K / 16] float8_e4m3fn.
    """
    groups = weight.unflatten(-1, (-1, NVFP4_GROUP))
    largest = _largest_of_groups(groups)
    scales = (divisor * (largest / E2M1_MAX)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    scales = torch.where(scales == 0, _LEAST_SCALE, scales)
    scaled = (groups / (scales / divisor).unsqueeze(-1)).flatten(-2)
    # Two codes are one 16-bit number: low half, high half.
    pairs = round_to_e2m1(scaled).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8), scales.to(torch.float8_e4m3fn)


def _largest_of_groups(groups: Tensor) -> Tensor:
    """Return the largest magnitudes [N, C] of groups [N, C, 16]."""
    # By halves: a reduction over a short last dimension is far slower.
    largest = groups.abs()
    while (half := largest.shape[-1] // 2) > 0:
        largest = torch.maximum(largest[..., :half], largest[..., half:])
    return largest.squeeze(-1)


def round_to_e2m1(values: Tensor) -> Tensor:
    """Return the codes (uint8) of float32 values, ties to the even code; beyond 6 is 6.

    A negative value that rounds to zero keeps its sign, a zero has none.
    """
    size = values.abs().clamp_(max=E2M1_MAX)
    # Steps are 0.5 up to 2, 1 up to 4, 2 from there: the grid that a value lies on gives the least code.
    code = (size * 2).round_()
    torch.minimum(code, size.round().add_(2), out=code)
    torch.minimum(code, size.mul_(0.5).round_().add_(4), out=code)
    return code.to(torch.uint8).bitwise_or_((values < 0).to(torch.uint8).bitwise_left_shift_(_SIGN_BIT))


def code_values(codes: Tensor) -> Tensor:
    """Return the float32 values [N, K] of codes [N, K / 2]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return table.index_select(0, pairs.flatten().int()).view(pairs.shape)
