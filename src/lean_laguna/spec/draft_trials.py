"""When another draft length is worth a step, or worth a change: by what it gains and how well that is known.

A length is tried where it would be better if what a trial tells of turned out well. Trials pay with the time
that they really lost, out of a budget that grows with the time spent. It is taken up only where its gain
stands out from what chance may make of it; the length begun with is gone back to for any gain, as it is the
one that is likely best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf

_LEAD_WAITS = 2, 64  # plain steps until drafting is tried: at first, and at most, doubled by each failure
_GIVEN_UP_AFTER = 8  # steps after a trial's, more than any engine runs ahead
_SURE, _SURE_OF_HOME = 1.5, 0.0  # errors by which a gain must stand out to be taken, and to go back
_CLOSE = (
    (0.8, 16),
    (0.92, 6),
)  # share of plain steps that drafting may earn, and the longest wait then
_DISTURBED = 3  # steps around a trial that may take longer for it: programs of another width, new layouts
_TELLING = 0.35  # share of what is not known of a gain that a trial must be about
_LONGEST_GAP = 32  # steps from a trial to the next of the same length, at most, doubled by each,
_CLEARLY = 1.02  # unless it seems so much better than need be
_FAR = 0.6  # of the rate in use, below which a length is not looked at
_LEAST_STEPS = 2  # before any trial: the first step of all tells little


@dataclass(frozen=True)
class Policy:
    """How bold the controller is.

    Attributes:
        explore_share: Share of decode time that trying other lengths may cost, as measured, in [0, 1].
        hysteresis: Gain in tokens per second that a change of length must promise.
        start_steps: Time that may be spent on trials at once, in steps, where little is known.
        recheck_close_steps: Steps after which the time of a length is known less well, at first; doubled by
            each trial.
        recheck_steps: Half of what that grows to.
        fresh_steps: Age of an observation that a change of length may rest on.
        max_saved_steps: Exploration time that may be saved up, in steps at the present length.
        trial_steps: Steps of a trial, of which the last is timed: the first of another length find nothing of
            theirs in a CPU's caches.
    """

    explore_share: float = 0.01
    hysteresis: float = 0.02
    start_steps: float = 1.5
    recheck_close_steps: int = 32
    recheck_steps: int = 256
    fresh_steps: int = 64
    max_saved_steps: float = 2.0
    trial_steps: int = 1


@dataclass(frozen=True)
class Estimates:
    """What is expected of each draft length, from 0 on.

    Attributes:
        tokens: Of one sequence in a step.
        step_s: Seconds of a step.
        counts: Observations that the seconds rest on.
        error: How far off the gain of a length over the one in use may be: of its logarithm; empty for not.
        doubt: The part of it that a trial of the length would tell of; likewise.
    """

    tokens: Sequence[float]
    step_s: Sequence[float]
    counts: Sequence[int]
    error: Sequence[float] = ()
    doubt: Sequence[float] = ()


@dataclass
class Trials:
    """Trials at one batch size and context length.

    Attributes:
        policy: How bold to be.
        saved_s: Seconds that trials may lose now; None before the first step.
        pending: Length tried and not heard of yet.
        home: Length begun with, where nothing was measured.
        num_left: Steps of the pending trial after the next one heard of.
    """

    policy: Policy
    saved_s: float | None = None
    pending: int | None = None
    home: int | None = None
    num_left: int = 0
    _goes_on: bool = False
    _num_steps: int = 0
    _waited: int = 0
    _last_seen: dict[int, int] = field(default_factory=dict)
    _patience: dict[int, int] = field(default_factory=dict)
    _again_after: dict[int, int] = field(default_factory=dict)
    _gaps: dict[int, int] = field(default_factory=dict)
    _unheard: dict[int, int] = field(default_factory=dict)
    _not_before: dict[int, int] = field(default_factory=dict)
    _last_draft: int = 0
    _disturbed_until: int = 0
    _dear_s: float = 0.0
    _lead_wait: int = _LEAD_WAITS[0]

    def choose(self, known: Estimates, current: int) -> int | None:
        """Return a length to try in the next step; None where there is none worth it.

        Args:
            known: What is expected.
            current: Length in use.
        """
        if self._num_steps < _LEAST_STEPS or self.saved_s is None:
            return None
        rate = known.tokens[current] / known.step_s[current]
        least = rate * (1 + self.policy.hysteresis)
        self._dear_s = 0.0
        for k, hoped in self._candidates(known, current):
            if hoped <= least:
                break
            cost_s = self.policy.trial_steps * (known.step_s[k] - known.tokens[k] / rate)
            if current == 0:
                self._dear_s = cost_s  # there is no other way to see that drafting pays again
            if cost_s <= max(0.0, self.saved_s):
                self.pending, self._waited = k, 0
                self.num_left, self._goes_on = self.policy.trial_steps - 1, False
                self._disturbed_until = self._num_steps + _DISTURBED
                return k
        return None

    def _candidates(self, known: Estimates, current: int) -> list[tuple[int, float]]:
        """Return lengths and the tokens per second to be hoped of them, best first."""
        rates = [tokens / step_s for tokens, step_s in zip(known.tokens, known.step_s, strict=True)]
        if current == 0:
            # While off, only trying shows that drafting pays again.
            lead = max(range(1, len(rates)), key=lambda k: rates[k], default=0)
            wait = min([self._lead_wait, *(w for share, w in _CLOSE if rates[lead] >= share * rates[0])])
            return [(lead, inf)] if lead and self._num_steps - self._last_draft >= wait else []
        least = rates[current] * (1 + self.policy.hysteresis)
        hoped = [
            (k, rates[k] * exp(doubt))
            for k, (doubt, error) in enumerate(zip(known.doubt, known.error, strict=True))
            if k != current and rates[k] > _FAR * least and self._num_steps >= self._not_before.get(k, 0)
            if rates[k] > _CLEARLY * least or self._num_steps >= self._again_after.get(k, 0)
            if doubt >= _TELLING * error
        ]
        return sorted(hoped, key=lambda one: (-one[1], one[0]))

    def next_of_pending(self) -> int | None:
        """Return the length of a trial that goes on in the next step; to be asked once a step."""
        goes_on, self._goes_on = self._goes_on, False
        return self.pending if goes_on else None

    def age(self, k: int) -> int:
        """Return the steps since a length was seen."""
        return self._num_steps - self._last_seen.get(k, 0)

    def patience(self, k: int) -> int:
        """Return the steps after which the time of a length is known less well."""
        return self._patience.get(k, self.policy.recheck_close_steps)

    def least_gain(self, known: Estimates, k: int) -> float:
        """Return the gain that a length must promise to be taken up, by what is known of it."""
        if (
            not known.error
            or not known.counts[k]
            or self._num_steps - self._last_seen.get(k, -inf) > self.policy.fresh_steps
        ):
            return inf
        sure = _SURE if k != self.home else _SURE_OF_HOME
        return exp(self.policy.hysteresis + sure * known.error[k]) - 1.0

    @property
    def is_waiting(self) -> bool:
        """Whether a trial has not been heard of; to be asked once a step."""
        self._waited += 1
        if self.pending is not None and self._waited > _GIVEN_UP_AFTER:
            # Its step may have been the last of a request; next time it may be heard of.
            self._unheard[self.pending] = wait = 2 * self._unheard.get(self.pending, _GIVEN_UP_AFTER)
            self._not_before[self.pending] = self._num_steps + wait
            self.pending = None
        return self.pending is not None

    def observe(
        self,
        num_draft_tokens: int,
        step_s: float,
        usual_s: float,
        worth_s: float,
        *,
        is_off: bool,
        num_steps: int = 1,
    ) -> bool:
        """Account for a step; returns whether it was the last of a trial.

        Args:
            num_draft_tokens: Longest draft.
            step_s: Seconds that it took.
            usual_s: Seconds that such steps take.
            worth_s: Seconds in which the length in use earns as many tokens.
            is_off: The length in use is 0.
            num_steps: Steps that it stands for, where not all are told of.
        """
        self._num_steps += num_steps
        self._last_seen[num_draft_tokens] = self._num_steps
        if num_draft_tokens:
            self._last_draft = self._num_steps
        if self.saved_s is None:
            self.saved_s = self.policy.start_steps * step_s
        most = max(self._dear_s, self.policy.max_saved_steps * usual_s)
        if self.pending is None or num_draft_tokens != self.pending:
            lost_s = max(0.0, step_s - usual_s) if self._num_steps <= self._disturbed_until else 0.0
            self.saved_s = min(most, self.saved_s + num_steps * self.policy.explore_share * step_s - lost_s)
            return False
        self.saved_s = max(-most, self.saved_s - max(0.0, step_s - worth_s))
        if self.num_left:
            self.num_left, self._goes_on = self.num_left - 1, True
            return False
        self.pending = None
        self._disturbed_until = self._num_steps + _DISTURBED
        gap = self._gaps[num_draft_tokens] = min(_LONGEST_GAP, 2 * self._gaps.get(num_draft_tokens, 1))
        self._again_after[num_draft_tokens] = self._num_steps + gap
        patience = self._patience.get(num_draft_tokens, self.policy.recheck_close_steps // 2)
        self._patience[num_draft_tokens] = min(2 * patience, 2 * self.policy.recheck_steps)
        if is_off:
            self._lead_wait = 0 if worth_s >= step_s else min(_LEAD_WAITS[1], max(4, 2 * self._lead_wait))
        return True
