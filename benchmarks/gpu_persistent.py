"""The whole step in one launch beside today's layers on a GPU: equality, row bits, where time goes, steps.

    PYTHONPATH=src python benchmarks/gpu_persistent.py --out FOLDER

Builds a random Laguna-XS (67 GB in BF16). Prints a short table last and writes gpu_persistent.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_step import Bench
from twins import relative

from lean_laguna.kernels.cuda.compiler import compiled
from lean_laguna.kernels.cuda.driver import architecture
from lean_laguna.kernels.cuda.layers import CudaLayers
from lean_laguna.kernels.cuda.step import StepKernel, Workspace
from lean_laguna.kernels.triton.draft_step import DraftStep
from lean_laguna.kernels.triton.launch import Launch, Tile
from lean_laguna.kernels.triton.step import TargetStep
from lean_laguna.kernels.triton.tiles import Tiles

PHASES = ("qkv", "attend", "combine", "out", "up", "route", "down", "norm")
MARKS = (
    ("tokens here", 8, 4),
    ("heads here after attend", 9, 1),
    ("chunk done after heads", 10, 9),
    ("parts here after combine", 11, 2),
    ("rows here after out", 12, 3),
    ("scores here after route", 13, 5),
    ("tables after scores", 14, 13),
    ("acts here after down", 15, 6),
)
"""Of stamps: what a block waits for, and since which stamp."""
PATIENCE = 400_000


class PersistentBench(Bench):
    """A step whose layers run in one launch, with other constants each time."""

    def build(self) -> None:
        super().build()
        layers = self.weights.layers + self.drafter.layers
        self.cuda = CudaLayers(layers, torch.device(self.device))
        self.workspace = Workspace.allocate(layers, self.device)
        self.kernels: dict[str, StepKernel] = {}
        self.usable: list[str] = []
        self.sync()

    def kernel(self, cols: int, options: dict[str, int]) -> StepKernel:
        taps = self.shape.taps
        return StepKernel(
            self.weights.layers,
            self.weights.embed,
            self.weights.norm,
            self.caches.layers,
            self.caches.tables,
            self.inputs.input_ids,
            self.inputs.rows,
            self.scratch.normed,
            self.workspace,
            eps=self.weights.eps,
            cols=cols,
            taps=[self.taps[:, taps.index(i)] if i in taps else None for i in range(self.shape.layers)],
            options={"PATIENCE": PATIENCE, **options},
        )

    def variants(self, names: list[str]) -> None:
        """Make the kernels of the command line's variants, ``name:cols:KEY=value,...``."""
        for text in names:
            name, cols, options = text.split(":")
            pairs = (pair.split("=") for pair in options.split(",") if pair)
            self.kernels[name] = self.kernel(int(cols), {key: int(value) for key, value in pairs})
        self.draft_kernels = {cols: self.draft_kernel(cols) for cols in (8, 16)}

    def draft_kernel(self, cols: int) -> StepKernel:
        layers = range(len(self.drafter.layers))
        return StepKernel(
            self.drafter.layers,
            self.weights.embed,
            self.drafter.norm,
            [(self.draft_cache[0][i], self.draft_cache[1][i]) for i in layers],
            [self.draft_table for _ in layers],
            self.inputs.input_ids,
            self.inputs.rows,
            self.scratch.normed,
            self.workspace,
            eps=self.drafter.eps,
            cols=cols,
            options={"PATIENCE": PATIENCE},
        )

    def compile_all(self) -> dict[str, float]:
        """Compile everything side by side; return seconds by kernel, and what failed."""
        begin = time.monotonic()
        arch = architecture(torch.cuda.current_device())

        def one(kernel: StepKernel) -> float:
            compiled(kernel.source, arch)
            return round(time.monotonic() - begin, 1)

        every = {**self.kernels, **{f"draft {c}": k for c, k in self.draft_kernels.items()}}
        found = {}
        with ThreadPoolExecutor(12) as pool:
            futures = {name: pool.submit(one, kernel) for name, kernel in every.items()}
            runs = [self.with_layers(None).run, super().target(self.launch(16, False)).run]
            self.compile(runs)
            for name, future in futures.items():
                try:
                    found[name] = future.result()
                except Exception as error:
                    found[name] = -1.0
                    print(f"FAILED to compile {name}: {str(error)[:600]}", flush=True)
                    self.kernels.pop(name, None)
        return found

    def with_layers(self, layer: Any, cols: int = 8) -> TargetStep:
        step = super().target(self.launch(cols, cols == 8))
        return step if layer is None else dataclasses.replace(step, layer=layer)

    def target(self, launch: Launch, **options: Any) -> TargetStep:
        name = next(n for n in self.usable if self.kernels[n].cols == launch.cols)
        return dataclasses.replace(super().target(launch, **options), whole=self.kernels[name].run)

    def equal(self) -> dict[str, Any]:
        """Run every variant at each row count; relative difference of normed rows and taps to Triton's."""
        found: dict[str, Any] = {}
        cases = ([1], 0), ([3], 0), ([8], 0), ([3, 2, 2], 0), ([11], 0), ([16], 0), ([1], 1)
        wanted = []
        for counts, far in cases:
            firsts = [self.long if far else self.context - 40 - 7 * r for r in range(len(counts))]
            requests = [0] if far else list(range(1, 1 + len(counts)))
            self.place_at(counts, firsts, requests)
            super().target(self.launch(16, False)).run()
            self.sync()
            n = sum(counts)
            wanted.append((self.scratch.normed[:n].clone(), self.taps[:n].clone()))
        runs = {name: (kernel.cols, kernel.run) for name, kernel in self.kernels.items()}
        for name, (cols, run) in runs.items():
            worst: list[Any] = []
            for (counts, far), (normed, taps) in zip(cases, wanted, strict=True):
                n = sum(counts)
                if n > cols:
                    continue
                firsts = [self.long if far else self.context - 40 - 7 * r for r in range(len(counts))]
                requests = [0] if far else list(range(1, 1 + len(counts)))
                self.place_at(counts, firsts, requests)
                self.scratch.normed.fill_(float("nan"))
                run()
                self.sync()
                complaint = self.workspace.complaint()
                if complaint:
                    worst.append(f"STUCK at {counts}: {complaint}")
                    self.workspace.state[4:].zero_()
                    break
                worst.append(
                    [
                        float(f"{relative(self.scratch.normed[:n], normed):.3g}"),
                        float(f"{relative(self.taps[:n, 0], taps[:, 0]):.3g}"),
                    ]
                )
            found[name] = worst
            print(name, worst, flush=True)
            if name in self.kernels and not any(isinstance(w, str) for w in worst):
                self.usable.append(name)
        return found

    def place_at(self, counts: list[int], firsts: list[int], requests: list[int]) -> None:
        """Place rows of these requests, in block table order from 0."""
        table = self.caches.tables[0]
        if not hasattr(self, "own_table"):
            self.own_table = table.clone()
        table.copy_(self.own_table)
        for r, request in enumerate(requests):
            table[r] = self.own_table[request]
        self.place(counts, firsts, requests=requests)

    def time_rows(self, run: Any, counts: tuple[int, ...]) -> dict[str, float]:
        self.place_at([1], [self.context], [0])
        replay, row = self.graph(run), {}
        for m in counts:
            self.place_at([m], [self.context], [0])
            row[f"ms_{m}"] = round(self.time_us(replay, 12) / 1000, 4)
        self.place_at([1], [self.long], [0])
        row["ms_1_long"] = round(self.time_us(replay, 12) / 1000, 4)
        return row

    def steps(self) -> list[dict[str, Any]]:
        table = []
        table.append({"setup": "triton", **self.time_rows(self.with_layers(None).run, (1, 8))})
        print(table[-1], flush=True)
        choose = super().target(self.launch(8, False)).choose
        table.append({"setup": "head alone", **self.time_rows(choose, (1, 8))})
        print(table[-1], flush=True)
        for name in self.usable:
            kernel = self.kernels[name]
            if self.left() < 60:
                break
            step = dataclasses.replace(super().target(self.launch(kernel.cols, False)), whole=kernel.run)
            counts = (1, 2, 4, 8) if kernel.cols == 8 else (1, 8, 16)
            table.append({"setup": name, **self.time_rows(step.run, counts)})
            print(table[-1], flush=True)
        return table

    def layers_apart(self) -> dict[str, float]:
        """Time today's CUDA C++ layers."""
        found = {}
        for cols, counts in ((8, (1, 2, 4, 8)), (16, (1, 8, 16))):
            run = self.with_layers(self.cuda, cols).run
            self.cuda.compile_ahead([run])
            found |= {f"{cols} columns, {k}": v for k, v in self.time_rows(run, counts).items()}
        print("cuda layers", found, flush=True)
        return found

    def where(self) -> dict[str, Any]:
        """Return, of kernels that stamp, microseconds from each phase's start to the next one's."""
        found = {}
        clock = 1.755
        for name in self.usable:
            kernel = self.kernels[name]
            if kernel.stamps is None:
                continue
            for m in (1, 8):
                self.place_at([m], [self.context], [0])
                for _ in range(3):
                    kernel.run()
                self.sync()
                found[f"{name} {m} rows"] = phases(kernel.stamps.cpu(), clock)
                torch.save(kernel.stamps.cpu()[::6].clone(), self.args_out / f"stamps_{name}_{m}.pt")
        return found

    def drafting(self) -> dict[str, Any]:
        """Time the drafter in three ways."""
        out: dict[str, Any] = {}
        start = min(self.context, self.draft_table.shape[1] * 16 - 60)
        for label, more in (
            ("triton", {}),
            ("whole", {"whole": self.draft_kernels[8].run}),
        ):
            draft = DraftStep(
                self.drafter,
                self.weights.embed,
                self.weights.head,
                self.draft_cache,
                self.draft_table,
                self.inputs,
                self.scratch,
                self.features,
                launch=self.launch(8, True),
                tiles=self.tiles,
                **more,
            )
            self.place([8], [start])
            self.compile([draft.propose] if label == "triton" else [])
            draft.propose()
            out[f"drafts {label}"] = self.inputs.input_ids[:8].tolist()
            self.place([8], [start])
            out[f"ms_propose {label}"] = round(self.time_us(self.graph(draft.propose), 10) / 1000, 4)
            if self.workspace.complaint():
                out[f"stuck {label}"] = self.workspace.complaint()
                self.workspace.state[4:].zero_()
        return out


