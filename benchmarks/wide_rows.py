"""Steps of more than 16 rows on the CUDA C++ kernels: bits against steps of one row, times, bytes a second.

``gpu_layers.py`` runs it. Requests have pages of their own; their tokens are random, and so is the routing.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import torch

from lean_laguna.kernels.triton.draft_step import DraftStep
from lean_laguna.kernels.triton.launch import MAX_ROWS
from lean_laguna.kernels.triton.step import TargetStep
from lean_laguna.kernels.triton.weights import SparseWeights

if TYPE_CHECKING:
    from gpu_layers import LayersBench

COLUMNS = (16, 32, 64)
CASES = ((16, 16), (16, 32), (24, 32), (32, 32), (32, 64), (48, 64), (64, 64))
"""Rows and columns that are timed."""


class WideRows:
    """Wide steps of a bench's model, over pages of many requests."""

    def __init__(self, bench: LayersBench):
        """Take the bench's model, built before."""
        self.bench = bench
        self.requests = 6 if bench.tiny else MAX_ROWS

    def build(self) -> None:
        """Fill pages for as many requests as there may be rows."""
        bench = self.bench
        lengths = [bench.context + 64] * self.requests
        self.caches = bench.maker.caches(bench.weights.layers, lengths)
        draft = bench.maker.caches(bench.drafter.layers, lengths)
        self.draft_cache = tuple(torch.stack([layer[i] for layer in draft.layers]) for i in (0, 1))
        self.draft_table = draft.tables[0]
        bench.sync()

    def step(self, cols: int, *, logits: bool = False) -> TargetStep:
        """Return a step of so many columns."""
        bench = self.bench
        return dataclasses.replace(bench.target(bench.launch(cols), logits=logits), caches=self.caches)

    def draft(self, cols: int) -> DraftStep:
        """Return a drafter's step of so many columns."""
        bench = self.bench
        return DraftStep(
            bench.drafter,
            bench.weights.embed,
            bench.weights.head,
            self.draft_cache,
            self.draft_table,
            bench.inputs,
            bench.scratch,
            bench.features,
            launch=bench.launch(cols),
            tiles=bench.tiles,
            layer=bench.cuda,
        )

    def compile(self) -> float:
        """Compile all of it side by side."""
        runs = [self.step(cols, logits=True).run for cols in (1, *COLUMNS)]
        runs += [self.step(cols).run for cols in COLUMNS]
        for draft in map(self.draft, COLUMNS):
            runs += [draft.propose, lambda draft=draft: draft.append_context(self.bench.taps)]
        self.bench.compile_cuda(runs)
        return self.bench.left()

    def spread(self, rows: int, each: int) -> list[int]:
        """Lay out so many rows, ``each`` of a request, and return the counts."""
        counts = [each] * (rows // each)
        self.bench.place(counts, [self.bench.context] * len(counts))
        return counts

    def bits(self) -> dict[str, int]:
        """Count rows, spread at random over requests, whose logits differ from those of a step of one row."""
        bench, chance = self.bench, random.Random(1)
        replays = {}
        for cols in (1, *COLUMNS):
            self.spread(1, 1)
            replays[cols] = bench.graph(self.step(cols, logits=True).run)
        found = {"rows": 0}
        for trial in range(1 if bench.tiny else 8):
            cols = COLUMNS[1 + trial % 2]
            counts = self.random_counts(chance, chance.randint(cols // 2 + 1, cols))
            first = [bench.context - chance.randrange(bench.context // 4) for _ in counts]
            alone = []
            for r, count in enumerate(counts):
                for i in range(count):
                    bench.place([0] * r + [1], [0] * r + [first[r] + i])
                    replays[1]()
                    alone.append(bench.logits[:1].clone())
            bench.place(counts, first)
            replays[cols]()
            bench.sync()
            got, want = bench.logits[: sum(counts)].view(torch.int32), torch.cat(alone).view(torch.int32)
            key = f"{cols} columns, different"
            found["rows"] += len(got)
            found[key] = found.get(key, 0) + int((got != want).any(-1).sum())
            if not got.view(torch.float32).isfinite().all():
                found["not finite"] = found.get("not finite", 0) + 1
        return found

    def random_counts(self, chance: random.Random, rows: int) -> list[int]:
        """Deal rows out to requests, some of which get none."""
        counts: list[int] = []
        while sum(counts) < rows and len(counts) < self.requests:
            counts.append(min(chance.choice((0, 1, 1, 2, 4, 8, 8, 16)), rows - sum(counts)))
        return counts

    def live_experts(self, rows: int, cols: int) -> float:
        """Return how many experts the rows laid out choose, the mean of the layers."""
        bench, found = self.bench, []

        def run(layer: Any, *args: Any, **options: Any) -> None:
            bench.cuda(layer, *args, **options)
            if isinstance(layer.mlp, SparseWeights):
                found.append(bench.scratch.routing.expert_ids[:rows].unique().numel())

        dataclasses.replace(self.step(cols), layer=run).run()
        return sum(found) / len(found)

    def step_bytes(self, live: float) -> float:
        """Return the bytes of weights that a step must read."""
        total, item = 0.0, self.bench.dtype.itemsize
        for layer in self.bench.weights.layers:
            total += (layer.attention.qkv.numel() + layer.attention.out.numel()) * item
            mlp = layer.mlp
            if isinstance(mlp, SparseWeights):
                total += (mlp.router_gate_up.numel() + mlp.shared_down.numel()) * item
                total += (mlp.gate_up[0].numel() + mlp.down[0].numel()) * item * live
            else:
                total += (mlp.gate_up.numel() + mlp.down.numel()) * item
        return total + self.bench.weights.head.numel() * item

    def steps(self) -> list[dict[str, Any]]:
        """Time steps of 8 rows of each request, and of 1."""
        table = []
        for rows, cols in CASES[:1] + CASES[3:4] if self.bench.tiny else CASES:
            row: dict[str, Any] = {"rows": rows, "columns": cols}
            for each in (8, 1):
                if rows // each > self.requests:
                    continue
                self.spread(rows, each)
                live = self.live_experts(rows, cols)
                replay = self.bench.graph(self.step(cols).run)
                us = self.bench.time_us(replay, 10)
                row[f"ms, {each} of a request"] = round(us / 1000, 4)
                row[f"live, {each}"] = round(live, 1)
                row[f"TB/s, {each}"] = round(self.step_bytes(live) / us / 1e6, 3)
            print(row, flush=True)
            table.append(row)
        return table

    def drafting(self) -> dict[str, Any]:
        """Time the drafter's context and drafts of 8 rows of each request."""
        out = {}
        for rows, cols in ((8, 16), (16, 16), (32, 32), (64, 64)):
            if rows // 8 > self.requests:
                continue
            draft = self.draft(cols)
            self.spread(rows, 8)
            context = self.bench.graph(lambda draft=draft: draft.append_context(self.bench.taps))
            out[f"ms_context {rows} rows"] = round(self.bench.time_us(context, 10) / 1000, 4)
            self.spread(rows, 8)
            out[f"ms_propose {rows} rows"] = round(
                self.bench.time_us(self.bench.graph(draft.propose), 10) / 1000, 4
            )
        return out

    def profile(self) -> dict[str, Any]:
        """Return median microseconds, kernel by kernel."""
        out = {}
        for rows, cols in ((16, 16), (32, 32), (64, 64)):
            self.spread(rows, 8)
            replay = self.bench.graph(self.step(cols).run)
            for name, medians in self.bench.by_kernel(replay).items():
                out[f"{rows} rows, {cols} columns, {name}"] = medians
        return out
