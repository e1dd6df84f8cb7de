"""Attention over paged keys and values in fixed chunks of the context, each row's bits its own.

Queries run in tiles of ``ROW_TILE`` rows of one sequence, keys in chunks of ``ATTN_CHUNK`` absolute
positions. A chunk that a row cannot see contributes an exact zero, so it does not matter how far the tile
reaches beyond the row, nor which rows share the tile. Keys and values of positions that are not visible to
any row of the tile are read from the null page, which is zero: what lies in unwritten pages never enters a
product.

Shapes: B tiles, S chunks, M = ROW_TILE * H / J query rows per kv head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from lean_laguna.kernels.elementwise import scalar
from lean_laguna.kernels.linear import ROW_TILE, batched_matmul

ATTN_CHUNK = 64
# Elements of keys and values gathered at once: bounds the memory of a prefill step (64 MiB in float32).
_MAX_GATHERED = 1 << 24
# Tiles are computed together while their chunks, padded to the longest tile, number at most this or this
# share.
_MIN_CHUNKS, _MAX_PADDING = 64, 1.25


class Span(Protocol):
    """What attention needs of ``models.forward_batch.SequenceSpan``."""

    @property
    def start(self) -> int:
        """First packed row."""

    @property
    def num_rows(self) -> int:
        """Rows of the span."""

    @property
    def first_position(self) -> int:
        """Absolute position of the first row."""

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Per KV group, the physical block of each logical block; 0 is not kept."""


@dataclass(frozen=True)
class TileBatch:
    """Tiles computed together.

    Attributes:
        rows: Packed row of each tile row, [B * ROW_TILE] int64; rows beyond a span repeat its last row. None
            where tile rows and packed rows are the same.
        kv_rows: Row of the storage seen as [.., P] for keys, then for values, by tile, kv head and position,
            [2 * B * J * S * ATTN_CHUNK] int64.
        mask: 0 where a row sees a key and -inf elsewhere, [B, 1, ROW_TILE, 1, S, ATTN_CHUNK] float32.
        num_tiles: B.
        num_chunks: S.
    """

    rows: torch.Tensor | None
    kv_rows: torch.Tensor
    mask: torch.Tensor
    num_tiles: int
    num_chunks: int


@dataclass(frozen=True)
class AttentionPlan:
    """Where the rows of a forward pass find their keys in one KV group; shared by the group's layers.

    Attributes:
        slots: Flat slot of each kept row's own key and value, [K] int64.
        kept_rows: Rows whose page is kept, [K] int64; None where all are.
        batches: Tiles in order.
        packed_rows: Tile row of each packed row, [T] int64; None where they are the same.
        num_rows: T.
    """

    slots: torch.Tensor
    kept_rows: torch.Tensor | None
    batches: tuple[TileBatch, ...]
    packed_rows: torch.Tensor | None
    num_rows: int


