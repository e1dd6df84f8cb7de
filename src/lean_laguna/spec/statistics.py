"""Counting drafts and acceptance, with vLLM's definitions.

One draft is one request in one step that carried draft tokens. Accepted tokens are the verifier's verdict:
drafts that were right but fell behind an end-of-sequence, a stop or the length limit count as accepted,
though they are never emitted. The bonus token is in no count.

Source: vLLM ``v1/spec_decode/metrics.py``.
"""

from __future__ import annotations

from lean_laguna.core.types import SpeculationStats


class SpeculationCounter:
    """Counts of one completion; sums over many are sums of `SpeculationStats`. Owned by the engine."""

    def __init__(self, *, keeps_steps: bool = False) -> None:
        """Start at nothing.

        Args:
            keeps_steps: Also remember each step with drafts, which grows with the output.
        """
        self._steps: list[tuple[int, int]] | None = [] if keeps_steps else None
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_steps = 0
        self._accepted_at: list[int] = []
        self._num_cut_draft_tokens = 0

    def record_cut(self, num_draft_tokens: int) -> None:
        """Count drafts that were made and not sent to verification."""
        self._num_cut_draft_tokens += num_draft_tokens

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one decode step.

        Args:
            num_draft_tokens: Drafts sent to verification; 0 counts as a step without a draft.
            num_accepted_tokens: Of those, accepted from the first on.
        """
        assert 0 <= num_accepted_tokens <= num_draft_tokens
        self._num_steps += 1
        if not num_draft_tokens:
            return
        if self._steps is not None:
            self._steps.append((num_draft_tokens, num_accepted_tokens))
        self._num_drafts += 1
        self._num_draft_tokens += num_draft_tokens
        self._accepted_at += [0] * (num_draft_tokens - len(self._accepted_at))
        for position in range(num_accepted_tokens):
            self._accepted_at[position] += 1

    def stats(self) -> SpeculationStats:
        """Return the counts so far."""
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._accepted_at),
            num_accepted_tokens_per_pos=tuple(self._accepted_at),
            num_steps=self._num_steps,
            num_cut_draft_tokens=self._num_cut_draft_tokens,
            per_step=tuple(self._steps or ()),
        )
