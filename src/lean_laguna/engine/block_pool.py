"""Who holds each KV block of one group: sequences, the prefix cache, or nobody. Numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

NULL_BLOCK = 0
"""Block number of a logical block that is not kept; never handed out, never read."""


class BlockPool:
    """The physical blocks 1 .. ``num_blocks - 1`` of one KV group.

    Invariant: each is in exactly one state: in use (at least one sequence refers to it), cached only (no
    sequence does, the prefix cache does; it may be reclaimed) or free. Owned by the scheduler; the prefix
    cache is the only other caller.

    Attributes:
        num_blocks: Blocks of the group, the null block included.
        reclaim: Asked for room when nothing is free; must free at least one cached block.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"a block pool holds at least the null block, found num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.reclaim: Callable[[], None] | None = None
        self._free = list(range(num_blocks - 1, 0, -1))
        self._references = [0] * num_blocks
        self._cache_holds = [0] * num_blocks
        self._num_cached_only = 0

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at all."""
        return self.num_blocks - 1

    @property
    def num_cached_only(self) -> int:
        """Blocks that only the prefix cache keeps."""
        return self._num_cached_only

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can hand out now: free ones and cached ones that nobody uses."""
        return len(self._free) + self._num_cached_only

    @property
    def num_in_use(self) -> int:
        """Blocks that sequences refer to; a shared block counts once."""
        return self.capacity - self.num_available

    def is_referenced(self, block: int) -> bool:
        """True while a sequence refers to ``block``."""
        return self._references[block] > 0

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each; their content is stale.

        The caller has made sure of :attr:`num_available`; running out is a fault of the admission rule.
        """
        blocks = []
        for _ in range(count):
            if not self._free:
                assert self._num_cached_only, "KV blocks ran out although the admission reserved them"
                assert self.reclaim is not None
                self.reclaim()
            block = self._free.pop()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, which a sequence or the prefix cache holds already."""
        for block in blocks:
            if self._references[block] == 0:
                assert self._cache_holds[block], f"block {block} is free and cannot be shared"
                self._num_cached_only -= 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; blocks that nobody holds any more become free."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} was released more often than acquired"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._settle(block)

    def hold_cached(self, blocks: Iterable[int]) -> None:
        """Let the prefix cache keep blocks that a sequence refers to now."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} has no owner and cannot enter the cache"
            self._cache_holds[block] += 1

    def drop_cached(self, blocks: Iterable[int]) -> None:
        """Let the prefix cache let go of blocks."""
        for block in blocks:
            assert self._cache_holds[block] > 0, f"block {block} is not in the cache"
            self._cache_holds[block] -= 1
            if self._references[block] == 0 and self._cache_holds[block] == 0:
                self._num_cached_only -= 1
                self._free.append(block)

    def _settle(self, block: int) -> None:
        if self._cache_holds[block]:
            self._num_cached_only += 1
        else:
            self._free.append(block)
