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


def encode(weight: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight.

    Args:
        weight: [N, K], K a multiple of 16, finite.
        divisor: [1] float32, of ``global_scale``.

    Returns:
        Codes [N, K / 2] uint8, the even column in the low half of a byte; scales [N, K / 16] float8_e4m3fn.
    """
    groups = weight.unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1)
    scales = (divisor * (largest / E2M1_MAX)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    scales[scales == 0] = _LEAST_SCALE
    scaled = (groups / (scales / divisor).unsqueeze(-1)).flatten(-2)
    codes = round_to_e2m1(scaled)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales.to(torch.float8_e4m3fn)


def round_to_e2m1(values: Tensor) -> Tensor:
    """Return the codes (uint8) of float32 values, ties to the even code; beyond 6 is 6.

    A negative value that rounds to zero keeps its sign, a zero has none.
    """
    size = values.abs()
    codes = (size > 0.25).to(torch.uint8)
    codes += size >= 0.75
    codes += size > 1.25
    codes += size >= 1.75
    codes += size > 2.5
    codes += size >= 3.5
    codes += size > 5.0
    return codes + (values < 0) * torch.tensor(_SIGN, dtype=torch.uint8)


def code_values(codes: Tensor) -> Tensor:
    """Return the float32 values [N, K] of codes [N, K / 2]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return table.index_select(0, pairs.flatten().int()).view(pairs.shape)
