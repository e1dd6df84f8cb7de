"""Runs the same prompts on several sides, interleaved so that a machine that drifts drifts for all of them.

What is measured is one request at a time: the single user's case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lean_laguna.backends.base import Backend, GenerationResult
from lean_laguna.core.types import SamplingParams
from lean_laguna.tasks.prompts import PromptSet

# Called with the number of finished generations, the number of all, and what is being run.
RoundProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """What is run on every side.

    Attributes:
        prompts: The prompt set.
        params: Sampling parameters; prompt i is run with seed ``seed`` + i on every side and in every repeat.
        repeats: Measured passes over the prompts, per side, at least 1.
        warmup: Generations per side, not measured, before the first pass.
        seed: Base of the seeds.
    """

    prompts: PromptSet
    params: SamplingParams
    repeats: int = 3
    warmup: int = 1
    seed: int = 0

    def params_of(self, index: int) -> SamplingParams:
        """Return the parameters of prompt ``index``."""
        return dataclasses.replace(self.params, seed=self.seed + index)


@dataclass(frozen=True)
class Rounds:
    """Results per side: ``results[side][repeat][prompt]``."""

    results: Mapping[str, list[list[GenerationResult]]]

    def passes(self, side: str) -> list[list[GenerationResult]]:
        """Return the measured passes of a side."""
        return self.results[side]


def run_rounds(sides: Mapping[str, Backend], plan: Plan, on_progress: RoundProgress | None = None) -> Rounds:
    """Run every prompt on every side ``plan.repeats`` times.

    Within a repeat each prompt runs on all sides in turn; the order of the sides turns round from prompt to
    prompt and from repeat to repeat (A B, B A, A B ...), so that neither a drift nor being first favours a
    side.

    Args:
        sides: Backends by name, in the order of the report.
        plan: What to run.
        on_progress: Told before each generation.

    Raises:
        RequestError: A backend cannot serve a prompt.
    """
    prompts = plan.prompts.prompts
    total = len(sides) * (plan.warmup + plan.repeats * len(prompts))
    done = 0

    def run(name: str, index: int, what: str) -> GenerationResult:
        nonlocal done
        if on_progress is not None:
            on_progress(done, total, what)
        done += 1
        return sides[name].generate([prompts[index].prompt], plan.params_of(index))[0]

    for count in range(plan.warmup):
        for name in sides:
            run(name, count % len(prompts), f"warm-up, {name}")
    results: dict[str, list[list[GenerationResult]]] = {name: [] for name in sides}
    for repeat in range(plan.repeats):
        for passes in results.values():
            passes.append([])
        for index, prompt in enumerate(prompts):
            order = list(sides) if (repeat + index) % 2 == 0 else list(reversed(list(sides)))
            for name in order:
                what = f"repeat {repeat + 1} of {plan.repeats}, {prompt.id}, {name}"
                results[name][repeat].append(run(name, index, what))
    if on_progress is not None:
        on_progress(total, total, "done")
    return Rounds(results)
