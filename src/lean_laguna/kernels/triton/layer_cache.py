"""One layer's pages as kernels read and write them: numbers of the model's type, or FP8 codes with scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.formats import e4m3

E4M3_MAX = tl.constexpr(448.0)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
# Numbers from 2^14 on have steps of 2^-9.
_SUBNORMAL_STEPS = tl.constexpr(1.5 * 2.0**14)


class LayerCache(NamedTuple):
    """Pages of one layer, [num_blocks, kv_block_size, J, P] each.

    Attributes:
        keys: In the model's type, or float8_e4m3fn; or its codes as uint8, see ``has_e4m3``.
        values: Likewise.
        k_scale: What codes of keys are multiplied by; FP8 only.
        v_scale: Likewise, of values.
    """

    keys: Tensor
    values: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def has_e4m3(device: torch.device) -> bool:
    """Say whether Triton knows e4m3 on a device: from Ada on. Elsewhere kernels take codes as bytes."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _code(x):
    """Return e4m3 codes [int32] of float32 numbers that are such."""
    bits = x.to(tl.int32, bitcast=True)
    # Exponent and mantissa, whose exponent counts from -7 and not from -127; or steps of 2^-9.
    places = ((bits >> 20) & 0x7FF) - (120 << 3)
    steps = (tl.abs(x) * 512.0).to(tl.int32)
    return tl.where(tl.abs(x) < _LEAST_NORMAL, steps, places) | ((bits >> 24) & 0x80)


@triton.jit
def to_cache(x, scale, KIND: tl.constexpr):
    """Return numbers as a cache of a type keeps them: as they are, or codes of them over the scale.

    A negative number that rounds to zero becomes +0, where a cast keeps its sign.
    """
    if KIND.is_fp8e4nv() or KIND.is_uint8():
        scaled = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
        x = tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)
        # Rounded here, to 3 bits or to steps of 2^-9: Triton's interpreter rounds up to no power of two.
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (x + _SUBNORMAL_STEPS) - _SUBNORMAL_STEPS
        x = tl.where(tl.abs(x) < _LEAST_NORMAL, small, normal)
        if KIND.is_uint8():
            x = _code(x)
    return x.to(KIND)


@triton.jit
def from_cache(x, scale, KIND: tl.constexpr):
    """Return what a cache keeps as numbers of the model's type."""
    if x.dtype.is_fp8e4nv():
        x = (x.to(tl.float32) * scale).to(KIND)
    elif x.dtype.is_uint8():
        x = (e4m3(x) * scale).to(KIND)
    return x
