"""Steps whose drafts are sent as far as confidence and costs say: what they go by, and what they have earned.

For one batch size and context length. Where they earn less than the best fixed length would, they stop for a
time.
"""

from __future__ import annotations

from dataclasses import dataclass

from lean_laguna.spec.draft_caps import DraftCaps, full_lengths
from lean_laguna.spec.draft_costs import StepTimes
from lean_laguna.spec.draft_schedule import DraftSchedule, StepCosts

_DECAY = 0.99
_EXPECTED_GAIN, _EXPECTED_TOKENS = 1.05, 60.0  # over the best fixed length, and what the guess counts for
_LEAST_GAIN, _KNOWN_AFTER, _FIXED_STEPS = 0.98, 128, 256
_PLAN_LASTS = 8  # steps; working it out costs as much as some kernels
_LEAST_STEP_S = 1e-9


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
        gain: Tokens per second over those of the best fixed length; a guess until enough is known.
    """

    def __init__(self) -> None:
        self.gain = _EXPECTED_GAIN
        self._caps = DraftCaps()
        self._plan: _Plan | None = None
        self._tokens, self._fixed_tokens = _EXPECTED_GAIN * _EXPECTED_TOKENS, _EXPECTED_TOKENS
        self._num_steps = self._num_known = 0
        self._fixed_left = 0

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
        if self._fixed_left:
            self._fixed_left -= 1
            return length
        plan = self._plan
        if plan is None or self._num_steps >= plan.until or plan.made_for != (batch, length):
            estimates = [times.estimate(k) for k in range(max_draft_tokens + 1)]
            caps = full_lengths(schedule.row_tiles, batch, max_draft_tokens)
            cap = next((cap for cap in caps if cap >= length), length)
            plan = self._plan = _Plan(
                StepCosts([verify_s for _, verify_s in estimates], batch * tokens_per_s),
                caps,
                [draft_s for draft_s, _ in estimates],
                self._caps.choose(caps, length) if schedule.compares_caps else cap,
                self._num_steps + _PLAN_LASTS,
                (batch, length),
            )
        schedule.costs = plan.costs
        return plan.cap

    def observe(
        self, schedule: DraftSchedule, times: StepTimes, lengths: tuple[int, int], emitted: float, best: float
    ) -> None:
        """Account for a scheduled step, by what such steps usually take.

        Args:
            schedule: As the drafter left it.
            times: Of steps, by draft length.
            lengths: Longest draft sent, and made.
            emitted: Tokens, over the sequences.
            best: Tokens per second of one sequence at the best fixed length.
        """
        sent, made = lengths
        step_s = times.estimate(made)[0] + times.estimate(sent)[1]
        # Against what the best fixed length would have earned in the same time, on the same text.
        self._tokens = self._tokens * _DECAY + emitted
        self._fixed_tokens = self._fixed_tokens * _DECAY + max(_LEAST_STEP_S, step_s) * best
        self._num_steps += 1
        self._num_known += 1
        plan = self._plan
        if plan is not None and schedule.compares_caps and schedule.survival:
            self._caps.observe(plan.caps, made, schedule.survival, plan.costs, plan.draft_s)
        self.gain = self._tokens / self._fixed_tokens
        if self._num_known >= _KNOWN_AFTER and self.gain < _LEAST_GAIN:
            self._fixed_left, self._num_known = _FIXED_STEPS, 0
            self._tokens, self._fixed_tokens = _EXPECTED_TOKENS, _EXPECTED_TOKENS
            self.gain = 1.0
