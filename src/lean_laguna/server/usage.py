"""The numbers of a response: tokens used, and how speculation went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lean_laguna.core.types import RequestOutput, SpeculationStats
from lean_laguna.server.settings import SpecDecodeMetrics


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


def speculation_metrics(outputs: Sequence[RequestOutput], level: SpecDecodeMetrics) -> dict[str, Any] | None:
    """Return the ``metrics`` object of a response in vLLM's shape; None for several completions.

    Args:
        outputs: Of the response's prompts.
        level: ``none``, ``summary``, or ``detailed`` for what each step drafted and accepted, too.

    Source: vLLM 0.30, ``--per-request-spec-decode-metrics``; vllm-project/vllm pull request 48915.
    """
    if level == "none" or len(outputs) != 1 or len(outputs[0].outputs) != 1:
        return None
    stats = outputs[0].outputs[0].speculation
    if stats is None:
        return None
    numbers = _summary(stats)
    if level == "detailed":
        numbers["per_step_accepted"] = [accepted for _, accepted in stats.per_step]
        numbers["per_step_drafted"] = [drafted for drafted, _ in stats.per_step]
    return {"speculative_decoding": numbers}


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
        # Ours: vLLM cuts none.
        **({"num_cut_draft_tokens": stats.num_cut_draft_tokens} if stats.num_cut_draft_tokens else {}),
    }
