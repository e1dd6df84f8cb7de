"""When another draft length is worth a step: where it could be better, and as far as the time for it goes.

A length whose time is not known well is tried where it would be better if that turned out short. Trials pay
with the time that they really lost, out of a budget that grows with the time spent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

_DOUBT = (0.15, 0.1, 0.06, 0.05, 0.04, 0.03, 0.0)  # of a time seen so often: by so much it may be shorter
_DOUBT_OF_OLD = 0.05  # of a time seen some steps ago: the machine may have been slower
_DOUBT_OF_NONE = 0.8  # of plain steps never seen: verifying may cost by the row
_LEAD_WAITS = 2, 64  # plain steps until drafting is tried: at first, and at most, doubled by each failure
_GIVEN_UP_AFTER = 8  # steps after a trial's, more than any engine runs ahead
_STANDARD_ERRORS = 1.25  # of a median, in those of a mean
_LEAST_GAINS = (inf, 0.1, 0.05, 0.0)  # of a length whose time was observed 0, 1, 2, 3 times
_CLOSE, _CLOSE_WAIT = 0.8, 16  # where drafting is expected to earn that share of plain steps, wait no longer
_DISTURBED = 3  # steps around a trial that may take longer for it: programs of another width, new layouts
_ODD = 2.0  # times what the shape says: a busy moment, more likely than what a length takes
_LEAST_STEPS = 2  # before any trial: the first step of all tells little


@dataclass(frozen=True)
class Policy:
    """How bold the controller is.

    Attributes:
        explore_share: Share of decode time that trying other lengths may cost, as measured, in [0, 1].
        hysteresis: Gain in tokens per second that a change of length must promise.
        start_steps: Time that may be spent on trials at once, in steps, where little is known.
        recheck_steps: Steps after which the time of a length is known less well.
        recheck_close_steps: The same at first, where it is about as good as the one in use; longer each time.
        fresh_steps: Age of an observation that a change of length may rest on.
        max_saved_steps: Exploration time that may be saved up, in steps at the present length.
    """

    explore_share: float = 0.02
    hysteresis: float = 0.02
    start_steps: float = 1.5
    recheck_steps: int = 256
    recheck_close_steps: int = 32
    fresh_steps: int = 64
    max_saved_steps: float = 2.0


@dataclass(frozen=True)
class Estimates:
    """What is expected of each draft length, from 0 on.

    Attributes:
        tokens: Of one sequence in a step.
        step_s: Seconds of a step.
        counts: Observations that the seconds rest on.
        spread: How far one of them is usually off, as a share.
        likely_s: Seconds of steps by those of the length in use, as far as the usual shape is right.
        alike: Lengths whose steps are like those of the length in use.
    """

    tokens: Sequence[float]
    step_s: Sequence[float]
    counts: Sequence[int]
    spread: float = 0.0
    likely_s: Mapping[int, float] = field(default_factory=dict)
    alike: Collection[int] = ()


@dataclass
class Trials:
    """Trials at one batch size and context length.

    Attributes:
        policy: How bold to be.
        saved_s: Seconds that trials may lose now; None before the first step.
        pending: Length tried and not heard of yet.
    """

    policy: Policy
    saved_s: float | None = None
    pending: int | None = None
    _num_steps: int = 0
    _waited: int = 0
    _last_seen: dict[int, int] = field(default_factory=dict)
    _patience: dict[int, int] = field(default_factory=dict)
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
            cost_s = known.step_s[k] - known.tokens[k] / rate
            if current == 0:
                self._dear_s = cost_s  # there is no other way to see that drafting pays again
            if cost_s <= self.saved_s:
                self.pending, self._waited = k, 0
                self._disturbed_until = self._num_steps + _DISTURBED
                return k
        return None

    def _candidates(self, known: Estimates, current: int) -> list[tuple[int, float]]:
        """Return lengths and the tokens per second to be hoped of them, best first."""
        rates = [tokens / step_s for tokens, step_s in zip(known.tokens, known.step_s, strict=True)]
        if current == 0:
            # While off, only trying shows that drafting pays again.
            lead = max(range(1, len(rates)), key=lambda k: rates[k], default=0)
            wait = self._lead_wait if rates[lead] < _CLOSE * rates[0] else min(self._lead_wait, _CLOSE_WAIT)
            return [(lead, inf)] if lead and self._num_steps - self._last_draft >= wait else []
        doubts = {k: self._doubt(known, k) for k in range(len(rates)) if k != current}
        hoped = [
            (k, max(rates[k] / (1 - doubt), self._rate_by_shape(known, k)))
            for k, doubt in doubts.items()
            if self._num_steps >= self._not_before.get(k, 0)
            if doubt or self.least_gain(known, k) > self.policy.hysteresis
        ]
        return sorted(hoped, key=lambda one: (-one[1], one[0]))

    def age(self, k: int) -> int:
        """Return the steps since a length was seen."""
        return self._num_steps - self._last_seen.get(k, 0)

    def _rate_by_shape(self, known: Estimates, k: int) -> float:
        """Return the tokens per second of a length by what the one in use takes, if its own time is old."""
        is_old = self.age(k) > self._patience.get(k, self.policy.recheck_close_steps)
        likely_s = known.likely_s.get(k, 0.0)
        is_odd = k in known.alike or known.step_s[k] > _ODD * likely_s
        return known.tokens[k] / likely_s if is_old and is_odd and likely_s > 0 else 0.0

    def least_gain(self, known: Estimates, k: int) -> float:
        """Return the gain that a length must promise to be taken up, by what its time rests on."""
        count = known.counts[k]
        if not count or self._num_steps - self._last_seen.get(k, -inf) > self.policy.fresh_steps:
            return inf
        usual = self.policy.hysteresis + _STANDARD_ERRORS * known.spread / sqrt(count)
        return max(usual, _LEAST_GAINS[min(count, len(_LEAST_GAINS) - 1)])

    def _doubt(self, known: Estimates, k: int) -> float:
        count = min(known.counts[k], len(_DOUBT) - 1)
        if not count and not k:
            return _DOUBT_OF_NONE
        age = self.age(k)
        if count and age > self.policy.recheck_steps:
            return _DOUBT[1]
        patience = self._patience.get(k, self.policy.recheck_close_steps)
        return max(_DOUBT[count], _DOUBT_OF_OLD if age > patience else 0.0)

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
        self, num_draft_tokens: int, step_s: float, usual_s: float, worth_s: float, *, is_off: bool
    ) -> bool:
        """Account for a step; returns whether it was a trial.

        Args:
            num_draft_tokens: Longest draft.
            step_s: Seconds that it took.
            usual_s: Seconds that such steps take.
            worth_s: Seconds in which the length in use earns as many tokens.
            is_off: The length in use is 0.
        """
        self._num_steps += 1
        self._last_seen[num_draft_tokens] = self._num_steps
        if num_draft_tokens:
            self._last_draft = self._num_steps
        if self.saved_s is None:
            self.saved_s = self.policy.start_steps * step_s
        most = max(self._dear_s, self.policy.max_saved_steps * usual_s)
        if self.pending is None or num_draft_tokens != self.pending:
            lost_s = max(0.0, step_s - usual_s) if self._num_steps <= self._disturbed_until else 0.0
            self.saved_s = min(most, self.saved_s + self.policy.explore_share * step_s - lost_s)
            return False
        self.pending = None
        self._disturbed_until = self._num_steps + _DISTURBED
        patience = self._patience.get(num_draft_tokens, self.policy.recheck_close_steps // 2)
        self._patience[num_draft_tokens] = min(2 * patience, 2 * self.policy.recheck_steps)
        self.saved_s = max(-most, self.saved_s - max(0.0, step_s - worth_s))
        if is_off:
            self._lead_wait = 0 if worth_s >= step_s else min(_LEAD_WAITS[1], max(4, 2 * self._lead_wait))
        return True
