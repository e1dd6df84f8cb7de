"""Which sequences compute what in the next step: admission, prefill chunks, decode rows.

A sequence is admitted only when every KV block it can ever need is set aside, so nothing is preempted
later; otherwise it waits. Prefill runs in chunks whose ends are absolute multiples of the chunk size; a step
may take several of one sequence, one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lean_laguna.engine.block_pool import BlockPool
from lean_laguna.engine.block_table import BlockTable, quota_blocks
from lean_laguna.engine.prefix_cache import PrefixCache, PrefixHit
from lean_laguna.engine.sequence import SequenceState
from lean_laguna.models.kv_cache import KVGroup


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt positions ``start .. end - 1`` of one sequence."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """True where the chunk's last row yields the first output token."""
        return self.end == self.sequence.num_prompt_tokens


@dataclass(frozen=True)
class StepPlan:
    """What one step computes; ``prefill`` holds as many rows in all as ``SchedulerLimits`` says."""

    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[SequenceState] = field(default_factory=list)


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a step.

    Attributes:
        max_num_seqs: Sequences running at once.
        prefill_chunk_size: Where chunks end, at absolute multiples of it.
        kv_block_size: Positions per KV block.
        max_draft_tokens: Most draft tokens verified with an anchor.
        steps_ahead: Steps launched before the tokens of the first are known.
        prefill_rows: Most prompt rows per step of one sequence, where nobody decodes; 0 takes one chunk's.
        prefill_rows_beside: Likewise of all, where somebody does or several have prompts.
    """

    max_num_seqs: int
    prefill_chunk_size: int
    kv_block_size: int
    max_draft_tokens: int
    steps_ahead: int = 0
    prefill_rows: int = 0
    prefill_rows_beside: int = 0

    @property
    def decode_span(self) -> int:
        """Most positions, from the anchor of a sequence on, that its launched steps may write."""
        return (1 + self.steps_ahead) * (1 + self.max_draft_tokens)

    def rows_per_step(self, total_positions: int) -> int:
        """Return the most positions of one sequence written while those before are still needed."""
        return min(total_positions, max(self.prefill_chunk_size, self.decode_span))

    def budget(self, *, is_beside: bool) -> int:
        """Return the most prompt rows of a step, beside other sequences or alone."""
        return (self.prefill_rows_beside if is_beside else self.prefill_rows) or self.prefill_chunk_size


class Scheduler:
    """Owns the block pools, the prefix cache, and the queue.

    Invariant: in a windowed group the quotas of the running sequences add up to at most the pool's
    capacity; in an unwindowed group a running sequence already holds all blocks it will need. So an
    allocation for a running sequence never fails.

    Attributes:
        groups: The KV groups.
        pools: One per group.
        prefix_cache: None where turned off.
        running: Admitted sequences, oldest first.
        waiting: Sequences not yet admitted, oldest first.
        num_prompt_tokens: Prompt tokens of all sequences admitted so far.
        num_cached_tokens: Of those, tokens taken from the prefix cache.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        *,
        enable_prefix_caching: bool,
    ):
        """Start with every block free.

        Args:
            limits: What bounds a step.
            groups: KV groups that have layers.
            num_blocks: Per group, the null block included.
            enable_prefix_caching: Keep the blocks of prompts for later sequences.
        """
        self.limits = limits
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        windows = [group.window for group in groups]
        self.prefix_cache = (
            PrefixCache(self.pools, windows, limits.prefill_chunk_size) if enable_prefix_caching else None
        )
        self.running: list[SequenceState] = []
        self.waiting: deque[SequenceState] = deque()
        self._windows = tuple(windows)
        self._num_reserved = [0] * len(self.pools)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._in_flight: dict[bytes, SequenceState] = {}

    def quotas(self, total_positions: int) -> tuple[int, ...]:
        """Return, per group, the most blocks a sequence of so many positions holds at once."""
        rows = self.limits.rows_per_step(total_positions)
        return tuple(
            quota_blocks(total_positions, rows, window, self.limits.kv_block_size) for window in self._windows
        )

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence that fits an empty engine."""
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Free everything a sequence holds, running or waiting; its cached prompt stays."""
        if sequence.is_admitted:
            self.running.remove(sequence)
            for table in sequence.tables:
                table.clear()
            for group, quota in enumerate(sequence.quotas):
                self._num_reserved[group] -= quota
            sequence.tables = ()
            for key in sequence.prefix_keys:
                self._land(key, sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> StepPlan:
        """Admit what fits, then plan one step; chunks are in order of admission."""
        if self.waiting:
            self._admit()
        plan = StepPlan(decode=[sequence for sequence in self.running if not sequence.is_prefilling])
        budget = self.limits.budget(is_beside=True)
        # A first token that is there does not wait for another's prompt, only for its own.
        extra = 0 if plan.decode else self.limits.budget(is_beside=False) - budget
        for sequence in self.running:
            start = sequence.num_computed
            while sequence.is_prefilling and start < sequence.num_prompt_tokens:
                chunk = self._next_chunk(sequence, start)
                is_first = not plan.prefill or plan.prefill[0].sequence is sequence
                if chunk.end - start > budget + (extra if is_first else 0):
                    break
                budget -= chunk.end - start
                plan.prefill.append(chunk)
                start = chunk.end
        return plan

    def prepare(self, sequence: SequenceState, num_rows: int) -> None:
        """Make the tables of a running sequence cover its next ``num_rows`` positions."""
        start = sequence.num_computed
        for table in sequence.tables:
            table.slide(start)
            table.extend(start + num_rows)

    def chunk_done(self, chunk: PrefillChunk) -> None:
        """Record that a chunk's KV, and the drafter's context, are written."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        if self.prefix_cache is not None and chunk.end % self.limits.prefill_chunk_size == 0:
            self.prefix_cache.insert(sequence.prefix_keys, chunk.end, sequence.tables)
            self._land(sequence.prefix_keys[chunk.end // self.limits.prefill_chunk_size - 1], sequence)

    def _next_chunk(self, sequence: SequenceState, start: int) -> PrefillChunk:
        size = self.limits.prefill_chunk_size
        return PrefillChunk(sequence, start, min((start // size + 1) * size, sequence.num_prompt_tokens))

    def _admit(self) -> None:
        """Admit from the front; only a sequence that waits for another's prefill lets later ones pass."""
        passed: list[SequenceState] = []
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            hit = self._lookup(sequence)
            if self._is_being_computed(sequence, hit):
                passed.append(self.waiting.popleft())
                continue
            if not self._try_admit(sequence, hit):
                break
            self.waiting.popleft()
        self.waiting.extendleft(reversed(passed))

    def _lookup(self, sequence: SequenceState) -> PrefixHit | None:
        if self.prefix_cache is None or sequence.needs_prompt_logits:
            return None
        return self.prefix_cache.lookup(sequence.prefix_keys, sequence.num_prompt_tokens)

    def _is_being_computed(self, sequence: SequenceState, hit: PrefixHit | None) -> bool:
        """True where a running sequence is computing the chunk that this one would start with."""
        if self.prefix_cache is None or sequence.needs_prompt_logits:
            return False
        size = self.limits.prefill_chunk_size
        next_chunk = hit.num_tokens // size if hit else 0
        usable = (sequence.num_prompt_tokens - 1) // size
        return next_chunk < usable and sequence.prefix_keys[next_chunk] in self._in_flight

    def _try_admit(self, sequence: SequenceState, hit: PrefixHit | None) -> bool:
        quotas = self.quotas(sequence.max_positions)
        for group, (pool, quota) in enumerate(zip(self.pools, quotas, strict=True)):
            if self._windows[group] is not None:
                if self._num_reserved[group] + quota > pool.capacity:
                    return False
                continue
            shared = hit.kept[group].blocks if hit else ()
            num_taken = quota - len(shared) + sum(not pool.is_referenced(block) for block in shared)
            if num_taken > pool.num_available:
                return False
        self._start(sequence, quotas, hit)
        return True

    def _start(self, sequence: SequenceState, quotas: tuple[int, ...], hit: PrefixHit | None) -> None:
        block_size = self.limits.kv_block_size
        sequence.quotas = quotas
        sequence.tables = tuple(
            BlockTable(pool, window, block_size)
            for pool, window in zip(self.pools, self._windows, strict=True)
        )
        # All shared blocks first: an allocation may evict the entries they come from.
        if hit is not None:
            for group, table in enumerate(sequence.tables):
                table.adopt(hit.kept[group].first_logical_block, hit.kept[group].blocks)
            sequence.num_computed = sequence.num_cached_tokens = hit.num_tokens
        for group, table in enumerate(sequence.tables):
            self._num_reserved[group] += quotas[group]
            if table.window is None:
                table.extend(sequence.max_positions)
        self.num_prompt_tokens += sequence.num_prompt_tokens
        self.num_cached_tokens += sequence.num_cached_tokens
        if self.prefix_cache is not None:
            for key in sequence.prefix_keys[sequence.num_computed // self.limits.prefill_chunk_size :]:
                self._in_flight.setdefault(key, sequence)
        self.running.append(sequence)

    def _land(self, key: bytes, sequence: SequenceState) -> None:
        if self._in_flight.get(key) is sequence:
            del self._in_flight[key]
