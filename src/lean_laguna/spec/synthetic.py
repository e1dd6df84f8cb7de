"""Synthetic acceptance: drafts stand by a draw at given rates, whatever the target says; for timing only.

What comes out is not the model's output. The meaning is vLLM's ``rejection_sample_method: synthetic``: entry
i of the rates is the probability that the first i + 1 drafts all stand, so rates do not increase. The draw is
a function of the request's seed and the anchor's position, the same here and in ``kernels.triton.accept``.

Source: vLLM ``config/speculative.py`` (synthetic_acceptance_rates, synthetic_acceptance_length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lean_laguna.spec.acceptance import Acceptance
from lean_laguna.spec.noise import UInt64Array, philox4x32

STREAM = 1
"""Third word of the counter; noise for sampling has 0 there."""
MAX_THRESHOLD = 1 << 32


@dataclass(frozen=True)
class SyntheticAcceptance:
    """Rates to accept at.

    Attributes:
        rate_sets: Of which each block draws one. Entry i of a set is the probability that drafts 0 to i all
            stand; drafts beyond the last never do.
    """

    rate_sets: tuple[tuple[float, ...], ...]

    def thresholds(self, num_entries: int) -> list[list[int]]:
        """Return, by set, what a 32-bit draw must lie below for each draft to stand, 0 beyond the rates."""
        known = [[round(rate * MAX_THRESHOLD) for rate in rates[:num_entries]] for rates in self.rate_sets]
        return [own + [0] * (num_entries - len(own)) for own in known]

    def accept(
        self, draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int], seed: int, position: int
    ) -> Acceptance:
        """Return a verdict on one block; accepted drafts go out as they are.

        Args:
            draft_token_ids: G drafts.
            sampled_token_ids: The target's tokens at the G drafted positions and the one after.
            seed: Of the request.
            position: Absolute position of the anchor.
        """
        draw, which = draw_words(seed, position)
        thresholds = self.thresholds(len(draft_token_ids))[which * len(self.rate_sets) >> 32]
        count = sum(draw < threshold for threshold in thresholds)
        return Acceptance(count, [*draft_token_ids[:count], sampled_token_ids[count]])


def draw_words(seed: int, position: int) -> tuple[int, int]:
    """Return the 32-bit words that decide on the block anchored at ``position``, and draw its set."""

    def words(*values: int) -> list[UInt64Array]:
        return [np.array([value], dtype=np.uint64) for value in values]

    drawn = philox4x32(words(position, 0, STREAM, 0), words(seed & 0xFFFFFFFF, seed >> 32))
    return int(drawn[0][0]), int(drawn[1][0])