def plan_attention(
    spans: Sequence[Span],
    group: int,
    kv_block_size: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Lay out the attention of a forward pass over one KV group.

    A row at position p sees the keys at positions ``max(0, p - window + 1) .. p``, its own among them, which
    must be written before attention runs.

    Args:
        spans: Sequences of the batch, covering the packed rows in order.
        group: Index of the KV group in the spans' block tables.
        kv_block_size: Tokens per KV page.
        num_kv_heads: J of the group.
        head_dim: P of the group; bounds memory only.
        window: Keys a row sees, itself included; None sees all.
        device: Where the plan's tensors go.

    Returns:
        The plan.

    Raises:
        ValueError: A visible position's page is not kept.
    """
    tiles = _Tiles.of(spans, group, kv_block_size, window)
    max_chunks = max(1, _MAX_GATHERED // (2 * num_kv_heads * head_dim * ATTN_CHUNK))
    packed = tiles.packed_rows()
    is_identity = packed.shape[0] == 1 or bool((np.diff(packed) == 1).all())
    batches = tuple(
        tiles.batch(first, last, num_kv_heads, not is_identity or last - first < tiles.count, device)
        for first, last in tiles.groups(max_chunks)
    )
    slots = tiles.slots(tiles.row_positions(packed), tiles.tile_of(packed))
    kept = slots >= kv_block_size
    all_kept = bool(kept.all())
    return AttentionPlan(
        torch.from_numpy(slots if all_kept else slots[kept]).to(device),
        None if all_kept else torch.from_numpy(np.flatnonzero(kept)).to(device),
        batches,
        None if is_identity else torch.from_numpy(packed).to(device),
        packed.shape[0],
    )


def paged_attention(q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """Attend from packed rows to their cached keys.

    Args:
        q: Queries [T, H, P]; T is the plan's number of rows or that rounded up to whole tiles.
        kv: A layer's storage [num_blocks, kv_block_size, 2, J, P], contiguous.
        plan: Of this batch and the layer's group.
        scale: Factor on the scores.

    Returns:
        [T, H, P]; rows beyond the plan's are finite and mean nothing.
    """
    num_rows, padding = q.shape[0], -q.shape[0] % ROW_TILE
    if padding:
        q = F.pad(q, (0, 0, 0, 0, 0, padding))
    outs = [_attend(q, kv, batch, scale) for batch in plan.batches]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if plan.packed_rows is not None:
        out = out.index_select(0, plan.packed_rows)
    missing = num_rows - out.shape[0]
    return out[:num_rows] if missing <= 0 else F.pad(out, (0, 0, 0, 0, 0, missing))


def _attend(q: torch.Tensor, kv: torch.Tensor, batch: TileBatch, scale: float) -> torch.Tensor:
    num_tiles, num_chunks = batch.num_tiles, batch.num_chunks
    num_kv_heads, head_dim = kv.shape[-2:]
    per_kv = q.shape[1] // num_kv_heads
    pairs, tall = num_tiles * num_kv_heads, ROW_TILE * per_kv
    gathered = kv.view(-1, head_dim).index_select(0, batch.kv_rows)
    keys, values = gathered.view(2, pairs * num_chunks, ATTN_CHUNK, head_dim)
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
        # torch's outer reduction adds the chunks in their order; chunks out of sight are an exact zero.
        out = partial.view(pairs, num_chunks, tall * head_dim).sum(1)
    rows = out.view(num_tiles, num_kv_heads, ROW_TILE, per_kv, head_dim).transpose(1, 2)
    return rows.contiguous().view(num_tiles * ROW_TILE, -1, head_dim)


@dataclass(frozen=True)
class _Tiles:
    """The tiles of a batch: which span, which rows, which keys.

    Attributes:
        span: Span of each tile, [N].
        start: First packed row of each tile, [N].
        rows: Rows of each tile, 1 .. ROW_TILE, [N].
        position: Position of each tile's first row, [N].
        first_chunk: First chunk a row of the tile sees, [N].
        num_chunks: Chunks up to the last that a row sees, [N].
        tables: Block tables of the spans, padded with the null block, [number of spans, L].
    """

    span: np.ndarray
    start: np.ndarray
    rows: np.ndarray
    position: np.ndarray
    first_chunk: np.ndarray
    num_chunks: np.ndarray
    tables: np.ndarray
    kv_block_size: int
    window: int | None

    @classmethod
    def of(cls, spans: Sequence[Span], group: int, kv_block_size: int, window: int | None) -> _Tiles:
        lengths = np.array([span.num_rows for span in spans])
        per_span = -(-lengths // ROW_TILE)
        owner = np.repeat(np.arange(len(spans)), per_span)
        offset = ROW_TILE * (np.arange(owner.size) - np.repeat(np.cumsum(per_span) - per_span, per_span))
        rows = np.minimum(ROW_TILE, lengths[owner] - offset)
        position = np.array([span.first_position for span in spans])[owner] + offset
        lowest = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
        first_chunk = lowest // ATTN_CHUNK
        longest = max(len(span.block_tables[group]) for span in spans)
        tables = np.zeros((len(spans), longest), dtype=np.int64)
        for row, span in zip(tables, spans, strict=True):
            row[: len(span.block_tables[group])] = span.block_tables[group]
        start = np.array([span.start for span in spans])[owner] + offset
        num_chunks = (position + rows - 1) // ATTN_CHUNK - first_chunk + 1
        return cls(owner, start, rows, position, first_chunk, num_chunks, tables, kv_block_size, window)

    @property
    def count(self) -> int:
        return self.span.size

    def groups(self, max_chunks: int) -> list[tuple[int, int]]:
        """Cut the tiles into runs that are worth computing together within the memory bound."""
        runs, first, widest, total = [], 0, 0, 0
        for i, chunks in enumerate(self.num_chunks.tolist()):
            wider, size = max(widest, chunks), i - first + 1
            if i > first and wider * size > min(
                max_chunks, max(_MIN_CHUNKS, _MAX_PADDING * (total + chunks))
            ):
                runs.append((first, i))
                first, wider, total = i, chunks, 0
            widest, total = wider, total + chunks
        return [*runs, (first, self.count)]

    def batch(
        self, first: int, last: int, num_kv_heads: int, is_mapped: bool, device: torch.device | str
    ) -> TileBatch:
        num_chunks = int(self.num_chunks[first:last].max())
        in_tile = np.minimum(np.arange(ROW_TILE), self.rows[first:last, None] - 1)
        row_positions = self.position[first:last, None] + in_tile
        keys = self.first_chunk[first:last, None] * ATTN_CHUNK + np.arange(num_chunks * ATTN_CHUNK)
        seen = keys[:, None] <= row_positions[:, :, None]
        if self.window is not None:
            seen &= keys[:, None] > row_positions[:, :, None] - self.window
        slots = self.slots(keys, np.arange(first, last)[:, None])
        is_read = seen.any(1)
        if (is_read & (slots < self.kv_block_size)).any():
            raise ValueError("attention needs a position whose KV page is not kept")
        slots *= is_read
        kv_and_head = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads, 1)
        kv_rows = slots[None, :, None, :] * (2 * num_kv_heads) + kv_and_head
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        rows = self.start[first:last, None] + in_tile
        return TileBatch(
            torch.from_numpy(rows.reshape(-1)).to(device) if is_mapped else None,
            torch.from_numpy(kv_rows.reshape(-1)).to(device),
            torch.from_numpy(mask).view(last - first, 1, ROW_TILE, 1, num_chunks, ATTN_CHUNK).to(device),
            last - first,
            num_chunks,
        )

    def slots(self, positions: np.ndarray, tile: np.ndarray) -> np.ndarray:
        """Flat slots of positions; those beyond a sequence's table lie in the null block."""
        logical = positions // self.kv_block_size
        kept = logical < self.tables.shape[1]
        blocks = self.tables[self.span[tile], np.where(kept, logical, 0)] * kept
        slots: np.ndarray = blocks * self.kv_block_size + positions % self.kv_block_size
        return slots

    def packed_rows(self) -> np.ndarray:
        """Tile row of each packed row, [T]."""
        tile_rows = ROW_TILE * np.arange(self.count)[:, None] + np.arange(ROW_TILE)
        return tile_rows[np.arange(ROW_TILE) < self.rows[:, None]]

    def tile_of(self, tile_rows: np.ndarray) -> np.ndarray:
        return tile_rows // ROW_TILE

    def row_positions(self, tile_rows: np.ndarray) -> np.ndarray:
        positions: np.ndarray = self.position[tile_rows // ROW_TILE] + tile_rows % ROW_TILE
        return positions
