"""How many of a step's drafts are worth verifying: chosen by the drafter's own confidence and measured times.

The length that brings most expected tokens a second is taken: (1 + sum of survival) / (drafting + verifying).
The target decides every token whatever is sent, so the choice may look at the drafts themselves.

Source: DSpark (arXiv 2607.05147), section 3.2, for one stream or one batch of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds of a step.

    Attributes:
        draft_s: Of drafting, which is spent when the choice is made.
        verify_s: Of the rest, for a longest draft of 0, 1, 2, ... tokens.
    """

    draft_s: float
    verify_s: Sequence[float]

    def best_length(self, survival: Sequence[Sequence[float]]) -> int:
        """Return the length at which to cut all drafts of a step, 0 for verifying none.

        Args:
            survival: Per sequence, the chance that draft 1, 2, ... and all before it are accepted.
        """
        longest = min(max((len(chances) for chances in survival), default=0), len(self.verify_s) - 1)
        expected = float(len(survival))
        best, best_rate = 0, expected / self._step_s(0)
        for length in range(1, longest + 1):
            expected += sum(chances[length - 1] for chances in survival if len(chances) >= length)
            rate = expected / self._step_s(length)
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def may_pay(self, survival: Sequence[Sequence[float]], length: int) -> bool:
        """Return whether drafts beyond ``length`` could still be worth it; later ones survive no better.

        Args:
            survival: Per sequence, its first ``length`` chances or fewer, where it wants no more.
            length: Drafts made so far.
        """
        going_on = sum(chances[length - 1] for chances in survival if len(chances) >= length)
        expected = len(survival) + sum(sum(chances[:length]) for chances in survival)
        best = max(
            (len(survival) + sum(sum(chances[:k]) for chances in survival)) / self._step_s(k)
            for k in range(length + 1)
        )
        return any(
            (expected + (more - length) * going_on) / self._step_s(more) > best
            for more in range(length + 1, len(self.verify_s))
        )

    def _step_s(self, length: int) -> float:
        return max(1e-9, self.draft_s + self.verify_s[length])


@dataclass
class DraftSchedule:
    """What is agreed between who times steps and who drafts, for one engine.

    Attributes:
        costs: Of the step at hand; None where drafts are sent as they are.
        cut: Per sequence drafted for in the last step, the chances of its drafts that were made and not sent,
            each given that all before it are accepted.
        num_cut_draft_tokens: Drafts made and not sent, in all.
    """

    costs: StepCosts | None = None
    cut: list[tuple[float, ...]] = field(default_factory=list)
    num_cut_draft_tokens: int = 0
