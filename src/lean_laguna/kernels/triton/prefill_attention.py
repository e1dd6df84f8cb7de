"""Attention of one chunk of a sequence over the paged cache: first its keys and values, then its queries.

A program owns a tile of queries of one head and takes keys in absolute blocks, in ascending order: those on
an edge of what the tile sees with a mask, those between without. Rounding points are those of the decode
kernels (``heads``, ``combine``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.heads import normed_rotated
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile

APPEND_ROWS = 16
"""Tokens of a program that writes keys and values."""


@triton.jit(do_not_specialize=["first", "num_tokens"], do_not_specialize_on_alignment=["table_ptr"])
def _append_kernel(
    qkv_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    first,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    K_AT: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    live = row < num_tokens
    position = first + row
    d = tl.arange(0, P)
    at = row.to(tl.int64) * WIDTH + K_AT + head * P
    k = normed_rotated(qkv_ptr, at, live, k_norm_ptr, cos_ptr, sin_ptr, position, eps, P, ROTARY, QK_NORM)
    v = tl.load(qkv_ptr + (at + J * P)[:, None] + d[None, :], mask=live[:, None], other=0.0)
    block = tl.load(table_ptr + position // KV_BLOCK, mask=live, other=0).to(tl.int64)
    slot = ((block * KV_BLOCK + position % KV_BLOCK) * J + head) * P
    tl.store(k_cache_ptr + slot[:, None] + d[None, :], k, mask=live[:, None])
    tl.store(v_cache_ptr + slot[:, None] + d[None, :], v, mask=live[:, None])


def append_keys(
    qkv: Tensor,
    k_norm: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    table: Tensor,
    shape: AttentionShape,
    first: int,
    num_tokens: int,
    *,
    eps: float,
) -> None:
    """Normalise and rotate a chunk's keys; write keys and values to the cache.

    Args:
        qkv: [C, shape.width] q, k, v and gate as projected.
        k_norm: [P] weight of the key norm; anything where the shape has none.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each.
        cache: Keys and values of this layer, [num_blocks, kv_block_size, J, P]; the tokens' slots written.
        table: [.] int32 block table of the sequence.
        shape: Of this layer.
        first: Position of the chunk's first token.
        num_tokens: Tokens of the chunk.
        eps: Of the key norm.
    """
    J, P = shape.num_kv_heads, shape.head_dim
    _append_kernel[(cdiv(num_tokens, APPEND_ROWS), J)](
        qkv,
        k_norm,
        *rotary,
        *cache,
        table,
        first,
        num_tokens,
        eps,
        WIDTH=shape.width,
        K_AT=shape.num_heads * P,
        J=J,
        P=P,
        ROTARY=shape.rotary_dim,
        QK_NORM=shape.has_qk_norm,
        KV_BLOCK=cache[0].shape[1],
        ROWS=APPEND_ROWS,
        num_warps=4,
    )


@triton.jit
def _take_keys(
    q,
    peak,
    total,
    acc,
    from_key,
    to_key,
    begin,
    last,
    lowest,
    position,
    scale,
    k_ptr,
    v_ptr,
    table_ptr,
    column,
    STRIDE: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    MAPS: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold the keys of [from_key, to_key) into the running softmax, KEYS at a time."""
    d = tl.arange(0, P)
    i = tl.arange(0, KEYS)
    for start in tl.range(from_key, to_key, KEYS, num_stages=STAGES):
        key = start + i
        kept = (key <= last) & (key >= lowest)
        slot = (key - begin).to(tl.int64)
        if PAGED:
            if MASK:
                block = tl.load(table_ptr + key // KV_BLOCK, mask=kept, other=0)
            else:
                block = tl.load(table_ptr + key // KV_BLOCK)
            slot = block.to(tl.int64) * KV_BLOCK + key % KV_BLOCK
        if MAPS:
            k = k_ptr.load([start - begin, column]).T
        else:
            k_at = k_ptr + slot[None, :] * STRIDE + column + d[:, None]
            k = tl.load(k_at, mask=kept[None, :], other=0.0) if MASK else tl.load(k_at)
        scores = tl.dot(q, k)
        if MASK:
            seen = (key[None, :] <= position[:, None]) & kept[None, :]
            if WINDOW > 0:
                seen = seen & (position[:, None] - key[None, :] < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        safe = new_peak
        if MASK:
            # A row that has seen nothing yet.
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores * scale - safe[:, None])
        fade = tl.exp2(peak - safe)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        if MAPS:
            v = v_ptr.load([start - begin, column])
            if MASK:
                v = tl.where(kept[:, None], v, 0.0)
        else:
            v_at = v_ptr + slot[:, None] * STRIDE + column + d[None, :]
            v = tl.load(v_at, mask=kept[:, None], other=0.0) if MASK else tl.load(v_at)
        acc = tl.dot(p.to(q.dtype), v, acc)
        peak = new_peak
    return peak, total, acc


@triton.jit
def _opened(gate, DTYPE: tl.constexpr):
    """Return softplus as torch has it, rounded: linear above 20; log1p by Kahan's correction."""
    grown = tl.exp(tl.minimum(gate, 20.0))
    sum1 = 1.0 + grown
    rest = tl.where(sum1 == 1.0, 1.0, sum1 - 1.0)
    log1p = tl.where(sum1 == 1.0, grown, tl.log(sum1) * (grown / rest))
    return tl.where(gate > 20.0, gate, log1p).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["first", "num_tokens", "begin"], do_not_specialize_on_alignment=["table_ptr"])
def _chunk_kernel(
    qkv_ptr,
    out_ptr,
    q_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    num_tokens,
    begin,
    eps,
    scale,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    GATE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    MAPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    G: tl.constexpr = H // J
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    pid = tl.program_id(0)
    # The tiles with most to do first; heads that share keys side by side.
    tile = (tl.num_programs(0) - 1 - pid) // H
    head = pid % H
    row = tile * QUERIES + tl.arange(0, QUERIES)
    live = row < num_tokens
    q_first = first + tile * QUERIES
    position = first + row
    last = first + num_tokens - 1
    end = tl.minimum(last, q_first + QUERIES - 1) + 1
    at = row.to(tl.int64) * WIDTH + head * P
    q = normed_rotated(qkv_ptr, at, live, q_norm_ptr, cos_ptr, sin_ptr, position, eps, P, ROTARY, QK_NORM)
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, P), tl.float32)
    column = (head // G) * P
    lowest = 0
    low = 0
    if WINDOW > 0:
        lowest = tl.maximum(q_first - WINDOW + 1, 0)
        low = lowest // KEYS * KEYS
        # From here on the tile's last row sees every key.
        inner = tl.cdiv(tl.maximum(q_first + QUERIES - WINDOW, 0), KEYS) * KEYS
        inner = tl.minimum(inner, tl.cdiv(end, KEYS) * KEYS)
        peak, total, acc = _take_keys(
            q,
            peak,
            total,
            acc,
            low,
            inner,
            begin,
            last,
            lowest,
            position,
            scale,
            k_ptr,
            v_ptr,
            table_ptr,
            column,
            J * P,
            P,
            WINDOW,
            KEYS,
            KV_BLOCK,
            PAGED,
            MAPS,
            True,
            STAGES,
        )
        low = inner
    # Up to here the tile's first row sees every key.
    edge = tl.maximum((q_first + 1) // KEYS * KEYS, low)
    peak, total, acc = _take_keys(
        q,
        peak,
        total,
        acc,
        low,
        edge,
        begin,
        last,
        lowest,
        position,
        scale,
        k_ptr,
        v_ptr,
        table_ptr,
        column,
        J * P,
        P,
        WINDOW,
        KEYS,
        KV_BLOCK,
        PAGED,
        MAPS,
        False,
        STAGES,
    )
    peak, total, acc = _take_keys(
        q,
        peak,
        total,
        acc,
        edge,
        end,
        begin,
        last,
        lowest,
        position,
        scale,
        k_ptr,
        v_ptr,
        table_ptr,
        column,
        J * P,
        P,
        WINDOW,
        KEYS,
        KV_BLOCK,
        PAGED,
        MAPS,
        True,
        STAGES,
    )
    y = (acc / tl.where(live, total, 1.0)[:, None]).to(DTYPE)
    if GATE:
        gate_at = qkv_ptr + row.to(tl.int64) * WIDTH + (H + 2 * J) * P + head
        gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) * _opened(gate, DTYPE)[:, None]).to(DTYPE)
    d = tl.arange(0, P)
    out_at = row.to(tl.int64) * (H * P) + head * P
    tl.store(out_ptr + out_at[:, None] + d[None, :], y, mask=live[:, None])


