"""What the draft-length controller learns: how long steps take, and how many drafts are accepted.

Medians and decayed counts of what was observed; no clock and no randomness, so the same observations give the
same estimates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lean_laguna.spec.draft_shape import StepShape

_WINDOW = 15  # observations a median looks back on: eight slow steps in a row move it, seven do not
_KEPT_OF_OLD = 2  # of observations that lie far back
_SOLID = 3  # observations that count where others do, too: the first of a kind is often slow
_PACE_WINDOW, _PACE_SHARE = 9, 0.8  # steps that say how fast the machine is now; how far times follow that
_LEAST_FOR_SPREAD, _QUARTILES = 5, 1.35  # standard deviations between the quartiles of a normal distribution
_DECAY = 0.99  # weight that what happened to a draft keeps with each later draft: about 100 count
_PRIOR_RATE = 0.8  # acceptance of the first draft before any was seen
_PRIOR_WEIGHT = 2.0  # drafts that the prior counts for
_LEAST_RATE = 0.05  # as far as errors go
_ALIKE = 2.0  # drafts of one text that tell as much as one of many
_SURPRISE = 2.0  # summed misses of the expectation, in whole drafts, that mean the text has changed
_EXPECT_EVERY = 4  # blocks, between looks at what is expected
_KEPT_AFTER_SURPRISE = 0.2  # weight that the past keeps then

Shape = Callable[[int], tuple[float, float]]
"""Draft and verification times by draft length that are right beside each other, in any unit."""


class StepTimes:
    """Times of decode steps by number of draft tokens, for one batch size and context length.

    Machines are slower for a while, and lengths are timed at different moments; so times are kept as they
    would have been at one pace. What a length takes for good shows after a while.

    Attributes:
        shape: Lends its form where a length has not been observed.
        pace: How long steps take now, as a factor of the times kept.
    """

    def __init__(self, shape: Shape | None = None):
        self.shape: Shape = shape or partial(StepShape().times, 1)
        self.pace = 1.0
        self._paces: deque[float] = deque(maxlen=_PACE_WINDOW)
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._medians: dict[int, tuple[float, float]] = {}

    def add(self, num_draft_tokens: int, draft_s: float | None, verify_s: float) -> None:
        """Take one step's times in seconds; None where drafting was not for this length."""
        if draft_s is None:
            draft_s = verify_s if self.is_empty else self.estimate(num_draft_tokens)[0]
        samples = self._samples.setdefault(num_draft_tokens, deque(maxlen=_WINDOW))
        usual_s = sum(self._medians.get(num_draft_tokens, ()))
        if len(samples) >= _PACE_WINDOW and usual_s > 0:
            self._paces.append((draft_s + verify_s) / usual_s)
            self.pace = sorted(self._paces)[len(self._paces) // 2]
        share = self.pace**-_PACE_SHARE if self.pace > 0 else 1.0
        samples.append((draft_s * share, verify_s * share))
        middle = (len(samples) - 1) // 2  # the lesser of two: the first step of a kind is often slow
        self._medians[num_draft_tokens] = (
            sorted([sample[0] for sample in samples])[middle],
            sorted([sample[1] for sample in samples])[middle],
        )

    def count(self, num_draft_tokens: int) -> int:
        """Return how many observations the estimate rests on."""
        return len(self._samples.get(num_draft_tokens, ()))

    def spread(self, num_draft_tokens: int) -> float:
        """Return how far one observation is usually off, as a share; 0 as long as few were made."""
        totals = sorted(map(sum, self._samples.get(num_draft_tokens, ())))
        num = len(totals)
        if num < _LEAST_FOR_SPREAD or totals[num // 2] <= 0:
            return 0.0
        return (totals[3 * num // 4] - totals[num // 4]) / (_QUARTILES * totals[num // 2])

    @property
    def is_empty(self) -> bool:
        """True before the first observation."""
        return not self._medians

    def estimate(self, num_draft_tokens: int) -> tuple[float, float]:
        """Return seconds of drafting and of verification.

        As measured; else between the measured lengths around it, as far as the shape is; else the shape's,
        scaled to the nearest measured length.
        """
        return self._by(self._medians, num_draft_tokens)

    def ascending(self, longest: int) -> list[tuple[float, float]]:
        """Return estimates for 0 to ``longest`` drafts by lengths timed more than once or twice.

        Verifying fewer rows never counts as slower.
        """
        solid = {k: times for k, times in self._medians.items() if self.count(k) >= _SOLID} or self._medians
        found = [self._by(solid, k) for k in range(longest + 1)]
        for k in reversed(range(longest)):
            found[k] = found[k][0], min(found[k][1], found[k + 1][1])
        return found

    def _by(self, known: Mapping[int, tuple[float, float]], length: int) -> tuple[float, float]:
        """Return what a length takes, by medians of some."""
        measured = known.get(length)
        if measured is not None:
            return measured
        if not known:
            return self.shape(length)
        below = max((k for k in known if k < length), default=None)
        above = min((k for k in known if k > length), default=None)
        if below is not None and above is not None:
            return self._between(below, length, above)
        nearest = below if below is not None else above
        assert nearest is not None
        return self._scaled(nearest, length)

    def likely(self, num_draft_tokens: int, near: int | None) -> tuple[float, float]:
        """Return the times to be expected from what another length takes, as far as the shape is right.

        Args:
            num_draft_tokens: Drafts in the step.
            near: The other length; None or one that was not measured: as ``estimate``.
        """
        if near not in self._medians:
            return self.estimate(num_draft_tokens)
        return self._scaled(near, num_draft_tokens)

    def forget(self, num_draft_tokens: int) -> None:
        """Keep little of what was observed of a length, so that what is observed next counts soon."""
        samples = self._samples.get(num_draft_tokens)
        if samples is not None:
            self._samples[num_draft_tokens] = deque(list(samples)[-_KEPT_OF_OLD:], maxlen=_WINDOW)

    def _between(self, below: int, length: int, above: int) -> tuple[float, float]:
        low, high = self._medians[below], self._medians[above]
        at_low, at, at_high = (self.shape(k)[1] for k in (below, length, above))
        share = (at - at_low) / (at_high - at_low) if at_high > at_low else 0.5
        # A drafter's pass costs much the same at any length; only "no pass" is cheaper.
        along = (length - below) / (above - below)
        draft_s = high[0] if below == 0 else low[0] + along * (high[0] - low[0])
        return draft_s, low[1] + min(1.0, max(0.0, share)) * (high[1] - low[1])

    def _scaled(self, nearest: int, length: int) -> tuple[float, float]:
        draft_s, verify_s = self._medians[nearest]
        known, wanted = self.shape(nearest), self.shape(length)
        scale = verify_s / known[1] if known[1] > 0 else 1.0
        draft_scale = draft_s / known[0] if nearest and known[0] > 0 else scale
        return wanted[0] * draft_scale, wanted[1] * scale

    def to_dict(self) -> dict[str, list[float]]:
        """Return the medians: draft length to [draft_s, verify_s]."""
        return {str(k): list(times) for k, times in sorted(self._medians.items())}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], shape: Shape | None = None) -> StepTimes:
        """Start from stored medians, each counting as one observation."""
        times = cls(shape)
        for length, (draft_s, verify_s) in given.items():
            times.add(int(length), float(draft_s), float(verify_s))
        return times


class AcceptanceRates:
    """Probability that draft i is accepted once all before it were, from decayed counts of what happened.

    Text changes its kind at once (prose, then code), so drafts that do much better or worse than expected for
    some steps running make the estimate forget most of the past (a two-sided cumulative sum test).
    """

    def __init__(self, max_draft_tokens: int):
        self._accepted = [0.0] * max_draft_tokens
        self._tried = [0.0] * max_draft_tokens
        self._surplus = self._deficit = 0.0
        self._expected: list[float] = []
        self._num_added = 0

    def add(self, num_draft_tokens: int, num_accepted_tokens: int, unsent: Sequence[float] = ()) -> bool:
        """Take one verified block: the accepted drafts, and the rejected one if there is one.

        All drafted positions age, tried or not: one that is seldom reached must not live on old evidence.

        Args:
            num_draft_tokens: Drafts sent.
            num_accepted_tokens: Of those, accepted.
            unsent: The drafter's own chances of drafts that were made and not sent. They count as if tried:
                drafts are held back when they look bad, so counting the sent alone would flatter positions.

        Returns:
            Whether the text seems to have changed.
        """
        if not num_draft_tokens and not unsent:
            return False
        decay = _DECAY
        is_surprised = self._is_surprised(num_draft_tokens, num_accepted_tokens)
        if is_surprised:
            decay = _KEPT_AFTER_SURPRISE
            self._surplus = self._deficit = 0.0
        for index in range(num_draft_tokens):
            self._tried[index] = self._tried[index] * decay + (index <= num_accepted_tokens)
            self._accepted[index] = self._accepted[index] * decay + (index < num_accepted_tokens)
        reached = float(num_accepted_tokens == num_draft_tokens)
        for index, chance in enumerate(unsent, num_draft_tokens):
            self._tried[index] = self._tried[index] * decay + reached
            self._accepted[index] = self._accepted[index] * decay + reached * chance
            reached *= chance
        if is_surprised:
            self._expected = []
        return is_surprised

    def _is_surprised(self, num_draft_tokens: int, num_accepted_tokens: int) -> bool:
        if not self._expected or self._num_added % _EXPECT_EVERY == 0:
            self._expected = self.tokens_per_step()
        self._num_added += 1
        expected = self._expected[num_draft_tokens] - 1
        gap, slack = num_accepted_tokens - expected, 0.25 * (expected + 0.5)
        self._surplus = max(0.0, self._surplus + (gap - slack) / (num_draft_tokens + 1))
        self._deficit = max(0.0, self._deficit - (gap + slack) / (num_draft_tokens + 1))
        return max(self._surplus, self._deficit) > _SURPRISE

    def tokens_per_step(self) -> list[float]:
        """Return the expected tokens of a step, bonus included, for 0, 1, 2, ... drafts.

        A position is pulled towards the one before it, the first towards a constant, by two drafts' weight.
        """
        rate, weight = _PRIOR_RATE, _PRIOR_WEIGHT
        expected, reached = [1.0], 1.0
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            rate = (accepted + weight * rate) / (tried + weight)
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected

    def gain_variances(self, other: int) -> tuple[list[float], list[float]]:
        """Return how far off the gain of each length's tokens over another's may be.

        Args:
            other: Drafts of what they are compared with.

        Returns:
            Variances of its logarithm: in all, and by the drafts beyond ``other`` alone.
        """
        rate, variances = _PRIOR_RATE, []
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            weight = tried + _PRIOR_WEIGHT
            rate = (accepted + _PRIOR_WEIGHT * rate) / weight
            variances.append((1.0 - rate) * _ALIKE / (max(rate, _LEAST_RATE) * weight))
        tokens = np.array(self.tokens_per_step())
        # What a draft's rate moves: the tokens from it on, as a share of a step's. [length, draft]
        share = np.maximum(tokens[:, None] - tokens[None, :-1], 0.0) / tokens[:, None]
        moved = share - share[other]
        parts = moved * moved * np.array(variances)
        beyond: list[float] = parts[:, other:].sum(1).tolist()
        return parts.sum(1).tolist(), beyond

    def copy(self) -> AcceptanceRates:
        """Return an estimate of its own with the same counts."""
        twin = AcceptanceRates(len(self._tried))
        twin._accepted, twin._tried = list(self._accepted), list(self._tried)
        return twin

    def to_dict(self) -> dict[str, list[float]]:
        """Return the decayed counts."""
        return {"accepted": list(self._accepted), "tried": list(self._tried)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], max_draft_tokens: int) -> AcceptanceRates:
        """Start from stored counts, cut or filled to the drafter's length."""
        rates = cls(max_draft_tokens)
        for mine, theirs in ((rates._accepted, given["accepted"]), (rates._tried, given["tried"])):
            for index, value in enumerate(theirs[:max_draft_tokens]):
                mine[index] = float(value)
        return rates
