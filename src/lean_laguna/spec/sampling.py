"""From logits to tokens, for the target's rows and the drafter's.

The token of a row is argmax(options(logits) / temperature + Gumbel noise) over the tokens that the filters
leave, or the plain argmax at temperature 0: a function of the row's logits, its request and its prefix. Ties
go to the lower id. Nothing here knows whether a row was drafted, verified or decoded alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lean_laguna.core.types import Logprob
from lean_laguna.spec.logits import apply_logits_options, apply_temperature, surviving_ids
from lean_laguna.spec.logprobs import token_logprobs
from lean_laguna.spec.noise import NoiseCache, gumbel_noise_at
from lean_laguna.spec.request import SamplingRequest, bad_word_sequences

__all__ = [
    "RowBlock",
    "SampledRows",
    "SamplingRequest",
    "bad_word_sequences",
    "sample_drafts",
    "sample_next_drafts",
    "sample_rows",
]

Float64Array = NDArray[np.float64]

# Where filters leave few tokens of a large vocabulary, noise is drawn for those alone. Values are the same
# either way; in a small vocabulary whole rows, drawn once and kept, cost less.
_SPARSE_SHARE = 8
_LEAST_SPARSE_VOCAB = 16384


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Verified rows of one request: row i is for the token after the committed ones and the first i drafts.

    Attributes:
        request: The request.
        draft_token_ids: G drafts, giving G + 1 rows; empty for plain decoding and the last row of a prefill.
    """

    request: SamplingRequest
    draft_token_ids: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        """G + 1."""
        return len(self.draft_token_ids) + 1


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of verified rows.

    Attributes:
        token_ids: Per block, the token of each of its rows.
        logits: [R, V] as given, for log-probabilities.
    """

    token_ids: tuple[list[int], ...]
    logits: Tensor

    def logprobs(self, block: int, num_rows: int, num_logprobs: int) -> list[dict[int, Logprob]]:
        """Return `token_logprobs` of the first ``num_rows`` rows of a block."""
        start = sum(len(tokens) for tokens in self.token_ids[:block])
        chosen = self.token_ids[block][:num_rows]
        return token_logprobs(self.logits[start : start + len(chosen)], chosen, num_logprobs)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of one request: from ``start`` on in the batch, from ``first_row`` on in its block."""

    request: SamplingRequest
    draft_token_ids: Sequence[int]
    start: int
    num_rows: int
    first_row: int = 0


def sample_rows(logits: Tensor, blocks: Sequence[RowBlock], noise: NoiseCache) -> SampledRows:
    """Choose the token of every verified row.

    Args:
        logits: [R, V] float32 raw logits of the target, the blocks' rows one after the other; not changed.
        blocks: One per request, with R rows in all.
        noise: Shared with the drafter.

    Returns:
        The tokens, and log-probabilities on demand.
    """
    groups, start = [], 0
    for block in blocks:
        groups.append(_Rows(block.request, block.draft_token_ids, start, block.num_rows))
        start += block.num_rows
    assert start == len(logits), f"{len(logits)} rows of logits for {start} rows"
    tokens = _choose(logits, groups, noise)
    return SampledRows(tuple(tokens[g.start : g.start + g.num_rows] for g in groups), logits)


def sample_drafts(
    logits: Tensor, requests: Sequence[SamplingRequest], num_draft_tokens: Sequence[int], noise: NoiseCache
) -> list[list[int]]:
    """Choose draft tokens as the target would if these logits were its own: same options, same noise.

    Args:
        logits: [sum of num_draft_tokens, V] float32 of the drafter, over the target's vocabulary (-inf for
            tokens it cannot propose); row i of a request is for its i-th draft. Not changed.
        requests: The requests.
        num_draft_tokens: Drafts per request, at least 0.
        noise: Shared with the verifier.

    Returns:
        Per request, its drafts.
    """
    drafts: list[list[int]] = [[] for _ in requests]
    parallel: list[_Rows] = []
    rows: list[int] = []
    start = 0
    for index, (request, num_rows) in enumerate(zip(requests, num_draft_tokens, strict=True)):
        if request.depends_on_prefix:
            drafts[index] = _draft_in_order(logits[start : start + num_rows], request, noise)
        elif num_rows:
            parallel.append(_Rows(request, (-1,) * num_rows, len(rows), num_rows))
            rows.extend(range(start, start + num_rows))
        start += num_rows
    if parallel:
        tokens = iter(_choose(logits if len(rows) == len(logits) else logits[rows], parallel, noise))
        for index, (request, num_rows) in enumerate(zip(requests, num_draft_tokens, strict=True)):
            if not request.depends_on_prefix:
                drafts[index] = list(islice(tokens, num_rows))
    return drafts


