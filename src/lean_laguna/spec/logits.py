"""Logits options and filters, each a function of (request, committed tokens, drafts before this row).

Order, as in vLLM: allowed tokens, bad words, min_tokens, logit_bias; repetition, frequency and presence
penalty; then our constraints (grammar, thinking budget), which nothing after them can undo; temperature;
min_p, top_k, top_p.
Everything is float64 and row by row: a row's result does not depend on the rows beside it.

Source: vLLM ``v1/sample/sampler.py`` (order), ``model_executor/layers/utils.py`` (penalties),
``v1/sample/logits_processor/builtin.py`` (min_p, bias), ``v1/sample/ops/topk_topp_sampler.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.request import Int64Array, SamplingRequest

Float64Array = NDArray[np.float64]

# A nucleus is first looked for among tokens within e**-12 of the best, which holds it in all but odd cases.
_NUCLEUS_DEPTH = 12.0
_MOST_SCALE = 1e300  # keeps 0 * scale at 0
_MOST_SCORE = 1e300  # far from where doubles end


def apply_logits_options(
    scores: Float64Array, request: SamplingRequest, draft_token_ids: Sequence[int] = (), first_row: int = 0
) -> None:
    """Apply what changes logits to consecutive rows of one request, in place.

    Args:
        scores: [R, V] raw logits; row r is for the token after the committed ones and the first
            ``first_row + r`` drafts.
        request: The options and the committed tokens.
        draft_token_ids: At least ``first_row + R - 1`` drafts; a negative one stands for an unknown token.
        first_row: Index of the first row within its block.
    """
    if request.forbidden is not None:
        scores[:, request.forbidden] = -np.inf
    ban_tokens(scores, request, draft_token_ids, first_row)
    if len(request.bias_ids):
        scores[:, request.bias_ids] += request.bias_values
    if request.counts is not None:
        apply_penalties(scores, request, draft_token_ids, first_row)
    for constraint in request.constraints:
        constraint.restrict(scores, draft_token_ids, first_row)


def ban_tokens(
    scores: Float64Array, request: SamplingRequest, draft_token_ids: Sequence[int], first_row: int
) -> None:
    """Set the logits of banned tokens to -inf, in place; arguments as in `apply_logits_options`.

    A row whose every token (of the allowed ones) is banned is left alone: some token must follow.
    """
    for row in range(len(scores)):
        banned = request.banned_ids(draft_token_ids[: first_row + row])
        if banned and _leaves_some(banned, request, scores.shape[1]):
            scores[row, banned] = -np.inf


def _leaves_some(banned: Sequence[int], request: SamplingRequest, width: int) -> bool:
    if request.params.allowed_token_ids is None:
        return len(set(banned)) < width
    return not set(request.params.allowed_token_ids) <= set(banned)


def apply_penalties(
    scores: Float64Array, request: SamplingRequest, draft_token_ids: Sequence[int], first_row: int
) -> None:
    """Apply the three penalties to the tokens seen so far, in place; arguments as in `apply_logits_options`.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output; frequency is
    subtracted per occurrence in the output, presence once.
    """
    assert request.counts is not None
    params = request.params
    prefix = draft_token_ids[: first_row + len(scores) - 1]
    ids, in_prompt, counts = request.counts.rows(prefix, first_row, len(scores))
    if not len(ids):
        return
    seen_scores = scores[:, ids]
    if params.repetition_penalty != 1:
        penalty = np.where((counts > 0) | in_prompt, params.repetition_penalty, 1.0)
        with np.errstate(over="ignore"):
            seen_scores = np.where(seen_scores > 0, seen_scores / penalty, seen_scores * penalty)
        seen_scores = np.minimum(seen_scores, _MOST_SCORE)  # of two infinities no difference could be taken
    seen_scores -= params.frequency_penalty * counts
    seen_scores -= params.presence_penalty * (counts > 0)
    scores[:, ids] = seen_scores


def apply_temperature(scores: Float64Array, temperatures: Float64Array) -> None:
    """Scale rows by the inverse of their temperatures, in place, shifted so that each maximum is exactly 0.

    The shift changes no probability, and a tiny temperature cannot make infinities of the best tokens.

    Args:
        scores: [R, V].
        temperatures: [R], above 0.
    """
    best = scores.max(axis=1, keepdims=True)
    best[np.isneginf(best)] = 0
    scores -= best
    with np.errstate(over="ignore"):
        scores *= np.minimum(1 / temperatures, _MOST_SCALE)[:, None]


def surviving_ids(scores: Float64Array, params: Sequence[SamplingParams]) -> list[Int64Array | None]:
    """Return the tokens that min_p, top_k and top_p leave in each row; never none of them.

    Each filter sees what the one before left. Ties: top_k keeps all tokens that equal the k-th, as vLLM does;
    top_p takes lower ids first.

    Args:
        scores: [R, V] after temperature, maximum 0.
        params: R filters.

    Returns:
        Per row, ascending token ids, or None where no filter is on.
    """
    filtered = [row for row, p in enumerate(params) if p.min_p > 0 or p.top_k > 0 or p.top_p < 1]
    survivors: list[Int64Array | None] = [None] * len(params)
    if not filtered:
        return survivors
    if len(filtered) < len(params):
        scores, params = scores[filtered], [params[row] for row in filtered]
    floors = _floors(scores, params)
    totals = np.exp(scores).sum(axis=1) if any(p.top_p < 1 for p in params) else np.zeros(len(params))
    depths = np.array([-_NUCLEUS_DEPTH if p.top_p < 1 else -np.inf for p in params])
    left = ids_by_row(scores >= np.maximum(floors, depths)[:, None])
    for index, (row, kept) in enumerate(zip(filtered, left, strict=True)):
        if params[index].top_p < 1:
            floor = float(floors[index])
            kept = _nucleus(scores[index], kept, floor, float(totals[index]), params[index].top_p)
        survivors[row] = kept
    return survivors


def ids_by_row(mask: NDArray[np.bool_]) -> list[Int64Array]:
    """Return each row's ascending indices of true entries of a contiguous [R, V] mask."""
    num_rows, width = mask.shape
    flat = np.flatnonzero(mask)  # several times as fast as nonzero of a matrix
    bounds = flat.searchsorted(np.arange(num_rows + 1) * width).tolist()
    return [flat[bounds[row] : bounds[row + 1]] - row * width for row in range(num_rows)]