def phases(stamps: torch.Tensor, clock: float) -> dict[str, Any]:
    """Medians over layers and blocks, by kind of layer; stamps [blocks, layers, 8] cycles."""
    found: dict[str, Any] = {}
    layers = stamps.shape[1]
    for kind, chosen in (
        ("full", range(4, layers - 1, 4)),
        ("sliding", [i for i in range(1, layers - 1) if i % 4]),
    ):
        row = {}
        if not chosen:
            continue
        order = [0, 1, 2, 3, 4, 5, 6]
        for a, b in itertools.pairwise([*order, 7]):
            spans = []
            for i in chosen:
                begin = stamps[:, i, a]
                end = stamps[:, i, b] if b < 7 else stamps[:, i + 1, 0]
                spans += ((end - begin).double() / clock / 1000).tolist()
            spans.sort()
            row[PHASES[a]] = [round(spans[int(len(spans) * q)], 2) for q in (0.05, 0.5, 0.95)]
        for name, mark, since in MARKS:
            values = [
                ((stamps[:, i, mark] - stamps[:, i, since]).double() / clock / 1000)[stamps[:, i, mark] > 0]
                for i in chosen
            ]
            spans = torch.cat(values).sort().values.tolist()
            if spans:
                row[name] = [round(spans[int(len(spans) * q)], 2) for q in (0.05, 0.5, 0.95)]
        whole = [
            ((stamps[:, i + 1, 0] - stamps[:, i, 0]).double() / clock / 1000).median().item() for i in chosen
        ]
        row["layer"] = round(statistics.median(whole), 2)
        found[kind] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=280.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--variant", action="append", default=[], help="name:cols:KEY=value,KEY=value")
    args = parser.parse_args()
    bench = PersistentBench(args)
    bench.args_out = args.out
    bench.tiles = bench.chosen = dataclasses.replace(
        Tiles(),
        **{
            f.name: getattr(Tiles(), f.name).with_prefetch(0.0)
            for f in dataclasses.fields(Tiles)
            if isinstance(getattr(Tiles(), f.name), Tile)
        },
    )
    bench.phase("build", bench.build)
    bench.phase("make", lambda: bench.variants(args.variant))
    bench.phase("compile", bench.compile_all)
    bench.phase("read_tb_s", bench.read_bandwidth)
    bench.phase("equal", bench.equal)
    for name, body in (
        ("steps", bench.steps),
        ("where", bench.where),
        ("drafting", bench.drafting),
        ("bits", bench.bits),
    ):
        bench.phase(name, body)
        (args.out / "gpu_persistent.json").write_text(json.dumps(bench.found, indent=1, default=str))
    bench.found["kernels"] = {}
    for name in ("compile", "equal", "where", "drafting", "bits", "steps", "layers_apart"):
        value = bench.found.get(name)
        print(name)
        if name == "bits":
            print(f"  complaint: {bench.workspace.complaint()}")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value or []):
            print(f"  {key}: {item}")
    print(f"errors {list(bench.found['errors'])}, read {bench.found.get('read_tb_s')} TB/s")


if __name__ == "__main__":
    main()
