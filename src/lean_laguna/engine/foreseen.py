"""Drafts that need no drafter: what a grammar, or a spent thinking budget, leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence

from lean_laguna.engine.scheduler import SchedulerLimits
from lean_laguna.engine.sequence import SequenceState

MOST_WITHOUT_DRAFTER = 15


def with_foreseen(
    drafts: Sequence[list[int]], sequences: Sequence[SequenceState], limits: SchedulerLimits
) -> list[list[int]]:
    """Return drafts, those that go against what a sequence's constraints foresee replaced by that.

    Args:
        drafts: The drafter's, per sequence; empty without one.
        sequences: Decoding; one whose request turned speculation off is left alone.
        limits: Bound the rows of a step.
    """
    most = limits.max_draft_tokens or min(MOST_WITHOUT_DRAFTER, limits.prefill_chunk_size - 1)
    return [_foreseen(draft, sequence, most) for draft, sequence in zip(drafts, sequences, strict=True)]


def _foreseen(draft: list[int], sequence: SequenceState, most: int) -> list[int]:
    if not sequence.sampling.constraints or sequence.request.num_speculative_tokens == 0:
        return draft
    foreseen = sequence.sampling.forced_tokens(min(most, sequence.completion.num_remaining - 1))
    return draft if draft[: len(foreseen)] == foreseen else foreseen
