"""Log-probabilities in the shapes that clients read: legacy completions, chat, and vLLM's prompt lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lean_laguna.core.types import Logprob
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.stream import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this number for a token that cannot be drawn."""


@dataclass
class LegacyLogprobs:
    """Collects ``logprobs`` of the completions endpoint: parallel lists, one entry per token.

    Attributes:
        offset: Characters of the text before the next token.
    """

    tokenizer: Tokenizer
    num_top: int
    as_token_ids: bool
    offset: int = 0
    _tokens: list[str] = field(default_factory=list)
    _token_logprobs: list[float | None] = field(default_factory=list)
    _top: list[dict[str, float] | None] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], candidates: Sequence[TokenLogprobs | None]) -> None:
        """Take tokens, each with its candidates; None for the first token of a prompt."""
        for token, found in zip(token_ids, candidates, strict=True):
            text = self._name(token)
            self._tokens.append(text)
            self._offsets.append(self.offset)
            self.offset += len(self.tokenizer.token_text(token))
            if found is None:
                self._token_logprobs.append(None)
                self._top.append(None)
                continue
            self._token_logprobs.append(finite(found[token].logprob))
            self._top.append(self._top_of(token, found) if self.num_top else None)

    def take(self) -> dict[str, Any]:
        """Return what was collected and start anew."""
        taken = {
            "text_offset": self._offsets,
            "token_logprobs": self._token_logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._top,
        }
        self._offsets, self._token_logprobs, self._tokens, self._top = [], [], [], []
        return taken

    def _top_of(self, token: int, found: TokenLogprobs) -> dict[str, float]:
        """Return texts to log-probabilities; of tokens that look the same, the more probable one's."""
        top: dict[str, float] = {}
        for candidate, entry in found.items():
            if entry.rank > self.num_top and candidate != token:
                continue
            name = self._name(candidate)
            top[name] = max(top.get(name, LEAST_LOGPROB), finite(entry.logprob))
        return top

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_token_ids else self.tokenizer.token_text(token)


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    candidates: Sequence[TokenLogprobs],
    num_top: int,
    as_token_ids: bool,
) -> dict[str, Any]:
    """Return ``logprobs`` of the chat endpoint: one object per token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        name = f"token_id:{token}" if as_token_ids else tokenizer.token_text(token)
        return {"token": name, "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token))}

    content = []
    for token, found in zip(token_ids, candidates, strict=True):
        ranked = sorted((value.rank, candidate) for candidate, value in found.items())
        top = [entry(candidate, found[candidate].logprob) for _, candidate in ranked[:num_top]]
        content.append({**entry(token, found[token].logprob), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(
    candidates: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's ``prompt_logprobs``: per prompt token, candidates by token id."""
    if candidates is None:
        return None
    return [
        None
        if found is None
        else {
            str(token): {
                "logprob": finite(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token, value in found.items()
        }
        for found in candidates
    ]


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
