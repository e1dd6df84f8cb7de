"""What row invariance costs: the step's kernels as they are, for all row counts, and the best for each count.

    PYTHONPATH=src python benchmarks/gpu_invariance.py --out FOLDER [--budget SECONDS]

Free means: for each number of rows the fastest of all kernels and tiles (other K splits too, so other bits),
of all splits of the context, and of the library's product where it has one (without the norm that ours
includes). Same bits: the fastest for each number of rows of those that give a row the engine's bits. Its
cost against free is that of row invariance; the engine's is that of having few shapes of launches, too.
Weights are random, of Laguna-XS's shape. Prints a table last and writes gpu_invariance.json. ``--tiny`` tries
the script on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_step import Bench, Run
from random_model import LEGAL

from lean_laguna.kernels.cuda import attention as cuda_attention
from lean_laguna.kernels.cuda import products
from lean_laguna.kernels.cuda.compiler import compiled
from lean_laguna.kernels.cuda.driver import architecture, collecting, multiprocessors
from lean_laguna.kernels.triton import attention
from lean_laguna.kernels.triton.experts import expert_gate_up
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch, Tile
from lean_laguna.kernels.triton.step import rows_of

ROWS = (1, 2, 4, 8, 16)
CHUNKS = (32, 64, 128)
EXPERTS = ("router", "expert_gate_up", "expert_down")
"""Classes that the CUDA C++ kernels run as one."""
TILES = {
    "qkv": (Tile(16, 64, 4, 4, 4), Tile(32, 64, 4, 4, 3), Tile(64, 64, 1, 4, 5), Tile(16, 128, 4, 4, 3)),
    "out": (Tile(16, 128, 4, 4, 4), Tile(16, 64, 8, 8, 6), Tile(16, 64, 8, 8, 4), Tile(16, 128, 4, 4, 3)),
    "router": (Tile(16, 64, 4, 4, 4), Tile(16, 64, 4, 4, 6), Tile(16, 128, 4, 4, 3)),
    "expert_gate_up": (
        Tile(16, 64, 4, 4, 4),
        Tile(16, 128, 4, 4, 3),
        Tile(32, 64, 4, 4, 4),
        Tile(16, 64, 8, 8, 3),
    ),
    "expert_down": (Tile(16, 128, 4, 4, 4), Tile(16, 128, 4, 4, 3), Tile(16, 128, 8, 8, 4)),
    "head": (Tile(64, 128, 1, 4, 3), Tile(128, 64, 1, 4, 4), Tile(64, 64, 4, 4, 3)),
}
CUDA = {
    "as the engine has it": {},
    "half as much on its way": {
        (products, "BULK_COLUMNS"): 4096,
        (products, "ADD_RING"): 12,
        (products, "LONE_ADD_RING"): 8,
        (products, "DOWN_RING"): 8,
    },
    "three quarters on its way": {(products, "BULK_COLUMNS"): 6144, (products, "DOWN_RING"): 12},
    "more on its way": {(products, "BULK_COLUMNS"): 10240, (products, "DOWN_RING"): 20},
    "two programs of half": {
        (products, "BULK_COLUMNS"): 4096,
        (products, "_num_programs"): lambda device, cols: 2 * multiprocessors(device),
    },
    "loads by lanes": {(products, "has_bulk_copies"): lambda device: False},
    "clusters of 2": {(cuda_attention, "cluster_programs"): lambda shape, cols: (2, 2)},
    "clusters of 4": {(cuda_attention, "cluster_programs"): lambda shape, cols: (4, 4)},
    "clusters of 8": {(cuda_attention, "cluster_programs"): lambda shape, cols: (8, 8)},
    "4 parts": {
        (cuda_attention, "PARTS"): 4,
        (cuda_attention, "cluster_programs"): lambda shape, cols: (4, 4),
    },
    "one program a multiprocessor": {(cuda_attention, "PROGRAMS"): 1},
    "three programs a multiprocessor": {(cuda_attention, "PROGRAMS"): 3},
}


OTHER_BITS = "CUDA 4 parts"
"""The one of these whose sums are added up in another order: none of the others changes a bit."""


@contextlib.contextmanager
def patched(constants: dict[Any, Any]) -> Iterator[None]:
    """Give modules other constants for a while; each must be there."""
    kept = {key: getattr(*key) for key in constants}
    for (module, name), value in constants.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)


class Invariance(Bench):
    """Times every kernel class of a step at every number of rows, in all ways to run it."""

    rows: tuple[int, ...] = ROWS

    def build(self) -> None:
        with patched({(attention, "CHUNK"): min(CHUNKS)}):  # the most partial sums: buffers for all
            super().build()
        self.rows = (1, 16) if self.tiny else ROWS

    def columns(self, rows: int, *, is_cuda: bool = False) -> int:
        if is_cuda and rows == 1:
            return 1
        return 8 if rows <= 8 else 16

    def route(self, rows: int) -> None:
        """Leave the same near-uniform routing for every tile at this number of rows."""
        experts, top_k = self.shape.experts, self.shape.top_k
        expected = experts * (1 - (1 - top_k / experts) ** rows)
        draw = torch.Generator().manual_seed(rows)
        wanted = torch.randn(MAX_ROWS, experts, generator=draw)
        while abs(len(wanted[:rows].topk(top_k).indices.unique()) - expected) > 1:
            wanted = torch.randn(MAX_ROWS, experts, generator=draw)
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

    # --- ways to run a class

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

    def attend_all(self, launch: Launch, *, is_cuda: bool) -> None:
        sc = self.scratch
        for i, layer in enumerate(self.weights.layers):
            a = layer.attention
            own = () if is_cuda else (sc.partial,)
            (cuda_attention.attend if is_cuda else attention.attend)(
                rows_of(sc.qkv, a.shape.width),
                rows_of(sc.heads, a.shape.num_heads * a.shape.head_dim),
                (a.q_norm, a.k_norm),
                layer.rotary,
                self.caches.layers[i],
                self.caches.tables[i],
                self.inputs.rows,
                *own,
                a.shape,
                launch,
                eps=1e-6,
            )

    def cuda_runs(self) -> dict[str, Callable[[Launch], None]]:
        """Return each class's CUDA C++ kernels over all layers."""
        sc, n, layers = self.scratch, self.inputs.rows.num_rows, self.weights.layers
        hidden = torch.zeros_like(sc.hidden).normal_()

        def qkv(launch: Launch) -> None:
            for i in self.layers(False, True):
                a = layers[i].attention
                out = rows_of(sc.qkv, a.shape.width)
                products.project(sc.hidden, a.input_norm, a.qkv, out, n, 1e-6, launch)

        def out(launch: Launch) -> None:
            for i in self.layers(False, True):
                a = layers[i].attention
                products.project_add(rows_of(sc.heads, a.out.shape[1]), a.out, hidden, n, launch)

        def experts(launch: Launch) -> None:
            for i in self.layers(True):
                m = layers[i].mlp
                scores, act = rows_of(sc.scores, self.shape.experts), rows_of(sc.act, self.shape.shared)
                products.run_experts(m, sc.hidden, scores, sc.normed, act, sc.routing, n, 1e-6, launch)

        return {
            "qkv": qkv,
            "out": out,
            "experts": experts,
            "attention": lambda launch: self.attend_all(launch, is_cuda=True),
        }

    def cases(self) -> Iterator[tuple[str, str, Callable[[int], Run]]]:
        """Return class, what is tried, and its run at a number of rows."""
        classes = self.classes()
        for name, tiles in TILES.items():
            for tile in (getattr(self.tiles, name),) if self.tiny else tiles:

                def at(rows: int, name: str = name, tile: Tile = tile) -> Run:
                    run: Run = classes[name][0](tile, self.launch(self.columns(rows), False))
                    return run

                shape = f"{tile.block_n}x{tile.block_k} split {tile.split} warps {tile.warps} {tile.stages}"
                yield name, f"Triton {shape}", at
            library = self.library(name)
            if library is not None:
                yield name, "library", library
        for chunk in CHUNKS[1:2] if self.tiny else CHUNKS:

            def attend(rows: int, chunk: int = chunk) -> Run:
                def run() -> None:
                    with patched({(attention, "CHUNK"): chunk}):
                        self.attend_all(self.launch(self.columns(rows), False), is_cuda=False)

                return run

            yield "attention", f"Triton chunks of {chunk}", attend
        if not self.tiny:
            yield from self.cuda_cases()

    def cuda_cases(self) -> Iterator[tuple[str, str, Callable[[int], Run]]]:
        for name, launch_all in self.cuda_runs().items():
            for label, constants in CUDA.items():
                modules = {module for module, _ in constants}
                if modules and ((name == "attention") != (cuda_attention in modules)):
                    continue

                def at(rows: int, launch_all: Any = launch_all, constants: Any = constants) -> Run:
                    def run() -> None:
                        with patched(constants):
                            launch_all(Launch(self.columns(rows, is_cuda=True), pdl=True))

                    return run

                yield name, f"CUDA {label}", at

    # --- times

    def compile_all(self, cases: list[tuple[str, str, Callable[[int], Run]]]) -> None:
        """Compile the Triton kernels and the CUDA C++ ones, side by side."""
        with collecting() as sources:
            self.compile([at(rows) for _, what, at in cases for rows in (1, 8, 16) if what != "library"])
        if not sources:
            return
        arch = architecture(torch.cuda.current_device())
        with ThreadPoolExecutor(16) as pool:
            for future in [pool.submit(compiled, source, arch) for source in dict.fromkeys(sources)]:
                with contextlib.suppress(Exception):  # said again where it is launched
                    future.result()

    def times(self) -> dict[str, Any]:
        """Return microseconds a step of every class and case, by number of rows."""
        # What engines run comes first, and what is only tried here last: a fault ends all that is after it.
        only_here = {f"CUDA {label}" for label, constants in CUDA.items() if constants}
        cases = sorted(self.cases(), key=lambda case: case[1] in only_here)
        self.place([1], [self.context])
        self.compile_all(cases)
        found: dict[str, dict[str, Any]] = {}
        for name, what, at in cases:
            entry: dict[str, Any] = {}
            found.setdefault(name, {})[what] = entry
            if self.left() < 4:
                entry["error"] = "skipped: out of time"
                continue
            try:
                self.time_case(name, what, at, entry)
            except Exception as error:
                entry["error"] = repr(error)[:200]
                print(f"{name}: {what}: {entry['error']}", flush=True)
                if not self.still_runs():
                    break
        return found

    def time_case(self, name: str, what: str, at: Callable[[int], Run], entry: dict[str, Any]) -> None:
        """Time one case at every number of rows into ``entry``."""
        replays: dict[int, Run] = {}
        for rows in self.rows:
            self.place([rows], [self.context])
            if name in EXPERTS:
                self.route(rows)
            is_cuda = what.startswith("CUDA")
            key = rows if what == "library" else self.columns(rows, is_cuda=is_cuda)
            if key not in replays:
                replays[key] = self.graph(at(rows))
            entry[str(rows)] = round(self.time_us(replays[key], 10), 1)

    def still_runs(self) -> bool:
        """Say whether the card takes anything after an error: a kernel's fault ends it for the process."""
        try:
            self.sync()
            self.inputs.input_ids.clone()
        except RuntimeError:
            self.found["errors"]["fault"] = "a kernel ended the process's use of the card"
            return False
        return True

    def cuda_sources(self) -> dict[str, int]:
        """Ask for the CUDA C++ kernels of every case without a GPU; return how many each case launches."""
        self.shape, self.dtype = LEGAL, torch.bfloat16
        self.build()
        counts = {}
        for name, what, at in self.cuda_cases():
            with collecting() as sources:
                for rows in self.rows:
                    at(rows)()
            counts[f"{name}: {what}"] = len(sources)
        return counts

    def cost(self) -> dict[str, Any]:
        """Return by rows and class: the engine's kernel, the best single one, and the best of all."""
        return {str(rows): self.cost_at(str(rows)) for rows in self.rows}

    def cost_at(self, rows: str) -> dict[str, Any]:
        classes = self.found["times"]
        # Sliding layers are timed for these, 30 of 40; full ones, 10, have 3/4 of their heads.
        scale = {"qkv": 1 + 10 / 30 * 0.77, "out": 1 + 10 / 30 * 0.75}
        table = {}
        for name, cases in classes.items():
            if name not in (*EXPERTS, "experts"):
                table[name] = self.choice(cases, rows, scale.get(name, 1.0))
        parts = [self.choice(classes.get(name, {}), rows) for name in EXPERTS]
        whole = self.choice(classes.get("experts", {}), rows)
        if all(parts):
            apart = [sum(part[i] for part in parts) for i in range(4)]
            best = " + ".join(part[4] for part in parts)
            table["experts"] = [*apart, best]
            if whole:  # the engine's; Triton's have other bits
                free, what = min((whole[3], whole[4]), (apart[3], best))
                table["experts"] = [*whole[:2], min(whole[2], apart[2]), free, what]
        total = [sum(row[i] for row in table.values() if row) for i in range(4)]
        keys = ("engine", "same bits", "one for all", "free")
        costs = zip(("the engine's", "the same bits", "one for all"), total, strict=False)
        return (
            {key: round(us, 1) for key, us in zip(keys, total, strict=True)}
            | {f"cost of {what} %": round(100 * (us / max(1e-9, total[3]) - 1), 2) for what, us in costs}
            | {"classes": table}
        )

    def choice(self, cases: dict[str, Any], rows: str, scale: float = 1.0) -> list[Any]:
        """Return four times and a name.

        Of the engine's kernel, the best with its bits, the best one for all counts, the best, and its name.
        """
        cases = {k: v for k, v in cases.items() if rows in v}
        exact = {k: v for k, v in cases.items() if k != "library" and all(str(r) in v for r in self.rows)}
        if not exact:
            return []
        own = next((k for k in exact if k == "CUDA as the engine has it"), next(iter(exact)))
        alike = [k for k in cases if k == own or (k.startswith("CUDA") and k != OTHER_BITS)]
        single = min(exact, key=lambda k: sum(exact[k][str(r)] for r in self.rows))
        free = min(cases, key=lambda k: cases[k][rows])
        times = [exact[own][rows], min(cases[k][rows] for k in alike), exact[single][rows], cases[free][rows]]
        return [*(round(us * scale, 1) for us in times), free]

    def show(self, out: Path) -> None:
        self.write(out / "gpu_invariance.json")
        for name, cases in (self.found.get("times") or {}).items():
            for what, entry in cases.items():
                print(f"{name:15} {what:42} {entry}")
        for rows, row in (self.found.get("cost") or {}).items():
            print(f"M={rows}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k != "classes"))
            for name, parts in row["classes"].items():
                print(f"    {name:15} {parts}")
        print(f"errors: {self.found['errors']}; {self.found['seconds']} s in all")


def main() -> None:
    """Time all cases within the time budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on the CPU")
    args = parser.parse_args()
    bench = Invariance(args)
    bench.found |= {"synthetic": True, "context": bench.context}
    bench.phase("build", bench.build)
    bench.phase("times", bench.times)
    bench.phase("cost", bench.cost, 0)
    if args.tiny:
        bench.phase("cuda_sources", bench.cuda_sources)
    bench.show(args.out)
    sys.exit(bool(bench.found["errors"]))


if __name__ == "__main__":
    main()
