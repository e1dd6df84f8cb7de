"""Puts one streamed completion together: text, tokens, counts, and when each piece came."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from lean_laguna.backends.base import GenerationResult
from lean_laguna.core.errors import BackendError
from lean_laguna.core.types import FinishReason, Logprob, RequestTimes, SamplingParams, SpeculationStats

_REASONS = ("stop", "length", "abort")


class CompletionReader:
    """Takes the events of one stream, each at the moment it comes.

    Attributes:
        num_tokens: Tokens so far as the server counts them, else those seen.
        has_running_usage: Chunks carry the count so far, so that each one's tokens are known.
    """

    def __init__(self, params: SamplingParams):
        self.num_tokens = 0
        self.has_running_usage = False
        self._asked_logprobs = params.logprobs is not None
        self._arrival_s = time.perf_counter()
        self._arrivals_s: list[float] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._speculation: SpeculationStats | None = None

    def take(self, event: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Take one event and return its choice, if it has one."""
        now_s = time.perf_counter()
        self._speculation = _speculation(event) or self._speculation
        choices = event.get("choices") or ()
        choice: Mapping[str, Any] | None = choices[0] if choices else None
        if event.get("usage"):
            self._usage = event["usage"]
            self.has_running_usage |= choice is not None and not choice.get("finish_reason")
        if choice is None:
            return None
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        text, ids = choice.get("text") or delta.get("content") or "", choice.get("token_ids") or ()
        self._texts.append(text)
        self._ids += ids
        self._take_logprobs(choice, ids)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if self.has_running_usage:
            num_tokens = int(self._usage.get("completion_tokens", 0))
        else:
            num_tokens = len(self._ids) or self.num_tokens + bool(text or thought)
        if num_tokens > self.num_tokens:
            self._arrivals_s.append(now_s)
        self.num_tokens = num_tokens
        return choice

    def result(self, where: str) -> GenerationResult:
        """Return the completion.

        Raises:
            BackendError: The server never said how many tokens there were.
        """
        num_tokens = self._usage.get("completion_tokens")
        if num_tokens is None:
            if not self._ids and self._texts:
                raise BackendError(
                    f"{where}: the stream ended without 'usage', so its tokens cannot be counted"
                )
            num_tokens = len(self._ids)
        details = self._usage.get("prompt_tokens_details") or {}
        has_ids = len(self._ids) == num_tokens
        first_s, last_s = (self._arrivals_s[0], self._arrivals_s[-1]) if self._arrivals_s else (None, None)
        reason = self._finish_reason if self._finish_reason in _REASONS else None
        return GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(self._ids) if has_ids else (),
            num_prompt_tokens=int(self._usage.get("prompt_tokens", 0)),
            finish_reason=cast("FinishReason | None", reason),
            times=RequestTimes(self._arrival_s, first_s, last_s),
            arrivals_s=tuple(self._arrivals_s),
            logprobs=tuple(self._logprobs) if self._logprobs and has_ids else None,
            speculation=self._speculation,
            num_cached_tokens=int(details.get("cached_tokens") or 0),
            num_completion_tokens=int(num_tokens),
        )

    def _take_logprobs(self, choice: Mapping[str, Any], ids: Any) -> None:
        """Keep the candidates that can be told by id, which the legacy shape names by text only."""
        found = choice.get("logprobs")
        if not self._asked_logprobs or not found or "tokens" not in found:
            return
        names, values = found.get("tokens") or (), found.get("token_logprobs") or ()
        tops = found.get("top_logprobs") or [None] * len(names)
        for token, name, value, top in zip(ids, names, values, tops, strict=False):
            ranked = sorted((top or {}).items(), key=lambda pair: -pair[1])
            rank = 1 + sum(other > value for _, other in ranked)
            entry = {token: Logprob(value, rank, None if name.startswith("token_id:") else name)}
            for place, (other, logprob) in enumerate(ranked, start=1):
                number = other.removeprefix("token_id:")
                if number != other and number.isdigit() and int(number) != token:
                    entry[int(number)] = Logprob(logprob, place, None)
            self._logprobs.append(entry)


def _speculation(event: Mapping[str, Any]) -> SpeculationStats | None:
    """Return the server's own numbers of this request, in vLLM's shape."""
    found = (event.get("metrics") or {}).get("speculative_decoding")
    if not found:
        return None
    histogram = [int(count) for count in found.get("acceptance_histogram") or ()]
    per_pos = tuple(sum(histogram[i:]) for i in range(1, len(histogram)))
    return SpeculationStats(
        int(found.get("num_spec_steps", 0)),
        int(found.get("num_draft_tokens", 0)),
        int(found.get("num_accepted_draft_tokens", 0)),
        per_pos,
    )
