"""Which rows attend to which keys: tiles of rows, chunks of the context, and their places in the cache.

Made once per forward pass and KV group, on the host, and shared by the group's layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lean_laguna.kernels.linear import ROW_TILE

ATTN_CHUNK = 64
# Elements of keys and values gathered at once: bounds the memory of a prefill step (64 MiB in float32).
_MAX_GATHERED = 1 << 24
# Tiles are computed together while their chunks, padded to the longest tile, number at most this, or this
# share of what is needed.
_MIN_CHUNKS, _MAX_PADDING = 64, 1.25
_IN_TILE = np.arange(ROW_TILE)
HIDDEN, SEEN = np.float32(-np.inf), np.float32(0)


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
    """Where the rows of a forward pass find their keys in one KV group.

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


@dataclass(frozen=True)
class _Cut:
    """Tiles of a batch as arrays.

    Attributes:
        span: Span of each tile, [N].
        packed: Packed row of each tile row, the last repeated, [N, ROW_TILE].
        positions: Position of each tile row, the last repeated, [N, ROW_TILE].
        tile_rows: Tile row of each packed row, [T]; None where they are the same.
    """

    span: np.ndarray
    packed: np.ndarray
    positions: np.ndarray
    tile_rows: np.ndarray | None


class Tiles:
    """Up to ROW_TILE consecutive rows of one sequence each; the same for every KV group."""

    def __init__(self, spans: Sequence[Span]):
        """Cut the sequences of a batch, which cover the packed rows in order."""
        self.spans = tuple(spans)

    @property
    def num_rows(self) -> int:
        """Packed rows T."""
        last = self.spans[-1]
        return last.start + last.num_rows

    @functools.cached_property
    def cut(self) -> _Cut:
        """The tiles."""
        spans = self.spans
        lengths = np.array([span.num_rows for span in spans])
        starts = np.array([span.start for span in spans])
        firsts = np.array([span.first_position for span in spans])
        owner, offset = np.arange(len(spans)), np.zeros(len(spans), dtype=np.int64)
        if lengths.max() > ROW_TILE:
            per_span = -(-lengths // ROW_TILE)
            owner = np.repeat(owner, per_span)
            before = np.repeat(np.cumsum(per_span) - per_span, per_span)
            offset = ROW_TILE * (np.arange(owner.size) - before)
        rows = np.minimum(lengths[owner] - offset, ROW_TILE)
        within = offset[:, None] + np.minimum(_IN_TILE, rows[:, None] - 1)
        tile_rows = None
        if owner.size > 1 and (rows[:-1] < ROW_TILE).any():
            tile_rows = np.flatnonzero((rows[:, None] > _IN_TILE).reshape(-1))
        return _Cut(owner, starts[owner, None] + within, firsts[owner, None] + within, tile_rows)


def plan_attention(
    tiles: Tiles,
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
        tiles: Of the batch.
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
    layout = _Layout.of(tiles, group, kv_block_size, window)
    runs = layout.runs(max(1, _MAX_GATHERED // (2 * num_kv_heads * head_dim * ATTN_CHUNK)))
    tile_rows = tiles.cut.tile_rows
    is_mapped = tile_rows is not None or len(runs) > 1
    slots = layout.own_slots()
    kept = slots >= kv_block_size
    all_kept = bool(kept.all())
    return AttentionPlan(
        torch.from_numpy(slots if all_kept else slots[kept]).to(device),
        None if all_kept else torch.from_numpy(np.flatnonzero(kept)).to(device),
        tuple(layout.batch(first, last, num_kv_heads, is_mapped, device) for first, last in runs),
        None if tile_rows is None else torch.from_numpy(tile_rows).to(device),
        tiles.num_rows,
    )


@dataclass(frozen=True)
class _Layout:
    """Tiles over the pages of one KV group.

    Attributes:
        tables: Block tables of the spans, padded with the null block, [number of spans, L].
        lowest: Lowest position that a row of each tile sees, [N].
        first_chunk: Its chunk, [N].
        num_chunks: Chunks from there to the tile's last row, [N].
    """

    tiles: Tiles
    tables: np.ndarray
    kv_block_size: int
    window: int | None
    lowest: np.ndarray
    first_chunk: np.ndarray
    num_chunks: np.ndarray

    @classmethod
    def of(cls, tiles: Tiles, group: int, kv_block_size: int, window: int | None) -> _Layout:
        rows = [span.block_tables[group] for span in tiles.spans]
        tables = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            tables[i, : len(row)] = row
        first, last = tiles.cut.positions[:, 0], tiles.cut.positions[:, -1]
        lowest = np.zeros_like(first) if window is None else np.maximum(first - (window - 1), 0)
        first_chunk = lowest // ATTN_CHUNK
        num_chunks = last // ATTN_CHUNK - first_chunk + 1
        return cls(tiles, tables, kv_block_size, window, lowest, first_chunk, num_chunks)

    def runs(self, max_chunks: int) -> list[tuple[int, int]]:
        """Cut the tiles into runs that are worth computing together within the memory bound."""
        counts = self.num_chunks.tolist()
        runs, first, widest, total = [], 0, 0, 0
        for i, chunks in enumerate(counts):
            wider, size = max(widest, chunks), i - first + 1
            bound = min(max_chunks, max(_MIN_CHUNKS, _MAX_PADDING * (total + chunks)))
            if i > first and wider * size > bound:
                runs.append((first, i))
                first, wider, total = i, chunks, 0
            widest, total = wider, total + chunks
        return [*runs, (first, len(counts))]

    def own_slots(self) -> np.ndarray:
        """Slot of each packed row's own key and value, [T]."""
        cut = self.tiles.cut
        slots = self._slots(cut.span[:, None], cut.positions).reshape(-1)
        return slots[: self.tiles.num_rows] if cut.tile_rows is None else slots[cut.tile_rows]

    def batch(
        self, first: int, last: int, num_kv_heads: int, is_mapped: bool, device: torch.device | str
    ) -> TileBatch:
        """Lay out the tiles ``first .. last - 1``."""
        cut, run = self.tiles.cut, slice(first, last)
        num_chunks = int(self.num_chunks[run].max())
        positions = cut.positions[run]
        keys = (self.first_chunk[run] * ATTN_CHUNK)[:, None] + np.arange(num_chunks * ATTN_CHUNK)
        is_read = (keys >= self.lowest[run, None]) & (keys <= positions[:, -1:])
        slots = self._slots(cut.span[run, None], keys) * is_read
        if np.count_nonzero(slots >= self.kv_block_size) < np.count_nonzero(is_read):
            raise ValueError("attention needs a position whose KV page is not kept")
        seen = keys[:, None] <= positions[:, :, None]
        if self.window is not None:
            seen &= keys[:, None] > positions[:, :, None] - self.window
        kv_and_head = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads, 1)
        kv_rows = (slots * (2 * num_kv_heads))[None, :, None] + kv_and_head
        mask = torch.from_numpy(np.where(seen, SEEN, HIDDEN)).to(device)
        return TileBatch(
            torch.from_numpy(cut.packed[run].reshape(-1)).to(device) if is_mapped else None,
            torch.from_numpy(kv_rows.reshape(-1)).to(device),
            mask.view(last - first, 1, ROW_TILE, 1, num_chunks, ATTN_CHUNK),
            last - first,
            num_chunks,
        )

    def _slots(self, span: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slots of positions; those beyond a table take its last entry and are not read."""
        logical, offset = np.divmod(positions, self.kv_block_size)
        blocks = self.tables[span, np.minimum(logical, self.tables.shape[1] - 1)]
        slots: np.ndarray = blocks * self.kv_block_size + offset
        return slots
