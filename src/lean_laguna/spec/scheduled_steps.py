"""Steps whose drafts are sent as far as confidence and costs say: what they go by, and what they earn.

For one batch size and context length. A scheduled step's chances tell what sending all drafts of the best
fixed length would have earned in its place; both are summed over the same steps, so chance hardly disturbs
their ratio. Steps are scheduled once that is seen to gain, beyond chance, and while it does. Else all drafts
are sent and nothing is planned, and the chances of a few steps now and then are looked at, less and less
often, where they do not come by themselves. A drafter that claims more than comes true is not believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from lean_laguna.spec.draft_caps import DraftCaps, full_lengths
from lean_laguna.spec.draft_costs import StepTimes
from lean_laguna.spec.draft_schedule import DraftSchedule, StepCosts

_DECAY = 0.98
_ON_ABOVE, _OFF_BELOW = 1.02, 1.005  # gain over the best fixed length
_SURE = 1.0  # standard errors by which the gain must stand out to be believed
_KNOWN_AFTER, _HOPELESS_AFTER, _HOPELESS = 8, 4, 0.9  # steps seen before the gain counts; or so little gain
_LOOKS_FROM, _FIRST_LOOKS = 16, 16  # steps before the first look, and looks in a row at first
_LOOKS = 4  # looks in a row later
_LOOK_AFTER = 32, 512  # steps from looks to the next: at first, and at most, doubled by each failure
_KEPT_OF_OLD = 0.2  # weight that what was seen keeps where something else begins
_PLAN_LASTS = 8, 32  # steps, at first and later; working it out costs as much as some kernels
_SETTLED_AFTER = 64  # steps whose chances were seen
_LONGEST = 3.0  # times the usual, that a draft counts for at most: a machine may stall
_SCATTER = 2.0  # variance of the tokens that come, of as many expected
_CLAIM_DECAY, _TRUSTED_TOKENS = 0.995, 100.0  # tokens that have come true as claimed before any did
_LEAST_S = 1e-9


@dataclass(frozen=True)
class _Plan:
    """What steps go by, until step ``until``."""

    costs: StepCosts
    caps: list[int]
    draft_s: list[float]
    cap: int
    until: int
    made_for: tuple[int, int]


class ScheduledSteps:
    """Plans and accounts for scheduled steps; owned by the draft-length controller.

    Attributes:
        is_on: Steps are scheduled.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._caps = DraftCaps()
        self._plan: _Plan | None = None
        self._asked = (0, 0, 0.0, 0)  # batch, best fixed length, tokens per second, longest draft
        self._num_chosen = self._num_seen = 0
        self._looks_left, self._next_look, self._look_after = _FIRST_LOOKS, _LOOKS_FROM, _LOOK_AFTER[0]
        self._weight = self._tokens = self._seconds = self._fixed_tokens = self._fixed_seconds = 0.0
        self._won = self._won_squared = 0.0
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
        if self._plan is not None and self._plan.made_for != (batch, length):
            self.start_anew()
        schedule.wants_chances = self.is_on or schedule.is_always_told or self._looks()
        self._asked = (batch, length, tokens_per_s, max_draft_tokens)
        if not self.is_on:
            return length
        plan = self._current_plan(schedule, times)
        schedule.costs = plan.costs
        return plan.cap

    def _current_plan(self, schedule: DraftSchedule, times: StepTimes) -> _Plan:
        """Return the plan for the step last chosen for: the last one while it lasts."""
        plan = self._plan
        if plan is None or self._num_chosen >= plan.until:
            batch, length, tokens_per_s, max_draft_tokens = self._asked
            estimates = [times.estimate(k) for k in range(max_draft_tokens + 1)]
            caps = full_lengths(schedule.row_tiles, batch, max_draft_tokens)
            cap = next((cap for cap in caps if cap >= length), length)
            plan = self._plan = _Plan(
                StepCosts([verify_s for _, verify_s in estimates], batch * tokens_per_s),
                caps,
                [draft_s for draft_s, _ in estimates],
                self._caps.choose(caps, length) if schedule.compares_caps else cap,
                self._num_chosen + _PLAN_LASTS[self._num_seen >= _SETTLED_AFTER],
                (batch, length),
            )
        return plan

    def start_anew(self) -> None:
        """Keep little of what was seen, and look soon: the text or the best fixed length is another."""
        self._plan = None
        self._fade(_KEPT_OF_OLD)
        self._next_look = max(_LOOKS_FROM, min(self._next_look, self._num_chosen + _LOOK_AFTER[0]))
        self._look_after = _LOOK_AFTER[0]

    def _looks(self) -> bool:
        """Say whether this step, while off, is one to see by what scheduling would gain."""
        if self._num_chosen < self._next_look:
            return False
        if self._looks_left:
            self._looks_left -= 1
            return True
        self._looks_left, self._next_look = _LOOKS, self._num_chosen + self._look_after
        self._look_after = min(_LOOK_AFTER[1], 2 * self._look_after)
        return False

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
        plan = self._current_plan(schedule, times)  # not before: most steps teach nothing while this is off
        claims = (sum(own[:num]) for own, (num, _) in zip(schedule.survival, accepted, strict=True))
        self._claimed = self._claimed * _CLAIM_DECAY + sum(claims)
        self._came = self._came * _CLAIM_DECAY + sum(count for _, count in accepted)
        if made is None:
            made, sent = sent, plan.costs.best_length(schedule.survival)
        usual_s, verify_s = times.estimate(made)[0], times.estimate(sent)[1]
        draft_s = min(draft_s, _LONGEST * usual_s) if usual_s > 0 else draft_s
        num = len(accepted)
        tokens = num + sum(sum(own[:sent]) for own in schedule.survival)
        fixed_tokens = num + sum(_reaching(own, fixed) for own in schedule.survival)
        self._add(tokens, draft_s + verify_s, fixed_tokens, sum(times.estimate(fixed)))
        if schedule.compares_caps:
            self._caps.observe(plan.caps, made, schedule.survival, plan.costs, plan.draft_s)
        self._decide()

    def _add(self, tokens: float, seconds: float, fixed_tokens: float, fixed_seconds: float) -> None:
        self._num_seen += 1
        self._fade(_DECAY)
        self._weight += 1.0
        self._tokens += tokens
        self._seconds += seconds
        self._fixed_tokens += fixed_tokens
        self._fixed_seconds += fixed_seconds
        rate = self._fixed_tokens / max(_LEAST_S, self._fixed_seconds)
        won = tokens - fixed_tokens - rate * (seconds - fixed_seconds)
        self._won += won
        self._won_squared += won * won

    def _fade(self, share: float) -> None:
        self._weight *= share
        self._tokens *= share
        self._seconds *= share
        self._fixed_tokens *= share
        self._fixed_seconds *= share
        self._won *= share
        self._won_squared *= share

    @property
    def _error(self) -> float:
        """How far off the gain may be by the chance of which steps were seen."""
        variance = max(0.0, self._won_squared - self._won**2 / self._weight)
        return sqrt(variance) / max(_LEAST_S, self._fixed_tokens)

    def _decide(self) -> None:
        """Turn scheduling on or off once enough was seen."""
        if self._num_seen < _KNOWN_AFTER and (self._num_seen < _HOPELESS_AFTER or self._gain >= _HOPELESS):
            return
        was_on = self.is_on
        self.is_on = self._gain > (_OFF_BELOW if was_on else _ON_ABOVE + _SURE * self._error)
        if was_on and not self.is_on:
            self._looks_left, self._look_after = 0, _LOOK_AFTER[0]
            self._next_look = self._num_chosen + self._look_after


def _reaching(survival: Sequence[float], length: int) -> float:
    """Return the drafts expected to stand of so many; those not made survive like the last that was."""
    known = sum(survival[:length])
    if not survival or len(survival) >= length:
        return known
    before = survival[-2] if len(survival) > 1 else 1.0
    going_on, reached = survival[-1] / max(_LEAST_S, before), survival[-1]
    for _ in range(length - len(survival)):
        reached *= going_on
        known += reached
    return known
