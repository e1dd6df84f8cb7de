"""Steps whose drafts are sent as far as confidence and costs say: what they go by, and what they earn.

For one batch size and context length. A step's chances tell what sending all drafts of the best fixed length
would have earned in its place, or what scheduling would have earned, where all were sent; both are summed
over the same steps, so chance hardly disturbs their ratio. Steps are scheduled while that is seen to gain.
A drafter that claims more than comes true is not believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from lean_laguna.spec.draft_costs import StepTimes
from lean_laguna.spec.draft_schedule import DraftSchedule, StepCosts

_DECAY = 0.98
_ON_ABOVE, _OFF_BELOW = 1.0, 0.95  # gain over the best fixed length: chance moves it by some percent
_KNOWN_AFTER = 8  # steps seen before the gain counts
_KEPT_OF_OLD = 0.2  # weight that what was seen keeps where something else begins
_PLAN_LASTS = (
    8,
    512,
)  # choices, at first, doubled by each, and at most: working it out costs as much as kernels
_PLAN_HOLDS = 0.1  # as far as what time is worth may be another
_LONGEST = 3.0  # times the usual, that a draft counts for at most: a machine may stall
_CAUTION = 0.85  # of what time is worth, by which drafts are cut: what is not sent has to be drafted again
_SCATTER = 2.0  # variance of the tokens that come, of as many expected
_CLAIM_DECAY, _TRUSTED_TOKENS = 0.995, 100.0  # tokens that have come true as claimed before any did
_LEAST_S = 1e-9


@dataclass(frozen=True)
class _Plan:
    """What steps go by, until step ``until``."""

    costs: StepCosts
    draft_s: list[float]
    cap: int
    stops_early: bool
    lasts: int
    until: int
    made_for: tuple[int, int, float]

    def expected_draft_s(self, survival: Sequence[Sequence[float]], cap: int) -> float:
        """Return what drafting takes where so many drafts are asked for."""
        return self.draft_s[self.costs.num_made(survival, cap) if self.stops_early else cap]


class ScheduledSteps:
    """Plans and accounts for scheduled steps; owned by the draft-length controller.

    Attributes:
        is_on: Steps are scheduled.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._plan: _Plan | None = None
        self._asked = (0, 0, 0.0, 0)  # batch, best fixed length, tokens per second, longest draft
        self._num_chosen = self._num_seen = 0
        self._drafting = self._usual_drafting = _LEAST_S  # seconds of scheduled steps, and what was expected
        self._tokens = self._seconds = self._fixed_tokens = self._fixed_seconds = 0.0
        self._claimed = self._came = _TRUSTED_TOKENS

    @property
    def gain(self) -> float:
        """Tokens per second over those of the best fixed length; 1 while steps are not scheduled."""
        return max(1.0, self._gain) if self.is_on else 1.0

    @property
    def _gain(self) -> float:
        if not self._num_seen:
            return 1.0
        ratio = self._tokens * self._fixed_seconds / max(_LEAST_S, self._fixed_tokens * self._seconds)
        # What came may by chance be less than what was claimed.
        return ratio * min(1.0, (self._came + sqrt(_SCATTER * self._came)) / self._claimed)

    def choose(
        self,
        schedule: DraftSchedule,
        times: StepTimes,
        batch: int,
        length: int,
        tokens_per_s: float,
        max_draft_tokens: int,
    ) -> int:
        """Put a step's costs into the schedule, or None where it is not to be scheduled.

        Args:
            schedule: Shared with the drafter.
            times: Of steps, by draft length.
            batch: Sequences.
            length: The best fixed length.
            tokens_per_s: Expected of one sequence of steps like these.
            max_draft_tokens: Longest draft.

        Returns:
            How far to draft.
        """
        schedule.costs = None
        self._num_chosen += 1
        if self._asked[:2] not in ((0, 0), (batch, length)):
            self.start_anew()
        self._asked = (batch, length, tokens_per_s, max_draft_tokens)
        if not self.is_on:
            return length
        plan = self._current_plan(schedule, times)
        schedule.costs = plan.costs
        return plan.cap

    def _current_plan(self, schedule: DraftSchedule, times: StepTimes) -> _Plan:
        """Return the plan for the step last chosen for: the last one while it lasts."""
        plan, (batch, length, tokens_per_s, longest) = self._plan, self._asked
        if self._num_seen >= _KNOWN_AFTER:
            tokens_per_s = self._tokens / max(_LEAST_S, self._seconds * batch)
        if plan is None or plan.made_for[:2] != (batch, length):
            lasts = _PLAN_LASTS[0]
        elif self._num_chosen < plan.until and abs(tokens_per_s / plan.made_for[2] - 1.0) < _PLAN_HOLDS:
            return plan
        else:
            lasts = min(_PLAN_LASTS[1], 2 * plan.lasts)
        estimates = times.ascending(longest)
        caps = full_lengths(schedule.row_tiles, batch, longest)
        cap = next((cap for cap in caps if cap >= length), length)
        worth = _CAUTION * tokens_per_s
        least = 0.0
        if schedule.stops_early and cap > 1:
            least = worth * (sum(estimates[cap]) - sum(estimates[1])) / (cap - 1)
        self._plan = _Plan(
            StepCosts([verify_s for _, verify_s in estimates], batch * worth, min(1.0, least)),
            [draft_s for draft_s, _ in estimates],
            cap,
            schedule.stops_early,
            lasts,
            self._num_chosen + lasts,
            (batch, length, max(_LEAST_S, tokens_per_s)),
        )
        return self._plan

    def start_anew(self) -> None:
        """Keep little of what was seen: the text or the best fixed length is another."""
        self._fade(_KEPT_OF_OLD)

    def observe(
        self,
        schedule: DraftSchedule,
        times: StepTimes,
        lengths: tuple[int, int | None, int],
        draft_s: float,
        accepted: Sequence[tuple[int, int]],
    ) -> None:
        """Account for a step whose chances are known: as it was, or as it would have been scheduled.

        Args:
            schedule: As the drafter left it.
            times: Of steps, by draft length.
            lengths: Longest draft sent, and made, None where it was not scheduled; and the best fixed length.
            draft_s: Seconds that drafting took.
            accepted: Per sequence, drafts sent, and accepted.
        """
        sent, made, fixed = lengths
        if not self._asked[0] or len(schedule.survival) != len(accepted) or not all(schedule.survival):
            return
        plan = self._current_plan(schedule, times)
        claims = (sum(own[:num]) for own, (num, _) in zip(schedule.survival, accepted, strict=True))
        self._claimed = self._claimed * _CLAIM_DECAY + sum(claims)
        self._came = self._came * _CLAIM_DECAY + sum(count for _, count in accepted)
        costs, survival = plan.costs.verify_s, schedule.survival
        if made is None:  # as it would have been
            survival = [_extended(own, plan.cap) for own in survival]
            sent, draft_s = plan.costs.best_length(survival), plan.expected_draft_s(survival, plan.cap)
            draft_s *= self._drafting / self._usual_drafting
        else:
            usual_s = plan.expected_draft_s(survival, made)
            draft_s = min(draft_s, _LONGEST * usual_s) if usual_s > 0 else draft_s
            self._drafting = _DECAY * self._drafting + draft_s
            self._usual_drafting = _DECAY * self._usual_drafting + usual_s
        num = len(accepted)
        tokens = num + sum(sum(own[:sent]) for own in survival)
        fixed_tokens = num + sum(_reaching(own, fixed) for own in schedule.survival)
        self._add(tokens, draft_s + costs[sent], fixed_tokens, plan.draft_s[fixed] + costs[fixed])

    def _add(self, tokens: float, seconds: float, fixed_tokens: float, fixed_seconds: float) -> None:
        self._num_seen += 1
        self._fade(_DECAY)
        self._tokens += tokens
        self._seconds += seconds
        self._fixed_tokens += fixed_tokens
        self._fixed_seconds += fixed_seconds
        if self._num_seen >= _KNOWN_AFTER:
            self.is_on = self._gain > (_OFF_BELOW if self.is_on else _ON_ABOVE)

    def _fade(self, share: float) -> None:
        self._tokens *= share
        self._seconds *= share
        self._fixed_tokens *= share
        self._fixed_seconds *= share


def _reaching(survival: Sequence[float], length: int) -> float:
    """Return the drafts expected to stand of so many."""
    return sum(survival[:length] if len(survival) >= length else _extended(survival, length))


def _extended(survival: Sequence[float], length: int) -> list[float]:
    """Return the chances of so many drafts; those not made survive like the last that was."""
    found = list(survival)
    if found and len(found) < length:
        going_on = found[-1] / max(_LEAST_S, found[-2] if len(found) > 1 else 1.0)
        for _ in range(length - len(found)):
            found.append(found[-1] * going_on)
    return found


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
