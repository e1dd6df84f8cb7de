"""Attention of one chunk of a sequence: from its queries to all keys up to their own, or to a window of them.

A program owns a tile of queries of one head and takes keys in absolute blocks, ascending; it may start from
what a library has summed over keys long before the chunk. Keys come laid in order of position
(``prefill_keys``), which costs a few percent and lets tensor maps fetch them, or from their pages. Rounding
points are those of the decode kernels (``combine``); the library's part is rounded once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.layer_cache import LayerCache, from_cache
from lean_laguna.kernels.triton.prefill_keys import first_key
from lean_laguna.kernels.triton.prefill_parts import merge_parts, part_span, softplus
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile, uses_maps

_LOG2E = 1.4426950408889634


def attend_before(
    qkv: Tensor, ordered: tuple[Tensor, Tensor], shape: AttentionShape, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Attend to keys before the chunk with cuDNN: 680 TFLOP/s on an H200, where Triton reaches 550.

    Its algorithm follows from the shapes alone, the padded chunk's and ``num_keys``.

    Args:
        qkv: [C, shape.width] with queries ready.
        ordered: [S, J, P] keys and values from position 0 on.
        shape: Of this layer, without a window.
        num_keys: Keys to attend to, none of them the chunk's.

    Returns:
        [H, C, P] softmax-weighted values in the model's dtype, any strides, and [H, C] float32 natural
        logarithms of the sums of exponentials.
    """
    H, P = shape.num_heads, shape.head_dim
    q = qkv[:, : H * P].unflatten(1, (H, P)).transpose(0, 1)[None]
    k, v = (t[:num_keys].transpose(0, 1)[None] for t in ordered)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return found[0][0], found[1].view(H, -1)


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
    k_scale,
    v_scale,
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
        # Blocks of ordered keys are whole; of pages, what was never written may be anything.
        if MAPS:
            k = k_ptr.load([start - begin, column]).T
        else:
            k_at = k_ptr + slot[None, :] * STRIDE + column + d[:, None]
            k = tl.load(k_at, mask=kept[None, :], other=0.0) if MASK and PAGED else tl.load(k_at)
            k = from_cache(k, k_scale, q.dtype)
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
        else:
            v_at = v_ptr + slot[:, None] * STRIDE + column + d[None, :]
            v = tl.load(v_at, mask=kept[:, None], other=0.0) if MASK and PAGED else tl.load(v_at)
            v = from_cache(v, v_scale, q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc)
        peak = new_peak
    return peak, total, acc


