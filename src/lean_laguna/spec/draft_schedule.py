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
from functools import cached_property
from itertools import accumulate

ROW_TILES = (2, 4, 8, 12, 16)
"""Rows of a CPU's products; see ``kernels.linear``."""


@dataclass(frozen=True)
class StepCosts:
    """What verification takes, and what time is worth.

    Attributes:
        verify_s: Measured seconds for a longest draft of 0, 1, 2, ... tokens.
        tokens_per_s: Tokens that all sequences of a step together earn in a second.
        least: Chance, as far as the draft before tells, below which a sequence's next draft is not made; 0
            where that saves nothing.
    """

    verify_s: Sequence[float]
    tokens_per_s: float
    least: float = 0.0

    @cached_property
    def prices(self) -> list[float]:
        """The tokens that verifying so many drafts costs."""
        return [self.tokens_per_s * seconds for seconds in self.verify_s]

    def best_length(self, survival: Sequence[Sequence[float]]) -> int:
        """Return the length at which to cut all drafts of a step, 0 for verifying none.

        Args:
            survival: Per sequence, the chance that draft 1, 2, ... and all before it are accepted.
        """
        worth = StepWorth(self)
        for length in range(max((len(chances) for chances in survival), default=0)):
            worth.add(sum(chances[length] for chances in survival if len(chances) > length))
        return worth.best

    def num_made(self, survival: Sequence[Sequence[float]], most: int) -> int:
        """Return the drafts that are made of the sequence that gets furthest, of as many as are given.

        Args:
            survival: As for ``best_length``.
            most: What is asked for.
        """
        return max((self._num_made(chances, most) for chances in survival), default=0)

    def _num_made(self, chances: Sequence[float], most: int) -> int:
        before, reached = 1.0, 1.0
        for made, chance in enumerate(chances[:most]):
            # The next one goes on as likely as the last did.
            if made and reached * reached < self.least * before:
                return made
            before, reached = reached, chance
        return min(most, len(chances))


class StepWorth:
    """What sending the drafts of a step is worth as they are made, beside the time that it takes.

    Attributes:
        best: The length that exceeds its price by most, of those so far.
    """

    def __init__(self, costs: StepCosts):
        self.best = 0
        self._prices = costs.prices
        self._best_value = -self._prices[0]
        self._length, self._expected, self._last = 0, 0.0, 0.0

    def add(self, reaching: float) -> None:
        """Take the next draft of all sequences: the sum of their chances of survival."""
        self._length, self._last = self._length + 1, reaching
        self._expected += reaching
        if self._length < len(self._prices):
            value = self._expected - self._prices[self._length]
            if value > self._best_value:
                self.best, self._best_value = self._length, value

    @property
    def may_grow(self) -> bool:
        """Whether more drafts could still be worth it; later ones survive no better than the last."""
        expected, last = self._expected, self._last
        for price in self._prices[self._length + 1 :]:
            expected += last
            if expected - price > self._best_value:
                return True
        return False


@dataclass
class DraftSchedule:
    """What is agreed between who times steps and who drafts, for one engine.

    Attributes:
        row_tiles: Numbers of rows that steps are made for: drafting up to the next costs little more.
        stops_early: A draft that is not made saves its time.
        wants_chances: Somebody learns from the chances of the step at hand.
        costs: Of the step at hand; None where drafts are sent as they are.
        survival: Per sequence drafted for in the last step, chances of its drafts as far as known.
        cut: Per sequence drafted for in the last step, the chances of its drafts that were made and not sent,
            each given that all before it are accepted.
        num_cut_draft_tokens: Drafts made and not sent, in all.
    """

    row_tiles: Sequence[int] = ROW_TILES
    stops_early: bool = False
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
