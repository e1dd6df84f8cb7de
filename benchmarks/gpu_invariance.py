"""What row invariance costs: the step's kernels with one tile for all row counts, and with the best for each.

    PYTHONPATH=src python benchmarks/gpu_invariance.py --out FOLDER [--budget SECONDS]

Free means: for each number of rows the fastest of all tiles (other K splits too, so other bits), of all
splits of the context, and of the library's product where it has one (without the norm that ours includes).
Weights are random, of Laguna-XS's shape. Prints a table last and writes gpu_invariance.json.
``--tiny`` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_step import Bench, Run

from lean_laguna.core.provenance import describe_run
from lean_laguna.kernels.triton import attention
from lean_laguna.kernels.triton.experts import expert_gate_up
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch
from lean_laguna.kernels.triton.step import rows_of

ROWS = (1, 2, 4, 8, 16)
CHUNKS = (32, 64, 128, 256)


class Invariance(Bench):
    """Times every kernel class of a step, tile by tile, at every number of rows."""

    def columns(self, rows: int) -> int:
        return 8 if rows <= 8 else 16

    def route(self, rows: int) -> None:
        """Leave the same near-uniform routing for every tile at this number of rows."""
        draw = torch.Generator().manual_seed(rows)
        wanted = torch.randn(MAX_ROWS, self.shape.experts, generator=draw)
        scores = rows_of(self.scratch.scores, self.shape.experts)
        scores.copy_(wanted)
        mlp, tile = self.weights.layers[1].mlp, self.tiles.expert_gate_up
        expert_gate_up(
            self.scratch.normed,
            scores,
            mlp.bias,
            mlp.gate_up,
            self.scratch.routing,
            self.inputs.rows.num_rows,
            tile,
            self.launch(16, False),
            top_k=self.shape.top_k,
        )

    def library(self, name: str) -> Callable[[int], Run] | None:
        """Return the library's product over all layers' weights of a class, by number of rows."""
        layers, s = self.weights.layers, self.scratch
        weights = {
            "qkv": [layers[i].attention.qkv for i in self.layers(False, True)],
            "out": [layers[i].attention.out for i in self.layers(False, True)],
            "router": [layers[i].mlp.router_gate_up for i in self.layers(True)],
            "head": [self.weights.head],
        }.get(name)
        if weights is None:
            return None
        x = s.qkv[: MAX_ROWS * weights[0].shape[1]].view(MAX_ROWS, -1)
        out = torch.empty(MAX_ROWS, weights[0].shape[0], dtype=x.dtype, device=x.device)

        def make(rows: int) -> Run:
            def run() -> None:
                for weight in weights:
                    torch.mm(x[:rows], weight.T, out=out[:rows])

            return run

        return make

    def attentions(self) -> Iterator[tuple[str, Callable[[Launch], Run]]]:
        """Attention of all layers with chunks of so many keys."""

        def make(chunk: int) -> Callable[[Launch], Run]:
            def bound(launch: Launch) -> Run:
                def run() -> None:
                    kept, attention.CHUNK = attention.CHUNK, chunk
                    try:
                        self.attend_all(launch)
                    finally:
                        attention.CHUNK = kept

                return run

            return bound

        for chunk in CHUNKS[1:2] if self.tiny else CHUNKS:
            yield f"chunks of {chunk}", make(chunk)

    def attend_all(self, launch: Launch) -> None:
        sc = self.scratch
        for i, layer in enumerate(self.weights.layers):
            a = layer.attention
            attention.attend(
                rows_of(sc.qkv, a.shape.width),
                rows_of(sc.heads, a.shape.num_heads * a.shape.head_dim),
                (a.q_norm, a.k_norm),
                layer.rotary,
                self.caches.layers[i],
                self.caches.tables[i],
                self.inputs.rows,
                sc.partial,
                a.shape,
                launch,
                eps=1e-6,
            )

    def cases(self) -> Iterator[tuple[str, str, bool, Callable[[int], Run]]]:
        """Class, what is tried, whether it is what the engine uses, and its run at a number of rows."""
        for name, (make, _, tiles) in self.classes().items():
            own = getattr(self.tiles, name)
            plain = {(dataclasses.replace(t, prefetch=0.0), o.get("programs", 0)) for t, o in tiles}
            plain = {(dataclasses.replace(own, prefetch=0.0), 0)} if self.tiny else plain
            for tile, programs in sorted(plain, key=str):
                is_own = tile == dataclasses.replace(own, prefetch=0.0) and programs in (0, 528)

                def at(rows: int, make: Any = make, tile: Any = tile, programs: int = programs) -> Run:
                    run: Run = make(tile, self.launch(self.columns(rows), False, programs))
                    return run

                shape = f"{tile.block_n}x{tile.block_k} split {tile.split} warps {tile.warps} {tile.stages}"
                yield name, f"{shape} programs {programs}", is_own, at
            library = self.library(name)
            if library is not None:
                yield name, "library", False, library
        for label, bound in self.attentions():
            for programs in (264,) if self.tiny else (132, 264, 528):

                def at_rows(rows: int, bound: Any = bound, programs: int = programs) -> Run:
                    run: Run = bound(self.launch(self.columns(rows), False, attention=programs))
                    return run

                is_own = label == f"chunks of {attention.CHUNK}" and programs == 264
                yield "attention", f"{label} programs {programs}", is_own, at_rows

    def times(self) -> dict[str, Any]:
        """Return microseconds a step of every class and case, by number of rows."""
        cases = list(self.cases())
        self.place([1], [self.context])
        self.compile([at(rows) for _, what, _, at in cases for rows in (1, 16) if what != "library"])
        found: dict[str, dict[str, Any]] = {}
        for name, what, is_own, at in cases:
            entry: dict[str, Any] = {"is_own": is_own}
            found.setdefault(name, {})[what] = entry
            if self.left() < 5:
                entry["error"] = "skipped: out of time"
                continue
            try:
                replays: dict[int, Run] = {}
                for rows in (1, 16) if self.tiny else ROWS:
                    self.place([rows], [self.context])
                    if name.startswith("expert"):
                        self.route(rows)
                    key = rows if what == "library" else self.columns(rows)
                    if key not in replays:
                        replays[key] = self.graph(at(rows))
                    entry[str(rows)] = round(self.time_us(replays[key], 10), 1)
            except Exception as error:
                entry["error"] = repr(error)[:200]
        return found

    def cost(self) -> dict[str, Any]:
        """Return by rows: the engine's kernels, the best single tile of each class, and the best of all."""
        classes = self.found["times"]
        # Sliding layers are timed for these, 30 of 40; full ones, 10, have 3/4 of their heads.
        scale = {"qkv": 1 + 10 / 30 * 0.77, "out": 1 + 10 / 30 * 0.75}
        total: dict[str, Any] = {}
        for rows in (1, 16) if self.tiny else ROWS:
            row = {"engine": 0.0, "one tile": 0.0, "free": 0.0}
            per_class = {}
            for name, cases in classes.items():
                timed = {k: v for k, v in cases.items() if str(rows) in v and "error" not in v}
                exact = {k: v for k, v in timed.items() if k != "library"}
                own = next((v for v in exact.values() if v["is_own"]), None)
                if own is None:
                    continue
                single = min(exact.values(), key=self.average)
                free = min(timed, key=lambda k: timed[k][str(rows)])
                parts = [own[str(rows)], single[str(rows)], timed[free][str(rows)]]
                parts = [round(part * scale.get(name, 1.0), 1) for part in parts]
                per_class[name] = [*parts, free]
                for key, part in zip(row, parts, strict=True):
                    row[key] += part
            total[str(rows)] = {key: round(us, 1) for key, us in row.items()} | {
                "cost, one tile %": round(100 * (row["one tile"] / max(1e-9, row["free"]) - 1), 2),
                "cost, engine %": round(100 * (row["engine"] / max(1e-9, row["free"]) - 1), 2),
                "classes": per_class,
            }
        return total

    @staticmethod
    def average(entry: dict[str, Any]) -> float:
        """Return how slow a tile is over all row counts: what a single choice has to balance."""
        times = [us for key, us in entry.items() if key.isdigit()]
        return sum(times) / len(times)

    def show(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.found["seconds"] = round(time.monotonic() - self.begin, 1)
        (out / "gpu_invariance.json").write_text(json.dumps(self.found, indent=1, default=str))
        for rows, row in (self.found.get("cost") or {}).items():
            print(f"M={rows}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k != "classes"))
            for name, (own, single, free, what) in row["classes"].items():
                print(f"    {name:15} engine {own:8} one tile {single:8} free {free:8} us ({what})")
        print(f"errors: {self.found['errors']}; {self.found['seconds']} s in all")


def main() -> None:
    """Time all cases within the time budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on the CPU")
    args = parser.parse_args()
    bench = Invariance(args)
    bench.found |= describe_run(None) | {"synthetic": True, "context": bench.context}
    kept, attention.CHUNK = attention.CHUNK, min(CHUNKS)  # the most partial sums: buffers for all
    bench.phase("build", bench.build)
    attention.CHUNK = kept
    bench.phase("times", bench.times)
    bench.phase("cost", bench.cost, 0)
    bench.show(args.out)


if __name__ == "__main__":
    main()
