"""Attention over paged keys and values in fixed chunks of the context, each row's bits its own.

Queries run in tiles of ``ROW_TILE`` rows of one sequence, keys in chunks of ``ATTN_CHUNK`` absolute
positions. A chunk that a row cannot see contributes an exact zero, so it does not matter how far the tile
reaches beyond the row, nor which rows share the tile. Keys and values of positions that are not visible to
any row of the tile are read from the null page, which is zero: what lies in unwritten pages never enters a
product.

Shapes: B tiles, S chunks, M = ROW_TILE * H / J query rows per kv head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lean_laguna.kernels.attention_plan import ATTN_CHUNK, AttentionPlan, Span, TileBatch
from lean_laguna.kernels.elementwise import add_up, scalar
from lean_laguna.kernels.linear import ROW_TILE, batched_matmul

__all__ = ["AttentionPlan", "Span", "paged_attention", "store_kv"]

E4M3_MAX = 448.0


def store_kv(
    own: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, scales: tuple[float, float] = (1.0, 1.0)
) -> None:
    """Store keys and values in their pages, as FP8 codes where that is what pages hold.

    Args:
        own: [T, 2 * J * P], keys before values.
        kv: A layer's storage [num_blocks, kv_block_size, 2, J, P], contiguous; changed.
        slots: Flat slots [T] int64.
        scales: Of keys and of values; a code is the value over its scale, saturated. FP8 only.
    """
    if kv.dtype == torch.float8_e4m3fn:
        halves = own.float().view(own.shape[0], 2, -1)
        halves = halves / halves.new_tensor(scales).view(1, 2, 1)
        own = halves.clamp_(-E4M3_MAX, E4M3_MAX).to(kv.dtype).view(own.shape).view(torch.uint8)
        kv = kv.view(torch.uint8)
    kv.view(-1, own.shape[1]).index_copy_(0, slots, own.to(kv.dtype))


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Attend from packed rows to their cached keys.

    Args:
        q: Queries [T, H, P]; T is the plan's number of rows or that rounded up to whole tiles.
        kv: A layer's storage [num_blocks, kv_block_size, 2, J, P], contiguous.
        plan: Of this batch and the layer's group.
        scale: Factor on the scores.
        kv_scales: Of keys and of values, where pages hold FP8 codes.

    Returns:
        [T, H, P]; rows beyond the plan's are finite and mean nothing.
    """
    num_rows, padding = q.shape[0], -q.shape[0] % ROW_TILE
    if padding:
        q = F.pad(q, (0, 0, 0, 0, 0, padding))
    outs = [_attend(q, kv, batch, scale, kv_scales) for batch in plan.batches]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if plan.packed_rows is not None:
        out = out.index_select(0, plan.packed_rows)
    missing = num_rows - out.shape[0]
    return out[:num_rows] if missing <= 0 else F.pad(out, (0, 0, 0, 0, 0, missing))


def _attend(
    q: torch.Tensor, kv: torch.Tensor, batch: TileBatch, scale: float, kv_scales: tuple[float, float]
) -> torch.Tensor:
    num_tiles, num_chunks = batch.num_tiles, batch.num_chunks
    num_kv_heads, head_dim = kv.shape[-2:]
    per_kv = q.shape[1] // num_kv_heads
    pairs, tall = num_tiles * num_kv_heads, ROW_TILE * per_kv
    keys, values = _gather(kv, batch.kv_rows, q.dtype, kv_scales).view(
        2, pairs * num_chunks, ATTN_CHUNK, head_dim
    )
    if batch.rows is not None:
        q = q.index_select(0, batch.rows)
    tiled = q.view(num_tiles, ROW_TILE, num_kv_heads, per_kv, head_dim).permute(0, 2, 1, 3, 4)
    spread = tiled.unsqueeze(2).expand(-1, -1, num_chunks, -1, -1, -1)
    queries = torch.mul(spread, scalar(scale, q.dtype), out=q.new_empty(spread.shape))
    scores = batched_matmul(queries.view(pairs * num_chunks, tall, head_dim), keys.transpose(1, 2))
    grouped = scores.view(num_tiles, num_kv_heads, num_chunks, ROW_TILE, per_kv, ATTN_CHUNK).permute(
        0, 1, 3, 4, 2, 5
    )
    masked = torch.add(grouped, batch.mask, out=batch.mask.new_empty(grouped.shape))
    weights = torch.softmax(masked.view(pairs, tall, num_chunks * ATTN_CHUNK), -1).to(q.dtype)
    if num_chunks == 1:
        out = batched_matmul(weights, values)
    else:
        by_chunk = weights.view(pairs, tall, num_chunks, ATTN_CHUNK).transpose(1, 2)
        partial = batched_matmul(by_chunk.reshape(pairs * num_chunks, tall, ATTN_CHUNK), values)
        # Chunks out of sight are an exact zero.
        out = add_up(
            partial.view(pairs, num_chunks, tall * head_dim), partial.new_empty(pairs, tall * head_dim)
        )
    rows = out.view(num_tiles, num_kv_heads, ROW_TILE, per_kv, head_dim).transpose(1, 2)
    return rows.contiguous().view(num_tiles * ROW_TILE, -1, head_dim)


def _gather(
    kv: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, scales: tuple[float, float]
) -> torch.Tensor:
    """Return rows of a layer's storage, keys before values; FP8 codes as numbers of ``dtype``."""
    if kv.dtype != torch.float8_e4m3fn:
        return kv.view(-1, kv.shape[-1]).index_select(0, rows)
    codes = kv.view(torch.uint8).view(-1, kv.shape[-1]).index_select(0, rows).view(kv.dtype)
    halves = codes.float().view(2, -1)
    return halves.mul_(halves.new_tensor(scales).view(2, 1)).to(dtype)
