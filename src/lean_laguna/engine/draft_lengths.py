"""How many tokens to draft for each sequence of a step: as its request asks, or as the controller says."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lean_laguna.core.config import DraftLength, EngineConfig
from lean_laguna.engine.sequence import SequenceState
from lean_laguna.spec.draft_length import DraftLengthController
from lean_laguna.spec.draft_trials import Policy
from lean_laguna.spec.dspark_proposer import DSparkProposer
from lean_laguna.spec.proposer import Proposer

_CHECKED_DRAFT_TOKENS, _LEAST_ACCEPTED = 200, 2
"""Of so many first draft tokens a drafter made for the target has more accepted, whatever the text."""


_SPARE_SHARE = 1 / 16  # of the time that the host waits, for learning from steps that need not teach
_WAITS_KEPT = 0.9  # weight of the waits before a step
_LONGEST_LESSON = 4.0  # times the usual one
_RAREST = 64  # steps of which one teaches where the host hardly waits


class SpareTime:
    """Which steps may teach for nothing, because the host waits for the device anyway.

    They are chosen before they come: long waits are for steps whose many drafts go well.
    """

    def __init__(self, learning_s: float):
        """Start with no wait known.

        Args:
            learning_s: What learning from a step takes, until `learned` says more.
        """
        self._learning_s, self._wait_s = learning_s, 0.0
        self.restart()

    def restart(self) -> None:
        """Begin anew, with nothing under way: until launches run ahead there is no time to spare."""
        per_step_s = max(self._learning_s / _RAREST, _SPARE_SHARE * self._wait_s)
        self._num_left = max(1, int(self._learning_s / per_step_s))

    def learned(self, seconds: float) -> None:
        """Take what learning from a step took; a stall now and then says nothing."""
        most_s = _LONGEST_LESSON * self._learning_s
        self._learning_s = _WAITS_KEPT * self._learning_s + (1 - _WAITS_KEPT) * min(seconds, most_s)

    def is_enough(self, waited_s: float) -> bool:
        """Say whether a step may teach.

        Args:
            waited_s: How long the host has waited for it.
        """
        self._wait_s = _WAITS_KEPT * self._wait_s + (1 - _WAITS_KEPT) * waited_s
        self._num_left -= 1
        if self._num_left:
            return False
        self.restart()
        return True


class DraftLengths:
    """Asks the controller for a step's length and tells it what the step took; owned by the engine.

    Attributes:
        controller: None without a drafter.
        num_made_tokens: Longest draft of the step last chosen for, where it is scheduled; else None.
    """

    def __init__(self, controller: DraftLengthController | None):
        self.controller = controller
        self.num_made_tokens: int | None = None
        self._context_len = 0
        self._chosen_of: dict[SequenceState, int] = {}
        self._num_drafted = self._num_accepted = 0

    def choose(self, sequences: Sequence[SequenceState]) -> list[int]:
        """Return the drafts wanted per sequence: at most what can be emitted with a bonus token after it."""
        if self.controller is None:
            return [0] * len(sequences)
        following = [s for s in sequences if s.follows_engine]
        chosen = 0
        if following:
            self._context_len = max(s.num_computed for s in following)
            # A step that holds a request with a length of its own sends what it drafts.
            is_alone = len(following) == len(sequences)
            chosen = self.controller.choose(len(following), self._context_len, may_schedule=is_alone)
        schedule = self.controller.schedule
        if schedule is not None and not following:
            schedule.costs, schedule.wants_chances = None, False
        self.num_made_tokens = chosen if schedule is not None and schedule.costs is not None else None
        lengths = [
            min(
                chosen if s.follows_engine else s.request.num_speculative_tokens or 0,
                s.completion.num_remaining - 1,
            )
            for s in sequences
        ]
        self._chosen_of = dict(zip(sequences, lengths, strict=True))
        return lengths

    def hears(
        self,
        sequences: Sequence[SequenceState],
        accepted: Sequence[tuple[int, int]],
        *,
        is_idle: bool = False,
    ) -> bool:
        """Say whether ``observe`` would learn from a step; to be asked once for each step.

        Args:
            sequences: That the step was for.
            accepted: Per sequence, its drafts and how many were accepted.
            is_idle: There is time to learn.
        """
        self._check_acceptance(accepted)
        controller = self.controller
        if controller is None or controller.is_fixed or not all(s.follows_engine for s in sequences):
            return False
        most = max(num_drafts for num_drafts, _ in accepted)
        return controller.hears(most, len(sequences), self._context_len, is_idle=is_idle)

    def observe(
        self,
        sequences: Sequence[SequenceState],
        accepted: Sequence[tuple[int, int]],
        *,
        draft_s: float,
        verify_s: float,
        num_made_tokens: int | None = None,
        is_usual: bool = True,
        are_earlier: bool = False,
        is_heard: bool = False,
    ) -> None:
        """Report a step that only decoded.

        One that held requests with a length of their own, or drafts that no drafter made, teaches nothing.

        Args:
            sequences: As given to ``choose``.
            accepted: Per sequence, its drafts and how many were accepted.
            draft_s: Seconds for proposing and for the drafter's context.
            verify_s: Seconds for the rest.
            num_made_tokens: Longest draft made for it, where it was scheduled.
            is_usual: The times are those of steps of this length.
            are_earlier: The step was launched before the one last chosen for; all its drafts are a drafter's.
            is_heard: ``hears`` has said so.
        """
        if not is_heard and not self.hears(sequences, accepted):
            return
        assert self.controller is not None, "hears() says so"
        chosen = [self._chosen_of.get(sequence, 0) for sequence in sequences]
        are_foreseen = (num > most for (num, _), most in zip(accepted, chosen, strict=True))
        if not are_earlier and any(are_foreseen):
            return
        schedule = self.controller.schedule
        self.controller.observe(
            max(num_drafts for num_drafts, _ in accepted),
            len(sequences),
            self._context_len,
            draft_s=draft_s,
            verify_s=verify_s,
            accepted=accepted,
            unsent=schedule.cut if schedule is not None and len(schedule.cut) == len(sequences) else (),
            num_made_tokens=num_made_tokens,
            is_usual=is_usual,
            is_heard=True,
        )

    def _check_acceptance(self, accepted: Sequence[tuple[int, int]]) -> None:
        """Say once, on stderr, that a drafter does not seem to belong to its target."""
        if self._num_drafted >= _CHECKED_DRAFT_TOKENS:
            return
        self._num_drafted += sum(num_drafts for num_drafts, _ in accepted)
        self._num_accepted += sum(count for _, count in accepted)
        if self._num_drafted >= _CHECKED_DRAFT_TOKENS and self._num_accepted < _LEAST_ACCEPTED:
            print(
                f"lean-laguna: {self._num_accepted} of the first {self._num_drafted} draft tokens were "
                "accepted: the drafter does not seem to belong to this target. Likely causes: it was trained "
                "for another checkpoint or another tokenizer, its target_layer_ids or mask_token_id are "
                "wrong, or its weights are not trained. The output is right, only slower than without it",
                file=sys.stderr,
            )

    def explain(self) -> str | None:
        """Say in one line what is used and why; None without a drafter."""
        return self.controller.explain() if self.controller is not None else None


def controller_for(
    proposer: Proposer | None,
    num_speculative_tokens: DraftLength | None,
    config: EngineConfig,
    *,
    trial_steps: int = 1,
) -> DraftLengthController | None:
    """Return the controller for a drafter; the configuration says the length where the caller does not."""
    if proposer is None:
        return None
    configured = config.speculative.num_speculative_tokens if config.speculative else "auto"
    return DraftLengthController(
        proposer.max_draft_tokens,
        configured if num_speculative_tokens is None else num_speculative_tokens,
        policy=Policy(trial_steps=trial_steps),
        schedule=proposer.schedule if isinstance(proposer, DSparkProposer) else None,
    )
