"""Query and key heads on their way into attention: norm, rotation, KV append.

Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaAttention and apply_rotary_pos_emb: every
product and the sum of the rotation are rounded to the model's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lean_laguna.kernels.triton.layer_cache import to_cache


@triton.jit
def normed_rotated(
    x_ptr,
    at,
    mask,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    position,
    eps,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return [rows, P]: heads at offsets ``at`` [rows], normalised and rotated as Hugging Face rounds."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, P)
    rotated = d < ROTARY
    partner = tl.where(rotated, tl.where(d < HALF, d + HALF, d - HALF), d)
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    other = tl.load(x_ptr + at[:, None] + partner[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / P + eps)[:, None]
        w = tl.load(weight_ptr + d).to(tl.float32)[None, :]
        w_other = tl.load(weight_ptr + partner).to(tl.float32)[None, :]
        x = ((x * inverse).to(DTYPE).to(tl.float32) * w).to(DTYPE).to(tl.float32)
        other = ((other * inverse).to(DTYPE).to(tl.float32) * w_other).to(DTYPE).to(tl.float32)
    angle = position.to(tl.int64)[:, None] * HALF + (d % HALF)[None, :]
    turn = mask[:, None] & rotated[None, :]
    cos = tl.load(cos_ptr + angle, mask=turn, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turn, other=0.0).to(tl.float32)
    signed = tl.where(d < HALF, -1.0, 1.0)[None, :] * other
    turned = ((x * cos).to(DTYPE).to(tl.float32) + (signed * sin).to(DTYPE).to(tl.float32)).to(DTYPE)
    return tl.where(rotated[None, :], turned, x.to(DTYPE))


@triton.jit
def append_rows(
    qkv_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    start,
    count,
    first,
    from_key,
    to_key,
    head,
    eps,
    k_scale,
    v_scale,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    K_AT: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    """Write one KV head of a request's rows whose positions lie in [from_key, to_key) to the cache."""
    i = tl.arange(0, ROWS)
    d = tl.arange(0, P)
    position = first + i
    here = (i < count) & (position >= from_key) & (position < to_key)
    at = (start + i) * WIDTH + K_AT + head * P
    k = normed_rotated(qkv_ptr, at, here, k_norm_ptr, cos_ptr, sin_ptr, position, eps, P, ROTARY, NORM)
    v = tl.load(qkv_ptr + (at + J * P)[:, None] + d[None, :], mask=here[:, None], other=0.0)
    block = tl.load(table_ptr + position // KV_BLOCK, mask=here, other=0).to(tl.int64)
    slot = ((block * KV_BLOCK + position % KV_BLOCK) * J + head) * P
    k = to_cache(k, k_scale, k_cache_ptr.dtype.element_ty)
    v = to_cache(v, v_scale, v_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + slot[:, None] + d[None, :], k, mask=here[:, None])
    tl.store(v_cache_ptr + slot[:, None] + d[None, :], v, mask=here[:, None])
