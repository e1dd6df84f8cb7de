"""A drafter's attention for one block of one sequence with buffers, views and context made in advance.

Unlike the target's, a drafter's bits decide which tokens are proposed, never which are emitted; so products
have whatever height they have, and all keys of a row are attended to at once.

Shapes: L layers, C context positions, R rows of the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from lean_laguna.kernels.attention_plan import Span
from lean_laguna.kernels.prepared import TileAttention

# Columns beyond the window: rows are appended until they are used up, then the window is read from its pages.
_ROOM = 256


class BlockAttention(TileAttention):
    """Norms, rotation, attention and output gate of a block; its layers share it."""

    def __init__(
        self, joint: torch.Tensor, heads: int, kv_heads: int, head_dim: int, rotary: int, eps: float
    ):
        """Cut views into a layer's projections; see ``TileAttention``."""
        super().__init__(joint, heads, kv_heads, head_dim, rotary, eps)
        num_rows, self._tall = joint.shape[0], joint.shape[0] * self.per_kv
        self._q_by_kv = self._q.view(num_rows, kv_heads, self.per_kv, head_dim).transpose(0, 1)
        self._queries = torch.empty(kv_heads, num_rows, self.per_kv, head_dim)
        self._queries_flat = self._queries.view(kv_heads, self._tall, head_dim)

    def attend_to(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend and gate.

        Args:
            keys: [J, P, C + R], the block's own last.
            values: [J, C + R, P].
            mask: 0 where a row sees a key and -inf elsewhere, [R, 1, C + R].

        Returns:
            [R, H * P].
        """
        torch.mul(self._q_by_kv, self._scale, out=self._queries)
        scores = torch.bmm(self._queries_flat, keys)
        scores.view(self.kv_heads, self._num_rows, self.per_kv, -1).add_(mask)
        rows = torch.bmm(torch.softmax(scores, -1), values).view(self._queries.shape).transpose(0, 1)
        if not self._gate.shape[1]:
            self._out_rows.copy_(rows)
            return self.out
        gate = F.softplus(self._gate).view(self._num_rows, self.kv_heads, self.per_kv, -1)
        torch.mul(rows, gate, out=self._out_rows)
        return self.out


class ContextMirror:
    """What a drafter's layers see of one sequence's context, in the order of its positions.

    Every layer has the same window. A block's own rows may stand after the context, for its pass only.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, window: int):
        self._window, self._room = window, window + _ROOM
        self._begin = self._end = 0
        self._table: tuple[int, ...] = ()
        self._key: object = None
        # Not under inference mode, whose tensors could not be written to outside it.
        with torch.inference_mode(False):
            self._keys = torch.zeros(num_layers, num_kv_heads, head_dim, self._room)
            self._values = torch.zeros(num_layers, num_kv_heads, self._room, head_dim)

    def prepare(
        self, span: Span, group: int, pages: Sequence[torch.Tensor], kv_block_size: int, key: object
    ) -> int | None:
        """Hold what the span's rows see of the positions before them, and make room for them.

        Args:
            span: At most ``_ROOM`` rows.
            group: Its KV group.
            pages: Storage of each layer, [num_blocks, kv_block_size, 2, J, P]; only read.
            kv_block_size: Tokens per KV page.
            key: Equal to that of the last ``seal`` iff nothing else touched the pages since.

        Returns:
            C, the columns from ``columns`` on that are context; None where a page of it is not kept.
        """
        first, table = span.first_position, span.block_tables[group]
        lowest = max(0, first - self._window + 1)
        seen = slice(lowest // kv_block_size, -(-first // kv_block_size))
        if 0 in table[seen]:
            return None
        holds = (
            self._key is not None
            and self._key == key
            and self._begin <= lowest
            and first <= self._end
            and first - self._begin + span.num_rows <= self._room
            and (table is self._table or table[seen] == self._table[seen])
        )
        if not holds:
            self._fill(table, lowest, first, pages, kv_block_size)
        self._key, self._table, self._end = None, table, first
        return first - lowest

    def columns(self, count: int, num_rows: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return by layer the last ``count`` keys [J, P, C + R] and values [J, C + R, P], room for rows."""
        end = self._end - self._begin
        return (
            self._keys[..., end - count : end + num_rows].unbind(0),
            self._values[:, :, end - count : end + num_rows].unbind(0),
        )

    def append(self, kv: torch.Tensor) -> None:
        """Add the context of the prepared rows, [R, L, 2, J, P]."""
        at, num_rows = self._end - self._begin, kv.shape[0]
        self._keys[..., at : at + num_rows].copy_(kv[:, :, 0].permute(1, 2, 3, 0))
        self._values[:, :, at : at + num_rows].copy_(kv[:, :, 1].permute(1, 2, 0, 3))
        self._end += num_rows

    def seal(self, key: object) -> None:
        """Trust what is held for as long as ``prepare`` comes with an equal key."""
        self._key = key

    def _fill(
        self,
        table: tuple[int, ...],
        lowest: int,
        first: int,
        pages: Sequence[torch.Tensor],
        kv_block_size: int,
    ) -> None:
        self._begin, count = lowest, first - lowest
        positions = np.arange(lowest, first)
        blocks = np.array(table, dtype=np.int64)[positions // kv_block_size]
        slots = torch.from_numpy(blocks * kv_block_size + positions % kv_block_size)
        for layer, storage in enumerate(pages):
            rows = storage.flatten(0, 1).index_select(0, slots)
            self._keys[layer, :, :, :count].copy_(rows[:, 0].permute(1, 2, 0))
            self._values[layer, :, :count].copy_(rows[:, 1].transpose(0, 1))
