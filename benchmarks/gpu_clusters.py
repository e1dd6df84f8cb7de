"""How many programs share a row's keys in windows, in steps of at most 8 rows: whole steps, and their bits.

    PYTHONPATH=src python benchmarks/gpu_clusters.py --out FOLDER

Of few tasks each has a whole cluster, of many half of one, as the kernel counts them (``crews``); beside it
always four programs, always eight, and other crowds that decide. Ways take turns on the same rows of a random
Laguna-XS. Prints a table and writes gpu_clusters.json; ``--tiny`` tries the script on a CPU, without kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_invariance import patched
from gpu_layers import LayersBench

from lean_laguna.kernels.cuda import attention
from lean_laguna.kernels.cuda.driver import collecting, compile_ahead
from lean_laguna.kernels.triton.attention import AttentionShape

COLS, TURNS = 8, 5
OWN = attention.cluster_programs
LAYOUTS = {"1 column": [1]} | {
    f"{requests} x {rows}": [rows] * requests
    for requests, rows in [
        *((1, n) for n in range(1, 9)),
        (2, 1),
        (3, 1),
        (4, 1),
        (2, 2),
        (2, 3),
        (2, 4),
        (4, 2),
    ]
}
"""Requests by rows of each."""


def always(programs: int) -> Any:
    """Return what has so many programs share each task of layers with windows."""

    def cluster_programs(shape: AttentionShape, cols: int) -> tuple[int, int]:
        return (programs, programs) if cols == COLS and shape.window else OWN(shape, cols)

    return {(attention, "cluster_programs"): cluster_programs}


WAYS: dict[str, dict[Any, Any]] = {
    "four": always(4),
    "eight": always(8),
    "crews": {},
    "crews, crowd 1": {(attention, "CROWD"): 1.0},
    "crews, crowd 0": {(attention, "CROWD"): 0.0},
}


class Clusters(LayersBench):
    """Whole steps, way by way."""

    def step(self, way: str, cols: int = COLS) -> None:
        with patched(WAYS[way]):
            self.target(self.launch(cols), logits=True).run()

    def compile_all(self) -> float:
        ways = [partial(self.step, way) for way in WAYS]
        with contextlib.nullcontext([]) if self.tiny else collecting() as sources:
            self.compile([*ways, partial(self.step, "crews", 1)])
        if not self.tiny:
            compile_ahead(sources, torch.device(self.device))
        return self.left()

    def times(self) -> dict[str, Any]:
        """Return microseconds of each way by layout, and whether all said the same."""
        self.place([1], [self.context])
        graphs = {way: self.graph(partial(self.step, way)) for way in WAYS}
        lone = {"crews": self.graph(partial(self.step, "crews", 1))}
        found: dict[str, Any] = {}
        for layout, counts in list(LAYOUTS.items())[: 2 if self.tiny else None]:
            self.place(counts, [self.context - 60] * len(counts))
            ways, said = lone if layout == "1 column" else graphs, []
            for run in ways.values():
                for _ in range(2):
                    run()
                said.append(self.logits[: sum(counts)].clone())
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(TURNS):
                for way, run in ways.items():
                    times[way].append(self.time_us(run, 6))
            entry: dict[str, Any] = {way: round(statistics.median(own), 1) for way, own in times.items()}
            entry["same bits"] = all(torch.equal(said[0], other) for other in said)
            found[layout] = entry
            print(f"{layout:9} {entry}", flush=True)
        return found


def main() -> None:
    """Time all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    bench = Clusters(args)
    with collecting() if bench.tiny else contextlib.nullcontext():
        bench.phase("build", bench.build)
        bench.phase("compile", bench.compile_all)
        bench.phase("times", bench.times)
    bench.write(args.out / "gpu_clusters.json")
    sys.exit(bool(bench.found["errors"]))


if __name__ == "__main__":
    main()
