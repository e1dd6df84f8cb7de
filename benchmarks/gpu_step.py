"""One call on a GPU: every kernel checked, timed alone and inside the whole step, row bits hashed.

    PYTHONPATH=src python benchmarks/gpu_step.py --out FOLDER

Builds a random Laguna-XS (67 GB in BF16). Prints a short table last and writes gpu_step.json. Under the
interpreter (``TRITON_INTERPRET=1 ... --tiny``) it only shows that the script runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from phases import Phases, Run
from random_model import TINY, XS, Maker

from lean_laguna.kernels.triton import step as step_module
from lean_laguna.kernels.triton.accept import Requests, accept
from lean_laguna.kernels.triton.attention import attend
from lean_laguna.kernels.triton.draft_step import DraftStep, Features
from lean_laguna.kernels.triton.expert_down import expert_down
from lean_laguna.kernels.triton.experts import expert_gate_up
from lean_laguna.kernels.triton.head import sample
from lean_laguna.kernels.triton.launch import MAX_ROWS, WIDE, Launch, Tile
from lean_laguna.kernels.triton.projection import gate_up, project
from lean_laguna.kernels.triton.step import Inputs, Scratch, TargetStep, rows_of
from lean_laguna.kernels.triton.tiles import Tiles


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK * STEPS + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(STEPS):
        total += tl.load(x_ptr + at + i * BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


class Bench(Phases):
    """The model, its buffers, and what is measured."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.chosen_programs = 528
        self.shape = TINY if args.tiny else XS
        self.dtype = torch.float32 if args.tiny else torch.bfloat16
        self.context = 40 if args.tiny else 2048
        self.long = 100 if args.tiny else 32768
        self.chosen = self.tiles = (
            Tiles(**{f.name: Tile(32, 32, 2, 2, 2) for f in dataclasses.fields(Tiles)})
            if args.tiny
            else Tiles()
        )

    def build(self) -> None:
        s = self.shape
        torch.manual_seed(1)
        lengths = [self.long + 64] + [self.context + 64] * 3
        self.maker = Maker(s, self.long + 64, self.device, self.dtype)
        self.weights = self.maker.target()
        self.drafter = self.maker.drafter()
        self.caches = self.maker.caches(self.weights.layers, lengths)
        draft = self.maker.caches(self.drafter.layers, lengths[1:2])
        self.draft_cache = tuple(torch.stack([layer[i] for layer in draft.layers]) for i in (0, 1))
        self.draft_table = draft.tables[0]
        self.inputs = Inputs.allocate(self.device)
        self.scratch = Scratch.allocate(
            self.weights.layers + self.drafter.layers, self.weights.head, dataclasses.replace(self.tiles)
        )
        parts = -(-s.vocab // 16)
        best = (
            torch.zeros(parts, MAX_ROWS, device=self.device),
            torch.zeros(parts, MAX_ROWS, dtype=torch.int32, device=self.device),
        )
        self.scratch = dataclasses.replace(self.scratch, best=best)
        scratch = self.scratch
        for rows in (scratch.hidden, scratch.normed, scratch.qkv, scratch.heads, scratch.act, scratch.scores):
            # As much is drawn as so many rows need, whatever the capacity: so later draws do not follow it.
            rows.zero_().view(-1)[: rows.numel() * WIDE // MAX_ROWS].normal_()
        self.sampled = torch.zeros(MAX_ROWS, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(MAX_ROWS, s.vocab, device=self.device)
        self.taps = torch.zeros(MAX_ROWS, len(s.taps), s.hidden, dtype=self.dtype, device=self.device)
        self.features = Features.allocate(self.drafter)
        self.sync()

    def place(self, counts: list[int], first: list[int], *, requests: list[int] | None = None) -> None:
        """Lay out ``counts[r]`` rows of request r from position ``first[r]``; tokens follow the position."""
        rows, dev = self.inputs.rows, self.device

        def put(into: torch.Tensor, values: list[int]) -> None:
            into.zero_()
            into[: len(values)] = torch.tensor(values, dtype=into.dtype, device=dev)

        spread = [(r, i) for r, n in enumerate(counts) for i in range(n)]
        put(rows.num_rows, [len(spread)])
        put(rows.num_requests, [len(counts)])
        put(rows.row_start, [sum(counts[:r]) for r in range(len(counts))])
        put(rows.row_count, counts)
        put(rows.row_request, [r for r, _ in spread])
        put(rows.positions, [first[r] + i for r, i in spread])
        names = list(range(len(counts))) if requests is None else requests
        tokens = [(7919 * (first[r] + i) + 31 * names[r]) % self.shape.vocab for r, i in spread]
        put(self.inputs.input_ids, tokens)

    def launch(self, cols: int = 8, pdl: bool = True, programs: int = 0, attention: int = 264) -> Launch:
        """Return launch settings; under the interpreter few programs, since they run one after another."""
        if self.tiny:
            return Launch(cols, False, 3, 3)
        return Launch(cols, pdl, programs or self.chosen_programs, attention)

    def target(
        self,
        launch: Launch,
        *,
        tiles: Tiles | None = None,
        logits: bool = False,
        taps: bool = True,
    ) -> TargetStep:
        return TargetStep(
            self.weights,
            self.caches,
            self.inputs,
            self.scratch,
            self.sampled,
            tap_layers=self.shape.taps if taps else (),
            taps=self.taps if taps else None,
            logits=self.logits if logits else None,
            launch=launch,
            tiles=tiles or self.tiles,
        )

    # --- compiling and timing

    def compile(self, runs: list[Run]) -> None:
        """Compile every kernel that the runs would launch, side by side, launching none."""
        if self.tiny:
            return
        from triton.runtime.jit import JITFunction

        launch = JITFunction.run

        def dry(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return launch(kernel, *args, grid=grid, warmup=True, **kwargs)

        before = time.monotonic()
        JITFunction.run = dry
        try:
            with ThreadPoolExecutor(16) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for run in runs:
                    run()
        finally:
            JITFunction.run = launch
        print(f"compiled in {time.monotonic() - before:.1f} s ({len(runs)} runs)", flush=True)

    def time_us(self, replay: Run, repeats: int = 20) -> float:
        """Return the median time of one replay."""
        if self.tiny:
            replay()
            return 1.0
        for _ in range(3):
            replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        self.sync()
        times = sorted(a.elapsed_time(b) * 1000 for a, b in itertools.pairwise(events))
        return times[len(times) // 2]

    # --- what is measured

    def read_bandwidth(self) -> float:
        """Return TB/s of a kernel that only reads."""
        if self.tiny:
            return 0.0
        source = self.weights.layers[1].mlp.gate_up.view(torch.int32).flatten()
        programs = source.numel() // (2048 * 16)
        out = torch.empty(programs, dtype=torch.int32, device=self.device)
        run = self.graph(
            lambda: _read_kernel[(programs,)](source, out, programs, BLOCK=2048, STEPS=16, num_warps=4)
        )
        return programs * 2048 * 16 * 4 / self.time_us(run) / 1e6

    def check(self) -> dict[str, float]:
        """Compare each kernel class with plain PyTorch: relative error of the worst class member."""
        from twins import check_all

        self.compile([lambda: check_all(self)])
        return check_all(self)

    def layers(self, sparse: bool, sliding: bool | None = None) -> list[int]:
        return [
            i
            for i in range(1 if sparse else 0, self.shape.layers)
            if sliding is None or bool(self.weights.layers[i].attention.shape.window) == sliding
        ]

    def classes(
        self,
    ) -> dict[
        str, tuple[Callable[[Tile, Launch], Run], Callable[[int], float], list[tuple[Tile, dict[str, Any]]]]
    ]:
        """Each kernel class: how to run it over all layers, bytes of one launch at M rows, tiles to try."""
        s, W, sc, n = self.shape, self.weights, self.scratch, self.inputs.rows.num_rows
        sliding, sparse = self.layers(False, True), self.layers(True)
        item = 2

        def qkv(tile: Tile, launch: Launch) -> Run:
            def run() -> None:
                for i in sliding:
                    a = W.layers[i].attention
                    out = rows_of(sc.qkv, a.shape.width)
                    project(sc.hidden, a.qkv, out, n, tile, launch, norm=a.input_norm, eps=1e-6)

            return run

        def out(tile: Tile, launch: Launch) -> Run:
            def run() -> None:
                for i in sliding:
                    a = W.layers[i].attention
                    heads = rows_of(sc.heads, a.shape.num_heads * a.shape.head_dim)
                    project(
                        heads,
                        a.out,
                        sc.qkv[: MAX_ROWS * s.hidden].view(MAX_ROWS, -1),
                        n,
                        tile,
                        launch,
                        residual=sc.hidden,
                    )

            return run

        def router(tile: Tile, launch: Launch) -> Run:
            def run() -> None:
                for i in sparse:
                    m = W.layers[i].mlp
                    act, scores = rows_of(sc.act, s.shared), rows_of(sc.scores, s.experts)
                    gate_up(
                        sc.hidden,
                        m.norm,
                        m.router_gate_up,
                        act,
                        n,
                        1e-6,
                        tile,
                        launch,
                        scores=scores,
                        normed=sc.normed,
                    )

            return run

        def up(tile: Tile, launch: Launch) -> Run:
            def run() -> None:
                for i in sparse:
                    m = W.layers[i].mlp
                    scores = rows_of(sc.scores, s.experts)
                    expert_gate_up(
                        sc.normed, scores, m.bias, m.gate_up, sc.routing, n, tile, launch, top_k=s.top_k
                    )

            return run

        def down(tile: Tile, launch: Launch) -> Run:
            def run() -> None:
                for i in sparse:
                    m = W.layers[i].mlp
                    hidden = sc.qkv[: MAX_ROWS * s.hidden].view(MAX_ROWS, -1)
                    act = rows_of(sc.act, s.shared)
                    expert_down(
                        sc.routing,
                        m.down,
                        hidden,
                        n,
                        tile,
                        launch,
                        scaling=2.5,
                        shared_act=act,
                        shared_weight=m.shared_down,
                    )

            return run

        def head(tile: Tile, launch: Launch) -> Run:
            inp = self.inputs
            return lambda: sample(
                sc.normed,
                W.head,
                self.sampled,
                inp.seeds,
                inp.temperatures,
                inp.rows.positions,
                n,
                sc.best,
                tile,
                launch,
                position_offset=1,
            )

        def live(m: int) -> float:
            return s.experts * (1 - (1 - s.top_k / s.experts) ** m)

        def spread(tiles: list[Tile], chosen: int = 0) -> list[tuple[Tile, dict[str, Any]]]:
            """All tiles with early launch; the chosen one also without, and with other prefetch shares."""
            cases = [(t.with_prefetch(0.5), {"pdl": True}) for t in tiles]
            own = tiles[chosen]
            return [
                *cases,
                (own, {"pdl": False}),
                (own, {"pdl": True}),
                (own.with_prefetch(1.0), {"pdl": True}),
            ]

        thin = [Tile(16, 64, 4, 4, 4), Tile(16, 128, 4, 4, 3), Tile(16, 128, 4, 4, 4), Tile(16, 64, 4, 4, 6)]
        wide = [Tile(32, 64, 4, 4, 3), Tile(32, 64, 4, 4, 4), Tile(16, 64, 8, 8, 4), Tile(32, 32, 8, 8, 4)]
        plain = [Tile(64, 128, 1, 4, 4), Tile(64, 64, 1, 4, 5), Tile(32, 256, 1, 1, 3)]
        deep = [Tile(16, 128, 4, 4, 4), Tile(16, 128, 8, 8, 3), Tile(16, 64, 8, 8, 4), Tile(16, 64, 8, 8, 6)]
        shared = (s.experts + 2 * s.shared) * s.hidden * item
        up_tiles = [(Tile(16, 64, 4, 4, 4), p) for p in (264, 396, 528, 792)]
        up_tiles += [(t, 528) for t in (Tile(16, 128, 4, 4, 3), Tile(16, 64, 4, 4, 6), Tile(16, 64, 8, 8, 3))]
        up_tiles += [
            (t, 264)
            for t in (
                Tile(32, 64, 4, 4, 4),
                Tile(32, 128, 4, 4, 3),
                Tile(16, 128, 8, 8, 3),
                Tile(32, 64, 8, 8, 3),
            )
        ]
        up_tiles += [(Tile(32, 64, 4, 4, 3), 396)]
        ups = [(t, {"pdl": True, "programs": p}) for t, p in up_tiles] + [
            (up_tiles[2][0], {"pdl": False, "programs": 528})
        ]
        downs = [Tile(16, 128, 4, 4, st, p) for st in (3, 4, 6) for p in (0.0, 1.0)]
        downs += [Tile(16, 128, 8, 8, st, 1.0) for st in (3, 4, 6)] + [Tile(16, 128, 2, 2, 4, 1.0)]
        down_cases = [(t, {"pdl": True}) for t in downs] + [(downs[2], {"pdl": False})]
        heads = [
            Tile(64, 128, 1, 4, 3),
            Tile(64, 128, 1, 4, 4),
            Tile(32, 64, 4, 4, 4),
            Tile(64, 64, 4, 4, 3),
            Tile(128, 64, 1, 4, 4),
        ]
        head_cases = [(t, {"pdl": True}) for t in heads] + [(heads[0], {"pdl": False})]
        width = W.layers[sliding[0]].attention.shape.width
        return {
            "qkv": (qkv, lambda m: width * s.hidden * item, spread(thin + wide + plain)),
            "out": (
                out,
                lambda m: s.hidden * s.sliding_heads * s.head_dim * item,
                spread(deep + thin[:2] + wide[:1]),
            ),
            "router": (
                router,
                lambda m: shared,
                spread([*thin[:2], thin[3], wide[2], wide[0], Tile(16, 128, 8, 8, 2)]),
            ),
            "expert_gate_up": (up, lambda m: live(m) * 2 * s.expert * s.hidden * item, ups),
            "expert_down": (down, lambda m: (live(m) * s.expert + s.shared) * s.hidden * item, down_cases),
            "head": (head, lambda m: s.vocab * s.hidden * item, head_cases),
        }

    def kernels(self) -> dict[str, list[dict[str, Any]]]:
        """Time every kernel class in graphs over all layers' weights, tile by tile, at 1 and 8 rows."""
        classes, table = self.classes(), {}
        cases = [
            (name, tile, self.launch(**options), make)
            for name, (make, _, tiles) in classes.items()
            for tile, options in (tiles[:1] if self.tiny else tiles)
        ]
        if self.tiny:
            cases = [(name, getattr(self.tiles, name), launch, make) for name, _, launch, make in cases]
        routing = self.target(self.launch(pdl=False))
        self.compile([routing.run, *(make(tile, launch) for _, tile, launch, make in cases)])
        routing.run()
        for name, tile, launch, make in cases:
            if self.left() < 60:
                break
            count = {
                "head": 1,
                "qkv": len(self.layers(False, True)),
                "out": len(self.layers(False, True)),
            }.get(name, len(self.layers(True)))
            row: dict[str, Any] = {
                "tile": dataclasses.asdict(tile),
                "pdl": launch.pdl,
                "programs": launch.programs,
            }
            try:
                replay = None
                for m in (1, 8):
                    self.place([m], [self.context])
                    if name in ("expert_gate_up", "expert_down"):
                        self.refresh_routing()
                    replay = replay or self.graph(make(tile, launch))
                    us = self.time_us(replay) / count
                    row[f"us_{m}"], row[f"tb_s_{m}"] = round(us, 2), round(classes[name][1](m) / us / 1e6, 3)
            except Exception as error:
                row["error"] = repr(error)[:300]
            table.setdefault(name, []).append(row)
        return table

    def refresh_routing(self) -> None:
        """Leave near-uniform routing of the live rows in the scratch buffers."""
        layer, sc = self.weights.layers[1].mlp, self.scratch
        rows_of(sc.scores, self.shape.experts).normal_()
        scores = rows_of(sc.scores, self.shape.experts)
        n = self.inputs.rows.num_rows
        expert_gate_up(
            sc.normed,
            scores,
            layer.bias,
            layer.gate_up,
            sc.routing,
            n,
            self.tiles.expert_gate_up,
            self.launch(pdl=False),
            top_k=self.shape.top_k,
        )

    def best_tiles(self) -> Tiles:
        """Return the tiles that took least time at one row."""
        chosen = {}
        for name, rows in self.found.get("kernels", {}).items():
            timed = [r for r in rows if "us_1" in r and r["pdl"]]
            if timed:
                chosen[name] = Tile(**min(timed, key=lambda r: r["us_1"] + 0.1 * r["us_8"])["tile"])
        if "qkv" in chosen:
            chosen["dense_gate_up"] = dataclasses.replace(
                self.tiles.dense_gate_up, prefetch=chosen["qkv"].prefetch
            )
        if "out" in chosen:
            chosen["dense_down"] = chosen["out"]
        return dataclasses.replace(self.tiles, **chosen)

    def best_programs(self) -> int:
        timed = [
            r for r in self.found.get("kernels", {}).get("expert_gate_up", []) if "us_1" in r and r["pdl"]
        ]
        return min(timed, key=lambda r: r["us_1"] + 0.1 * r["us_8"])["programs"] if timed else 528

    def steps(self) -> list[dict[str, Any]]:
        """Time the whole step in several set-ups: milliseconds by rows, at the short and the long context."""
        best, programs = (self.tiles, 528) if self.tiny else (self.best_tiles(), self.best_programs())
        self.chosen, self.chosen_programs = best, programs
        none = dataclasses.replace(
            best, **{f.name: getattr(best, f.name).with_prefetch(0.0) for f in dataclasses.fields(Tiles)}
        )
        setups = [
            ("default tiles, no early launch", self.launch(pdl=False, programs=528), self.tiles),
            ("best tiles, no early launch", self.launch(pdl=False), best),
            ("best tiles, early, no prefetch", self.launch(), none),
            ("best tiles, early, prefetch", self.launch(), best),
            ("best tiles, early, prefetch, 16 columns", self.launch(16), best),
        ]
        self.compile([self.target(launch, tiles=tiles).run for _, launch, tiles in setups])
        table = []
        for label, launch, tiles in setups[:1] if self.tiny else setups:
            if self.left() < 30:
                break
            row: dict[str, Any] = {"setup": label}
            try:
                self.place([1], [self.context])
                replay = self.graph(self.target(launch, tiles=tiles).run)
                for m in (1,) if self.tiny else (1, 2, 4, 8, 16)[: 4 if launch.cols == 8 else 5]:
                    self.place([m], [self.context])
                    row[f"ms_{m}"] = round(self.time_us(replay, 10) / 1000, 4)
                self.place([1], [self.long])
                row["ms_1_long"] = round(self.time_us(replay, 10) / 1000, 4)
            except Exception as error:
                row["error"] = repr(error)[:300]
            print(row, flush=True)
            table.append(row)
        return table

    def without(self) -> dict[str, float]:
        """Return what each kernel class costs inside the step: its time less the time without the class."""
        launch, saved = self.launch(), {}
        self.place([1], [self.context])

        def timed() -> float:
            return self.time_us(self.graph(self.target(launch, tiles=self.chosen).run), 10)

        whole = timed()
        for name in ("attend", "expert_gate_up", "expert_down", "gate_up", "project", "sample"):
            keep = getattr(step_module, name)
            setattr(step_module, name, lambda *a, **k: None)
            try:
                saved[name] = round(whole - timed(), 1)
            finally:
                setattr(step_module, name, keep)
        return {"whole": round(whole, 1), **saved}

    def profile(self) -> dict[str, Any]:
        """Return each kernel's total time in one step and its launches, without early launch."""
        if self.tiny:
            return {}
        from torch.profiler import ProfilerActivity, profile

        out = {}
        for m in (1, 8):
            self.place([m], [self.context])
            replay = self.graph(self.target(self.launch(pdl=False), tiles=self.chosen).run)
            replay()
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                replay()
                self.sync()
            out[str(m)] = {
                e.key: [round(e.device_time_total, 1), e.count]
                for e in prof.key_averages()
                if e.device_time_total > 0
            }
        return out

    def bit_launches(self) -> dict[str, Launch]:
        """Return the set-ups whose rows' bits are compared."""
        launches = {"plain": self.launch(pdl=False), "early": self.launch(), "early16": self.launch(16)}
        if self.tiny:
            launches.pop("early")
        return launches

    def bits(self) -> dict[str, Any]:
        """Count logits rows whose bits differ from decoding alone, over rows, slots, columns and set-ups."""
        base, best = self.context, self.chosen
        rounds = 12 if not self.tiny else 3
        launches = self.bit_launches()
        steps = {k: self.target(v, tiles=best, logits=True) for k, v in launches.items()}
        # Kernels in CUDA C++ run while Triton's are compiled: on one row, which every width takes.
        self.place([1], [base])
        self.compile([s.run for s in steps.values()])
        graphs = {}
        for key, run in steps.items():
            self.place([1], [base])
            graphs[key] = self.graph(run.run)

        def rows_after(
            key: str, counts: list[int], first: list[int], requests: list[int] | None = None
        ) -> torch.Tensor:
            self.place(counts, first, requests=requests)
            graphs[key]()
            self.sync()
            return self.logits[: sum(counts)].clone()

        alone = torch.cat([rows_after("plain", [1], [base + i]) for i in range(rounds)])
        digest = hashlib.sha256(alone.cpu().numpy().tobytes()).hexdigest()[:16]
        result: dict[str, Any] = {
            "hash": digest,
            "rows": 0,
            "mismatches": {},
            "finite": bool(alone.isfinite().all()),
        }

        def compare(label: str, got: torch.Tensor, want: torch.Tensor) -> None:
            bad = int((got.view(torch.int32) != want.view(torch.int32)).any(-1).sum())
            result["rows"] += got.shape[0]
            result["mismatches"][label] = result["mismatches"].get(label, 0) + bad

        for key in graphs:
            width = launches[key].cols
            for i in range(rounds):
                compare(f"{key} 1 row", rows_after(key, [1], [base + i]), alone[i : i + 1])
            for m in range(2, min(width, rounds) + 1):
                for start in range(0, rounds - m + 1, max(1, m // 2)):
                    compare(f"{key} verify", rows_after(key, [m], [base + start]), alone[start : start + m])
            if width == 1:
                continue
            # Beside other requests, in another slot: request 0's rows come last.
            n = 3
            table = self.caches.tables[0]
            swapped = table.clone()
            table[2] = swapped[0]
            table[0] = swapped[2]
            got = rows_after(key, [3, 2, n], [base - 5, base - 9, base], requests=[2, 1, 0])
            table.copy_(swapped)
            compare(f"{key} beside others", got[5:], alone[:n])
        return result

    def sampling(self) -> dict[str, Any]:
        """Same tokens at T = 0.8 for one row and for many, and what the noise costs."""
        launch, best = self.launch(), self.chosen
        base, m = self.context, 6
        self.place([1], [base])
        replay = self.graph(self.target(launch, tiles=best).run)
        out: dict[str, Any] = {"ms_greedy": round(self.time_us(replay, 10) / 1000, 4)}
        self.inputs.temperatures.fill_(0.8)
        self.inputs.seeds.fill_(1234567891011)
        out["ms_sampling"] = round(self.time_us(replay, 10) / 1000, 4)
        singles = []
        for i in range(m):
            self.place([1], [base + i])
            replay()
            self.sync()
            singles.append(self.sampled[0].item())
        self.place([m], [base])
        replay()
        self.sync()
        out["same"] = self.sampled[:m].tolist() == singles
        self.inputs.temperatures.zero_()
        return out

    def speculate(self) -> dict[str, Any]:
        """Time the drafter, and a whole speculative step: verify 8 rows, context, accept, draft 7."""
        launch, best = self.launch(), self.chosen
        target = self.target(launch, tiles=best)
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
            tiles=best,
        )

        def ints(value: int = 0) -> torch.Tensor:
            return torch.full((MAX_ROWS,), value, dtype=torch.int32, device=self.device)

        ring = torch.zeros(MAX_ROWS, 64, dtype=torch.int32)
        ring = ring if self.tiny else ring.pin_memory()
        requests = Requests(
            ints(10**6),
            ints(7),
            torch.zeros(MAX_ROWS, dtype=torch.int64, device=self.device),
            torch.zeros(MAX_ROWS, device=self.device),
            ints(-1)[:, None],
            ring,
            ints(),
            ints(),
            ints(),
        )

        def whole() -> None:
            target.run()
            draft.append_context(self.taps)
            accept(
                self.inputs.input_ids,
                self.sampled,
                self.inputs.rows,
                self.inputs.seeds,
                self.inputs.temperatures,
                requests,
                launch,
                mask_token=self.drafter.mask_token,
            )
            draft.propose()

        def context() -> None:
            draft.append_context(self.taps)

        self.compile([whole])
        start = min(self.context, self.draft_table.shape[1] * 16 - 60)
        self.place([8], [start])
        out: dict[str, Any] = {
            "ms_context": round(self.time_us(self.graph(context), 10) / 1000, 4),
            "ms_propose": round(self.time_us(self.graph(draft.propose), 10) / 1000, 4),
        }
        self.place([8], [start])
        requests.emitted.zero_()
        out["ms_step"] = round(self.time_us(self.graph(whole), 10) / 1000, 4)
        out["emitted"], out["rows"] = requests.emitted[0].item(), self.inputs.rows.num_rows.item()
        out["first_tokens"] = ring[0, :4].tolist()
        return out

    def attention_alone(self) -> dict[str, Any]:
        """Time attention and its combination by layer kind, rows and context."""

        def attend_all(chosen: list[int], programs: int) -> Run:
            def run() -> None:
                for i in chosen:
                    layer = self.weights.layers[i]
                    a = layer.attention
                    attend(
                        rows_of(self.scratch.qkv, a.shape.width),
                        rows_of(self.scratch.heads, a.shape.num_heads * a.shape.head_dim),
                        (a.q_norm, a.k_norm),
                        layer.rotary,
                        self.caches.layers[i],
                        self.caches.tables[i],
                        self.inputs.rows,
                        self.scratch.partial,
                        a.shape,
                        self.launch(attention=programs),
                        eps=1e-6,
                    )

            return run

        cases = [
            (sliding, programs, self.layers(False, sliding))
            for sliding in (False, True)
            for programs in ((132,) if self.tiny else (132, 264, 528))
        ]
        self.compile([attend_all(chosen, programs) for _, programs, chosen in cases])
        out = {}
        for sliding, programs, chosen in cases:
            self.place([1], [self.context])
            replay = self.graph(attend_all(chosen, programs))
            for m, at in ((1, self.context), (8, self.context), (1, self.long), (8, self.long)):
                self.place([m], [at])
                key = f"{'sliding' if sliding else 'full'} {programs} programs, {m} rows at {at}"
                out[key] = round(self.time_us(replay) / len(chosen), 2)
        return out

    # --- the end

    def report(self, out: Path) -> None:
        found = self.found
        self.write(out / "gpu_step.json")
        for name, rows in (found.get("kernels") or {}).items():
            for r in sorted(rows, key=lambda r: r.get("us_1", 1e9))[:5]:
                t = r["tile"]
                shape = " ".join(f"{key} {value}" for key, value in t.items())
                timed = [f"M={m} {r[f'us_{m}']} us {r[f'tb_s_{m}']} TB/s" for m in (1, 8) if f"us_{m}" in r]
                numbers = r.get("error") or ", ".join(timed)
                print(f"{name:15} {shape} pdl {r['pdl']!s:5} p {r['programs']:4} {numbers}")
            plain = [r for r in rows if not r["pdl"] and "us_1" in r]
            print(f"{name:15} without early launch: " + ", ".join(f"{r['us_1']} us" for r in plain))
        for key in (
            "attention_alone",
            "check",
            "profile",
            "without",
            "sampling",
            "speculate",
            "bits",
            "steps",
        ):
            value = found.get(key)
            if isinstance(value, dict):
                print(key)
                for k, v in value.items():
                    print(f"  {k}: {v}")
            elif value:
                for row in value:
                    print(f"  {row}")
        wall = found.get("read_tb_s")
        fastest = min((r.get("ms_1", 1e9) for r in found.get("steps") or []), default=1e9)
        print(f"errors: {list(found['errors'])}")
        print(f"read-only {wall} TB/s; fastest step of one row {fastest} ms = {1000 / fastest:.1f} tok/s")
        print(f"{found['seconds']} s in all")


def main() -> None:
    """Run all phases within the time budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument(
        "--budget", type=float, default=225.0, help="seconds; phases that would overrun are skipped"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a toy shape on the CPU, to try the script itself"
    )
    bench = Bench(parser.parse_args())
    bench.phase("build", bench.build)
    bench.phase("read_tb_s", bench.read_bandwidth)
    bench.phase("check", bench.check)
    bench.phase("kernels", bench.kernels, 60)
    bench.phase("steps", bench.steps, 40)
    bench.phase("bits", bench.bits, 15)
    bench.phase("speculate", bench.speculate, 10)
    bench.phase("attention_alone", bench.attention_alone, 10)
    bench.phase("without", bench.without, 8)
    bench.phase("sampling", bench.sampling, 4)
    bench.phase("profile", bench.profile, 8)
    bench.report(parser.parse_args().out)
    sys.exit(bool(bench.found["errors"]))


if __name__ == "__main__":
    main()
