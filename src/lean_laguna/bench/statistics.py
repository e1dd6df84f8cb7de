"""Numbers out of timed generations, with vLLM's keys where vLLM has one.

Every phase of a request is in exactly one metric: arrival to first token in TTFT, first to last token in
decode.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_laguna.backends.base import GenerationResult
from lean_laguna.core.types import SpeculationStats

NGRAM = 8
MS = 1000.0


@dataclass(frozen=True)
class Spread:
    """A repeated measurement.

    Attributes:
        values: One per repeat, in order; at least one.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def relative(self) -> float:
        """(largest - smallest) / median; 0 for one value."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return median, extremes and all values, ready for JSON."""
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
        }


def decode_tok_per_s(results: Sequence[GenerationResult]) -> float | None:
    """Return tokens after the first per second of decoding, over all results together.

    Each result adds (completion tokens - 1) and (time of last token - time of first); None where none
    decoded.
    """
    timed = [(r.num_decode_tokens, r.decode_s) for r in results if r.decode_s]
    seconds = sum(s for _, s in timed if s)
    return sum(n for n, _ in timed) / seconds if seconds else None


def speculation_of(results: Sequence[GenerationResult]) -> SpeculationStats | None:
    """Return the summed counts; None where no result comes from a run with a drafter."""
    parts = [r.speculation for r in results if r.speculation is not None]
    return sum(parts, SpeculationStats()) if parts else None


def side_metrics(passes: Sequence[Sequence[GenerationResult]]) -> dict[str, Any]:
    """Return the metrics of one side over all its passes.

    Keys are vLLM's benchmark keys, and ``decode_tok_per_s`` with its spread over the passes. Keys about
    speculation are absent, not zero, where no drafter ran.

    Args:
        passes: Per repeat, the results of all prompts.
    """
    results = list(itertools.chain.from_iterable(passes))
    busy_s = sum((r.times.last_token_s or r.times.arrival_s) - r.times.arrival_s for r in results)
    num_output = sum(r.num_tokens for r in results)
    metrics: dict[str, Any] = {
        "completed": len(results),
        "duration": busy_s,
        "total_input_tokens": sum(r.num_prompt_tokens for r in results),
        "total_output_tokens": num_output,
    }
    if busy_s:
        metrics["request_throughput"] = len(results) / busy_s
        metrics["output_throughput"] = num_output / busy_s
    rates = [rate for one in passes if (rate := decode_tok_per_s(one)) is not None]
    if rates:
        metrics["decode_tok_per_s"] = Spread(tuple(rates)).to_dict()
    metrics |= latency_metrics("ttft", [s for r in results if (s := r.ttft_s) is not None])
    metrics |= latency_metrics(
        "tpot", [s / r.num_decode_tokens for r in results if (s := r.decode_s) is not None]
    )
    metrics |= latency_metrics("itl", [gap for r in results for gap in _gaps(r.arrivals_s)])
    if (share := distinct_ngram_share([r.token_ids for r in passes[0]])) is not None:
        metrics[f"distinct_{NGRAM}gram_share"] = share
    return metrics | speculation_metrics(speculation_of(results))


def speculation_metrics(stats: SpeculationStats | None) -> dict[str, Any]:
    """Return vLLM's ``spec_decode_*`` keys, and how many drafts were cut, if any; empty without a drafter.

    The rate is in percent, as vLLM writes it; the length is 1 + accepted / drafts, the bonus token counted;
    the rate of each position is unconditional.
    """
    if stats is None:
        return {}
    metrics: dict[str, Any] = {
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_draft_tokens": stats.num_draft_tokens,
        "spec_decode_accepted_tokens": stats.num_accepted_tokens,
    }
    if stats.num_cut_draft_tokens:  # ours: vLLM cuts none
        metrics["spec_decode_cut_draft_tokens"] = stats.num_cut_draft_tokens
    if stats.mean_acceptance_length is not None and stats.draft_acceptance_rate is not None:
        metrics["spec_decode_acceptance_rate"] = 100 * stats.draft_acceptance_rate
        metrics["spec_decode_acceptance_length"] = stats.mean_acceptance_length
        metrics["spec_decode_per_position_acceptance_rates"] = list(stats.draft_acceptance_rate_per_pos)
    return metrics


def latency_metrics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and 99th percentile in milliseconds; empty without values."""
    if not seconds:
        return {}
    return {
        f"mean_{name}_ms": MS * statistics.fmean(seconds),
        f"median_{name}_ms": MS * statistics.median(seconds),
        f"std_{name}_ms": MS * statistics.pstdev(seconds),
        f"p99_{name}_ms": MS * percentile(seconds, 99),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation between neighbours, as numpy does by default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distinct_ngram_share(texts: Sequence[Sequence[int]], size: int = NGRAM) -> float | None:
    """Return distinct n-grams / all n-grams within each text; None where all texts are too short.

    A model that loops is easy to draft for. This share beside the acceptance keeps loops from passing for
    skill.
    """
    distinct = total = 0
    for ids in texts:
        grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
        distinct += len(set(grams))
        total += len(grams)
    return distinct / total if total else None


def find_suspicious(metrics: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each value that sits at its floor or ceiling and so may be an artefact."""
    found = []
    rate = metrics.get("spec_decode_acceptance_rate")
    if metrics.get("spec_decode_num_drafts") == 0:
        found.append("the drafter was loaded but never proposed a token")
    elif rate == 0:
        found.append("no draft token was accepted: the drafter may not belong to this target")
    elif rate == 100:
        found.append(
            "every draft token was accepted: acceptance is at its ceiling, check the prompts and the counters"
        )
    share = metrics.get(f"distinct_{NGRAM}gram_share")
    if share is not None and share < 0.5:
        found.append(
            f"the outputs repeat themselves (distinct {NGRAM}-grams: {share:.0%}), which flatters any drafter"
        )
    return found + find_busy_machine(metrics)


def find_busy_machine(metrics: Mapping[str, Any]) -> list[str]:
    """Return a sentence where the repeats differ by more than a quiet machine's do."""
    spread = metrics.get("decode_tok_per_s")
    if spread and len(spread["values"]) > 1 and (spread["max"] - spread["min"]) / spread["median"] > 0.2:
        return ["decode speed varied by more than 20 % between repeats: the machine was busy with other work"]
    return []


def _gaps(arrivals_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(arrivals_s)]
