"""Log-probabilities as a request gets them: with the token's text, and for the prompt's own tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from lean_laguna.core.types import Logprob
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.logprobs import token_logprobs

_ROWS_AT_ONCE = 64
"""Rows of logits held at a time: a whole chunk over a large vocabulary would be hundreds of megabytes."""


def with_text(candidates: Mapping[int, Logprob], tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return candidates with each token's text filled in."""
    return {
        token: dataclasses.replace(entry, decoded_token=tokenizer.token_text(token))
        for token, entry in candidates.items()
    }


def prompt_logprobs(
    hidden: Tensor,
    next_token_ids: Sequence[int],
    num_logprobs: int,
    compute_logits: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
) -> list[dict[int, Logprob]]:
    """Return the log-probabilities of prompt tokens given those before them.

    Args:
        hidden: [S, D] hidden states of consecutive prompt positions.
        next_token_ids: At most S tokens: row i is for token i.
        num_logprobs: Most probable tokens beside the actual one.
        compute_logits: From [R, D] to [R, V] float32.
        tokenizer: For the tokens' text.
    """
    found: list[dict[int, Logprob]] = []
    for start in range(0, len(next_token_ids), _ROWS_AT_ONCE):
        tokens = next_token_ids[start : start + _ROWS_AT_ONCE]
        logits = compute_logits(hidden[start : start + len(tokens)])
        found += [with_text(row, tokenizer) for row in token_logprobs(logits, tokens, num_logprobs)]
    return found
