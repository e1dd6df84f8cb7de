"""One layer's pages as kernels read and write them: numbers of the model's type, or FP8 codes with scales."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

E4M3_MAX = tl.constexpr(448.0)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
# Numbers from 2^14 on have steps of 2^-9.
_SUBNORMAL_STEPS = tl.constexpr(1.5 * 2.0**14)


class LayerCache(NamedTuple):
    """Pages of one layer, [num_blocks, kv_block_size, J, P] each.

    Attributes:
        keys: In the model's type, or float8_e4m3fn.
        values: Likewise.
        k_scale: What codes of keys are multiplied by; FP8 only.
        v_scale: Likewise, of values.
    """

    keys: Tensor
    values: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@triton.jit
def to_cache(x, scale, KIND: tl.constexpr):
    """Return numbers as a cache of a type keeps them: as they are, or codes of them over the scale.

    A negative number that rounds to zero becomes +0, where a cast keeps its sign.
    """
    if KIND.is_fp8e4nv():
        scaled = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
        x = tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)
        # Rounded here, to 3 bits or to steps of 2^-9: Triton's interpreter rounds up to no power of two.
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (x + _SUBNORMAL_STEPS) - _SUBNORMAL_STEPS
        x = tl.where(tl.abs(x) < _LEAST_NORMAL, small, normal)
    return x.to(KIND)


@triton.jit
def from_cache(x, scale, KIND: tl.constexpr):
    """Return what a cache keeps as numbers of the model's type."""
    if x.dtype.is_fp8e4nv():
        x = (x.to(tl.float32) * scale).to(KIND)
    return x
