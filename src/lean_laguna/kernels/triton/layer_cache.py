"""One layer's pages as kernels read and write them: numbers of the model's type, or FP8 codes with scales."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

E4M3_MAX = tl.constexpr(448.0)


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
    """Return numbers as a cache of a type keeps them: as they are, or codes of them over the scale."""
    if KIND == tl.float8e4nv:
        scaled = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
        x = tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)
    return x.to(KIND)


@triton.jit
def from_cache(x, scale, KIND: tl.constexpr):
    """Return what a cache keeps as numbers of the model's type."""
    if x.dtype == tl.float8e4nv:
        x = (x.to(tl.float32) * scale).to(KIND)
    return x
