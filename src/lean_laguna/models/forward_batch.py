"""What one forward pass computes: packed rows, where they stand, and where their KV pages lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SequenceSpan:
    """Consecutive positions of one sequence within the packed rows.

    Attributes:
        start: First packed row.
        num_rows: Rows, at least 1.
        first_position: Absolute position of the first row; the others follow.
        block_tables: Per KV group, the physical block of each logical block ``position // kv_block_size``;
            0 is the null block: that page is not kept.
    """

    start: int
    num_rows: int
    first_position: int
    block_tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ForwardBatch:
    """Packed rows of several sequences; spans cover the rows in order, without gaps.

    Attributes:
        input_ids: Token ids, [T] int64.
        positions: Absolute positions, [T] int64.
        spans: One per sequence.
        kv_block_size: Tokens per KV page.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    spans: tuple[SequenceSpan, ...]
    kv_block_size: int

    def slot_mapping(self, group: int) -> torch.Tensor:
        """Flat KV slot of each row in a group, [T] int64; slots of the null block mean: not kept."""
        parts = []
        for span in self.spans:
            positions = np.arange(span.first_position, span.first_position + span.num_rows)
            table = np.asarray(span.block_tables[group], dtype=np.int64)
            parts.append(
                table[positions // self.kv_block_size] * self.kv_block_size + positions % self.kv_block_size
            )
        return torch.from_numpy(np.concatenate(parts)).to(self.input_ids.device)

    @classmethod
    def single(
        cls,
        input_ids: torch.Tensor,
        first_position: int,
        block_tables: tuple[tuple[int, ...], ...],
        kv_block_size: int,
    ) -> ForwardBatch:
        """Batch of one sequence: rows of ``input_ids`` [T] from ``first_position`` on."""
        rows = input_ids.numel()
        positions = torch.arange(first_position, first_position + rows, device=input_ids.device)
        return cls(
            input_ids, positions, (SequenceSpan(0, rows, first_position, block_tables),), kv_block_size
        )
