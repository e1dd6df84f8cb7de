"""The A/B: the same prompts and limits without a drafter and with one; only the drafter differs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from lean_laguna.backends.base import Backend, GenerationResult
from lean_laguna.bench.parity import CONTROL, Comparer, Verdict, count_kinds, worst_kind
from lean_laguna.bench.rounds import Plan, RoundProgress, Rounds, run_rounds
from lean_laguna.bench.statistics import Spread, decode_tok_per_s, find_suspicious, side_metrics

BASELINE, SPECULATIVE = "baseline", "speculative"


@dataclass(frozen=True)
class ABResult:
    """What an A/B found.

    Attributes:
        plan: What was run.
        rounds: Every generation of both sides.
        metrics: Per side, vLLM's keys.
        speedup: Decode speed with the drafter / without, per repeat; None where nothing was decoded.
        verdicts: Every repeat of both sides against the first of the baseline.
    """

    plan: Plan
    rounds: Rounds
    metrics: dict[str, dict[str, Any]]
    speedup: Spread | None
    verdicts: list[Verdict]

    @property
    def num_mismatches(self) -> int:
        """Prompts whose worst verdict is ``mismatch``, on either side."""
        return sum(worst_kind(self.verdicts_of(p.id)) == "mismatch" for p in self.plan.prompts.prompts)

    def verdicts_of(self, prompt_id: str) -> list[Verdict]:
        """Return all verdicts on one prompt."""
        return [v for v in self.verdicts if v.prompt_id == prompt_id]

    def warnings(self) -> list[str]:
        """Return what a reader must know before believing the numbers."""
        return list(
            dict.fromkeys(itertools.chain.from_iterable(find_suspicious(m) for m in self.metrics.values()))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the part of the result file that was measured, ready for JSON."""
        control = [v for v in self.verdicts if v.side == CONTROL]
        speculative = [v for v in self.verdicts if v.side == SPECULATIVE]
        return {
            "sides": self.metrics,
            **({"speedup": self.speedup.to_dict()} if self.speedup else {}),
            "parity": {
                "num_mismatches": self.num_mismatches,
                "control": count_kinds(control),
                "speculative": count_kinds(speculative),
                "differences": [v.to_dict() for v in self.verdicts if v.kind != "identical"],
            },
            "per_prompt": [self._prompt_row(i) for i in range(len(self.plan.prompts.prompts))],
            "warnings": self.warnings(),
        }

    def _prompt_row(self, index: int) -> dict[str, Any]:
        prompt = self.plan.prompts.prompts[index]
        row: dict[str, Any] = {"id": prompt.id, "difficulty": prompt.difficulty}
        for side in (BASELINE, SPECULATIVE):
            metrics = side_metrics([[one[index]] for one in self.rounds.passes(side)])
            kept = ("spec_decode_acceptance_length", "median_ttft_ms", "decode_tok_per_s")
            row[side] = {name: metrics[name] for name in kept if name in metrics}
            row[side]["completion_tokens"] = self.rounds.passes(side)[0][index].num_tokens
        row["parity"] = worst_kind(self.verdicts_of(prompt.id))
        return row


def run_ab(
    baseline: Backend, speculative: Backend, plan: Plan, on_progress: RoundProgress | None = None
) -> ABResult:
    """Run both sides interleaved and compare every output.

    Args:
        baseline: Without a drafter.
        speculative: The same with one.
        plan: Prompts, parameters, repeats.
        on_progress: Told before each generation.

    Raises:
        RequestError: A backend cannot serve a prompt.
    """
    rounds = run_rounds({BASELINE: baseline, SPECULATIVE: speculative}, plan, on_progress)
    metrics = {side: side_metrics(rounds.passes(side)) for side in (BASELINE, SPECULATIVE)}
    return ABResult(
        plan=plan,
        rounds=rounds,
        metrics=metrics,
        speedup=speedup_of(rounds.passes(BASELINE), rounds.passes(SPECULATIVE)),
        verdicts=_verdicts(baseline, rounds, plan),
    )


def speedup_of(baseline: list[list[GenerationResult]], other: list[list[GenerationResult]]) -> Spread | None:
    """Return decode speed of ``other`` / ``baseline``, repeat by repeat; None where nothing was decoded."""
    rates = [(decode_tok_per_s(a), decode_tok_per_s(b)) for a, b in zip(baseline, other, strict=True)]
    ratios = tuple(b / a for a, b in rates if a and b)
    return Spread(ratios) if ratios else None


def _verdicts(baseline: Backend, rounds: Rounds, plan: Plan) -> list[Verdict]:
    comparer = Comparer(baseline, plan)
    expected = rounds.passes(BASELINE)[0]
    names = {BASELINE: CONTROL, SPECULATIVE: SPECULATIVE}
    verdicts = []
    for side, name in names.items():
        for one in rounds.passes(side)[1 if side == BASELINE else 0 :]:
            verdicts += [comparer.compare(i, expected[i], found, name) for i, found in enumerate(one)]
    return verdicts
