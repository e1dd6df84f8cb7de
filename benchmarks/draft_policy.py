"""What choosing draft lengths and cutting drafts by confidence earns, on nano's own drafts and given costs.

    python benchmarks/draft_policy.py --out FILE [--num-prompts 12] [--traces FILE]

At every position of what nano says, nano-dspark drafts 3, 7, 11 and 15 tokens: how many stand, and how likely
it called them. Output does not depend on drafts, so any policy can be replayed on these traces, with step
times of a machine that is not at hand: the engine's own (``auto``), any fixed length, and drafts cut by what
time is worth. Seconds are in ``MACHINES``. What the host takes is not in them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from lean_laguna import LLM, SamplingParams
from lean_laguna.core.files import atomic_write_text
from lean_laguna.core.provenance import checkpoint_hash, describe_run
from lean_laguna.models.catalog import resolve_model
from lean_laguna.spec.acceptance import Acceptance
from lean_laguna.spec.draft_length import DraftLengthController
from lean_laguna.spec.draft_schedule import ROW_TILES, DraftSchedule, StepWorth
from lean_laguna.spec.draft_shape import StepShape
from lean_laguna.tasks.prompts import load_prompts

SCHEMA_VERSION = 1
BLOCKS, MOST = (3, 7, 11, 15), 15
Block = tuple[int, list[float]]
"""Drafts that stand, and the chance of each to be reached and to stand."""
Trace = list[dict[int, Block]]
"""By position, the block of each length."""


@dataclass(frozen=True)
class Machine:
    """Milliseconds of steps with 0, 1, ... 15 drafts.

    Attributes:
        verify_ms: Of verifying so many.
        draft_ms: Of making so many.
        skipped_ms: Of a draft asked for and not made; None where drafting does not end early.
        late: Steps that are launched before what one said is heard.
        row_tiles: As the engine's.
    """

    verify_ms: Sequence[float]
    draft_ms: Sequence[float]
    skipped_ms: float | None = None
    late: int = 0
    row_tiles: Sequence[int] = ROW_TILES


def _wider(last: float, step: float) -> list[float]:
    return [last + step * k for k in range(1, 9)]


_TILES = (8, 16, 32, 64)
MACHINES = {
    # Two shared CPU cores, one used, greedy; results/dspark_serving_cpu.json is of the same.
    "cpu": Machine(
        [4.7, 4.8, 5.6, 5.8, 7.5, 7.5, 7.5, 7.6, *[9.0] * 4, *[10.2] * 4],
        [0.02, 2.2, 2.4, 2.6, 2.9, 3.4, 3.4, 3.4, *[4.0] * 4, *[4.2] * 4],
    ),
    # results/dspark_serving_h200.json: medians by drafts sent, and by drafts made.
    "h200 nano": Machine(
        [0.134, 0.140, 0.146, 0.149, 0.154, 0.163, 0.168, 0.171, *_wider(0.19, 0.008)],
        [0.034, 0.040, 0.045, 0.050, 0.055, 0.060, 0.065, 0.069, *_wider(0.08, 0.005)],
        0.0032,
        2,
        _TILES,
    ),
    "h200 xs": Machine(
        [1.72, 2.30, 2.41, 2.47, 2.54, 2.59, 2.66, 2.73, *_wider(2.9, 0.12)],
        [0.333, 0.364, 0.400, 0.430, 0.456, 0.471, 0.490, 0.510, *_wider(0.54, 0.02)],
        0.0032,
        2,
        _TILES,
    ),
}


def collect(temperature: float, num_prompts: int) -> list[Trace]:
    """Draft at every position: each step accepts nothing, so that the next stands one token on."""
    llm: Any = LLM("nano", speculative_config={"model": "nano-dspark"}, max_num_seqs=1)
    engine, length, seen = llm.engine, [0], []

    def choose(batch: int, context_len: int, *, may_schedule: bool = True) -> int:
        engine.controller.schedule.costs, engine.controller.schedule.wants_chances = None, True
        return length[0]

    def accept(sequence: Any, draft: Sequence[int], sampled: Sequence[int]) -> Acceptance:
        chances = engine.controller.schedule.survival
        seen.append((list(draft), list(chances[0]) if chances else []))
        return Acceptance(0, [sampled[0]])

    engine.controller.choose, engine._accept = choose, accept
    engine._draft_lengths.hears = lambda *args, **options: False
    found = []
    for i, prompt in enumerate(load_prompts("mixed").first(num_prompts).prompts):
        trace: Trace = []
        for length[0] in BLOCKS:
            seen.clear()
            params = SamplingParams(temperature=temperature, max_tokens=256, ignore_eos=True, seed=i)
            said = llm.generate([prompt.prompt], params)[0].outputs[0].token_ids
            trace = trace or [{} for _ in seen]
            for position, (draft, chances) in enumerate(seen):
                following = said[position + len(said) - len(seen) :]
                same = [a == b for a, b in zip(draft, following, strict=False)]
                trace[position][length[0]] = (same.index(False) if False in same else len(same), chances)
        found.append(trace)
        print(f"T={temperature}: {i + 1} of {num_prompts} prompts", flush=True)
    return found


class Replay:
    """A policy on a machine; what it learned stays from run to run."""

    def __init__(self, machine: Machine, length: int | None, seed: int):
        self.machine, self.length, self._draw = machine, length, random.Random(seed)
        stops_early = machine.skipped_ms is not None
        self.schedule = DraftSchedule(row_tiles=machine.row_tiles, stops_early=stops_early)
        self.controller = DraftLengthController(MOST, schedule=self.schedule)
        self._unheard: deque[tuple[Any, ...]] = deque()
        if stops_early:
            self.controller.shape = StepShape(64, tuple(machine.row_tiles), self._timed())

    def _timed(self) -> tuple[list[list[float]], list[list[float]]]:
        """Return the times by rows that an engine measures at start."""

        def table(own: Sequence[float]) -> list[list[float]]:
            narrow = [0.0, *own[:8], *[own[7]] * 57]
            wide = [0.0, *[max(one, own[8]) for one in own], *[own[-1]] * 49]
            return [[1e-3 * ms for ms in row] for row in (narrow, wide, wide, wide)]

        return table(self.machine.verify_ms), table(self.machine.draft_ms)

    def run(self, traces: Sequence[Trace]) -> float:
        """Return tokens a second over some traces."""
        tokens, seconds = 0, 0.0
        for trace in traces:
            position = 0
            while position < len(trace):
                emitted, step_s = self._step(trace[position], len(trace) - position)
                tokens, seconds, position = tokens + emitted, seconds + step_s, position + emitted
        return tokens / seconds

    def _step(self, blocks: dict[int, Block], left: int) -> tuple[int, float]:
        machine, schedule = self.machine, self.schedule
        asked = self.controller.choose(1, 200) if self.length is None else self.length
        costs = schedule.costs if self.length is None else None
        asked = min(asked, left)
        stand, chances = blocks[next(k for k in BLOCKS if k >= asked)] if asked else (0, [])
        chances = chances[:asked]
        made = sent = len(chances)
        if costs is not None:
            made = costs.num_made([chances], made) if machine.skipped_ms is not None else made
            worth = StepWorth(costs)
            for chance in chances[:made]:
                worth.add(chance)
            sent = worth.best
        pace = 1e-3 * (1 + 0.01 * abs(self._draw.gauss(0, 1)))
        draft_s = pace * (machine.draft_ms[made] + (machine.skipped_ms or 0.0) * (len(chances) - made))
        verify_s, accepted = pace * machine.verify_ms[sent], min(stand, sent)
        if self.length is None:
            reached = [1.0, *chances]
            given = [after / max(1e-9, before) for before, after in zip(reached, chances, strict=False)]
            given[made:] = given[made - 1 : made] * (len(given) - made)
            heard = (sent, asked if costs is not None else None, draft_s, verify_s, accepted, given)
            self._unheard.append(heard)
            if len(self._unheard) > machine.late:
                self._learn(*self._unheard.popleft())
        return 1 + accepted, draft_s + verify_s

    def _learn(
        self, sent: int, made: int | None, draft_s: float, verify_s: float, accepted: int, given: list[float]
    ) -> None:
        if not self.controller.hears(sent, 1, 200):
            return
        self.schedule.note([sent], [tuple(given) or None])
        self.controller.observe(
            sent,
            1,
            200,
            draft_s=draft_s,
            verify_s=verify_s,
            accepted=[(sent, accepted)],
            unsent=self.schedule.cut,
            num_made_tokens=made,
            is_heard=True,
        )


def compare(machine: Machine, traces: Sequence[Trace], repeats: int) -> dict[str, Any]:
    """Return tokens a second of each policy over those of seven drafts."""
    base = Replay(machine, 7, 0).run(traces)
    found: dict[str, Any] = {
        f"fixed {k}": round(Replay(machine, k, 0).run(traces) / base, 3) for k in (0, 1, 3, 5, 7, 11, 15)
    }
    ratios = []
    for seed in range(repeats):
        auto = Replay(machine, None, seed)
        auto.run(traces[:4])
        ratios.append(auto.run([*traces, *traces, *traces]) / base)
    found["auto"] = {"mean": round(mean(ratios), 4), "all": [round(ratio, 4) for ratio in ratios]}
    return found


def main() -> None:
    """Collect or read traces, replay, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=6, help="runs of auto, with other jitter")
    parser.add_argument("--traces", type=Path, help="written here, or read where they are")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    traces: dict[str, list[Trace]] = {}
    if arguments.traces is not None and arguments.traces.exists():
        kept = json.loads(arguments.traces.read_text())
        traces = {
            name: [[{int(k): tuple(block) for k, block in at.items()} for at in one] for one in own]
            for name, own in kept.items()
        }
    else:
        traces = {f"T={t}": collect(t, arguments.num_prompts) for t in (0.0, 0.8)}
        if arguments.traces is not None:
            atomic_write_text(arguments.traces, json.dumps(traces))
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "draft-policy",
        **describe_run(),
        "models": {name: checkpoint_hash(resolve_model(name)) for name in ("nano", "nano-dspark")},
        "num_prompts": arguments.num_prompts,
    }
    for name, machine in MACHINES.items():
        content[name] = {t: compare(machine, own, arguments.repeats) for t, own in traces.items()}
        for t, found in content[name].items():
            print(f"{name} {t}: {found}", flush=True)
    if arguments.out is not None:
        atomic_write_text(arguments.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
