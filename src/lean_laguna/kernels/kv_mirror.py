"""One sequence's keys and values laid out for products and kept from step to step.

Gathering pages anew for a row costs more than attending to them. A mirror holds what a group's layers see of
one sequence; each step adds its own rows, and whenever anything else may have touched the pages the mirror is
filled anew from them.

Shapes: L layers, S chunks of ``ATTN_CHUNK`` positions, n rows of the step, R rows of its tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lean_laguna.kernels.attention_plan import ATTN_CHUNK, HIDDEN, SEEN, Span


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a tile and the place where they go.

    Attributes:
        row: First row.
        count: Rows.
        at: First place: a slot of the pages, or a position counted from the mirror's first.
    """

    row: int
    count: int
    at: int


@dataclass(frozen=True)
class TilePlan:
    """Where the rows of one tile of one sequence find their keys in one KV group.

    Attributes:
        table: Block table of the group.
        first: Position of the first row.
        num_rows: n.
        lowest: Lowest position that a row sees.
        begin: First position of its chunk.
        num_chunks: S, up to the last row's chunk.
        mask: 0 where a row sees a key and -inf elsewhere, [R, 1, S, ATTN_CHUNK] float32; rows from n on see
            what the last one sees.
        slots: Where the rows' own keys and values go among the pages.
    """

    table: tuple[int, ...]
    first: int
    num_rows: int
    lowest: int
    begin: int
    num_chunks: int
    mask: torch.Tensor
    slots: tuple[Piece, ...]

    @classmethod
    def of(cls, span: Span, group: int, kv_block_size: int, window: int | None, height: int) -> TilePlan:
        """Lay out a span of at most ``height`` rows, which a tile of that height computes.

        A row at position p sees the keys at positions ``max(0, p - window + 1) .. p``.

        Raises:
            ValueError: A visible position's page is not kept.
        """
        table, first, num_rows = span.block_tables[group], span.first_position, span.num_rows
        lowest = 0 if window is None else max(0, first - window + 1)
        last = first + num_rows - 1
        if 0 in table[lowest // kv_block_size : last // kv_block_size + 1]:
            raise ValueError("attention needs a position whose KV page is not kept")
        begin = lowest // ATTN_CHUNK * ATTN_CHUNK
        num_chunks = last // ATTN_CHUNK - begin // ATTN_CHUNK + 1
        ages = _ages(num_chunks * ATTN_CHUNK, num_rows, height) - (first - begin)
        is_hidden = ages > 0
        if window is not None:
            is_hidden |= ages <= -window
        mask = torch.from_numpy(np.where(is_hidden, HIDDEN, SEEN)).view(height, 1, num_chunks, ATTN_CHUNK)
        slots = tuple(
            Piece(
                piece.row,
                piece.count,
                table[piece.at // kv_block_size] * kv_block_size + piece.at % kv_block_size,
            )
            for piece in cut(first, num_rows, kv_block_size)
        )
        return cls(table, first, num_rows, lowest, begin, num_chunks, mask, slots)


def cut(first: int, num_rows: int, size: int) -> list[Piece]:
    """Cut consecutive positions where blocks of ``size`` begin; ``at`` is each piece's first position."""
    pieces, row = [], 0
    while row < num_rows:
        at = first + row
        count = min(num_rows - row, size - at % size)
        pieces.append(Piece(row, count, at))
        row += count
    return pieces


@functools.lru_cache(maxsize=256)
def _ages(num_keys: int, num_rows: int, height: int) -> np.ndarray:
    """Return [height, num_keys]: how far key j lies beyond row i, were the first row at key 0."""
    rows = np.minimum(np.arange(height, dtype=np.int32), num_rows - 1)
    return np.arange(num_keys, dtype=np.int32) - rows[:, None]


class KVMirror:
    """What the layers of one KV group see of one sequence.

    Attributes:
        keys: Per layer, [J * S, P, ATTN_CHUNK].
        values: Per layer, [J * S, ATTN_CHUNK, P].
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int):
        self._shape = num_layers, num_kv_heads, head_dim
        self._begin = self._end = self._lowest = 0
        self._table: tuple[int, ...] = ()
        self._key: object = None
        self._keys, self._values = torch.empty(0), torch.empty(0)
        self.keys: Sequence[torch.Tensor] = ()
        self.values: Sequence[torch.Tensor] = ()
        self._num_chunks = 0
        self._targets: list[tuple[Piece, Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []

    def num_bytes(self, num_chunks: int) -> int:
        """Bytes it would take to hold so many chunks."""
        num_layers, num_kv_heads, head_dim = self._shape
        return 8 * num_layers * num_kv_heads * head_dim * num_chunks * ATTN_CHUNK

    def prepare(self, plan: TilePlan, pages: Sequence[torch.Tensor], kv_block_size: int, key: object) -> None:
        """Hold every position before the plan's first row that its rows see, and make room for its rows.

        Args:
            plan: Of the step.
            pages: Storage of each layer, [num_blocks, kv_block_size, 2, J, P].
            kv_block_size: Tokens per KV page.
            key: Equal to that of the last ``seal`` iff nothing else touched the pages since.
        """
        if not self._holds(plan, kv_block_size, key):
            self._fill(plan, pages, kv_block_size)
        self._key = None
        self._lowest, self._end, self._table = plan.lowest, plan.first + plan.num_rows, plan.table
        self._targets = []
        for piece in cut(plan.first, plan.num_rows, ATTN_CHUNK):
            chunk, at = divmod(piece.at - plan.begin, ATTN_CHUNK)
            place = slice(at, at + piece.count)
            self._targets.append(
                (
                    piece,
                    self._keys[:, :, chunk, :, place].unbind(0),
                    self._values[:, :, chunk, place].unbind(0),
                )
            )

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the rows of a step: keys [J, P, R] and values [J, R, P]; rows from the plan's n on are left."""
        for piece, to_keys, to_values in self._targets:
            rows = slice(piece.row, piece.row + piece.count)
            to_keys[layer].copy_(keys[..., rows])
            to_values[layer].copy_(values[:, rows])

    def seal(self, key: object) -> None:
        """Trust what is held for as long as ``prepare`` comes with an equal key."""
        self._key = key

    def _holds(self, plan: TilePlan, kv_block_size: int, key: object) -> bool:
        if self._key is None or self._key != key:
            return False
        if (plan.begin, plan.num_chunks) != (self._begin, self._num_chunks):
            return False
        if plan.first > self._end or plan.lowest < self._lowest:
            return False
        if plan.table is self._table:
            return True
        pages = slice(plan.lowest // kv_block_size, -(-plan.first // kv_block_size))
        return plan.table[pages] == self._table[pages]

    def _fill(self, plan: TilePlan, pages: Sequence[torch.Tensor], kv_block_size: int) -> None:
        num_layers, num_kv_heads, head_dim = self._shape
        self._begin = plan.begin
        if plan.num_chunks != self._num_chunks:
            self._num_chunks = plan.num_chunks
            with torch.inference_mode(
                False
            ):  # not under it, whose tensors could not be written to outside it
                shape = num_layers, num_kv_heads, plan.num_chunks
                self._keys = torch.zeros(*shape, head_dim, ATTN_CHUNK)
                self._values = torch.zeros(*shape, ATTN_CHUNK, head_dim)
            self.keys = self._keys.flatten(1, 2).unbind(0)
            self.values = self._values.flatten(1, 2).unbind(0)
        positions = np.arange(plan.lowest, plan.first)
        table = np.array(plan.table, dtype=np.int64)
        slots = torch.from_numpy(
            table[positions // kv_block_size] * kv_block_size + positions % kv_block_size
        )
        # What nobody sees is zero here: an unwritten page may hold anything.
        rows = torch.zeros(plan.num_chunks * ATTN_CHUNK, 2, num_kv_heads, head_dim)
        by_chunk = rows.view(plan.num_chunks, ATTN_CHUNK, 2, num_kv_heads, head_dim)
        for layer, storage in enumerate(pages):
            torch.index_select(
                storage.flatten(0, 1), 0, slots, out=rows[plan.lowest - plan.begin : plan.first - plan.begin]
            )
            self._keys[layer].copy_(by_chunk[:, :, 0].permute(2, 0, 3, 1))
            self._values[layer].copy_(by_chunk[:, :, 1].permute(2, 0, 1, 3))
