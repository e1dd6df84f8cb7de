"""Every logits option and filter in plain Python, one token at a time, as vLLM documents them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lean_laguna.core.types import SamplingParams


def reference_scores(
    raw: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
    bad_word_ids: Sequence[Sequence[int]],
) -> list[float]:
    """Options before temperature, for the token after ``output`` (drafts included)."""
    scores = [float(value) for value in raw]
    banned = {
        word[-1]
        for word in bad_word_ids
        if len(word) - 1 <= len(output) and list(output[len(output) - len(word) + 1 :]) == list(word[:-1])
    }
    if len(output) < params.min_tokens:
        banned |= set(stop_ids)
    allowed = range(len(scores)) if params.allowed_token_ids is None else params.allowed_token_ids
    for token in set(range(len(scores))) - set(allowed):
        scores[token] = -math.inf
    if set(allowed) - banned:
        for token in banned:
            scores[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in range(len(scores)):
        count = list(output).count(token)
        if count or token in prompt:
            if scores[token] > 0:
                scores[token] /= params.repetition_penalty
            else:
                scores[token] *= params.repetition_penalty
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty * (count > 0)
    return scores


def reference_survivors(scores: Sequence[float], params: SamplingParams) -> set[int]:
    """Tokens that temperature, min_p, top_k and top_p leave."""
    best = max(scores)
    weights = {token: math.exp((score - best) / params.temperature) for token, score in enumerate(scores)}
    if params.min_p > 0:
        weights = {t: w for t, w in weights.items() if w >= params.min_p * max(weights.values())}
    if params.top_k:
        kth = sorted(weights.values(), reverse=True)[: params.top_k][-1]
        weights = {t: w for t, w in weights.items() if w >= kth}
    if params.top_p < 1:
        total, before, kept = sum(weights.values()), 0.0, {}
        for token in sorted(weights, key=lambda t: (-weights[t], t)):
            if before >= params.top_p * total:
                break
            kept[token] = weights[token]
            before += weights[token]
        weights = kept
    return set(weights)
