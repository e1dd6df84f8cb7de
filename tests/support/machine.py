"""A machine and a drafter on paper, for draft-length control: step times and acceptance as functions."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lean_laguna.spec.draft_length import DraftLengthController


@dataclass
class Machine:
    """Times of a step; ``rates(context)`` gives each position's acceptance given the ones before it.

    A step of another length than the one before takes longer by the share ``cold``.
    """

    draft_s: Callable[[int, int, int], float]
    verify_s: Callable[[int, int, int], float]
    rates: Callable[[int], Sequence[float]]
    jitter: float = 0.0
    max_draft_tokens: int = 15
    cold: float = 0.0

    def tokens_per_s(self, length: int, batch: int = 1, context: int = 100) -> float:
        """True speed of one sequence at a fixed draft length."""
        expected, reached = 1.0, 1.0
        for rate in self.rates(context)[:length]:
            reached *= rate
            expected += reached
        return expected / (self.draft_s(length, batch, context) + self.verify_s(length, batch, context))

    def best(self, batch: int = 1, context: int = 100) -> int:
        """Truly best draft length."""
        return max(range(self.max_draft_tokens + 1), key=lambda k: self.tokens_per_s(k, batch, context))


@dataclass
class Run:
    """What came of a run."""

    lengths: list[int]
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run(
    machine: Machine,
    controller: DraftLengthController,
    num_steps: int,
    *,
    batch: int = 1,
    context: int = 100,
    growing: bool = False,
    late: int = 0,
    seed: int = 0,
) -> Run:
    """Let the controller drive the machine; it hears of a step ``late`` steps later."""
    rng = random.Random(seed)
    lengths, tokens, seconds = [], 0, 0.0
    unheard: deque[tuple[Any, ...]] = deque()
    for _ in range(num_steps):
        length = controller.choose(batch, context)
        accepted = []
        for _ in range(batch):
            count = 0
            for rate in machine.rates(context)[:length]:
                if rng.random() >= rate:
                    break
                count += 1
            accepted.append((length, count))
        noise = [1 + machine.jitter * abs(rng.gauss(0, 1)) for _ in range(2)]
        is_cold = bool(lengths) and lengths[-1] != length
        draft_s, verify_s = (
            own_s(length, batch, context) * by * (1 + machine.cold * is_cold)
            for own_s, by in zip((machine.draft_s, machine.verify_s), noise, strict=True)
        )
        unheard.append((length, batch, context, draft_s, verify_s, accepted))
        if len(unheard) > late:
            heard = unheard.popleft()
            controller.observe(*heard[:3], draft_s=heard[3], verify_s=heard[4], accepted=heard[5])
        lengths.append(length)
        tokens += sum(1 + count for _, count in accepted)
        seconds += draft_s + verify_s
        if growing:
            context += 1 + accepted[0][1]
    return Run(lengths, tokens, seconds)
