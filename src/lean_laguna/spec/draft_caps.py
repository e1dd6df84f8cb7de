"""How far to draft before confidence decides what is sent: by what steps would have brought with less.

A step that drafts far tells, by its chances of survival, what would have been sent and earned had it drafted
less; so all shorter caps are compared on the same steps. Longer ones are tried now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

from lean_laguna.spec.draft_schedule import StepCosts

_DECAY = 0.98
_TRY_CLOSE_AFTER, _TRY_ANY_AFTER, _CLOSE = 128, 1024, 0.95  # scheduled steps, and share of the best rate


class DraftCaps:
    """Compares draft lengths of scheduled steps, for one batch size and context length."""

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._num_steps = self._last_trial = 0

    def observe(
        self,
        caps: Sequence[int],
        num_made_tokens: int,
        survival: Sequence[Sequence[float]],
        costs: StepCosts,
        draft_s: Sequence[float],
    ) -> None:
        """Learn from one scheduled step.

        Args:
            caps: Draft lengths to compare, ascending.
            num_made_tokens: Longest draft made.
            survival: Per sequence, chances as far as drafts were made; missing ones would not have been sent.
            costs: Of the step.
            draft_s: Seconds of drafting 0, 1, 2, ... tokens.
        """
        self._num_steps += 1
        for cap in (cap for cap in caps if cap <= num_made_tokens):
            shorter = [chances[:cap] for chances in survival]
            sent = costs.best_length(shorter)
            tokens = sum(1 + sum(chances[:sent]) for chances in shorter)
            seconds = draft_s[cap] + costs.verify_s[sent]
            self._tokens[cap] = self._tokens.get(cap, 0.0) * _DECAY + tokens
            self._seconds[cap] = self._seconds.get(cap, 0.0) * _DECAY + seconds

    def choose(self, caps: Sequence[int], start: int) -> int:
        """Return the cap for the next step.

        Args:
            caps: As for ``observe``.
            start: What to start with where nothing is known.
        """
        known = [cap for cap in caps if cap in self._tokens]
        if not known:
            return next((cap for cap in caps if cap >= start), caps[-1])
        rates = {cap: self._tokens[cap] / max(1e-9, self._seconds[cap]) for cap in known}
        best = max(known, key=lambda cap: (rates[cap], -cap))
        longer = next((cap for cap in caps if cap > best), best)
        is_close = rates.get(longer, rates[best]) > _CLOSE * rates[best]
        after = _TRY_CLOSE_AFTER if is_close else _TRY_ANY_AFTER
        if longer in rates and self._num_steps - self._last_trial < after:
            return best
        self._last_trial = self._num_steps
        return longer


def full_lengths(row_tiles: Sequence[int], batch: int, max_draft_tokens: int) -> list[int]:
    """Return the draft lengths that leave no row of a step's tiles unused, and the longest.

    Args:
        row_tiles: Numbers of rows that products are made for, ascending; multiples of the last are, too.
        batch: Sequences.
        max_draft_tokens: Longest draft.
    """
    most = row_tiles[-1]
    found = {max_draft_tokens}
    for share in range(1, min(batch, most // 2) + 1):  # sequences that share a tile
        if share == batch or share == most // (most // share):
            found |= {tile // share - 1 for tile in row_tiles if share == batch or tile == most}
    return sorted(length for length in found if 1 <= length <= max_draft_tokens)
