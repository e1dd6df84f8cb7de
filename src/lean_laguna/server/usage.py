"""The numbers of a response: tokens used, and how speculation went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lean_laguna.core.types import RequestOutput, SpeculationStats


def usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_cached_tokens: int,
    num_reasoning_tokens: int | None,
) -> dict[str, Any]:
    """Return a ``usage`` object.

    Args:
        num_prompt_tokens: Over all prompts.
        num_completion_tokens: Over all completions.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
        num_reasoning_tokens: Completion tokens of thinking; None where the endpoint knows none.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "completion_tokens": num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return counts


def speculation_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """Return the ``metrics`` object of a response in vLLM's shape; None for several completions.

    Source: vLLM 0.30, ``--per-request-spec-decode-metrics summary``.
    """
    if len(outputs) != 1 or len(outputs[0].outputs) != 1:
        return None
    stats = outputs[0].outputs[0].speculation
    return None if stats is None else {"speculative_decoding": _summary(stats)}


def _summary(stats: SpeculationStats) -> dict[str, Any]:
    reached = (stats.num_drafts, *stats.num_accepted_tokens_per_pos)
    histogram = [count - after for count, after in zip(reached, (*reached[1:], 0), strict=True)]
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.num_drafts,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": len(stats.num_accepted_tokens_per_pos),
    }
