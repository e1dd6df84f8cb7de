"""How many tokens to draft: fixed, or chosen while running from measured time and acceptance.

The length that maximises expected tokens per second is used: (1 + sum of acceptance) / (draft + verify time),
for the present batch size and context length. A length of 0 is plain decoding. The first step takes what is
likely best, by what steps usually cost beside each other; what has been measured replaces that, also at other
batch sizes and context lengths. It can be kept in a profile, one per machine, models and precision.

Bound: trials of other lengths cost at most `Policy.start_steps` steps and `Policy.explore_share` of the time,
and another length is taken up when it gains more than `Policy.hysteresis` and what chance may make of what
was seen. So with true estimates decoding is at most the sum of the two shares slower than the best length,
plain decoding among them, and where lengths are about as good it stays with what was likely best at first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any

from lean_laguna.core.config import DraftLength
from lean_laguna.core.errors import ConfigError
from lean_laguna.spec.draft_costs import AcceptanceRates, Shape, StepTimes
from lean_laguna.spec.draft_schedule import DraftSchedule, StepCosts
from lean_laguna.spec.draft_shape import StepShape
from lean_laguna.spec.draft_trials import Estimates, Policy, Trials
from lean_laguna.spec.scheduled_steps import ScheduledSteps

PROFILE_VERSION = 1
_CONTEXT_UNIT = 1024
_PLAN_AFTER = ((16, 1), (128, 4))  # until so many steps of a kind, steps between looks at all lengths
_PLAN_EVERY = 16, 128  # choices from then on, at first and at most, doubled by each that changes nothing
_LONGEST_PLAN, _PLAN_OFF = 512, 64  # steps that this comes to at most; and while off: drafting must be tried
_STEPS_BETWEEN = 2  # likewise, from a trial to the next: they say how fast the machine is
_TIME_EVERY = 4  # likewise, steps of which one is timed
_LEARNING_S = 5e-5  # what learning from a step takes, unless told otherwise
_LEARNING_SHARE = 0.003  # of a step, what learning may take once the first have taught
_LONGEST_STRIDE = 64  # steps of which one teaches
_MOST_REPEATED = 16  # steps that one choice is for
_LEARN_FIRST, _LEARN_AGAIN = 128, 16  # steps that teach until then, and where the text is another
_DEAR = 0.1  # of a step, what learning may take for another text to be learned from at once
_UNSEEN = 1.1  # what a length that was not timed must promise over one that was
_USUAL_SPREAD, _USUAL_WEIGHT = 0.1, 4  # of step times, and the steps that it counts for
_OF_MEDIAN = 1.57  # variance of a median over that of a mean
_AGED = 0.05  # by so much a length's time may have changed in the steps of its patience
_LEAST_STEP_S = 1e-9  # a clock may read nothing


class _Cell:
    """What is known, and what is used, at one batch size and context length."""

    def __init__(self, times: StepTimes, policy: Policy, lender: StepTimes | None = None):
        self.times, self.lender = times, lender
        self.trials = Trials(policy)
        self.current: int | None = None
        self.rates: list[float] = []  # tokens per second of one sequence by draft length, as of the last plan
        self.plan_left, self.plan_every = 0, _PLAN_EVERY[0]
        self.is_after_trial = False
        self.num_steps = self.num_unheard = 0
        self.num_to_learn = _LEARN_FIRST  # steps that have yet to teach until they may take less
        self.stride = 1  # steps of which one teaches
        self.length = self.num_to_repeat = 0  # the choice at hand, and for how many steps more
        self.costs: StepCosts | None = None
        self.scheduled = ScheduledSteps()

    def begin_anew(self) -> None:
        """Look at everything again in the next step: the text is another.

        Not where steps are scheduled: they follow the text by themselves.
        """
        self.scheduled.start_anew()
        if self.scheduled.is_on:
            return
        self.plan_left = self.num_to_repeat = 0
        self.plan_every = _PLAN_EVERY[0]
        if _LEARNING_SHARE * self.stride < _DEAR:
            self.stride, self.num_to_learn = 1, max(self.num_to_learn, _LEARN_AGAIN)

    @property
    def is_timed(self) -> bool:
        """Whether a step at the length in use is timed: not each, once its time is well known."""
        return self.num_to_learn > 0 or self.num_steps % max(_TIME_EVERY, self.stride) == 0


class DraftLengthController:
    """Chooses the draft length of every step; owned by one engine.

    Deterministic: choices follow from the observations alone. They decide speed, never tokens.

    Attributes:
        shape: What steps cost beside each other before they were timed.
        learning_s: What learning from a step takes: of shorter steps fewer teach.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        num_speculative_tokens: DraftLength = "auto",
        *,
        profile: Mapping[str, Any] | None = None,
        policy: Policy | None = None,
        schedule: DraftSchedule | None = None,
    ):
        """Start, from nothing or from what an earlier run learned.

        Args:
            max_draft_tokens: Longest draft that the drafter can make.
            num_speculative_tokens: A fixed length, or "auto".
            profile: From `to_dict`, of the same machine, models and precision.
            policy: How bold to be.
            schedule: Of a drafter that says how confident it is.

        Raises:
            ConfigError: The fixed length is beyond the drafter's, or the profile is of another kind.
        """
        if num_speculative_tokens != "auto" and not 0 <= num_speculative_tokens <= max_draft_tokens:
            raise ConfigError(
                f"num_speculative_tokens must be 0 to {max_draft_tokens} for this drafter or 'auto', "
                f"found {num_speculative_tokens}"
            )
        self.max_draft_tokens = max_draft_tokens
        self.policy = policy or Policy()
        self.schedule = schedule
        self.shape = StepShape()
        self.learning_s = _LEARNING_S
        self._fixed = None if num_speculative_tokens == "auto" else num_speculative_tokens
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._rates: dict[int, AcceptanceRates] = {}
        self._last_key = (0, 0)
        if profile is not None:
            self.restore(profile)

    def choose(self, batch: int, context_len: int, *, may_schedule: bool = True) -> int:
        """Return the draft length for the next step, and put its costs into ``schedule`` where that decides.

        Args:
            batch: Sequences decoded in the step, at least 1.
            context_len: Longest context among them, in tokens.
            may_schedule: False where others share the step.
        """
        if self.schedule is not None:
            self.schedule.costs = None
            self.schedule.wants_chances = self._fixed is None and may_schedule
        if self._fixed is not None:
            return self._fixed
        self._last_key = key = _key(batch, context_len)
        cell = self._cell(key)
        if not cell.num_to_repeat or not may_schedule:
            cell.length, is_trial = self._choose_fixed(key, cell)
            if self.schedule is not None:
                self._schedule(cell, batch, is_open=not is_trial and may_schedule)
            is_after_trial, cell.is_after_trial = (
                cell.is_after_trial,
                cell.is_after_trial and cell.plan_left > 0,
            )
            is_lone = cell.trials.pending is not None or is_after_trial
            cell.num_to_repeat = 1 if is_lone else min(_MOST_REPEATED, cell.stride)
        cell.num_to_repeat -= 1
        if self.schedule is not None:
            self.schedule.costs = cell.costs
        return cell.length

    def _schedule(self, cell: _Cell, batch: int, *, is_open: bool) -> None:
        """Decide whether confidence cuts the drafts of the next steps, and how far these go then."""
        assert self.schedule is not None
        if is_open and cell.length and not cell.times.is_empty:
            most, rate = self.max_draft_tokens, cell.rates[cell.length]
            cell.length = cell.scheduled.choose(self.schedule, cell.times, batch, cell.length, rate, most)
        cell.costs = self.schedule.costs

    def _choose_fixed(self, key: tuple[int, int], cell: _Cell) -> tuple[int, bool]:
        """Return the length of a step whose drafts are all sent, and whether it is a trial."""
        going_on = cell.trials.next_of_pending()
        if going_on is not None:
            return going_on, True
        if cell.current is not None and (cell.plan_left or cell.trials.is_waiting):
            cell.plan_left = max(0, cell.plan_left - 1)
            return cell.current, False
        known = self._estimates(key, cell)
        cell.rates = rates = self._tokens_per_s(cell, known)
        before, cell.current = cell.current, self._best(cell, known, rates)
        current = cell.current
        if before is None:
            cell.trials.home = current
        stride = 1 if cell.num_to_learn else int(self.learning_s / (_LEARNING_SHARE * known.step_s[current]))
        cell.stride = max(1, min(_LONGEST_STRIDE, stride))
        # Scheduled steps are seen to send all lengths; and to make all, where drafts end by themselves.
        is_settled = cell.scheduled.is_on and self.schedule is not None and self.schedule.stops_early
        trial = None if is_settled else cell.trials.choose(known, current)
        is_calm = trial is None and current == before and current > 0
        most = max(_PLAN_EVERY[0], min(_PLAN_EVERY[1], _LONGEST_PLAN // min(_MOST_REPEATED, cell.stride)))
        cell.plan_every = min(most, 2 * cell.plan_every) if is_calm else _PLAN_EVERY[0]
        if not current:
            cell.plan_every = max(1, _PLAN_OFF // min(_MOST_REPEATED, cell.stride))
        cell.plan_left = next((n for until, n in _PLAN_AFTER if cell.num_steps < until), cell.plan_every) - 1
        return (current, False) if trial is None else (trial, True)

    def _estimates(self, key: tuple[int, int], cell: _Cell) -> Estimates:
        current, rates = cell.current, self._acceptance(key[0])
        lengths = range(self.max_draft_tokens + 1)
        counts = [cell.times.count(k) or bool(cell.lender and cell.lender.count(k)) for k in lengths]
        if current is None or not cell.times.count(current):
            step_s = [max(_LEAST_STEP_S, sum(cell.times.estimate(k))) for k in lengths]
            return Estimates(rates.tokens_per_step(), step_s, counts)
        noise = _noise(cell.times, current)
        times = [self._time(key, cell, k, noise) for k in lengths]
        own = noise / cell.times.count(current)

        of_all, of_longer = rates.gain_variances(current)
        return Estimates(
            rates.tokens_per_step(),
            [time_s for time_s, _ in times],
            counts,
            [sqrt(time[1] + own + more) for time, more in zip(times, of_all, strict=True)],
            [sqrt(time[1] + more) for time, more in zip(times, of_longer, strict=True)],
        )

    def _time(self, key: tuple[int, int], cell: _Cell, length: int, noise: float) -> tuple[float, float]:
        """Return what a step takes, by what was seen of it and of the length in use, and its variance."""
        current, times = cell.current, cell.times
        assert current is not None
        own_s = max(_LEAST_STEP_S, sum(times.estimate(length)))
        if length == current:
            return own_s, 0.0
        by_shape = self.shape.doubt(2 ** key[1], length, current) ** 2
        count = times.count(length)
        if not count:
            return own_s, by_shape
        seen = noise / count + (_AGED * cell.trials.age(length) / cell.trials.patience(length)) ** 2
        likely_s = max(_LEAST_STEP_S, sum(times.likely(length, current)))
        share = by_shape / (by_shape + seen)
        return own_s**share * likely_s ** (1 - share), share * seen

    def _tokens_per_s(self, cell: _Cell, known: Estimates) -> list[float]:
        """Return expected tokens per second of one sequence by draft length; scheduled where it can be."""
        rates = [tokens / step_s for tokens, step_s in zip(known.tokens, known.step_s, strict=True)]
        return [rates[0], *(rate * cell.scheduled.gain for rate in rates[1:])]

    def _best(self, cell: _Cell, known: Estimates, rates: Sequence[float]) -> int:
        """Return the length to use from here on: another than before only where it promises enough."""
        if cell.current is None:
            sure = [
                rate if count else rate / _UNSEEN for rate, count in zip(rates, known.counts, strict=True)
            ]
            return max(range(len(sure)), key=lambda k: (sure[k], -k))
        best, worth = cell.current, rates[cell.current]
        for k, rate in enumerate(rates):
            if rate > rates[cell.current] and rate / (1 + cell.trials.least_gain(known, k)) > worth:
                best, worth = k, rate / (1 + cell.trials.least_gain(known, k))
        return best

    @property
    def is_fixed(self) -> bool:
        """Whether the length is given, and nothing is to be learned."""
        return self._fixed is not None

    def hears(self, num_draft_tokens: int, batch: int, context_len: int, *, is_idle: bool = False) -> bool:
        """Count a step, and say whether it teaches: of short ones not all do, for learning takes time.

        Args:
            num_draft_tokens: Longest draft in the step.
            batch: As given to `choose`.
            context_len: As given to `choose`.
            is_idle: Whoever learns has time to.
        """
        if self.is_fixed:
            return False
        cell = self._cell(_key(batch, context_len))
        cell.num_steps += 1
        cell.num_unheard += 1
        is_heard = is_idle or cell.num_steps % cell.stride == 0 or num_draft_tokens == cell.trials.pending
        cell.num_to_learn -= is_heard and cell.num_to_learn > 0
        return is_heard

    def observe(
        self,
        num_draft_tokens: int,
        batch: int,
        context_len: int,
        *,
        draft_s: float,
        verify_s: float,
        accepted: Sequence[tuple[int, int]],
        unsent: Sequence[Sequence[float]] = (),
        num_made_tokens: int | None = None,
        is_usual: bool = True,
        is_heard: bool = False,
    ) -> None:
        """Learn from a step that only decoded (no prefill in it), where `hears` wants to.

        Args:
            num_draft_tokens: Longest draft in the step; 0 for plain decoding.
            batch: As given to `choose`.
            context_len: As given to `choose`.
            draft_s: Seconds for proposing and for the drafter's context.
            verify_s: Seconds for everything else of the step.
            accepted: Per sequence, its draft tokens and how many were accepted.
            unsent: Per sequence, chances of drafts that were made and not sent; see `AcceptanceRates.add`.
            num_made_tokens: Longest draft made in a scheduled step; None for another.
            is_usual: See ``DraftLengths.observe``; as ``is_heard``.
            is_heard: `hears` has been asked, and said so.
        """
        if not (is_heard or self.hears(num_draft_tokens, batch, context_len)):
            return
        key = _key(batch, context_len)
        cell = self._cell(key)
        is_trial = num_draft_tokens == cell.trials.pending
        is_last = is_trial and not cell.trials.num_left
        held_back = unsent or [()] * len(accepted)
        rates = self._acceptance(key[0])
        for (drafted, num_accepted), chances in zip(accepted, held_back, strict=True):
            if rates.add(drafted, num_accepted, chances):
                cell.begin_anew()
        is_cut = num_made_tokens not in (None, num_draft_tokens)
        is_usual &= not is_cut or len({num for num, _ in accepted}) == 1
        is_usual |= is_last and not cell.times.count(num_draft_tokens)  # about right, better than unknown
        if is_usual and is_trial == is_last and (num_draft_tokens != cell.current or cell.is_timed):
            if cell.trials.age(num_draft_tokens) > self.policy.fresh_steps:
                cell.times.forget(num_draft_tokens)  # another time, maybe a busier one
            cell.times.add(num_draft_tokens, None if is_cut else draft_s, verify_s)
        step_s = draft_s + verify_s
        usual_s = (
            step_s if cell.times.is_empty else cell.times.pace * sum(cell.times.estimate(num_draft_tokens))
        )
        emitted = 1 + sum(n for _, n in accepted) / max(1, len(accepted))
        worth_s = emitted / cell.rates[cell.current or 0] if cell.rates else 0.0
        num_steps = 1 if is_trial else cell.num_unheard
        cell.num_unheard -= num_steps
        if cell.trials.observe(
            num_draft_tokens, step_s, usual_s, worth_s, is_off=not cell.current, num_steps=num_steps
        ):
            cell.plan_left = _STEPS_BETWEEN if cell.num_steps > _PLAN_AFTER[0][0] else 0
            cell.num_to_repeat, cell.is_after_trial = 0, True
        if not is_trial and cell.current and self.schedule is not None and self.schedule.survival:
            lengths = (num_draft_tokens, num_made_tokens, cell.current)
            cell.scheduled.observe(self.schedule, cell.times, lengths, draft_s, accepted)

    def explain(self) -> str:
        """Say in one line what is used for the last batch and context, and why."""
        if self._fixed is not None:
            return f"draft length {self._fixed}: fixed by num_speculative_tokens"
        cell = self._cells.get(self._last_key)
        if cell is None or cell.current is None or cell.times.is_empty:
            return "draft length: nothing measured yet"
        known = self._estimates(self._last_key, cell)
        rates = self._tokens_per_s(cell, known)
        chosen = cell.current
        other = 0 if chosen else max(range(1, len(rates)), key=lambda k: (rates[k], -k), default=0)

        def told(k: int) -> str:
            draft_s, verify_s = cell.times.estimate(k)
            step_s = known.tokens[k] / rates[k]  # what the choice is made by; the share is as seen
            draft_s *= step_s / max(_LEAST_STEP_S, draft_s + verify_s)
            return (
                f"{known.tokens[k]:.2f} tokens in {1e3 * step_s:.2f} ms "
                f"(draft {1e3 * draft_s:.2f}), {rates[k]:.0f} tok/s"
            )

        name = f"draft length {chosen}" if chosen else "drafting off"
        versus = "without drafting" if chosen else f"best length {other}"
        where = f"batch up to {2 ** self._last_key[1]}, context below {2 ** self._last_key[0]}k"
        return f"{name}: {told(chosen)}; {versus}: {told(other)}; {where}"

    def to_dict(self) -> dict[str, Any]:
        """Return what was learned, as JSON-ready values."""
        return {
            "version": PROFILE_VERSION,
            "max_draft_tokens": self.max_draft_tokens,
            "times": [
                {"context": context, "batch": batch, "steps": cell.times.to_dict()}
                for (context, batch), cell in sorted(self._cells.items())
                if not cell.times.is_empty
            ],
            "acceptance": {str(context): rates.to_dict() for context, rates in sorted(self._rates.items())},
        }

    def restore(self, profile: Mapping[str, Any]) -> None:
        """Take over what another controller learned, from its `to_dict`.

        Raises:
            ConfigError: It is of another kind.
        """
        if profile.get("version") != PROFILE_VERSION:
            found = profile.get("version")
            raise ConfigError(f"draft-length profile: 'version' must be {PROFILE_VERSION}, found {found!r}")
        try:
            for entry in profile["times"]:
                steps = {k: v for k, v in entry["steps"].items() if int(k) <= self.max_draft_tokens}
                key = int(entry["context"]), int(entry["batch"])
                self._cells[key] = _Cell(StepTimes.from_dict(steps, self._usual(key)), self.policy)
            for context, counts in profile["acceptance"].items():
                self._rates[int(context)] = AcceptanceRates.from_dict(counts, self.max_draft_tokens)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"draft-length profile: not as this program writes it ({error!r})") from None

    def _cell(self, key: tuple[int, int]) -> _Cell:
        if key not in self._cells:
            known = [k for k, other in self._cells.items() if not other.times.is_empty]
            shape, lender = self._usual(key), None
            if known:
                nearest = min(known, key=lambda k: (abs(k[1] - key[1]), abs(k[0] - key[0]), k))
                shape = partial(self._as_in, nearest, key)
                lender = self._cells[nearest].times if nearest[1] == key[1] else None
            self._cells[key] = _Cell(StepTimes(shape), self.policy, lender)
        return self._cells[key]

    def _usual(self, key: tuple[int, int]) -> Shape:
        """Return what steps of a batch size usually cost beside each other."""
        return lambda length: self.shape.times(2 ** key[1], length)

    def _as_in(self, other: tuple[int, int], key: tuple[int, int], length: int) -> tuple[float, float]:
        """Return the times measured at another batch size, changed by what usually differs."""
        found = self._cells[other].times.estimate(length)
        theirs, own = (self.shape.times(2**batch, length) for batch in (other[1], key[1]))
        draft_s = found[0] * own[0] / theirs[0] if length else found[0]
        return draft_s, found[1] * own[1] / theirs[1]

    def _acceptance(self, context: int) -> AcceptanceRates:
        if context not in self._rates:
            nearest = min(self._rates, key=lambda known: (abs(known - context), known), default=None)
            self._rates[context] = (
                AcceptanceRates(self.max_draft_tokens) if nearest is None else self._rates[nearest].copy()
            )
        return self._rates[context]


def _noise(times: StepTimes, length: int) -> float:
    """Return the variance of one step's time, as a share, as far as it was seen."""
    count = times.count(length)
    seen = count * times.spread(length) ** 2 if times.spread(length) else 0.0
    weight = count if times.spread(length) else 0
    return _OF_MEDIAN * (seen + _USUAL_WEIGHT * _USUAL_SPREAD**2) / (weight + _USUAL_WEIGHT)


def _key(batch: int, context_len: int) -> tuple[int, int]:
    """Return the buckets of context length (below 1k, 2k, 4k, ...) and batch (1, 2, up to 4, 8, ...)."""
    return (context_len // _CONTEXT_UNIT).bit_length(), (batch - 1).bit_length()
