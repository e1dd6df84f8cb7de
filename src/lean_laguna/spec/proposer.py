"""Who proposes draft tokens, and the DFlash drafter as one that does.

A proposal can only cost time: the target decides every token. So nothing here needs to be exact, and a
request that cannot be drafted for just gets fewer drafts or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.forward_batch import ForwardBatch, SequenceSpan
from lean_laguna.models.kv_cache import KVCache, KVGroup
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.request import SamplingRequest
from lean_laguna.spec.sampling import sample_drafts


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence to draft for; its last committed token is the anchor.

    Attributes:
        request: The sequence, with at least one output token committed.
        num_draft_tokens: Drafts wanted, at least 0.
        block_tables: Per KV group of the cache, the drafter's groups among them.
    """

    request: SamplingRequest
    num_draft_tokens: int
    block_tables: tuple[tuple[int, ...], ...] = ()

    @property
    def anchor_position(self) -> int:
        """Absolute position of the anchor."""
        return self.request.next_position - 1


class Proposer(Protocol):
    """What the engine asks of a drafter."""

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft it can make."""
        ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose raw residual output it wants; empty for none."""
        ...

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Return the KV groups of its context, which follow the target's in the cache; empty for none."""
        ...

    def append_context(self, aux_hidden_states: Tensor, batch: ForwardBatch, kv_cache: KVCache) -> None:
        """Take in what the target computed: prompt chunks, and verified rows.

        Args:
            aux_hidden_states: [T, m, D] residuals of ``target_layer_ids``.
            batch: Which rows these are; rows of rejected drafts may be among them.
            kv_cache: Holds its groups; written in place.
        """
        ...

    def propose(
        self, requests: Sequence[DraftRequest], kv_cache: KVCache, noise: NoiseCache
    ) -> list[list[int]]:
        """Draft for each request.

        Args:
            requests: At least one; each one's context is written up to the position before its anchor.
            kv_cache: Holds its groups; not changed.
            noise: Shared with the verifier.

        Returns:
            Per request, at most ``num_draft_tokens`` tokens.
        """
        ...


class TargetEnds(Protocol):
    """The two ends of the target that a drafter borrows."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed ids [T] to [T, D]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, D] into logits [R, V] float32."""
        ...


class DFlashProposer:
    """Proposes with a DFlash drafter: one pass for all requests, whatever their draft lengths.

    Drafting stops at the drafter's position limit; serving does not.
    """

    def __init__(self, drafter: DFlashDrafter, target: TargetEnds):
        """Pair a drafter with the target whose embedding and lm_head it borrows."""
        self.drafter = drafter
        self.target = target

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft: the drafter's block without the anchor."""
        return self.drafter.config.max_draft_tokens

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """0-based target layers, in the drafter's order."""
        return self.drafter.config.target_layer_ids

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Return the drafter's context groups."""
        return self.drafter.kv_groups()

    def append_context(self, aux_hidden_states: Tensor, batch: ForwardBatch, kv_cache: KVCache) -> None:
        """Write the context of the rows within the drafter's positions; see `Proposer.append_context`."""
        within = _rows_before(batch, self.drafter.config.max_position_embeddings)
        if within is not None:
            rows, batch = within
            aux_hidden_states = aux_hidden_states[rows]
        if batch.spans:
            with torch.no_grad():
                self.drafter.append_context(aux_hidden_states, batch, kv_cache)

    def propose(
        self, requests: Sequence[DraftRequest], kv_cache: KVCache, noise: NoiseCache
    ) -> list[list[int]]:
        """Draft for each request in one pass; see `Proposer.propose`."""
        lengths = [self._length(request) for request in requests]
        drafted = [(request, n) for request, n in zip(requests, lengths, strict=True) if n]
        if not drafted:
            return [[] for _ in requests]
        batch = self._block_batch(drafted, kv_cache.kv_block_size)
        with torch.no_grad():
            hidden = self.drafter.propose(batch, kv_cache, self.target.embed)
            logits = self.drafter.compute_logits(hidden[self._slots(batch)], self.target.compute_logits)
        drafts = iter(sample_drafts(logits, [r.request for r, _ in drafted], [n for _, n in drafted], noise))
        return [next(drafts) if n else [] for n in lengths]

    def _length(self, request: DraftRequest) -> int:
        room = self.drafter.config.max_position_embeddings - 1 - request.anchor_position
        return max(0, min(request.num_draft_tokens, self.max_draft_tokens, room))

    def _slots(self, batch: ForwardBatch) -> list[int] | slice:
        """Return the rows that predict, block by block."""
        first = self.drafter.config.first_slot
        if len(batch.spans) == 1:
            return slice(first, None)  # a view, where a list would copy
        return [span.start + row for span in batch.spans for row in range(first, span.num_rows)]

    def _block_batch(self, drafted: Sequence[tuple[DraftRequest, int]], kv_block_size: int) -> ForwardBatch:
        """Lay out the blocks [anchor, MASK, ...] one after the other."""
        mask = self.drafter.config.mask_token_id
        shift = self.drafter.config.first_slot
        ids: list[int] = []
        positions: list[range] = []
        spans: list[SequenceSpan] = []
        for request, num_drafts in drafted:
            first = request.anchor_position
            num_rows = num_drafts + shift
            spans.append(SequenceSpan(len(ids), num_rows, first, request.block_tables))
            positions.append(range(first, first + num_rows))
            ids += [request.request.output_token_ids[-1], *[mask] * (num_rows - 1)]
        device = self.drafter.fc.weight.device
        return ForwardBatch(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            positions=torch.tensor(list(chain(*positions)), dtype=torch.int64, device=device),
            spans=tuple(spans),
            kv_block_size=kv_block_size,
        )


def _rows_before(batch: ForwardBatch, limit: int) -> tuple[list[int], ForwardBatch] | None:
    """Return the rows at positions below ``limit`` and a batch of those alone; None where that is all."""
    if all(span.first_position + span.num_rows <= limit for span in batch.spans):
        return None
    rows: list[int] = []
    spans: list[SequenceSpan] = []
    for span in batch.spans:
        num_rows = min(span.num_rows, limit - span.first_position)
        if num_rows > 0:
            spans.append(SequenceSpan(len(rows), num_rows, span.first_position, span.block_tables))
            rows.extend(range(span.start, span.start + num_rows))
    kept = ForwardBatch(batch.input_ids[rows], batch.positions[rows], tuple(spans), batch.kv_block_size)
    return rows, kept
