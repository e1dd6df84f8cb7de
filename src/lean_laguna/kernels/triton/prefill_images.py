"""Keys and values of a sequence as matrix instructions of four warps read them.

Those of a block are made ready and written to their pages along the way; those before it come from there.

Of 128 keys and a KV head an image of keys and one of values, [128, P] values each. An image is panels of 64
of what is summed over, dimensions for keys and keys for values: a panel's rows of 128 bytes follow each
other, and the 16-byte pieces of row n are exchanged: piece c lies at c ^ (n % 8). Dimensions are taken in an
order in which a thread of these instructions has eight in a row: at place 32c + 8i + 2t + e lies
32c + 8t + 2i + e.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.heads import normed_rotated
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.layer_cache import LayerCache, from_cache, to_cache

IMAGE_KEYS = 128
"""Keys of an image."""
_ROWS = 64
"""Keys of a program, and of a panel of values."""


@triton.jit(do_not_specialize_on_alignment=["table_ptr"])
def _image_kernel(
    qkv_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    k_ptr,
    v_ptr,
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
    WINDOW: tl.constexpr,
    AFTER: tl.constexpr,
    ROWS: tl.constexpr,
):
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    first = tl.load(first_ptr)
    end = first + tl.load(num_tokens_ptr)
    base = tl.maximum(first - WINDOW, 0) if WINDOW > 0 else 0
    # Heads of a row lie side by side, and so do their programs.
    head = tl.program_id(0)
    part = tl.program_id(1)
    if AFTER:
        part += first // ROWS
    start = base + part * ROWS
    if start >= tl.cdiv(end, 2 * ROWS) * (2 * ROWS):
        return
    i = tl.arange(0, ROWS)
    d = tl.arange(0, P)
    position = start + i
    # A window's first image starts a key early, whose page may be another's by now.
    real = (position < end) & (position > first - WINDOW) if WINDOW > 0 else position < end
    page = tl.load(table_ptr + position // KV_BLOCK, mask=real, other=0).to(tl.int64)
    source = ((page * KV_BLOCK + position % KV_BLOCK) * J + head)[:, None] * P + d[None, :]
    if start >= first:
        at = (position - first).to(tl.int64) * WIDTH + (H + head) * P
        k = normed_rotated(qkv_ptr, at, real, k_norm_ptr, cos_ptr, sin_ptr, position, eps, P, ROTARY, QK_NORM)
        v = tl.load(qkv_ptr + (at + J * P)[:, None] + d[None, :], mask=real[:, None], other=0.0)
        kept = to_cache(k, k_scale, k_cache_ptr.dtype.element_ty)
        kept_v = to_cache(v, v_scale, v_cache_ptr.dtype.element_ty)
        tl.store(k_cache_ptr + source, kept, mask=real[:, None])
        tl.store(v_cache_ptr + source, kept_v, mask=real[:, None])
        k, v = from_cache(kept, k_scale, DTYPE), from_cache(kept_v, v_scale, DTYPE)
    else:
        k = from_cache(tl.load(k_cache_ptr + source, mask=real[:, None], other=0.0), k_scale, DTYPE)
        v = from_cache(tl.load(v_cache_ptr + source, mask=real[:, None], other=0.0), v_scale, DTYPE)
    image = (part // 2 * J + head).to(tl.int64) * (2 * ROWS * P)
    e = tl.arange(0, 8)[None, None, :]
    # A key's dimensions: P / 64 panels of 2 * ROWS keys.
    k = tl.permute(tl.reshape(k, (ROWS, P // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    n = (part % 2 * ROWS + i)[:, None, None]
    c = tl.arange(0, P // 8)[None, :, None]
    at = c // 8 * (2 * ROWS * 64) + n * 64 + (c % 8 ^ n % 8) * 8 + e
    tl.store(k_ptr + image + at, tl.reshape(k, (ROWS, P // 8, 8)))
    # A dimension's values: a panel of P rows.
    v = tl.permute(tl.reshape(tl.trans(v), (P // 32, 4, 4, 2, ROWS)), (0, 2, 1, 3, 4))
    n = d[:, None, None]
    c = tl.arange(0, ROWS // 8)[None, :, None]
    at = part % 2 * (P * ROWS) + n * ROWS + (c ^ n % 8) * 8 + e
    tl.store(v_ptr + image + at, tl.reshape(v, (P, ROWS // 8, 8)))


def lay_images(
    qkv: Tensor,
    k_norm: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: LayerCache | tuple[Tensor, Tensor],
    table: Tensor,
    images: tuple[Tensor, Tensor],
    shape: AttentionShape,
    first: Tensor,
    num_tokens: Tensor,
    num_keys: int,
    *,
    eps: float,
    is_after: bool = False,
) -> None:
    """Write a block's keys, normalised and rotated, and values to the cache, and lay images up to its last.

    The first image starts at position 0, or a window before the block's first.

    Args:
        qkv: [C, shape.width] q, k, v and gate as projected.
        k_norm: [P] weight of the key norm; anything where the shape has none.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each.
        cache: Pages, [num_blocks, kv_block_size, J, P] each; the tokens' slots written.
        table: [.] int32 block table of the sequence.
        images: Keys and values, written; [S, J, P] each, S whole images.
        shape: Of this layer; the window a multiple of IMAGE_KEYS.
        first: [1] int32, position of the block's first token, a multiple of IMAGE_KEYS.
        num_tokens: [1] int32, tokens of the block.
        num_keys: Keys that are laid, at least; zeros behind the last, up to the end of its image.
        is_after: In a layer without a window: those before the block are there already; ``num_keys`` counts
            the rest.
        eps: Of the key norm.
    """
    cache = LayerCache(*cache)
    _image_kernel[(shape.num_kv_heads, cdiv(num_keys, IMAGE_KEYS) * (IMAGE_KEYS // _ROWS))](
        qkv,
        k_norm,
        *rotary,
        cache.keys,
        cache.values,
        table,
        *images,
        first,
        num_tokens,
        eps,
        cache.k_scale,
        cache.v_scale,
        WIDTH=shape.width,
        H=shape.num_heads,
        J=shape.num_kv_heads,
        P=shape.head_dim,
        ROTARY=shape.rotary_dim,
        QK_NORM=shape.has_qk_norm,
        KV_BLOCK=cache.keys.shape[1],
        WINDOW=shape.window,
        AFTER=is_after,
        ROWS=_ROWS,
        num_warps=8,
    )
