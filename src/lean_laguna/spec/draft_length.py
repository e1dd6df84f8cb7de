"""How many tokens to draft: fixed, or chosen while running from measured time and acceptance.

The length that maximises expected tokens per second is used: (1 + sum of acceptance) / (draft + verify time),
for the present batch size and context length. A length of 0 is plain decoding.

What was learned can be kept in a profile, one per machine, models and precision.

Bound: once a start-up of a few steps per length is over, at most `Policy.explore_share` of the time goes to
trying other lengths, and a better one is taken up when it gains more than `Policy.hysteresis`. So with true
estimates decoding is at most the sum of the two slower than the best length, plain decoding among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_laguna.core.config import DraftLength
from lean_laguna.core.errors import ConfigError
from lean_laguna.spec.draft_costs import AcceptanceRates, StepTimes
from lean_laguna.spec.draft_schedule import DraftSchedule
from lean_laguna.spec.scheduled_steps import ScheduledSteps

PROFILE_VERSION = 1
_CONTEXT_UNIT = 1024
_PLAN_EVERY = 4  # steps between looks at all lengths: a look costs as much as a small kernel
_LEAST_STEP_S = 1e-9  # a clock may read nothing


@dataclass(frozen=True)
class Policy:
    """How bold the controller is.

    Attributes:
        explore_share: Share of decode time that trying other lengths may cost, as measured, in [0, 1].
        hysteresis: Gain in tokens per second that a change of length must promise.
        startup_repeats: Steps at each start-up length where nothing is known; the lengths are 0, 1, 3, 7, ...
            (1, 2, 4, 8, ... rows) and the longest.
        min_repeats: Observations below which a promising length is tried again.
        recheck_steps: Steps after which a length that could be better is tried again.
        max_saved_steps: Exploration time that may be saved up, in steps at the present length.
    """

    explore_share: float = 0.02
    hysteresis: float = 0.02
    startup_repeats: int = 3
    min_repeats: int = 3
    recheck_steps: int = 256
    max_saved_steps: float = 4.0


class _Cell:
    """What is known, and what is used, at one batch size and context length."""

    def __init__(self, times: StepTimes, is_known: bool = False):
        self.times = times
        self.is_known = is_known
        self.current: int | None = None
        self.tokens_per_s: list[float] = []  # by draft length, as of the last plan
        self.fixed_tokens_per_s: list[float] = []  # of steps that send all drafts
        self.num_steps = 0
        self.last_tried: dict[int, int] = {}
        self.probe: int | None = None
        self.probe_paid = False
        self.saved_s = 0.0
        self.scheduled = ScheduledSteps()


class DraftLengthController:
    """Chooses the draft length of every step; owned by one engine.

    Deterministic: choices follow from the observations alone. They decide speed, never tokens.
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
        self._fixed = None if num_speculative_tokens == "auto" else num_speculative_tokens
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._rates: dict[int, AcceptanceRates] = {}
        self._last_key = (0, 0)
        lengths = {2**i - 1 for i in range(max_draft_tokens.bit_length() + 1)} | {max_draft_tokens}
        self._startup = sorted(length for length in lengths if length <= max_draft_tokens)
        if profile is not None:
            self.restore(profile)

    def choose(self, batch: int, context_len: int, *, may_schedule: bool = True) -> int:
        """Return the draft length for the next step; the caller may shorten it per request.

        Where the drafter says how confident it is, the step's costs go into ``schedule``, or None where its
        drafts shall be sent as they are.

        Args:
            batch: Sequences decoded in the step, at least 1.
            context_len: Longest context among them, in tokens.
            may_schedule: False where others share the step.
        """
        length = self._choose_fixed(batch, context_len)
        if self.schedule is None:
            return length
        cell = self._cells.get(self._last_key)
        is_fixed = not may_schedule or self._fixed is not None or cell is None or cell.probe is not None
        if is_fixed or cell is None or not cell.current:
            self.schedule.costs = None
            return length
        return cell.scheduled.choose(
            self.schedule, cell.times, batch, length, cell.tokens_per_s[length], self.max_draft_tokens
        )

    def _choose_fixed(self, batch: int, context_len: int) -> int:
        """Return the length of a step whose drafts are all sent."""
        if self._fixed is not None:
            return self._fixed
        self._last_key = key = _key(batch, context_len)
        cell = self._cell(key)
        cell.probe = None
        if not self._is_ready(cell):
            return min(
                (k for k in self._startup if cell.times.count(k) < self.policy.startup_repeats),
                key=lambda k: (cell.times.count(k), k),
            )
        if cell.current is not None and cell.num_steps % _PLAN_EVERY and not cell.probe_paid:
            return cell.current
        cell.tokens_per_s = rates = self._tokens_per_s(key, cell)
        best = max(range(len(rates)), key=lambda k: (rates[k], -k))
        if cell.current is None or rates[best] > rates[cell.current] * (1 + self.policy.hysteresis):
            cell.current = best
        cell.probe = self._probe(cell, rates, cell.current)
        return cell.current if cell.probe is None else cell.probe

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
    ) -> None:
        """Learn from a step that only decoded (no prefill in it).

        Args:
            num_draft_tokens: Longest draft in the step; 0 for plain decoding.
            batch: As given to `choose`.
            context_len: As given to `choose`.
            draft_s: Seconds for proposing and for the drafter's context.
            verify_s: Seconds for everything else of the step.
            accepted: Per sequence, its draft tokens and how many were accepted.
            unsent: Per sequence, chances of drafts that were made and not sent; see `AcceptanceRates.add`.
            num_made_tokens: Longest draft made in a scheduled step; None for another.
        """
        if self._fixed is not None:
            return
        key = _key(batch, context_len)
        cell = self._cell(key)
        held_back = unsent or [()] * len(accepted)
        for (drafted, num_accepted), chances in zip(accepted, held_back, strict=True):
            self._acceptance(key[0]).add(drafted, num_accepted, chances)
        is_cut = num_made_tokens not in (None, num_draft_tokens)
        if not is_cut or len({num for num, _ in accepted}) == 1:
            cell.times.add(num_draft_tokens, None if is_cut else draft_s, verify_s)
        cell.num_steps += 1
        cell.last_tried[num_draft_tokens] = cell.num_steps
        if cell.current is not None:
            emitted = 1 + sum(n for _, n in accepted) / max(1, len(accepted))
            self._settle(cell, num_draft_tokens, draft_s + verify_s, emitted)
            if num_made_tokens is not None and cell.current and self.schedule is not None:
                lengths = (num_draft_tokens, num_made_tokens)
                best = cell.fixed_tokens_per_s[cell.current]
                cell.scheduled.observe(self.schedule, cell.times, lengths, emitted, best)

    def explain(self) -> str:
        """Say in one line what is used for the last batch and context, and why."""
        if self._fixed is not None:
            return f"draft length {self._fixed}: fixed by num_speculative_tokens"
        cell = self._cells.get(self._last_key)
        if cell is None or cell.current is None:
            return "draft length: measuring the lengths " + ", ".join(map(str, self._startup))
        rates = self._tokens_per_s(self._last_key, cell)
        tokens = self._acceptance(self._last_key[0]).tokens_per_step()
        chosen = cell.current
        other = 0 if chosen else max(range(1, len(rates)), key=lambda k: (rates[k], -k), default=0)

        def told(k: int) -> str:
            draft_s, verify_s = cell.times.estimate(k)
            return (
                f"{tokens[k]:.2f} tokens in {1e3 * (draft_s + verify_s):.2f} ms "
                f"(draft {1e3 * draft_s:.2f}), {rates[k]:.0f} tok/s"
            )

        name = f"draft length {chosen}" if chosen else "drafting off"
        versus = "without drafting" if chosen else f"best length {other}"
        return f"{name}: {told(chosen)}; {versus}: {told(other)}; {_describe(self._last_key)}"

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
            raise ConfigError(
                f"draft-length profile: 'version' must be {PROFILE_VERSION}, found {profile.get('version')!r}"
            )
        try:
            for entry in profile["times"]:
                steps = {k: v for k, v in entry["steps"].items() if int(k) <= self.max_draft_tokens}
                is_known = "0" in steps and len(steps) > 1
                cell = _Cell(StepTimes.from_dict(steps), is_known)
                self._cells[int(entry["context"]), int(entry["batch"])] = cell
            for context, counts in profile["acceptance"].items():
                self._rates[int(context)] = AcceptanceRates.from_dict(counts, self.max_draft_tokens)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"draft-length profile: not as this program writes it ({error!r})") from None

    def _cell(self, key: tuple[int, int]) -> _Cell:
        if key not in self._cells:
            self._cells[key] = _Cell(StepTimes())
        cell = self._cells[key]
        if cell.times.prior is None and not self._is_ready(cell):
            ready = [k for k, other in self._cells.items() if other is not cell and self._is_ready(other)]
            if ready:
                nearest = min(ready, key=lambda k: (abs(k[1] - key[1]), abs(k[0] - key[0]), k))
                cell.times.prior = self._cells[nearest].times
        return cell

    def _acceptance(self, context: int) -> AcceptanceRates:
        if context not in self._rates:
            nearest = min(self._rates, key=lambda known: (abs(known - context), known), default=None)
            self._rates[context] = (
                AcceptanceRates(self.max_draft_tokens) if nearest is None else self._rates[nearest].copy()
            )
        return self._rates[context]

    def _is_ready(self, cell: _Cell) -> bool:
        """Return whether enough is known to choose; start-up lengths that no request reaches are given up."""
        if not cell.is_known:
            repeats = self.policy.startup_repeats
            cell.is_known = (
                cell.times.prior is not None
                or all(cell.times.count(k) >= repeats for k in self._startup)
                or cell.num_steps >= 2 * repeats * len(self._startup)
            )
        return cell.is_known

    def _tokens_per_s(self, key: tuple[int, int], cell: _Cell) -> list[float]:
        """Return expected tokens per second of one sequence by draft length; scheduled where it can be."""
        tokens = self._acceptance(key[0]).tokens_per_step()
        cell.fixed_tokens_per_s = rates = [
            expected / max(_LEAST_STEP_S, sum(cell.times.estimate(k))) for k, expected in enumerate(tokens)
        ]
        gain = 1.0 if self.schedule is None else cell.scheduled.gain
        return [rates[0], *(rate * gain for rate in rates[1:])]

    def _probe(self, cell: _Cell, rates: list[float], current: int) -> int | None:
        """Return another length worth trying now, if the time for it has been saved up."""
        last = max(cell.last_tried, key=lambda k: cell.last_tried[k], default=current)
        if cell.probe_paid and last != current:
            return last
        policy = self.policy
        # Where a longer draft means another tile of rows, a look at each neighbour costs more than it tells.
        looks_around = self.schedule is None or self.schedule.compares_caps
        others = sorted((k for k in range(len(rates)) if k != current), key=lambda k: (-rates[k], k))
        for k in others:
            if self.schedule is not None and 0 < k < current:
                continue  # scheduled steps send fewer drafts by themselves, and tell of all that they make
            is_new = looks_around and cell.times.count(k) < policy.min_repeats and abs(k - current) <= 2
            is_next_best = k in (0, others[0])
            is_old = cell.num_steps - cell.last_tried.get(k, -policy.recheck_steps) >= policy.recheck_steps
            is_lead = current == 0 and k == others[0]  # while off, only trying shows that drafting pays again
            if not (is_new or is_lead or (is_next_best and is_old)):
                continue
            step_s = sum(cell.times.estimate(k))
            loss_s = step_s * (1 - rates[k] / rates[current])
            if loss_s <= cell.saved_s:
                return k
        return None

    def _settle(self, cell: _Cell, num_draft_tokens: int, step_s: float, emitted: float) -> None:
        """Account for a step: time is saved for exploring, and a probe pays with the time it really lost."""
        assert cell.current is not None
        worth_s = emitted / cell.tokens_per_s[cell.current]
        if cell.probe is not None and num_draft_tokens == cell.probe:
            cell.probe_paid = worth_s >= step_s
            cell.saved_s -= max(0.0, step_s - worth_s)
        else:
            cell.probe_paid = False
            most = self.policy.max_saved_steps * step_s
            cell.saved_s = min(most, cell.saved_s + self.policy.explore_share * step_s)


def _key(batch: int, context_len: int) -> tuple[int, int]:
    """Return the buckets of context length (below 1k, 2k, 4k, ...) and batch (1, 2, up to 4, 8, ...)."""
    return (context_len // _CONTEXT_UNIT).bit_length(), (batch - 1).bit_length()


def _describe(key: tuple[int, int]) -> str:
    context, batch = key
    return f"batch up to {2**batch}, context below {2**context}k"
