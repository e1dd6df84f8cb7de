"""Speed and parity against the draft length, measured on this machine, and the length that is best on it.

The best length depends on the machine more than on the model: published optima for one family run from 3
to 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean_laguna.backends.base import Backend
from lean_laguna.bench.ab import speedup_of
from lean_laguna.bench.parity import Comparer, Verdict, count_kinds
from lean_laguna.bench.rounds import Plan, RoundProgress, run_rounds
from lean_laguna.bench.statistics import Spread, find_busy_machine, side_metrics


@dataclass(frozen=True)
class SweepRow:
    """One draft length.

    Attributes:
        num_speculative_tokens: 0 is the baseline.
        metrics: vLLM's keys.
        speedup: Against the baseline, per repeat; None for the baseline, or where nothing was decoded.
        verdicts: Every repeat against the first of the baseline.
    """

    num_speculative_tokens: int
    metrics: dict[str, Any]
    speedup: Spread | None
    verdicts: list[Verdict]

    @property
    def tok_per_s(self) -> float:
        """Median decode speed; 0 where nothing was decoded."""
        rate = self.metrics.get("decode_tok_per_s")
        return float(rate["median"]) if rate else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the row ready for JSON."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            **self.metrics,
            **({"speedup": self.speedup.to_dict()} if self.speedup else {}),
            "parity": count_kinds(self.verdicts),
        }


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep.

    Attributes:
        plan: What was run.
        rows: The baseline (0) first, then ascending draft lengths.
    """

    plan: Plan
    rows: list[SweepRow]

    @property
    def best(self) -> SweepRow:
        """The fastest row; the baseline where no draft length beats it."""
        return max(self.rows, key=lambda row: (row.tok_per_s, -row.num_speculative_tokens))

    @property
    def num_mismatches(self) -> int:
        """Outputs that differ from the baseline's by more than a near-tie."""
        return sum(v.kind == "mismatch" for row in self.rows for v in row.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the part of the result file that was measured, ready for JSON."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "best_num_speculative_tokens": self.best.num_speculative_tokens,
            "warnings": list(dict.fromkeys(w for row in self.rows for w in find_busy_machine(row.metrics))),
            "parity": {
                "num_mismatches": self.num_mismatches,
                "differences": [v.to_dict() for r in self.rows for v in r.verdicts if v.kind != "identical"],
            },
        }


def run_sweep(
    sides: Mapping[int, Backend], plan: Plan, on_progress: RoundProgress | None = None
) -> SweepResult:
    """Run all draft lengths interleaved and compare every output with the baseline's.

    Args:
        sides: Backends by draft length; length 0, the baseline, must be among them.
        plan: Prompts, parameters, repeats.
        on_progress: Told before each generation.

    Raises:
        RequestError: A backend cannot serve a prompt.
    """
    lengths = sorted(sides)
    names = {length: f"{length} draft tokens" if length else "no drafter" for length in lengths}
    rounds = run_rounds({names[length]: sides[length] for length in lengths}, plan, on_progress)
    comparer = Comparer(sides[0], plan)
    baseline = rounds.passes(names[0])
    rows = []
    for length in lengths:
        passes = rounds.passes(names[length])
        verdicts = [
            comparer.compare(i, baseline[0][i], found, names[length])
            for one in (passes if length else passes[1:])
            for i, found in enumerate(one)
        ]
        speedup = speedup_of(baseline, passes) if length else None
        rows.append(SweepRow(length, side_metrics(passes), speedup, verdicts))
    return SweepResult(plan, rows)