def _floors(scores: Float64Array, params: Sequence[SamplingParams]) -> Float64Array:
    """Return per row the lowest score that min_p and top_k both keep, or -inf.

    The k-th best of what min_p left is the k-th best of all, or min_p left fewer: the higher floor decides.
    """
    floors = np.array([math.log(p.min_p) if p.min_p > 0 else -np.inf for p in params])
    for top_k in {p.top_k for p in params if 0 < p.top_k < scores.shape[1]}:
        rows = [row for row, p in enumerate(params) if p.top_k == top_k]
        at = scores.shape[1] - top_k
        chosen = scores if len(rows) == len(scores) else scores[rows]
        floors[rows] = np.maximum(floors[rows], np.partition(chosen, at, axis=1)[:, at])
    return floors


def _nucleus(
    scores: Float64Array, near_ids: Int64Array, floor: float, total: float, top_p: float
) -> Int64Array:
    """Return the smallest set of most probable tokens whose share of what is left reaches ``top_p``.

    Args:
        scores: [V].
        near_ids: Tokens at or above ``floor`` that are close to the best: looked at first.
        floor: Score that the filters before leave as the lowest, or -inf.
        total: Sum of exp(scores) over all tokens.
        top_p: In (0, 1).
    """
    if floor > -np.inf:
        total = float(np.exp(scores[scores >= floor]).sum())
    ids, values = near_ids, scores[near_ids]
    descending = -np.sort(-values)
    reached = np.exp(descending).cumsum()
    if reached[-1] < top_p * total:
        ids = np.flatnonzero(scores >= floor)
        values = scores[ids]
        descending = -np.sort(-values)
        reached = np.exp(descending).cumsum()
    num_kept = min(int(reached.searchsorted(top_p * total)) + 1, len(ids))
    cutoff = descending[num_kept - 1]
    mask = values > cutoff
    ties = np.flatnonzero(values == cutoff)
    mask[ties[: num_kept - int(np.count_nonzero(mask))]] = True
    kept: Int64Array = ids[mask]
    return kept