def sample_next_drafts(
    logits: Tensor, requests: Sequence[SamplingRequest], drafts: Sequence[Sequence[int]], noise: NoiseCache
) -> list[int]:
    """Choose one more draft token for each request, as `sample_drafts` would after these drafts.

    Args:
        logits: [R, V] float32 of the drafter, a row for each request. Not changed.
        requests: R requests.
        drafts: Their drafts so far.
        noise: Shared with the verifier.
    """
    rows = [_Rows(r, d, i, 1, len(d)) for i, (r, d) in enumerate(zip(requests, drafts, strict=True))]
    return _choose(logits, rows, noise)


def _draft_in_order(logits: Tensor, request: SamplingRequest, noise: NoiseCache) -> list[int]:
    """Draft token by token, each row seeing the drafts before it."""
    drafts: list[int] = []
    for index in range(len(logits)):
        drafts += _choose(logits[index : index + 1], [_Rows(request, drafts, 0, 1, index)], noise)
    return drafts


def _choose(logits: Tensor, groups: Sequence[_Rows], noise: NoiseCache) -> list[int]:
    """Choose the token of every row; the groups cover the rows in order."""
    if all(g.request.params.temperature == 0 and not g.request.changes_logits for g in groups):
        # The first of equal maxima in either case; numpy's is many times faster, where it need not copy.
        on_cpu = logits.device.type == "cpu"
        best = logits.detach().numpy().argmax(axis=-1) if on_cpu else logits.argmax(dim=-1)
        tokens: list[int] = best.tolist()
        return tokens
    scores = np.array(logits.detach().cpu().numpy(), dtype=np.float64)
    for group in groups:
        if group.request.changes_logits:
            rows = scores[group.start : group.start + group.num_rows]
            apply_logits_options(rows, group.request, group.draft_token_ids, group.first_row)
    sampled = [group for group in groups if group.request.params.temperature > 0]
    if len(sampled) == len(groups):
        return _sample(scores, sampled, noise)
    tokens = scores.argmax(axis=1).tolist()
    if sampled:
        at = [row for group in sampled for row in range(group.start, group.start + group.num_rows)]
        for row, token in zip(at, _sample(scores[at], sampled, noise), strict=True):
            tokens[row] = token
    return tokens


def _sample(scores: Float64Array, groups: Sequence[_Rows], noise: NoiseCache) -> list[int]:
    """Draw the token of every row; ``scores`` [R, V] holds the groups' rows alone and is used up."""
    requests = [group.request for group in groups for _ in range(group.num_rows)]
    positions = [
        group.request.next_position + group.first_row + row
        for group in groups
        for row in range(group.num_rows)
    ]
    apply_temperature(scores, np.array([request.params.temperature for request in requests]))
    survivors = surviving_ids(scores, [request.params for request in requests])
    few = scores.shape[1] // _SPARSE_SHARE if scores.shape[1] >= _LEAST_SPARSE_VOCAB else 0
    is_sparse = [ids is not None and len(ids) <= few for ids in survivors]
    sparse = [row for row, holds in enumerate(is_sparse) if holds]
    dense = [row for row, holds in enumerate(is_sparse) if not holds]
    tokens = [0] * len(scores)
    if dense:
        noisy = noise.rows([requests[row].seed for row in dense], [positions[row] for row in dense])
        noisy += scores if len(dense) == len(scores) else scores[dense]
        for row, best, values in zip(dense, noisy.argmax(axis=1).tolist(), noisy, strict=True):
            kept = survivors[row]
            tokens[row] = best if kept is None else int(kept[values[kept].argmax()])
    if sparse:
        _sample_sparse(scores, sparse, survivors, requests, positions, tokens)
    return tokens


def _sample_sparse(
    scores: Float64Array,
    rows: Sequence[int],
    survivors: Sequence[NDArray[np.int64] | None],
    requests: Sequence[SamplingRequest],
    positions: Sequence[int],
    tokens: list[int],
) -> None:
    """Draw the tokens of rows that have few tokens left, into ``tokens``."""
    kept = [ids for row in rows if (ids := survivors[row]) is not None]
    sizes = [len(ids) for ids in kept]
    seeds = np.repeat(np.array([requests[row].seed for row in rows], dtype=np.uint64), sizes)
    at = np.repeat(np.array([positions[row] for row in rows], dtype=np.uint64), sizes)
    drawn = gumbel_noise_at(seeds, at, np.concatenate(kept))
    start = 0
    for row, ids in zip(rows, kept, strict=True):
        end = start + len(ids)
        tokens[row] = int(ids[(scores[row, ids] + drawn[start:end]).argmax()])
        start = end
