"""What one completion has said: tokens, text, log-probabilities and why it ended, always in agreement.

Tokens arrive in runs (a verified block); everything that can end a completion is looked for token by token,
so the first event in the run wins and the result is the same however the tokens were grouped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lean_laguna.core.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    SamplingParams,
    SpeculationStats,
)
from lean_laguna.spec.acceptance import Ending, cut_block

TokenLogprobs = Mapping[int, Logprob]


class Detokenizer(Protocol):
    """Turns token ids into text as they come; never returns part of a character."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain."""
        ...

    def flush(self) -> str:
        """Return the rest."""
        ...


@dataclass(frozen=True)
class CompletionDelta:
    """What one engine step added to one completion.

    Attributes:
        request_id: The request.
        index: Which of its completions.
        text: New text, without a tail that could still become a stop text.
        token_ids: New tokens.
        logprobs: Per new token, where asked for.
        is_draft_token: Per new token, True where it came from an accepted draft.
        finish_reason: Set on the completion's last delta.
        stop_reason: The stop text or stop token id that ended it.
        is_request_finished: True on the last delta of the request.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    is_draft_token: tuple[bool, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    is_request_finished: bool


class Completion:
    """The output side of one sequence; owned by it.

    Attributes:
        token_ids: Emitted tokens, stop token included; nothing after the event that ended it.
        is_draft_token: Per token, whether it came from an accepted draft.
        logprobs: Per token, where asked for.
        finish_reason: None while running.
        stop_reason: The stop text or stop token id; None for end-of-sequence.
    """

    def __init__(
        self,
        params: SamplingParams,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        detokenizer: Detokenizer,
    ):
        self.token_ids: list[int] = []
        self.is_draft_token: list[bool] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._ending = Ending(
            max_tokens,
            params.min_tokens,
            frozenset() if params.ignore_eos else frozenset(eos_token_ids),
            frozenset(params.stop_token_ids),
        )
        self._stop_texts = tuple(params.stop)
        self._keeps_stop = params.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._text = ""
        self._num_pushed = 0
        self._num_held_back = 0
        self._num_reported_tokens = 0
        self._num_reported_chars = 0

    @property
    def text(self) -> str:
        """Text that is certain to stay: while running, without a tail that could become a stop text."""
        return self._text[: len(self._text) - self._num_held_back] if self._num_held_back else self._text

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._ending.max_tokens - len(self.token_ids)

    def append(
        self, token_ids: Sequence[int], num_accepted: int, logprobs: Sequence[TokenLogprobs] | None = None
    ) -> int:
        """Take tokens in order, up to and including the one that ends the completion.

        Args:
            token_ids: The run: accepted drafts, then the target's own token.
            num_accepted: How many of them came from the drafter; they stand first.
            logprobs: Per token, where the request asked for them.

        Returns:
            How many tokens were kept.
        """
        assert self.finish_reason is None
        stop_text = self._push_and_look if self._stop_texts else None
        cut = cut_block(token_ids, len(self.token_ids), self._ending, stop_text)
        num_kept = cut.num_kept
        self.token_ids += token_ids[:num_kept]
        self.finish_reason, self.stop_reason = cut.finish_reason, cut.stop_reason
        ends_at_token = cut.finish_reason == "stop" and not isinstance(cut.stop_reason, str)
        if stop_text is None:
            self._text += self._detokenizer.push(token_ids[: num_kept - ends_at_token])
        if ends_at_token and self._keeps_stop:
            self._text += self._detokenizer.push(token_ids[num_kept - 1 : num_kept])
        num_from_drafts = min(num_accepted, num_kept)
        self.is_draft_token += [True] * num_from_drafts + [False] * (num_kept - num_from_drafts)
        if self.logprobs is not None:
            assert logprobs is not None
            self.logprobs += logprobs[:num_kept]
        if self.finish_reason is not None:
            self._end()
        elif self._stop_texts:
            self._num_held_back = self._possible_stop_tail()
        return num_kept

    def abort(self) -> None:
        """End it from outside; what was said stays."""
        if self.finish_reason is None:
            self.finish_reason = "abort"
            self._end()

    def fail(self, reason: str) -> None:
        """Say that its end is none: it was to be something that it is not."""
        assert self.finish_reason is not None
        self.finish_reason, self.stop_reason = "error", reason

    def delta(self, request_id: str, index: int, is_request_finished: bool) -> CompletionDelta:
        """Return what was added since the last call."""
        text, first = self.text, self._num_reported_tokens
        new_text = text[self._num_reported_chars :]
        self._num_reported_tokens, self._num_reported_chars = len(self.token_ids), len(text)
        return CompletionDelta(
            request_id=request_id,
            index=index,
            text=new_text,
            token_ids=tuple(self.token_ids[first:]),
            logprobs=None if self.logprobs is None else tuple(self.logprobs[first:]),
            is_draft_token=tuple(self.is_draft_token[first:]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            is_request_finished=is_request_finished,
        )

    def snapshot(self, index: int, seed: int, speculation: SpeculationStats | None) -> CompletionOutput:
        """Return the whole of it so far."""
        cumulative = None
        if self.logprobs is not None:
            said = zip(self.token_ids, self.logprobs, strict=True)
            cumulative = sum((candidates[token].logprob for token, candidates in said), 0.0)
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=cumulative,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            is_draft_token=tuple(self.is_draft_token),
            seed=seed,
            speculation=speculation,
        )

    def _push_and_look(self, token: int) -> str | None:
        """Add a token's text and return the stop text it completes, having cut the text there."""
        num_old = len(self._text)
        self._text += self._detokenizer.push((token,))
        self._num_pushed += 1
        if self._num_pushed <= self._ending.min_tokens:
            return None
        best: tuple[int, int, str] | None = None  # the one complete first; of those, the longest
        for stop in self._stop_texts:
            start = self._text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        self._text = self._text[: end if self._keeps_stop else start]
        return stop

    def _possible_stop_tail(self) -> int:
        """Return the length of the longest tail that begins a stop text."""
        longest = 0
        for stop in self._stop_texts:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _end(self) -> None:
        self._num_held_back = 0
        if not isinstance(self.stop_reason, str):
            self._text += self._detokenizer.flush()
