"""A backend that says what it was told to say, in given bursts, on a clock of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from lean_laguna.backends.base import GenerationResult, Progress, PromptInput, per_prompt_params
from lean_laguna.core.types import Logprob, RequestTimes, SamplingParams, SpeculationStats

Script = Callable[[str, SamplingParams, int], Sequence[int]]


class ScriptedBackend:
    """Replays ``script(prompt, params, call)``; a step takes ``step_s`` and yields ``burst`` tokens.

    Attributes:
        calls: Prompts and parameters of each call, in order.
    """

    def __init__(
        self,
        script: Script,
        *,
        burst: int = 1,
        step_s: float = 0.1,
        prefill_s: float = 0.5,
        top: dict[int, float] | None = None,
        log: list[str] | None = None,
        name: str = "scripted",
        num_draft_tokens: int | None = None,
    ):
        self.script, self.burst, self.step_s, self.prefill_s = script, burst, step_s, prefill_s
        self.top, self.log, self.name = top or {}, log, name
        self.num_draft_tokens = num_draft_tokens
        self.calls: list[tuple[PromptInput, SamplingParams]] = []
        self._clock = itertools.count(1000.0, 50.0)

    def generate(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[GenerationResult]:
        results = []
        for prompt, one in zip(prompts, per_prompt_params(params, len(prompts)), strict=True):
            if self.log is not None:
                self.log.append(f"{self.name}:{prompt}")
            self.calls.append((prompt, one))
            results.append(self._generate(str(prompt), one))
            if on_progress is not None:
                on_progress(len(results), len(prompts))
        return results

    def _generate(self, prompt: str, params: SamplingParams) -> GenerationResult:
        ids = tuple(self.script(prompt, params, len(self.calls) - 1))[: params.max_tokens]
        start = next(self._clock)
        first = start + self.prefill_s
        steps = -(-max(len(ids) - 1, 0) // self.burst)
        arrivals = tuple(first + self.step_s * i for i in range(steps + 1)) if ids else ()
        speculation = None
        if self.num_draft_tokens:
            accepted = len(ids) - 1 - steps
            per_pos = tuple(accepted if i < self.burst - 1 else 0 for i in range(self.num_draft_tokens))
            speculation = SpeculationStats(steps, steps * self.num_draft_tokens, accepted, per_pos, steps)
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(
                {i: Logprob(v, 1, f"t{i}") for i, v in {token: 0.0, **self.top}.items()} for token in ids
            )
        return GenerationResult(
            text="".join(f"t{i} " for i in ids),
            token_ids=ids,
            num_prompt_tokens=len(prompt),
            finish_reason="length",
            times=RequestTimes(start, arrivals[0] if ids else None, arrivals[-1] if ids else None),
            arrivals_s=arrivals,
            logprobs=logprobs,
            speculation=speculation,
        )

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"engine": self.name, "device": "cpu", "dtype": "float32", "num_threads": 1}
        info["model"] = {"name": "target", "sha256": "0" * 64, "num_parameters": 10_000_000}
        info["memory"] = {"weights": 40_000_000}
        if self.num_draft_tokens:
            info["drafter"] = {"name": "drafter", "sha256": "1" * 64}
            info["num_speculative_tokens"] = self.num_draft_tokens
        return info

    def close(self) -> None:
        pass
