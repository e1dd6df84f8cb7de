"""The protocol between whatever computes text and whatever measures it.

Bench, evaluation and training by reward see only this, so that one A/B and one parity check serve our engine
and anyone's server alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lean_laguna.core.types import FinishReason, Logprob, RequestTimes, SamplingParams, SpeculationStats

# Called with the number of finished prompts and of all prompts.
Progress = Callable[[int, int], None]
PromptInput = str | Sequence[int]


@dataclass(frozen=True)
class GenerationResult:
    """What came back for one prompt; text, ids and log-probabilities agree.

    Attributes:
        text: The completion.
        token_ids: Its tokens, as the backend reports them; empty from a server that names none.
        num_prompt_tokens: Length of the prompt in tokens.
        finish_reason: ``stop``, ``length`` or ``abort``.
        times: Arrival, first and last token, in seconds of ``time.perf_counter``.
        arrivals_s: When each run of tokens came, on the same clock; a run is one token without speculation
            and several with it.
        logprobs: Per token, candidates by id, where asked for.
        speculation: Counts of this completion; None where no drafter ran.
        num_cached_tokens: Prompt tokens taken from a prefix cache.
        num_completion_tokens: Their number, where ``token_ids`` may be missing; None says they are all.
    """

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: FinishReason | None
    times: RequestTimes
    arrivals_s: tuple[float, ...] = ()
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    speculation: SpeculationStats | None = None
    num_cached_tokens: int = 0
    num_completion_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion."""
        return len(self.token_ids) if self.num_completion_tokens is None else self.num_completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None where no token came."""
        first = self.times.first_token_s
        return None if first is None else first - self.times.arrival_s

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last; None where fewer than two tokens came."""
        first, last = self.times.first_token_s, self.times.last_token_s
        return None if first is None or last is None or self.num_tokens < 2 else last - first

    @property
    def num_decode_tokens(self) -> int:
        """Tokens after the first, which the time of ``decode_s`` produced."""
        return max(self.num_tokens - 1, 0)


class Backend(Protocol):
    """Computes completions. Calls come one after another, from one thread."""

    def generate(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[GenerationResult]:
        """Complete every prompt, all of them in flight at once, and return results in order.

        Args:
            prompts: Texts, or token ids.
            params: One for all prompts, or one for each; ``n`` must be 1.
            on_progress: Told of every finished prompt.

        Raises:
            RequestError: A prompt or a parameter cannot be served.
        """
        ...

    def info(self) -> dict[str, Any]:
        """Return what a result file must say about this backend, ready for JSON.

        Keys: ``engine``, ``device``, ``dtype``, ``kernels``, ``num_threads``, ``model`` (``name``,
        ``sha256``), ``drafter`` (the same, absent without one), ``num_speculative_tokens`` (absent
        without a drafter), ``memory`` (bytes by use).
        """
        ...

    def close(self) -> None:
        """Free what the backend holds; it cannot be used afterwards."""
        ...


def per_prompt_params(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    """Return one ``SamplingParams`` for each prompt.

    Raises:
        ValueError: A sequence of another length was given.
    """
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling parameters for {num_prompts} prompts")
    return params
