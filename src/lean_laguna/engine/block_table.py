"""The KV blocks of one sequence in one group; a windowed group keeps only what can still be seen."""

from __future__ import annotations

from collections.abc import Sequence

from lean_laguna.engine.block_pool import NULL_BLOCK, BlockPool


def blocks_for(num_positions: int, kv_block_size: int) -> int:
    """Return how many blocks hold positions 0 .. ``num_positions - 1``."""
    return -(-num_positions // kv_block_size)


def max_blocks_touched(num_positions: int, kv_block_size: int) -> int:
    """Return the most blocks that so many consecutive positions can touch, wherever they start."""
    return (num_positions + kv_block_size - 2) // kv_block_size + 1


def quota_blocks(total_positions: int, rows_per_step: int, window: int | None, kv_block_size: int) -> int:
    """Return the most blocks a sequence holds at once in a group.

    Args:
        total_positions: Positions it may ever write.
        rows_per_step: Most rows one forward pass computes for it (a prefill chunk or a verified block).
        window: Keys a query sees, itself included; None sees all.
        kv_block_size: Positions per block.
    """
    whole = blocks_for(total_positions, kv_block_size)
    if window is None:
        return whole
    return min(whole, max_blocks_touched(window - 1 + rows_per_step, kv_block_size))


class BlockTable:
    """Logical to physical blocks of one sequence in one group.

    Invariant: entries before the first kept block are the null block, the sequence holds one reference on
    each of the others. Owned by its sequence.
    """

    __slots__ = ("_entries", "_first_kept", "_frozen", "kv_block_size", "pool", "window")

    def __init__(self, pool: BlockPool, window: int | None, kv_block_size: int):
        self.pool = pool
        self.window = window
        self.kv_block_size = kv_block_size
        self._entries: list[int] = []
        self._first_kept = 0
        self._frozen: tuple[int, ...] | None = ()

    @property
    def num_held(self) -> int:
        """Blocks this sequence refers to."""
        return len(self._entries) - self._first_kept

    def adopt(self, first_logical_block: int, blocks: Sequence[int]) -> None:
        """Start from shared blocks of a cached prefix; only on an empty table."""
        assert not self._entries
        self.pool.acquire(blocks)
        self._entries = [NULL_BLOCK] * first_logical_block + list(blocks)
        self._first_kept = first_logical_block
        self._frozen = None

    def extend(self, num_positions: int) -> None:
        """Allocate so that positions below ``num_positions`` have a block."""
        missing = blocks_for(num_positions, self.kv_block_size) - len(self._entries)
        if missing > 0:
            self._entries += self.pool.allocate(missing)
            self._frozen = None

    def slide(self, next_position: int) -> None:
        """Release the blocks that no query at ``next_position`` or later can see."""
        if self.window is None:
            return
        first_visible = next_position - self.window + 1
        keep_from = min(first_visible // self.kv_block_size, len(self._entries))
        if keep_from <= self._first_kept:
            return
        self.pool.release(self._entries[self._first_kept : keep_from])
        self._entries[self._first_kept : keep_from] = [NULL_BLOCK] * (keep_from - self._first_kept)
        self._first_kept = keep_from
        self._frozen = None

    def blocks(self, first_position: int, end_position: int) -> tuple[int, tuple[int, ...]]:
        """Return the first logical block of a range of positions, and the range's physical blocks."""
        first = first_position // self.kv_block_size
        return first, tuple(self._entries[first : blocks_for(end_position, self.kv_block_size)])

    def as_tuple(self) -> tuple[int, ...]:
        """Return the table as the model reads it; the same object until the table changes."""
        if self._frozen is None:
            self._frozen = tuple(self._entries)
        return self._frozen

    def clear(self) -> None:
        """Release everything."""
        self.pool.release(self._entries[self._first_kept :])
        self._entries = []
        self._first_kept = 0
        self._frozen = ()
