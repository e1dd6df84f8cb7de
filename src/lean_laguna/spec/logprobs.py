"""Log-probabilities as reported to users: of the model's raw logits, before options, temperature and filters.

Raw logits of a row are the same bits with and without speculation, so these are too.

Source: vLLM's default ``logprobs_mode`` ``raw_logprobs``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lean_laguna.core.types import Logprob
from lean_laguna.spec.logits import ids_by_row


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[dict[int, Logprob]]:
    """Return each row's chosen token and its most probable ones.

    Args:
        logits: [R, V] float32 raw logits on any device; not changed.
        token_ids: R chosen tokens.
        num_logprobs: Most probable tokens beside the chosen one, at least 0.

    Returns:
        Per row, token id to log-probability and rank: the chosen token first, then by rank. Equal logits rank
        by token id. ``decoded_token`` is left to the caller.
    """
    scores = np.array(logits.detach().cpu().numpy(), dtype=np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    chosen = scores[np.arange(len(scores)), token_ids]
    num_better = (scores > chosen[:, None]).sum(axis=1).tolist()
    top_ids = _top_ids(scores, min(num_logprobs, scores.shape[1]))
    found = []
    for row, token, better, ids in zip(scores, token_ids, num_better, top_ids, strict=True):
        rank = 1 + better + int(np.count_nonzero(row[:token] == row[token]))
        entry = {token: Logprob(float(row[token]), rank)}
        for place, (other, value) in enumerate(zip(ids.tolist(), row[ids].tolist(), strict=True), start=1):
            entry.setdefault(other, Logprob(value, place))
        found.append(entry)
    return found


def _top_ids(scores: NDArray[np.float64], num: int) -> list[NDArray[np.int64]]:
    """Return each row's most probable tokens, best first, equal ones by id."""
    if num == 0:
        return [np.zeros(0, dtype=np.int64)] * len(scores)
    at = scores.shape[1] - num
    candidates = ids_by_row(scores >= np.partition(scores, at, axis=1)[:, at : at + 1])
    return [
        ids[np.argsort(-row[ids], kind="stable")[:num]] for row, ids in zip(scores, candidates, strict=True)
    ]
