"""How many of a step's drafts are worth verifying: chosen by the drafter's own confidence and measured times.

A second of verification costs the tokens that decoding earns in a second; the length whose expected tokens
exceed that cost by most is taken. That is what maximises tokens over time in the long run; the best rate of
each step by itself is not: it sends too much where a step goes badly and too little where it goes well.
The target decides every token whatever is sent, so the choice may look at the drafts themselves.

Source: DSpark (arXiv 2607.05147), section 3.2; Dinkelbach, "On Nonlinear Fractional Programming", 1967.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

ROW_TILES = (2, 4, 8, 12, 16)
"""Rows of a CPU's products; see ``kernels.linear``."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What verification takes, and what time is worth.

    Attributes:
        verify_s: Measured seconds for a longest draft of 0, 1, 2, ... tokens.
        tokens_per_s: Tokens that all sequences of a step together earn in a second.
    """

    verify_s: Sequence[float]
    tokens_per_s: float

    def best_length(self, survival: Sequence[Sequence[float]]) -> int:
        """Return the length at which to cut all drafts of a step, 0 for verifying none.

        Args:
            survival: Per sequence, the chance that draft 1, 2, ... and all before it are accepted.
        """
        longest = min(max((len(chances) for chances in survival), default=0), len(self.verify_s) - 1)
        expected = 0.0
        best, best_value = 0, -self._price(0)
        for length in range(1, longest + 1):
            expected += sum(chances[length - 1] for chances in survival if len(chances) >= length)
            value = expected - self._price(length)
            if value > best_value:
                best, best_value = length, value
        return best

    def may_pay(self, survival: Sequence[Sequence[float]], length: int) -> bool:
        """Return whether drafts beyond ``length`` could still be worth it; later ones survive no better.

        Args:
            survival: Per sequence, its first ``length`` chances or fewer, where it wants no more.
            length: Drafts made so far.
        """
        going_on = sum(chances[length - 1] for chances in survival if len(chances) >= length)
        expected = [sum(sum(chances[:k]) for chances in survival) for k in range(length + 1)]
        best = max(tokens - self._price(k) for k, tokens in enumerate(expected))
        return any(
            expected[length] + (more - length) * going_on - self._price(more) > best
            for more in range(length + 1, len(self.verify_s))
        )

    def _price(self, length: int) -> float:
        """Return the tokens that verifying so many drafts costs."""
        return self.tokens_per_s * self.verify_s[length]


@dataclass
class DraftSchedule:
    """What is agreed between who times steps and who drafts, for one engine.

    Attributes:
        row_tiles: Numbers of rows that steps are made for: more rows up to the next cost a drafter little.
        compares_caps: Find out how far to draft; else as far as the rows of the tile go.
        is_always_told: Chances are known of all drafts, also of those that are sent as they are.
        wants_chances: Somebody wants to know them of the step at hand.
        costs: Of the step at hand; None where drafts are sent as they are.
        survival: Per sequence drafted for in the last step, chances of its drafts as far as known.
        cut: Per sequence drafted for in the last step, the chances of its drafts that were made and not sent,
            each given that all before it are accepted.
        num_cut_draft_tokens: Drafts made and not sent, in all.
    """

    row_tiles: Sequence[int] = ROW_TILES
    compares_caps: bool = True
    is_always_told: bool = False
    wants_chances: bool = False
    costs: StepCosts | None = None
    survival: list[list[float]] = field(default_factory=list)
    cut: list[tuple[float, ...]] = field(default_factory=list)
    num_cut_draft_tokens: int = 0

    def note(self, num_sent: Sequence[int], chances: Sequence[Sequence[float] | None]) -> None:
        """Take what a step made and sent, where another chose for itself.

        Args:
            num_sent: Per sequence, the drafts sent.
            chances: Per sequence, of its drafts, each given that those before it are accepted; None where not
                known.
        """
        known = [() if own is None else tuple(own) for own in chances]
        self.cut = [own[num:] for own, num in zip(known, num_sent, strict=True)]
        self.survival = [list(accumulate(own, operator.mul)) for own in known] if all(known) else []
        self.num_cut_draft_tokens += sum(len(own) for own in self.cut)
