"""CUDA C++ layers beside Triton's on a GPU: equality, row bits, each kernel's time, whole steps.

    PYTHONPATH=src python benchmarks/gpu_layers.py --out FOLDER

Builds a random Laguna-XS (67 GB in BF16). Prints a short table last and writes gpu_layers.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from gpu_step import Bench
from twins import relative

from lean_laguna.kernels.cuda import products
from lean_laguna.kernels.cuda.layers import CudaLayers
from lean_laguna.kernels.triton import step as step_module
from lean_laguna.kernels.triton.draft_step import DraftStep
from lean_laguna.kernels.triton.launch import Launch, Tile
from lean_laguna.kernels.triton.step import TargetStep
from lean_laguna.kernels.triton.tiles import Tiles


class LayersBench(Bench):
    """A step whose layers run either way."""

    use_cuda = True

    def build(self) -> None:
        super().build()
        self.cuda = CudaLayers(self.weights.layers + self.drafter.layers, torch.device(self.device))
        self.sync()

    def target(self, launch: Launch, **options: Any) -> TargetStep:
        step = super().target(launch, **options)
        return dataclasses.replace(step, layer=self.cuda) if self.use_cuda else step

    def equal(self) -> dict[str, float]:
        """Return each layer kind's relative difference between the two, on the same inputs."""
        found = {}
        for rows, cols in ((1, 8), (7, 8), (13, 16)):
            launch = self.launch(cols, True)
            for i in (0, 1, 4):
                start = torch.randn_like(self.scratch.hidden)
                results = []
                for run in (step_module.run_layer, self.cuda):
                    self.place([rows], [self.context - 40])
                    self.scratch.hidden.copy_(start)
                    for _ in range(2 if run is self.cuda else 1):
                        self.scratch.hidden.copy_(start)
                        run(
                            self.weights.layers[i],
                            self.caches.layers[i],
                            self.caches.tables[i],
                            self.inputs,
                            self.scratch,
                            self.tiles,
                            launch,
                            eps=1e-6,
                        )
                    self.sync()
                    results.append((self.scratch.hidden[:rows] - start[:rows]).clone())
                found[f"layer {i}, {rows} rows"] = relative(results[1], results[0])
        return found

    def compile_all(self) -> float:
        runs = [self.target(self.launch(cols, True)).run for cols in (8, 16)]
        self.compile(runs)
        self.cuda.compile_ahead(runs)
        return self.left()

    def steps(self) -> list[dict[str, Any]]:
        table = []
        for label, cuda, launch, spread in (
            ("triton, plain", False, self.launch(8, False), 2),
            ("cuda, plain", True, self.launch(8, False), 1),
            ("cuda, early, 1 a multiprocessor", True, self.launch(8, True), 1),
            ("cuda, early", True, self.launch(8, True), 2),
            ("cuda, early, 16 columns", True, self.launch(16, True), 2),
        ):
            self.use_cuda = cuda
            products.PROGRAMS = spread
            self.place([1], [self.context])
            replay = self.graph(self.target(launch).run)
            row: dict[str, Any] = {"setup": label}
            for m in (1, 2, 4, 8, 16)[: 4 if launch.cols == 8 else 5]:
                self.place([m], [self.context])
                row[f"ms_{m}"] = round(self.time_us(replay, 10) / 1000, 4)
            self.place([1], [self.long])
            row["ms_1_long"] = round(self.time_us(replay, 10) / 1000, 4)
            print(row, flush=True)
            table.append(row)
        self.use_cuda = True
        products.PROGRAMS = 2
        return table

    def profile_cuda(self) -> dict[str, Any]:
        """Return, kernel by kernel within a layer, median microseconds alone and between starts."""
        from torch.profiler import ProfilerActivity, profile

        out = {}
        for m, early in ((1, False), (1, True), (8, False), (8, True)):
            self.place([m], [self.context])
            replay = self.graph(self.target(self.launch(8, early)).run)
            replay()
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                replay()
                replay()
                self.sync()
            events = sorted((e for e in prof.events() if e.device_time > 0), key=lambda e: e.time_range.start)
            found: dict[str, list[tuple[float, float, float]]] = {}
            before = None
            for e, after in itertools.pairwise(events):
                if e.name == "project" and after.name != "attention":
                    name = "router" if after.name == "experts_up" else "gate_up"
                elif e.name == "attention":
                    name = f"attention after {before}"
                else:
                    name = e.name
                before = e.name
                found.setdefault(name, []).append(
                    (
                        e.device_time,
                        after.time_range.start - e.time_range.start,
                        after.time_range.end - e.time_range.end,
                    )
                )
            for name, rows in found.items():
                medians = [round(statistics.median(r[i] for r in rows), 2) for i in range(3)]
                out[f"{m} rows, {'early' if early else 'plain'}, {name} x{len(rows)}"] = medians
        return out

    def drafting(self) -> dict[str, Any]:
        """Time the drafter either way."""
        out = {}
        for label, layer in (("triton", step_module.run_layer), ("cuda", self.cuda)):
            launch = self.launch(8, True)
            draft = DraftStep(
                self.drafter,
                self.weights.embed,
                self.weights.head,
                self.draft_cache,
                self.draft_table,
                self.inputs,
                self.scratch,
                self.features,
                launch=launch,
                tiles=self.tiles,
                layer=layer,
            )
            self.place([8], [min(self.context, self.draft_table.shape[1] * 16 - 60)])
            self.compile([draft.propose])
            draft.propose()
            out[f"ms_propose {label}"] = round(self.time_us(self.graph(draft.propose), 10) / 1000, 4)
            out[f"drafts {label}"] = self.inputs.input_ids[:8].tolist()
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=200.0)
    parser.add_argument("--tiny", action="store_true")
    bench = LayersBench(parser.parse_args())
    bench.tiles = bench.chosen = dataclasses.replace(
        Tiles(),
        **{
            f.name: getattr(Tiles(), f.name).with_prefetch(0.0)
            for f in dataclasses.fields(Tiles)
            if isinstance(getattr(Tiles(), f.name), Tile)
        },
    )
    bench.phase("build", bench.build)
    bench.phase("read_tb_s", bench.read_bandwidth)
    bench.phase("compile", bench.compile_all)
    bench.phase("equal", bench.equal)
    bench.phase("steps", bench.steps)
    bench.phase("bits", bench.bits)
    bench.phase("drafting", bench.drafting)
    bench.phase("profile", bench.profile_cuda, 10)
    bench.found["kernels"] = {}
    bench.report(parser.parse_args().out)


if __name__ == "__main__":
    main()