@triton.jit(do_not_specialize=["past_keys"], do_not_specialize_on_alignment=["table_ptr"])
def _chunk_kernel(
    qkv_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    past_ptr,
    past_lse_ptr,
    first_ptr,
    num_tokens_ptr,
    C,
    past_keys,
    scale,
    k_scale,
    v_scale,
    past_head_stride,
    past_row_stride,
    lse_stride,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    GATE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
    MAPS: tl.constexpr,
    PAST: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    pid = tl.program_id(0)
    # The tiles with most to do first; heads that share keys side by side.
    tile = (tl.num_programs(0) - 1 - pid) // H
    head = pid % H
    column = head // (H // J) * P
    num_tokens = tl.load(num_tokens_ptr)
    if tile * QUERIES >= num_tokens:
        return
    row = tile * QUERIES + tl.arange(0, QUERIES)
    live = row < num_tokens
    first = tl.load(first_ptr)
    begin = first_key(first, WINDOW) // KEYS * KEYS
    q_first = first + tile * QUERIES
    position = first + row
    last = first + num_tokens - 1
    end = tl.minimum(last, q_first + QUERIES - 1) + 1
    d = tl.arange(0, P)
    q_at = row.to(tl.int64) * WIDTH + head * P
    q = tl.load(qkv_ptr + q_at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    if GATE:
        gate_at = qkv_ptr + row.to(tl.int64) * WIDTH + (H + 2 * J) * P + head
        gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    if PAST:
        # One term of the softmax stands for all keys before the chunk.
        peak = tl.load(past_lse_ptr + head * lse_stride + row, mask=live, other=0.0) * 1.4426950408889634
        total = tl.full((QUERIES,), 1.0, tl.float32)
        past_at = head.to(tl.int64) * past_head_stride + row.to(tl.int64) * past_row_stride
        acc = tl.load(past_ptr + past_at[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    else:
        peak = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, P), tl.float32)
    lowest = past_keys
    low = past_keys
    part = tl.program_id(1)
    num_parts = 1
    if PARTS > 1:
        span, num_parts = part_span(first, KEYS, PARTS)
        if part >= num_parts:
            return
        low = part * span
        end = end if part == num_parts - 1 else low + span
    if WINDOW > 0:
        # So few blocks that masking all of them is quicker than another loop.
        lowest = tl.maximum(q_first - WINDOW + 1, 0)
        low = lowest // KEYS * KEYS
    else:
        # Up to here the tile's first row sees every key.
        edge = tl.maximum((q_first + 1) // KEYS * KEYS, low)
        if PARTS > 1:
            edge = edge if part == num_parts - 1 else end
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
            k_scale,
            v_scale,
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
        low = edge
    peak, total, acc = _take_keys(
        q,
        peak,
        total,
        acc,
        low,
        end,
        begin,
        last,
        lowest,
        position,
        scale,
        k_scale,
        v_scale,
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
    out_at = row.to(tl.int64) * (H * P) + head * P
    if num_parts > 1:
        own = part * (C * H) + row * H + head
        tl.store(parts_ptr + own[:, None] * P + d[None, :], acc, mask=live[:, None])
        tl.store(sums_ptr + own * 2, peak, mask=live)
        tl.store(sums_ptr + own * 2 + 1, total, mask=live)
    else:
        y = (acc / tl.where(live, total, 1.0)[:, None]).to(DTYPE)
        if GATE:
            y = (y.to(tl.float32) * softplus(gate, DTYPE)[:, None]).to(DTYPE)
        tl.store(out_ptr + out_at[:, None] + d[None, :], y, mask=live[:, None])


def attend_chunk(
    qkv: Tensor,
    out: Tensor,
    keys: LayerCache | tuple[Tensor, Tensor],
    table: Tensor,
    shape: AttentionShape,
    first: Tensor,
    num_tokens: Tensor,
    tile: AttentionTile,
    *,
    is_ordered: bool = False,
    past: tuple[Tensor, Tensor] | None = None,
    past_keys: int = 0,
    parts: Tensor | None = None,
) -> None:
    """Attend from a chunk's queries to all keys up to their own, or to those in their window; apply the gate.

    Args:
        qkv: [C, shape.width] q, k, v and gate; queries ready.
        out: [C, H * P], written for the chunk's tokens.
        keys: Keys and values, the chunk's own among them: pages [num_blocks, kv_block_size, J, P], or
            [S, J, P] as ``order_keys`` leaves them.
        table: [.] int32 block table of the sequence; unused with ordered keys.
        shape: Of this layer; causal.
        first: [1] int32, position of the chunk's first token.
        num_tokens: [1] int32, tokens of the chunk.
        tile: By the layer's shape.
        is_ordered: Keys are not in pages.
        past: From ``attend_before``, whose keys are not read again; or None.
        past_keys: How many those are, a multiple of ``tile.keys``.
        parts: [N, C, H, P + 2] float32, contents of no meaning: in a layer without a window, so many programs
            share the keys before the chunk where these are many; or None.
    """
    H, J, P = shape.num_heads, shape.num_kv_heads, shape.head_dim
    maps = is_ordered and uses_maps(tile, qkv.device)
    cache = LayerCache(*keys)
    operands: tuple[object, ...] = cache[:2]
    if maps:
        from triton.tools.tensor_descriptor import TensorDescriptor

        operands = tuple(TensorDescriptor.from_tensor(t.view(-1, J * P), [tile.keys, P]) for t in cache[:2])
    partial, lse = (qkv, qkv) if past is None else past
    rows, num_parts = qkv.shape[0], 1 if parts is None else parts.shape[0]
    num = num_parts * rows * H
    acc, sums = (qkv, qkv) if parts is None else parts.view(-1).split([num * P, num * 2])
    _chunk_kernel[(cdiv(rows, tile.queries) * H, num_parts)](
        qkv,
        out,
        acc,
        sums,
        *operands,
        table,
        partial,
        lse,
        first,
        num_tokens,
        rows,
        past_keys,
        P**-0.5 * _LOG2E,
        *cache[2:],
        *partial.stride()[:2],
        lse.stride(0),
        WIDTH=shape.width,
        H=H,
        J=J,
        P=P,
        WINDOW=shape.window,
        GATE=shape.has_gate,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        KV_BLOCK=1 if is_ordered else cache.keys.shape[1],
        PAGED=not is_ordered,
        MAPS=maps,
        PAST=past is not None,
        PARTS=num_parts,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    if num_parts > 1:
        merge_parts(qkv, out, acc, sums, shape, first, num_tokens, tile, num_parts)
