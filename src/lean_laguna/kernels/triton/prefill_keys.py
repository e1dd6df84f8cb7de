"""What attention of a chunk reads: its heads made ready, its keys appended, and all keys laid in order.

Rounding points are those of the decode kernels (``heads``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.heads import normed_rotated
from lean_laguna.kernels.triton.launch import cdiv, power_of_two
from lean_laguna.kernels.triton.layer_cache import LayerCache, from_cache, to_cache
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile

READY_ROWS = 16
"""Tokens of a program that makes heads ready."""


@triton.jit(do_not_specialize_on_alignment=["table_ptr"])
def _ready_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    first_ptr,
    num_tokens_ptr,
    eps,
    k_scale,
    v_scale,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    live = row < tl.load(num_tokens_ptr)
    position = tl.load(first_ptr) + row
    d = tl.arange(0, P)
    at = row.to(tl.int64) * WIDTH + head * P
    if head < H:
        q = normed_rotated(qkv_ptr, at, live, q_norm_ptr, cos_ptr, sin_ptr, position, eps, P, ROTARY, QK_NORM)
        # Other threads may still be reading what is overwritten.
        tl.debug_barrier()
        tl.store(qkv_ptr + at[:, None] + d[None, :], q, mask=live[:, None])
    else:
        k = normed_rotated(qkv_ptr, at, live, k_norm_ptr, cos_ptr, sin_ptr, position, eps, P, ROTARY, QK_NORM)
        v = tl.load(qkv_ptr + (at + J * P)[:, None] + d[None, :], mask=live[:, None], other=0.0)
        block = tl.load(table_ptr + position // KV_BLOCK, mask=live, other=0).to(tl.int64)
        slot = ((block * KV_BLOCK + position % KV_BLOCK) * J + head - H) * P
        k = to_cache(k, k_scale, k_cache_ptr.dtype.element_ty)
        v = to_cache(v, v_scale, v_cache_ptr.dtype.element_ty)
        tl.store(k_cache_ptr + slot[:, None] + d[None, :], k, mask=live[:, None])
        tl.store(v_cache_ptr + slot[:, None] + d[None, :], v, mask=live[:, None])


def ready_heads(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    cache: LayerCache | tuple[Tensor, Tensor],
    table: Tensor,
    shape: AttentionShape,
    first: Tensor,
    num_tokens: Tensor,
    *,
    eps: float,
) -> None:
    """Normalise and rotate a chunk's queries, in place, and its keys; write keys and values to the cache.

    Args:
        qkv: [C, shape.width] q, k, v and gate as projected; q changed.
        norms: [P] weights of the query and key norms; anything where the shape has none.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each.
        cache: Keys and values of this layer, [num_blocks, kv_block_size, J, P]; the tokens' slots written.
        table: [.] int32 block table of the sequence.
        shape: Of this layer.
        first: [1] int32, position of the chunk's first token.
        num_tokens: [1] int32, tokens of the chunk.
        eps: Of the norms.
    """
    H, J = shape.num_heads, shape.num_kv_heads
    cache = LayerCache(*cache)
    _ready_kernel[(cdiv(qkv.shape[0], READY_ROWS), H + J)](
        qkv,
        *norms,
        *rotary,
        cache.keys,
        cache.values,
        table,
        first,
        num_tokens,
        eps,
        cache.k_scale,
        cache.v_scale,
        WIDTH=shape.width,
        H=H,
        J=J,
        P=shape.head_dim,
        ROTARY=shape.rotary_dim,
        QK_NORM=shape.has_qk_norm,
        KV_BLOCK=cache.keys.shape[1],
        ROWS=READY_ROWS,
        num_warps=4,
    )


@triton.jit
def first_key(first, WINDOW: tl.constexpr):
    """Return the first position that a chunk from position ``first`` on sees."""
    return tl.maximum(first - WINDOW + 1, 0) if WINDOW > 0 else 0


@triton.jit(do_not_specialize_on_alignment=["table_ptr"])
def _order_kernel(
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    num_tokens_ptr,
    k_scale,
    v_scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    AFTER: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.load(first_ptr)
    lowest = first_key(first, WINDOW)
    if AFTER:
        lowest = first // KEYS * KEYS
    position = lowest // KEYS * KEYS + row
    end = first + tl.load(num_tokens_ptr)
    if lowest // KEYS * KEYS + tl.program_id(0) * ROWS >= tl.cdiv(end, KEYS) * KEYS:
        return
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (position >= lowest) & (position < end)
    page = tl.load(table_ptr + position // KV_BLOCK, mask=real, other=0).to(tl.int64)
    source = (page * KV_BLOCK + position % KV_BLOCK)[:, None] * SIZE + i[None, :]
    # Later blocks of a chunk fill up what those before have left.
    place = position if AFTER else row
    target = place.to(tl.int64)[:, None] * SIZE + i[None, :]
    inside = (i < SIZE)[None, :]
    mask = real[:, None] & inside
    k = tl.load(k_cache_ptr + source, mask=mask, other=0.0)
    v = tl.load(v_cache_ptr + source, mask=mask, other=0.0)
    tl.store(k_ptr + target, from_cache(k, k_scale, k_ptr.dtype.element_ty), mask=inside)
    tl.store(v_ptr + target, from_cache(v, v_scale, v_ptr.dtype.element_ty), mask=inside)


def order_keys(
    cache: LayerCache | tuple[Tensor, Tensor],
    table: Tensor,
    ordered: tuple[Tensor, Tensor],
    shape: AttentionShape,
    first: Tensor,
    num_tokens: Tensor,
    num_keys: int,
    tile: AttentionTile,
    *,
    is_after: bool = False,
) -> None:
    """Copy keys and values out of their pages, in order, up to the chunk's last.

    The first row of ``ordered`` is of position 0, or with a window of the first that is seen, rounded down to
    a multiple of ``tile.keys``.

    Args:
        cache: Pages, [num_blocks, kv_block_size, J, P] each.
        table: [.] int32 block table of the sequence.
        ordered: [S, J, P] each, written; S at least what ``num_keys`` comes to.
        shape: Of this layer.
        first: [1] int32, position of the chunk's first token.
        num_tokens: [1] int32, tokens of the chunk.
        num_keys: Keys seen at least; those there are fill whole blocks of ``tile.keys``, with zeros behind.
        tile: Of the attention that follows.
        is_after: In a layer without a window: those before the chunk are there already; ``num_keys`` counts
            the rest.
    """
    cache = LayerCache(*cache)
    size = cache.keys.shape[2] * cache.keys.shape[3]
    block = min(1024, power_of_two(size))
    part = min(8, tile.keys)
    _order_kernel[(cdiv(num_keys, tile.keys) * tile.keys // part, cdiv(size, block))](
        cache.keys,
        cache.values,
        table,
        *ordered,
        first,
        num_tokens,
        cache.k_scale,
        cache.v_scale,
        SIZE=size,
        BLOCK=block,
        KV_BLOCK=cache.keys.shape[1],
        ROWS=part,
        WINDOW=shape.window,
        KEYS=tile.keys,
        AFTER=is_after,
        num_warps=4,
    )
