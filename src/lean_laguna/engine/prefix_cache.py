"""Prompts that were computed before: their KV blocks, in every group, the drafter's context included.

A cached prefix ends at a multiple of the prefill chunk size, so a request that continues from it computes
the same chunks, and the same bits, as one that starts from nothing. To continue at an end, a request needs
every block before it of the unwindowed groups (the chunks), and of the windowed groups what a query right
after the end can see (the tail). Chunks and tails are kept and evicted apart: a long prompt has many ends,
and the last is the one that the next turn of a conversation continues from.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lean_laguna.engine.block_pool import BlockPool
from lean_laguna.engine.block_table import BlockTable


@dataclass(frozen=True)
class KeptBlocks:
    """A run of blocks of one group.

    Attributes:
        first_logical_block: Where the run stands in a block table.
        blocks: The physical blocks.
    """

    first_logical_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class PrefixHit:
    """A cached prefix that a sequence can start from.

    Attributes:
        num_tokens: Its length, a multiple of the chunk size.
        kept: Per group, the blocks to share.
    """

    num_tokens: int
    kept: tuple[KeptBlocks, ...]


Entries = OrderedDict[bytes, dict[int, KeptBlocks]]


def prefix_keys(token_ids: Sequence[int], chunk_size: int) -> tuple[bytes, ...]:
    """Return one key per whole chunk; key i stands for all tokens of the chunks 0 .. i."""
    keys = []
    state = hashlib.blake2b(digest_size=16)
    for end in range(chunk_size, len(token_ids) + 1, chunk_size):
        state.update(array("q", token_ids[end - chunk_size : end]).tobytes())
        keys.append(state.digest())
    return tuple(keys)


class PrefixCache:
    """Chunks and tails by key, least recently used first; evicted only when a pool runs out of free blocks.

    Invariant: a block is held in its pool once per entry that lists it; a tail's chunk is present, and so
    are all chunks before it; a chunk is at least as recently used as those after it. Owned by the scheduler.
    """

    def __init__(self, pools: Sequence[BlockPool], windows: Sequence[int | None], chunk_size: int):
        self._pools = tuple(pools)
        self._windows = tuple(windows)
        self._chunk_size = chunk_size
        self._chunks: Entries = OrderedDict()
        self._tails: Entries = OrderedDict()
        for group, pool in enumerate(self._pools):
            pool.reclaim = functools.partial(self._evict_for, group)

    def __len__(self) -> int:
        return len(self._tails)

    def __contains__(self, key: bytes) -> bool:
        return key in self._tails

    def lookup(self, keys: Sequence[bytes], num_prompt_tokens: int) -> PrefixHit | None:
        """Find the longest cached prefix that leaves at least one prompt token to compute.

        Args:
            keys: The prompt's keys, from :func:`prefix_keys`.
            num_prompt_tokens: The prompt's length.
        """
        usable = keys[: (num_prompt_tokens - 1) // self._chunk_size]
        num_found = next((i for i, key in enumerate(usable) if key not in self._chunks), len(usable))
        while num_found and usable[num_found - 1] not in self._tails:
            num_found -= 1
        if num_found == 0:
            return None
        found = usable[:num_found]
        # Deepest first, so that a chunk is never older than those after it and eviction starts at the end.
        for key in reversed(found):
            self._chunks.move_to_end(key)
        self._tails.move_to_end(found[-1])
        tail = self._tails[found[-1]]
        kept = tuple(
            tail[group]
            if group in tail
            else KeptBlocks(0, tuple(block for key in found for block in self._chunks[key][group].blocks))
            for group in range(len(self._pools))
        )
        return PrefixHit(num_found * self._chunk_size, kept)

    def insert(self, keys: Sequence[bytes], num_tokens: int, tables: Sequence[BlockTable]) -> None:
        """Keep the chunk that ends at ``num_tokens``; its KV is written and its window still held.

        Args:
            keys: The prompt's keys.
            num_tokens: Prompt tokens computed, a multiple of the chunk size.
            tables: The sequence's tables, one per group.
        """
        index = num_tokens // self._chunk_size - 1
        key = keys[index]
        if any(parent not in self._chunks for parent in keys[:index]):
            return
        if key not in self._chunks:
            self._chunks[key] = self._hold(tables, num_tokens, is_tail=False)
        for touched in reversed(keys[: index + 1]):
            self._chunks.move_to_end(touched)
        if key not in self._tails:
            self._tails[key] = self._hold(tables, num_tokens, is_tail=True)
        self._tails.move_to_end(key)

    def clear(self) -> None:
        """Forget everything; blocks that no sequence uses become free."""
        for key in list(self._chunks):
            self._drop_chunk(key)

    def _hold(self, tables: Sequence[BlockTable], num_tokens: int, *, is_tail: bool) -> dict[int, KeptBlocks]:
        kept = {}
        for group, table in enumerate(tables):
            if (table.window is not None) != is_tail:
                continue
            length = self._chunk_size if table.window is None else table.window - 1
            kept[group] = KeptBlocks(*table.blocks(max(0, num_tokens - length), num_tokens))
            self._pools[group].hold_cached(kept[group].blocks)
        return kept

    def _drop_chunk(self, key: bytes) -> None:
        self._let_go(self._chunks.pop(key))
        if key in self._tails:
            self._let_go(self._tails.pop(key))

    def _let_go(self, entry: dict[int, KeptBlocks]) -> None:
        for group, kept in entry.items():
            self._pools[group].drop_cached(kept.blocks)

    def _evict_for(self, group: int) -> None:
        """Evict until the group has a free block more."""
        pool = self._pools[group]
        num_before = pool.num_cached_only
        is_tail = self._windows[group] is not None
        entries = self._tails if is_tail else self._chunks
        for key in list(entries):
            # An entry whose blocks are all in use gives no room; the next request may still want it.
            if not _any_unused(pool, entries[key][group].blocks):
                continue
            if is_tail:
                self._let_go(entries.pop(key))
            else:
                self._drop_chunk(key)
            if pool.num_cached_only < num_before:
                return


def _any_unused(pool: BlockPool, blocks: Iterable[int]) -> bool:
    return any(not pool.is_referenced(block) for block in blocks)