def attend_chunk(
    qkv: Tensor,
    out: Tensor,
    q_norm: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    table: Tensor,
    shape: AttentionShape,
    first: int,
    num_tokens: int,
    tile: AttentionTile,
    *,
    eps: float,
    paged: bool = True,
    maps: bool = False,
    begin: int = 0,
) -> None:
    """Attend from a chunk's queries to all keys up to their own, or to those in their window; apply the gate.

    Args:
        qkv: [C, shape.width] q, k, v and gate as projected.
        out: [C, H * P], written for the chunk's tokens.
        q_norm: [P] weight of the query norm; anything where the shape has none.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each.
        cache: Keys and values of this layer, [num_blocks, kv_block_size, J, P], the chunk's own among them.
        table: [.] int32 block table of the sequence.
        shape: Of this layer; causal.
        first: Position of the chunk's first token.
        num_tokens: Tokens of the chunk.
        tile: By the layer's shape.
        eps: Of the query norm.
        paged: Whether ``cache`` is pages; otherwise [., J, P] in order of position, from ``begin`` on.
        begin: Position of the first key of an unpaged cache.
    """
    H, J, P = shape.num_heads, shape.num_kv_heads, shape.head_dim
    kv_block_size, operands = cache[0].shape[1], cache
    if maps:
        from triton.tools.tensor_descriptor import TensorDescriptor

        operands = tuple(TensorDescriptor.from_tensor(t.view(-1, J * P), [tile.keys, P]) for t in cache)
    _chunk_kernel[(cdiv(num_tokens, tile.queries) * H,)](
        qkv,
        out,
        q_norm,
        *rotary,
        *operands,
        table,
        first,
        num_tokens,
        begin,
        eps,
        P**-0.5 * 1.4426950408889634,
        WIDTH=shape.width,
        H=H,
        J=shape.num_kv_heads,
        P=P,
        ROTARY=shape.rotary_dim,
        WINDOW=shape.window,
        QK_NORM=shape.has_qk_norm,
        GATE=shape.has_gate,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        KV_BLOCK=kv_block_size,
        PAGED=paged,
        MAPS=maps,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
