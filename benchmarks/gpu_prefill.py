"""One call on a GPU: prefill checked against plain PyTorch, timed by kernel class and as a whole.

    PYTHONPATH=src python3 benchmarks/gpu_prefill.py --out FOLDER --budget 120

Builds a random Laguna-XS (67 GB in BF16). Prints a short table last and writes gpu_prefill.json. Under the
interpreter (``TRITON_INTERPRET=1 ... --tiny``) it only shows that the script runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from phases import Phases, Run
from random_model import TINY, XS, Maker
from torch import Tensor
from twins import linear, rms_norm, rotate
from twins import silu_and_mul as gated

from lean_laguna.kernels.cuda import driver
from lean_laguna.kernels.cuda.prompt_attention import attend_block, has_warpgroups
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.prefill import PrefillStep
from lean_laguna.kernels.triton.prefill_attention import attend_before, attend_chunk
from lean_laguna.kernels.triton.prefill_experts import expert_chunk_down, expert_chunk_up
from lean_laguna.kernels.triton.prefill_keys import order_keys, ready_heads
from lean_laguna.kernels.triton.prefill_rows import add_norm, combine, silu_and_mul
from lean_laguna.kernels.triton.prefill_scratch import PrefillScratch
from lean_laguna.kernels.triton.prefill_sort import sort_by_expert
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile, ExpertTile, PrefillTiles
from lean_laguna.kernels.triton.weights import LayerWeights, SparseWeights


def plain_layer(layer: LayerWeights, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return a whole sequence's residual stream after a layer, and the layer's keys, by plain PyTorch."""
    a, shape, n = layer.attention, layer.attention.shape, h.shape[0]
    H, J, P = shape.num_heads, shape.num_kv_heads, shape.head_dim
    at = torch.arange(n, device=h.device)
    cos, sin = (t[at] for t in layer.rotary)
    qkv = linear(rms_norm(h, a.input_norm), a.qkv)
    q, k, v, gate = qkv.split([H * P, J * P, J * P, H], -1)
    q = rotate(rms_norm(q.reshape(n, H, P), a.q_norm), cos, sin)
    k = rotate(rms_norm(k.reshape(n, J, P), a.k_norm), cos, sin)
    seen = at[None] <= at[:, None]
    if shape.window:
        seen &= at[:, None] - at[None] < shape.window
    keys, values = (t.reshape(n, J, P).float().repeat_interleave(H // J, 1).transpose(0, 1) for t in (k, v))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * P**-0.5
    y = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1).to(h.dtype)
    y = (y * F.softplus(gate.float()).to(y.dtype)[..., None]).reshape(n, -1)
    h = h + linear(y, a.out)
    m, x = layer.mlp, rms_norm(h, layer.mlp.norm)
    if not isinstance(m, SparseWeights):
        return h + linear(gated(linear(x, m.gate_up)), m.down), k
    E = m.bias.shape[0]
    both = linear(x, m.router_gate_up)
    sigmoid = torch.sigmoid(both[:, :E].float())
    ids = torch.sort(sigmoid + m.bias, dim=-1, descending=True, stable=True)[1][:, : m.top_k]
    weights = sigmoid.gather(1, ids)
    weights = (weights / weights.sum(-1, keepdim=True)).to(h.dtype).float()
    routed = torch.zeros(h.shape, device=h.device)
    for e in range(E):
        row, rank = (ids == e).nonzero(as_tuple=True)
        act = gated(linear(x[row], m.gate_up[e]))
        routed[row] += weights[row, rank][:, None] * (act.float() @ m.down[e].float().T)
    y = routed.to(h.dtype) * m.scaling + linear(gated(both[:, E:]), m.shared_down)
    return h + y, k


class Bench(Phases):
    """The model, its buffers, and what is measured."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.dtype = torch.float32 if args.tiny else torch.bfloat16
        self.shape = TINY if args.tiny else XS
        self.chunks = (16, 32) if args.tiny else tuple(map(int, args.chunks.split(",")))
        self.lengths = (20, 40) if args.tiny else (256, 2048, 32768)
        small = AttentionTile(16, 16, 4, 2)
        few = ExpertTile(16, 16, 32, 16, 4, 4, 2, 2)
        self.own: dict[str, Any] = {}
        if not args.tiny and has_warpgroups(torch.device("cuda")):
            self.own = {"attend_block": attend_block}
        self.tiles = PrefillTiles(small, small, few) if args.tiny else PrefillTiles()

    def build(self) -> None:
        torch.manual_seed(1)
        long = max(self.lengths)
        self.maker = Maker(self.shape, long, self.device, self.dtype)
        self.weights = self.maker.target()
        self.caches = self.maker.caches(self.weights.layers, [long])
        self.scratch = PrefillScratch.allocate(self.weights, self.chunks[-1], block=self.chunks[0])
        self.scratch.input_ids.random_(self.shape.vocab)
        self.ids = torch.randint(self.shape.vocab, (long,), dtype=torch.int32, device=self.device)
        a, m = self.weights.layers[1].attention.shape, self.shape
        wide = max(
            a.width + a.num_heads * a.head_dim, m.top_k * (m.hidden + m.expert), m.experts + 3 * m.shared
        )
        self.work = torch.empty(self.chunks[-1] * wide, dtype=self.dtype, device=self.device)
        self.sync()
        if not self.tiny:
            buffers = [getattr(self.scratch, n) for n in ("hidden", "normed", "room")]
            bytes_of = sum(t.nbytes for t in buffers)
            self.found["scratch_gib"] = round(bytes_of / 2**30, 3)

    def count(self, n: int) -> Tensor:
        return torch.tensor([n], dtype=torch.int32, device=self.device)

    def step(self, rows: int, tiles: PrefillTiles | None = None) -> PrefillStep:
        s = self.scratch
        scratch = dataclasses.replace(s, rows=rows)
        taps = torch.empty(
            rows, len(self.shape.taps), self.shape.hidden, dtype=self.dtype, device=self.device
        )
        return PrefillStep(
            self.weights,
            self.caches,
            scratch,
            self.shape.taps,
            taps,
            tiles=tiles or self.tiles,
            **self.own,
        )

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
            with ThreadPoolExecutor(16) as pool:
                from triton import AsyncCompileMode

                with AsyncCompileMode(pool, ignore_errors=True), driver.collecting() as sources:
                    for run in runs:
                        run()
        finally:
            JITFunction.run = launch
        driver.compile_ahead(sources, torch.device("cuda"))
        print(f"compiled in {time.monotonic() - before:.1f} s ({len(runs)} runs)", flush=True)

    def time_ms(self, run: Run, repeats: int = 7) -> float:
        """Return the median time of one run."""
        run()
        if self.tiny:
            return 1.0
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.sync()
        times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
        return times[len(times) // 2]

    # --- correctness

    def check(self) -> dict[str, Any]:
        """Run single layers on a prompt of several chunks, buffers full of NaN; errors by row."""
        torch.backends.cuda.matmul.allow_tf32 = False
        chunk, length = (16, 39) if self.tiny else (512, 1347)
        ids = torch.randint(self.shape.vocab, (length,), dtype=torch.int32, device=self.device)
        out: dict[str, Any] = {}
        for i in (0, 1) if self.tiny else (0, 1, 4):
            weights = dataclasses.replace(self.weights, layers=(self.weights.layers[i],))
            caches = self.maker.caches(weights.layers, [length])
            for pages in caches.layers[0]:
                pages.fill_(float("nan"))
            scratch = PrefillScratch.allocate(weights, 2 * chunk, block=chunk)
            for name in ("hidden", "normed", "room"):
                getattr(scratch, name).fill_(float("nan"))
            taps = torch.full_like(scratch.hidden, float("nan"))[:, None]
            got, at = [], 0
            step = PrefillStep(weights, caches, scratch, (0,), taps, tiles=self.tiles, library_from=chunk)
            step = dataclasses.replace(step, **self.own)
            while at < length:
                n = min(2 * chunk, length - at)
                step.scratch.input_ids[:n] = ids[at : at + n]
                step.run(step.scratch.input_ids, at, n)
                got.append(taps[:n, 0].clone())
                at += n
            start = weights.embed[ids.long()]
            want, keys = plain_layer(self.weights.layers[i], start)
            every = torch.arange(length, device=self.device)
            block = caches.tables[0][0, every // 16].long()
            own = caches.layers[0][0][block, every % 16]
            out[f"layer {i}"] = self.row_errors(torch.cat(got) - start, want - start)
            out[f"layer {i} keys"] = self.row_errors(own.flatten(1), keys.flatten(1))
        return out

    @staticmethod
    def row_errors(got: Tensor, want: Tensor) -> dict[str, float]:
        error = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
        error = torch.where(error.isfinite(), error, torch.inf)
        values = {"median": error.median(), "95 %": error.quantile(0.95), "worst": error.max()}
        return {name: round(value.item(), 5) for name, value in values.items()}

    def repeat(self) -> dict[str, bool]:
        """Say whether a prompt has the same bits again, over other leftovers, and in chunks of any length."""
        short, length, bits = self.chunks[0], min(9 * self.chunks[0] // 2, max(self.lengths)), []
        for chunk in (short, short, 2 * short, 4 * short if not self.tiny else 2 * short):
            self.scratch.room.normal_()
            for layer in self.caches.layers:
                for pages in layer:
                    pages.zero_()
            hidden = self.whole(self.step(chunk), length, chunk).clone()
            bits.append((hidden, *(pages.clone() for layer in self.caches.layers[-4:] for pages in layer)))
        same = [all(map(torch.equal, bits[0], other)) for other in bits[1:]]
        finite = bool(bits[0][0].isfinite().all())
        return {"again": same[0], "longer": all(same[1:]), "finite": finite}

    # --- time

    def whole(self, step: PrefillStep, length: int, chunk: int) -> Tensor:
        at, hidden = 0, self.scratch.normed
        while at < length:
            n = min(chunk, length - at)
            hidden = step.run(self.ids[at:], at, n)
            at += n
        return hidden

    def totals(self, tiles: PrefillTiles | None = None) -> dict[str, float]:
        """Time whole prompts, the head's argmax of the last row included."""
        out: dict[str, float] = {}
        for length, chunk in itertools.product(self.lengths, self.chunks):
            if chunk > max(length, self.chunks[0]):
                continue
            step = self.step(chunk, tiles)

            def run(step: PrefillStep = step, length: int = length, chunk: int = chunk) -> None:
                hidden = self.whole(step, length, chunk)
                torch.argmax(hidden @ self.weights.head.t(), -1)

            key = f"{length} tokens, chunks of {chunk}"
            self.sync()
            before = time.monotonic()
            run()
            self.sync()
            out[f"{key}, first time"] = round((time.monotonic() - before) * 1000, 1)
            out[key] = round(self.time_ms(run, 5 if length <= self.chunks[0] else 2), 2)
        return out

    def ways(self) -> dict[str, float]:
        """Time the longest prompt without CUDA C++, and with its chunks as graphs."""
        out: dict[str, float] = {}
        for chunk in self.chunks[1:]:
            step = dataclasses.replace(self.step(chunk), attend_block=None)
            run = partial(self.whole, step, max(self.lengths), chunk)
            out[f"Triton and the library, chunks of {chunk}"] = round(self.time_ms(run, 2), 2)
        for chunk in self.chunks if self.own else ():
            run = self.graphed(self.step(chunk), chunk)
            out[f"graphs, chunks of {chunk}"] = round(self.time_ms(run, 5), 2)
        return out

    def graphed(self, step: PrefillStep, chunk: int) -> Run:
        """Return a run of the longest prompt whose chunks are one graph."""
        tables = tuple(table[0] for table in self.caches.tables)
        ids, long = self.scratch.input_ids, max(self.lengths)
        replay = self.graph(partial(step.launch, ids, step.spans(chunk)[0][2], chunk, tables))

        def run() -> None:
            for at in range(0, long, chunk):
                step.scratch.note(at, chunk)
                ids[:chunk].copy_(self.ids[at : at + chunk])
                replay()

        return run

    def library_share(self) -> dict[str, float]:
        """Time the longest prompt by the multiples in which the library takes keys, the first time too."""
        out: dict[str, float] = {}
        for size in () if self.tiny else (8192, 2048):
            step = dataclasses.replace(self.step(self.chunks[-1]), library_from=size)
            self.sync()
            before = time.monotonic()
            self.whole(step, max(self.lengths), self.chunks[-1])
            self.sync()
            out[f"{size}, first time"] = round((time.monotonic() - before) * 1000, 1)
            out[f"{size}"] = round(
                self.time_ms(partial(self.whole, step, max(self.lengths), self.chunks[-1]), 2), 2
            )
        return out

    def profile(self) -> dict[str, Any]:
        """Return milliseconds of the longest prompt by kernel, in the longer chunks."""
        if self.tiny:
            return {}
        long, length = self.chunks[-1], max(self.lengths)
        step = self.step(long)
        self.whole(step, length, long)
        self.sync()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.whole(step, length, long)
            self.sync()
        found = {
            event.key[:90]: {"ms": round(event.self_device_time_total / 1e3, 2), "launches": event.count}
            for event in profile.key_averages()
            if event.self_device_time_total > 500
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))

    def rows_apart(self) -> dict[str, bool]:
        """Say whether the experts give a row the same bits in a long chunk as in short ones."""
        short, rows = self.chunks[0], self.chunks[-1]
        layer = next(layer for layer in self.weights.layers if isinstance(layer.mlp, SparseWeights))
        m, s, A, tile = layer.mlp, self.scratch, self.shape.top_k, self.tiles.experts
        (E, D, F), equal = m.down.shape, {}
        x = torch.randn(rows, D, device=self.device).to(self.dtype)
        logits = torch.randn(rows, E, device=self.device).to(self.dtype)

        def run(at: int, n: int) -> tuple[Tensor, Tensor]:
            act = torch.zeros(n * A, F, dtype=self.dtype, device=self.device)
            terms = torch.zeros(n * A, D, dtype=self.dtype, device=self.device)
            sort_by_expert(logits[at : at + n], m.bias, s.sort, n, self.count(n), tile, top_k=A)
            count = cdiv(n * A, tile.rows) + E
            expert_chunk_up(x[at : at + n], m.gate_up, s.sort, act, count, tile, top_k=A)
            expert_chunk_down(act, m.down, s.sort, terms, count, tile)
            by_pair = torch.empty_like(act)
            by_pair[s.sort.pairs[: n * A].long()] = act
            return by_pair, terms

        whole = run(0, rows)
        for size in (short, rows // 2):
            parts = [run(at, size) for at in range(0, rows, size)]
            for i, name in enumerate(("up", "down")):
                equal[f"{name}: {rows} rows and {size}"] = torch.equal(
                    whole[i], torch.cat([part[i] for part in parts])
                )
        return equal

    def host(self) -> float:
        """Return milliseconds of host time of one chunk's launches."""
        step = self.step(self.chunks[0])
        self.sync()
        before = time.monotonic()
        step.run(self.scratch.input_ids, 0, self.chunks[0])
        took = time.monotonic() - before
        self.sync()
        return round(took * 1000, 2)

    def classes(self) -> dict[str, float]:
        """Time what is neither attention nor an expert's product: one launch, over many layers' weights."""
        return {name: us for rows in self.chunks for name, us in self.classes_of(rows).items()}

    def classes_of(self, rows: int) -> dict[str, float]:
        sparse = [layer for layer in self.weights.layers if isinstance(layer.mlp, SparseWeights)]
        sparse = [layer for layer in sparse if layer.attention.shape.window][:8]
        s, D, shape = self.scratch, self.shape.hidden, sparse[0].attention.shape
        x, delta, hidden = s.normed[:rows].normal_(), torch.empty_like(s.hidden[:rows]), s.hidden[:rows]
        m, norms = sparse[0].mlp, (sparse[0].attention.q_norm, sparse[0].attention.k_norm)
        E, FS, A = m.bias.shape[0], m.shared_down.shape[1], m.top_k
        wide = shape.num_heads * shape.head_dim
        qkv = self.work[: rows * shape.width].view(rows, -1)
        heads = self.work[rows * shape.width :][: rows * wide].view(rows, wide)
        both, terms = (
            self.work[: rows * (E + 2 * FS)].view(rows, -1),
            self.work[: rows * A * D].view(rows, A, D),
        )
        shared = self.work[rows * (E + 2 * FS) : rows * (E + 3 * FS)].view(rows, FS)
        tile, n, zero = self.tiles.experts, self.count(rows), self.count(0)
        cache, table = self.caches.layers[1], self.caches.tables[1][0]
        names: dict[str, Callable[[LayerWeights], Any]] = {
            "qkv": lambda w: torch.mm(x, w.attention.qkv.t(), out=qkv),
            "out": lambda w: torch.mm(heads, w.attention.out.t(), out=delta),
            "router+shared": lambda w: torch.mm(x, w.mlp.router_gate_up.t(), out=both),
            "shared down": lambda w: torch.mm(shared, w.mlp.shared_down.t(), out=delta),
            "ready": lambda w: ready_heads(qkv, norms, w.rotary, cache, table, shape, zero, n, eps=1e-6),
            "order": lambda w: order_keys(cache, table, s.keys, shape, zero, n, rows, self.tiles.sliding),
            "attend sliding": lambda w: attend_chunk(
                qkv, heads, s.keys, table, shape, zero, n, self.tiles.sliding, is_ordered=True
            ),
            "silu": lambda w: silu_and_mul(both[:, E:], shared, n),
            "sort": lambda w: sort_by_expert(both, w.mlp.bias, s.sort, rows, n, tile, top_k=A),
            "add_norm": lambda w: add_norm(hidden, delta, w.mlp.norm, s.normed[:rows], n, 1e-6),
            "combine": lambda w: combine(hidden, terms, delta, n, scaling=2.5),
        }
        out: dict[str, float] = {}
        for name, body in names.items():
            self.work.normal_()
            run = self.graph(partial(lambda body: [body(layer) for layer in sparse], body))
            out[f"{name}, {rows} rows: us"] = round(self.time_ms(run) * 1000 / len(sparse), 1)
        return out

    def attention(self) -> list[dict[str, Any]]:
        """Time attention tile by tile: keys from pages, or gathered in order first and then by tensor map."""
        shapes = [(64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2)]
        tiles = [AttentionTile(*t) for t in ([(16, 16, 4, 2)] if self.tiny else shapes)]
        rows, long = self.chunks[-1], max(self.lengths)
        cases, runs = [], []
        for i in (0, 1):
            shape = self.weights.layers[i].attention.shape
            for first, n in ((0, self.chunks[0]), (long - rows, rows)):
                keys = torch.arange(first, first + n).double() + 1
                keys = keys.clamp(max=shape.window) if shape.window else keys
                flops = 4.0 * keys.sum().item() * shape.num_heads * shape.head_dim
                for tile in tiles:
                    for source in ("ordered",) if tile != tiles[-1] else ("ordered", "pages"):
                        cases.append(
                            {"kind": "sliding" if shape.window else "full", "first": first, "n": n}
                            | {"source": source, "tile": dataclasses.astuple(tile), "flops": flops}
                        )
                        runs.append(self.attend(i, first, n, tile, source))
        self.compile(runs)
        for row, run in zip(cases, runs, strict=True):
            try:
                ms = self.time_ms(run, 3)
                row |= {"ms": round(ms, 4), "tflops": round(row.pop("flops") / ms / 1e9, 1)}
            except Exception as error:
                row["error"] = repr(error)[:120]
            if self.left() < 20:
                break
        return cases

    def attend(self, i: int, first: int, n: int, tile: AttentionTile, source: str) -> Run:
        layer, rows = self.weights.layers[i], self.chunks[-1]
        shape, table, keys = layer.attention.shape, self.caches.tables[i][0], self.caches.layers[i]
        work, wide, start = self.work, shape.num_heads * shape.head_dim, self.count(first)
        if source != "pages":
            ordered = self.scratch.keys
            order_keys(keys, table, ordered, shape, start, self.count(n), first + n, tile)
            keys = ordered
        qkv = work[: rows * shape.width].view(rows, -1)
        qkv.normal_()
        out, count = work[rows * shape.width :][: rows * wide].view(rows, wide), self.count(n)

        def run() -> None:
            attend_chunk(qkv[:n], out, keys, table, shape, start, count, tile, is_ordered=source != "pages")

        return run

    def library_attention(self) -> dict[str, Any]:
        """Time the parts of attention far into a prompt where the library takes the keys before a chunk."""
        if self.tiny:
            return {}
        layer, rows, tile = self.weights.layers[0], self.chunks[-1], self.tiles.full
        shape, table, pages = layer.attention.shape, self.caches.tables[0][0], self.caches.layers[0]
        qkv = self.work[: rows * shape.width].view(rows, -1)
        qkv.normal_()
        out = torch.empty(rows, shape.num_heads * shape.head_dim, dtype=self.dtype, device=self.device)
        norms = (layer.attention.q_norm, layer.attention.k_norm)
        found: dict[str, Any] = {}
        count = self.count(rows)
        for first in (8192, 16384, 24576):
            start = self.count(first)
            keys = (shape, start, count, first + rows, tile)
            order = partial(order_keys, pages, table, self.scratch.keys, *keys)
            order()
            self.sync()
            before = time.monotonic()
            past = attend_before(qkv, self.scratch.keys, shape, first)
            self.sync()
            first_call = (time.monotonic() - before) * 1000
            common = (table, shape, start, count, tile)
            whole = partial(attend_chunk, qkv, out, self.scratch.keys, *common, is_ordered=True)
            whole()
            want = out.float()
            whole(past=past, past_keys=first)
            found[f"{first}: difference"] = self.row_errors(out.float(), want)
            times = {
                "order": self.time_ms(order),
                "ready": self.time_ms(
                    partial(
                        ready_heads, qkv, norms, layer.rotary, pages, table, shape, start, count, eps=1e-6
                    )
                ),
                "before": self.time_ms(partial(attend_before, qkv, self.scratch.keys, shape, first)),
                "own": self.time_ms(partial(whole, past=past, past_keys=first)),
                "all by Triton": self.time_ms(whole),
                "first call": first_call,
            }
            found[f"{first} keys before {rows}: ms"] = {k: round(v, 3) for k, v in times.items()}
        return found

    def expert_tiles(self) -> Iterator[tuple[int, ExpertTile]]:
        many = PrefillTiles().experts
        for rows in (256, 1024, *self.chunks):
            yield rows, ExpertTile(64, 128, 128, 64, 8, 4, 4, 3)
            for tile in (many, dataclasses.replace(many, tensor_maps=False)):
                yield rows, tile
                yield rows, dataclasses.replace(tile, halves=False)

    def experts(self) -> list[dict[str, Any]]:
        """Time the experts' products tile by tile over several layers' weights."""
        short = self.chunks[0]
        tiles = [(short, self.tiles.experts)] if self.tiny else list(self.expert_tiles())
        layers = [layer.mlp for layer in self.weights.layers if isinstance(layer.mlp, SparseWeights)][:6]
        A, s = self.shape.top_k, self.scratch
        E, D, width = self.shape.experts, self.shape.hidden, self.shape.expert
        runs, cases = [], []
        for rows, tile in tiles:
            both = self.work[: rows * (E + 2 * self.shape.shared)].view(rows, -1)
            act = self.work[: rows * A * width].view(-1, width)
            terms = self.work[rows * A * width :][: rows * A * D].view(-1, D)
            count = cdiv(rows * A, tile.rows) + E

            def prepare(rows=rows, tile=tile, both=both) -> None:
                both.normal_()
                sort_by_expert(both, layers[0].bias, s.sort, rows, self.count(rows), tile, top_k=A)
                s.normed.normal_()

            def up(rows=rows, tile=tile, act=act, count=count) -> None:
                for m in layers:
                    expert_chunk_up(s.normed[:rows], m.gate_up, s.sort, act, count, tile, top_k=A)

            def down(tile=tile, act=act, terms=terms, count=count) -> None:
                for m in layers:
                    expert_chunk_down(act, m.down, s.sort, terms, count, tile)

            cases.append((rows, tile))
            runs.append((prepare, up, down))
        self.compile([run for three in runs for run in three])
        found = []
        for (rows, tile), (prepare, up, down) in zip(cases, runs, strict=True):
            row: dict[str, Any] = {"rows": rows, "tile": dataclasses.astuple(tile)}
            try:
                prepare()
                row["tiles"] = s.sort.num_tiles.item()
                flops = 2.0 * rows * A * D * width
                for name, run, times, _prep in (("up", up, 2, None), ("down", down, 1, None)):
                    ms = self.time_ms(run, 3) / len(layers)
                    tb_s = times * E * D * width * 2 / ms / 1e9
                    row[name] = {"us": round(ms * 1000, 1), "tflops": round(flops * times / ms / 1e9, 1)}
                    row[name]["tb_s"] = round(tb_s, 2)
            except Exception as error:
                row["error"] = repr(error)[:160]
            found.append(row)
            if self.left() < 15:
                break
        return found

    def report(self, out: Path) -> None:
        found = self.found
        self.write(out / "gpu_prefill.json")
        for row in found.get("attention") or []:
            print(row)
        for row in found.get("experts") or []:
            print(row)
        for key in (
            "classes",
            "library_attention",
            "check",
            "repeat",
            "rows_apart",
            "totals",
            "ways",
            "library_share",
            "profile",
        ):
            value = found.get(key)
            print(key)
            for k, v in (value or {}).items():
                print(f"  {k}: {v}")
        print(f"host ms a chunk: {found.get('host')}; scratch GiB: {found.get('scratch_gib')}")
        print(f"errors: {list(found['errors'])}; {found['seconds']} s in all")


def main() -> None:
    """Run all phases within the time budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument(
        "--budget", type=float, default=120.0, help="seconds; phases that overrun are skipped"
    )
    parser.add_argument("--chunks", default="2048,8192", help="tokens at a time; blocks are the first")
    parser.add_argument(
        "--tiny", action="store_true", help="a toy shape on the CPU, to try the script itself"
    )
    parser.add_argument(
        "--phases",
        default="check,repeat,rows_apart,library_attention,totals,ways,profile,host,attention,classes,experts",
    )
    args = parser.parse_args()
    bench = Bench(args)
    bench.phase("build", bench.build)
    if not args.tiny:
        sizes = [(c, c) for c in (*bench.chunks, 256)] + [(2 * bench.chunks[-1], bench.chunks[-1])]
        runs = [partial(bench.whole, bench.step(c), n, c) for n, c in sizes]
        bench.phase("compile", lambda: bench.compile(runs))
    for name in args.phases.split(","):
        bench.phase(name, getattr(bench, name))
    bench.report(args.out)


if __name__ == "__main__":
    main()
