"""CUDA C++ layers beside Triton's on a GPU: equality, row bits, each kernel's time, whole steps.

    PYTHONPATH=src python benchmarks/gpu_layers.py --out FOLDER
    PYTHONPATH=src python benchmarks/gpu_layers.py --out FOLDER --wide   # only steps of more than 16 rows

Builds a random Laguna-XS (67 GB in BF16). Prints a short table last and writes gpu_layers.json. With
``TRITON_INTERPRET=1 ... --tiny`` no CUDA C++ kernel runs, but each is asked for, to try the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_step import Bench
from kernel_variants import STAMPED_BLOCKS, changed, last_layer, variant
from random_model import LEGAL
from twins import relative
from wide_rows import WideRows

from lean_laguna.kernels.cuda import products
from lean_laguna.kernels.cuda.driver import collecting, compile_ahead
from lean_laguna.kernels.cuda.layers import CudaLayers
from lean_laguna.kernels.triton import step as step_module
from lean_laguna.kernels.triton.draft_step import DraftStep
from lean_laguna.kernels.triton.launch import WIDE, Launch, Tile
from lean_laguna.kernels.triton.step import TargetStep
from lean_laguna.kernels.triton.tiles import Tiles

KERNELS = {"project", "project_add", "attention", "experts_up", "experts_down"}


def without_prefetch(tiles: Tiles) -> Tiles:
    """Return tiles that ask for nothing ahead of their turn."""
    given = {f.name: getattr(tiles, f.name) for f in dataclasses.fields(Tiles)}
    plain = {name: tile.with_prefetch(0.0) for name, tile in given.items() if isinstance(tile, Tile)}
    return dataclasses.replace(tiles, **plain)


class LayersBench(Bench):
    """A step whose layers run either way."""

    use_cuda = True

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        if args.tiny:
            self.shape, self.dtype = LEGAL, torch.bfloat16
            tiles = {f.name: Tile(128, 128, 2, 2, 2) for f in dataclasses.fields(Tiles)}
            self.tiles = self.chosen = Tiles(**tiles)
        else:
            self.tiles = self.chosen = without_prefetch(Tiles())

    def build(self) -> None:
        super().build()
        self.cuda = CudaLayers(torch.device(self.device))
        self.sync()

    def target(self, launch: Launch, **options: Any) -> TargetStep:
        step = super().target(launch, **options)
        return dataclasses.replace(step, layer=self.cuda) if self.use_cuda else step

    def equal(self) -> dict[str, float]:
        """Return each layer kind's relative difference between the two, on the same inputs."""
        found = {}
        for rows, cols in ((1, 1), (1, 8), (7, 8), (13, 16))[: 1 if self.tiny else 4]:
            launch = self.launch(cols, True)
            for i in (0, 1, 4)[: 2 if self.tiny else 3]:  # dense, with sliding attention, with full attention
                start = torch.zeros_like(self.scratch.hidden)
                start[:WIDE].normal_()
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
                found[f"layer {i}, {rows} rows, {cols} columns"] = relative(results[1], results[0])
        return found

    def compile_all(self) -> float:
        runs = [partial(self.run_changed, *own) for _, *own in self.setups()]
        runs += [partial(self.run_changed, launch, *own) for _, launch, *own in self.stamped()]
        runs += [partial(self.run_changed, self.launch(1), {}, {"NO_WAITS": 1})]
        names = self.compile_cuda(runs)
        assert not self.tiny or names == KERNELS
        return self.left()

    def compile_cuda(self, runs: list[Callable[[], None]]) -> set[str]:
        """Compile every kernel that the runs would launch, of both kinds; returns the names of CUDA C++'s."""
        with collecting() as sources:
            for run in runs if self.tiny else ():
                run()
            self.compile(runs)
        if not self.tiny:
            compile_ahead(sources, torch.device(self.device))
        return {source.name for source in sources}

    def run_changed(self, launch: Launch | None, sizes: dict[str, Any], constants: dict[str, int]) -> None:
        self.use_cuda = launch is not None
        with changed(products, sizes), variant(**constants):
            self.target(launch or self.launch(8, False)).run()
        self.use_cuda = True

    def bit_launches(self) -> dict[str, Launch]:
        return super().bit_launches() | {"lone": self.launch(1)}

    def stamped(self) -> list[tuple[int, Launch, dict[str, Any], dict[str, int]]]:
        """Return what is stamped: rows, launch, sizes and constants that differ."""
        stamps = {"STAMPS": STAMPED_BLOCKS}
        return [(1, self.launch(1), {}, stamps), (8, self.launch(8), {}, stamps)]

    def stamps(self) -> dict[str, list[str]]:
        """Return where the blocks of the last layer were."""
        found = {}
        for rows, launch, sizes, constants in self.stamped():
            self.place([rows], [self.context])
            with changed(products, sizes), variant(**constants) as launched:
                replay = self.graph(self.target(launch).run)

            def run(replay: Callable[[], None] = replay) -> None:
                replay()
                self.sync()

            found[f"{rows} rows, {launch.cols} columns, {sizes} {constants}"] = last_layer(launched, run)
        return found

    def shared(self) -> list[str]:
        """Return grid and shared memory of each kernel of the last two layers."""
        lines = []
        for cols in (1, 8):
            with variant() as launched:
                self.target(self.launch(cols, True)).run()
            lines += [f"{cols} columns {s.name:12} {grid:4} x {size:6} B" for s, grid, size in launched[-12:]]
        return lines

    def without_waits(self) -> float:
        """Return the milliseconds of a step whose kernels wait for nothing; its results mean nothing."""
        self.place([1], [self.context])
        with variant(NO_WAITS=1):
            replay = self.graph(self.target(self.launch(1, True)).run)
        return self.time_us(replay, 10) / 1000

    def steps(self) -> list[dict[str, Any]]:
        table = []
        for label, launch, changes, constants in self.setups():
            self.place([1], [self.context])
            replay = self.graph(partial(self.run_changed, launch, changes, constants))
            cols = 8 if launch is None else launch.cols
            row: dict[str, Any] = {"setup": label}
            for m in (1, 2, 4, 8, 16)[: {1: 1, 8: 4, 16: 5}[cols]]:
                self.place([m], [self.context])
                row[f"ms_{m}"] = round(self.time_us(replay, 10) / 1000, 4)
            self.place([1], [self.long])
            row["ms_1_long"] = round(self.time_us(replay, 10) / 1000, 4)
            print(row, flush=True)
            table.append(row)
        return table

    def setups(self) -> list[tuple[str, Launch | None, dict[str, Any], dict[str, int]]]:
        """Return what steps are timed with: name, launch (None: Triton), sizes and constants that differ."""
        lone, wide = self.launch(1), self.launch(8)
        triton: list[tuple[str, Launch | None, dict[str, Any], dict[str, int]]] = [("triton", None, {}, {})]
        return [
            *(() if self.tiny else triton),
            ("8 columns, no early launch", self.launch(8, False), {}, {}),
            ("8 columns", wide, {}, {}),
            ("8 columns, by lanes", wide, {"has_bulk_copies": lambda device: False}, {}),
            ("1 column", lone, {}, {}),
            ("1 column, 3 units", lone, {"BULK_COLUMNS": 6144}, {}),
            ("16 columns", self.launch(16), {}, {}),
        ]

    def profile_cuda(self) -> dict[str, Any]:
        """Return, kernel by kernel within a layer, median microseconds alone and between starts."""
        out = {}
        for m, cols, early in ((1, 1, True), (1, 8, True), (8, 8, False), (8, 8, True)):
            self.place([m], [self.context])
            replay = self.graph(self.target(self.launch(cols, early)).run)
            for name, medians in self.by_kernel(replay).items():
                out[f"{m} rows, {cols} columns, {'early' if early else 'plain'}, {name}"] = medians
        return out

    def by_kernel(self, replay: Callable[[], None]) -> dict[str, list[float]]:
        """Return each kernel's median microseconds: alone, to the next one's start, to the next one's end."""
        from torch.profiler import ProfilerActivity, profile

        replay()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            replay()
            replay()
            self.sync()
        events = sorted((e for e in prof.events() if e.device_time > 0), key=lambda e: e.time_range.start)
        found: dict[str, list[tuple[float, float, float]]] = {}
        before = None
        for e, after in itertools.pairwise(events):
            if e.name == "project" and not after.name.endswith("attention"):
                name = "router" if after.name in ("experts_up", "wide_route") else "gate_up"
            elif e.name.endswith("attention"):
                name = f"{e.name} after {before}"
            else:
                name = e.name
            before = e.name
            starts, ends = (
                after.time_range.start - e.time_range.start,
                after.time_range.end - e.time_range.end,
            )
            found.setdefault(name, []).append((e.device_time, starts, ends))
        return {
            f"{name} x{len(rows)}": [round(statistics.median(r[i] for r in rows), 2) for i in range(3)]
            for name, rows in found.items()
        }

    def report(self, out: Path) -> None:
        for key in ("equal", "shared", "stamps", "wide_bits", "wide_drafting", "wide_profile"):
            value = self.found.get(key, {})
            for name, lines in value.items() if isinstance(value, dict) else [(key, value)]:
                print(key, name, *(["", *lines] if isinstance(lines, list) else [lines]), sep="\n  ")
        super().report(out)
        print("ms without waits", self.found.get("ms_without_waits"))

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
    parser.add_argument("--wide", action="store_true")
    args = parser.parse_args()
    bench = LayersBench(args)
    # Without a GPU nothing of ours is launched.
    with collecting() if args.tiny else contextlib.nullcontext():
        bench.phase("build", bench.build)
        bench.phase("read_tb_s", bench.read_bandwidth)
        if not args.wide:
            run_narrow(bench)
        if args.wide or not args.tiny:
            run_wide(bench)
        if not args.wide:
            run_rest(bench)
    bench.found["kernels"] = {}
    bench.report(args.out)
    sys.exit(bool(bench.found["errors"]))


def run_narrow(bench: LayersBench) -> None:
    """Run what steps of at most 16 rows must show."""
    bench.phase("compile", bench.compile_all)
    bench.phase("equal", bench.equal)
    bench.phase("steps", bench.steps)
    bench.phase("bits", bench.bits)


def run_rest(bench: LayersBench) -> None:
    """Run what says where the time of narrow steps goes."""
    bench.phase("shared", bench.shared)
    bench.phase("drafting", bench.drafting)
    if not bench.tiny:
        bench.phase("stamps", bench.stamps)
        bench.phase("profile", bench.profile_cuda, 10)
    bench.phase("ms_without_waits", bench.without_waits)


def run_wide(bench: LayersBench) -> None:
    """Run all that wider steps are asked."""
    wide = WideRows(bench)
    bench.phase("wide_build", wide.build)
    bench.phase("wide_compile", wide.compile)
    bench.phase("wide_bits", wide.bits)
    bench.phase("wide_steps", wide.steps)
    bench.phase("wide_drafting", wide.drafting)
    if not bench.tiny:
        bench.phase("wide_profile", wide.profile)


if __name__ == "__main__":
    main()
