"""Quantised builds of a published shape on the GPU engine: speed, step times, memory, bits, draft lengths.

    PYTHONPATH=src python benchmarks/gpu_packed.py --out FOLDER [--builds nvfp4,fp8-all,...] [--kernels cuda]

Weights are random and stay packed; so nothing here is a model's output. Writes gpu_packed_KERNELS.json after
every build and prints a short table last. ``--tiny`` takes nano's shape and small counts, to try the script
itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_packed import to_kernels
from lean_laguna.engine.llm import LLM
from lean_laguna.kernels.triton.formats import decode
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.projection import project
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.presets import PRESETS
from lean_laguna.quant.scheme import packed_integer

RATES = (0.90, 0.81, 0.73, 0.62, 0.52, 0.46, 0.40)
BUILDS = "bf16,nvfp4,nvfp4-attention,fp8-all,int8,int4"
SWEEP = (3, 5, 7)


class Build:
    """One build's engine, loaded once."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args = name, args
        is_gpu = torch.cuda.is_available()
        before = torch.cuda.memory_allocated() if is_gpu else 0
        drafts: dict[str, Any] = {"model": "nano-dflash" if args.tiny else "dummy"}
        if not args.exact:
            drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}
        start = time.monotonic()
        self.llm = LLM(
            args.shape,
            load_format="dummy",
            shape=args.shape,
            scheme=name,
            kernels=args.kernels,
            max_model_len=64 if args.tiny else 4096,
            max_num_seqs=1 if args.tiny else 16,
            kv_cache_memory_bytes=None if args.tiny else 1 << 30,
            enable_prefix_caching=False,
            prefill_chunk_size=16 if args.tiny else 1024,
            speculative_config=drafts if args.exact or name in args.sweep.split(",") else None,
        )
        self.engine: Any = self.llm.engine
        self.load_s = time.monotonic() - start
        self.allocated = (torch.cuda.memory_allocated() if is_gpu else 0) - before

    def exact(self) -> dict[str, int]:
        """Count tokens that differ between decoding alone, with drafts, and in company."""
        num, new = (2, 4) if self.args.tiny else (6, 96)
        draw, vocab = random.Random(7), self.engine.target.config.vocab_size
        prompts = [[draw.randrange(100, vocab - 100) for _ in range(5 + 40 * i)] for i in range(num)]

        def run(indices: list[int], k: int) -> list[list[int]]:
            states = [
                self.engine.add_request(
                    prompts[i],
                    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=new, ignore_eos=True),
                    num_speculative_tokens=k,
                )
                for i in indices
            ]
            while self.engine.has_unfinished:
                self.engine.step()
            return [list(state.sequences[0].completion.token_ids) for state in states]

        alone = [run([i], 0)[0] for i in range(num)]
        others = [[run([i], k)[0] for i in range(num)] for k in (3, 7)]
        others += [run(list(range(num)), k) for k in (0, 3)]
        pairs = [(a, b) for other in others for a, b in zip(alone, other, strict=True)]
        different = sum(x != y for a, b in pairs for x, y in zip(a, b, strict=True))
        return {"tokens_compared": sum(len(a) for a, _ in pairs), "tokens_different": different}

    def memory(self) -> dict[str, Any]:
        """Bytes of the target's weights, and all that is allocated."""
        target = self.engine.target
        plain = sum(p.nbytes for p in target.parameters() if not p.is_meta)
        packed = sum(weight.num_bytes for weight in target.packed_weights.values())
        return {
            "target_gb": round((plain + packed) / 1e9, 3),
            "packed_gb": round(packed / 1e9, 3),
            "allocated_gb": round(self.allocated / 1e9, 3),
            "load_s": round(self.load_s, 1),
        }

    def once(self, prompt: int, new: int, k: int | None, seed: int) -> float:
        """Return decode tok/s of one request."""
        draw, vocab = random.Random(seed), self.engine.target.config.vocab_size
        ids = [draw.randrange(100, vocab - 100) for _ in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        state = self.engine.add_request(ids, params, num_speculative_tokens=k)
        while self.engine.has_unfinished:
            self.engine.step()
        times = state.snapshot().times
        return (new - 1) / max(1e-9, times.last_token_s - times.first_token_s)

    def speed(self, k: int | None, repeats: int = 3) -> list[float]:
        """Return decode tok/s of a few requests, after one to warm up."""
        prompt, new = (5, 3) if self.args.tiny else (1024, 257)
        self.once(prompt, min(new, 24), k, 0)
        return [round(self.once(prompt, new, k, 1 + i), 1) for i in range(repeats)]

    def rows(self) -> dict[str, Any]:
        """Time a step of the target by its rows, and hold rows together against the same rows alone."""
        programs, engine, tiny = self.engine.programs, self.engine, self.args.tiny
        prompt, many = (5, 3) if tiny else (1000, 16)
        ids = [100 + i for i in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        state = engine.add_request(ids, params, num_speculative_tokens=0)
        while len(state.sequences[0].completion.token_ids) < 2:
            engine.step()
        engine._drain([])
        sequence = state.sequences[0]
        engine.scheduler.prepare(sequence, many)
        lanes, first = engine._lanes, sequence.num_computed
        tokens = [300 + 7 * i for i in range(many)]
        found: dict[str, Any] = {}
        for n in (1, 3) if tiny else (1, 2, 4, 6, 8, 12, 16):
            lanes.put_rows(sequence, first, n, tokens[:n])
            found[str(n)] = round(self._time(programs.columns(n)), 4)
        lanes.put_rows(sequence, first, many, tokens)
        together = self._logits(programs.columns(many), many)
        lanes.put_rows(sequence, first, many // 2, tokens[: many // 2])
        narrow = self._logits(programs.columns(many // 2), many // 2)
        alone = []
        for i in range(many):
            lanes.put_rows(sequence, first + i, 1, tokens[i : i + 1])
            alone.append(self._logits(programs.columns(1), 1)[0])
        lanes.put_rows(sequence, first, 1, tokens[:1])
        stamps = self._stamps() if self.args.stamps else {}
        engine.abort(state.request_id)
        different = [(torch.stack(alone[: len(rows)]) != rows).any(1) for rows in (narrow, together)]
        rows = {
            "rows_compared": sum(map(len, different)),
            "rows_different": int(torch.cat(different).sum()),
            "finite": bool(together.isfinite().all()),
        }
        return {"step_ms": found, **rows, **stamps}

    def _stamps(self) -> dict[str, Any]:
        """Return where the blocks of the last layer are in a step of one row, in microseconds."""
        from kernel_variants import STAMPED_BLOCKS, last_layer, variant

        step = self._step(self.engine.programs.columns(1), logits=False)
        with variant(STAMPS=STAMPED_BLOCKS) as launched:
            self.engine.programs._cuda_layers.compile_ahead([step.run])
            step.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step.run()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        lines = last_layer(launched, replay)
        shared = [f"{source.name} {grid} x {size} B" for source, grid, size in launched[-6:]]
        return {"stamps": lines, "shared": shared}

    def _step(self, cols: int, *, logits: bool) -> Any:
        return self.engine.programs._target_step(cols, taps=False, logits=logits)

    def _logits(self, cols: int, n: int) -> torch.Tensor:
        self._step(cols, logits=True).run()
        return self.engine.programs.logits[:n].cpu().clone()

    def _time(self, cols: int) -> float:
        step = self._step(cols, logits=False)
        step.run()
        if not torch.cuda.is_available():
            return 0.0
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run()
        times = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            for _ in range(40):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 40)
        return median(times)


def checks() -> dict[str, Any]:
    """Hold decoded tiles and products of every format against the weight decoded by PyTorch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    n, k = 48, 512
    schemes = {name: PRESETS[name] for name in ("NVFP4A16", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "INT8")}
    schemes["W4A16_ASYM_32"] = packed_integer(4, 32, symmetric=False)
    found = {}
    for name, scheme in schemes.items():
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(n, k, generator=generator).bfloat16()
        stored = to_packed(encode(weight, scheme), scheme, (n, k)).to(device)
        packed, plain = to_kernels(stored, dtype), stored.decode(dtype)
        decoded = decode(packed, torch.empty(n * k, dtype=dtype, device=device))
        x = torch.randn(16, k, generator=generator).to(device, dtype)
        outs = [torch.full((16, n), float("nan"), dtype=dtype, device=device) for _ in range(2)]
        rows = torch.full((1,), 7, dtype=torch.int32, device=device)
        tile = Tiles().qkv if device == "cuda" else Tiles().qkv.with_prefetch(0.0)
        for own, out in zip((packed, plain), outs, strict=True):
            project(x, own, out, rows, tile, Launch(cols=8))
        found[name] = {
            "decoded_values_different": int((decoded != plain).sum()),
            "products_different": int((outs[0][:7] != outs[1][:7]).sum()),
            "largest_error": float((outs[0][:7] - outs[1][:7]).abs().max()),
        }
    return found


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Load one build and measure it."""
    build = Build(name, args)
    found: dict[str, Any] = {"memory": build.memory()}
    if args.exact:
        return found | build.exact()
    found["tok_per_s"] = build.speed(0)
    if name in args.sweep.split(","):
        found["drafts"] = {str(k): build.speed(k, 2) for k in SWEEP}
    print(name, found, flush=True)
    found |= build.rows()
    return found


def main() -> None:
    """Measure the builds that were asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--builds", default=BUILDS)
    parser.add_argument("--sweep", default="nvfp4", help="builds to measure with drafts, with commas")
    parser.add_argument("--shape", help="laguna-xs; tiny: nano")
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds; no build starts after it")
    parser.add_argument("--exact", action="store_true", help="only tokens with drafts against those without")
    parser.add_argument("--stamps", action="store_true", help="where a layer's time goes, CUDA C++ only")
    parser.add_argument("--no-checks", action="store_true", help="of tiles and single products")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.shape = args.shape or ("nano" if args.tiny else "laguna-xs")
    begin, file = time.monotonic(), args.out / f"gpu_packed_{args.kernels}.json"
    found: dict[str, Any] = {"kernels": args.kernels, "synthetic": True, **describe_run(None), "builds": {}}
    parts: list[tuple[str, Any]] = [] if args.no_checks else [("checks", checks)]
    parts += [(name, lambda name=name: measure(name, args)) for name in args.builds.split(",")]
    for name, part in parts:
        if time.monotonic() - begin > args.budget:
            found["builds"][name] = "skipped: out of time"
            continue
        start = time.monotonic()
        try:
            found["builds"][name] = part()
        except Exception:
            found["builds"][name] = {"error": traceback.format_exc()}
            print(traceback.format_exc()[-2500:])
        print(f"-- {name}: {time.monotonic() - start:.1f} s: {json.dumps(found['builds'][name])}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        args.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1, default=str))
    for name, entry in found["builds"].items():
        if isinstance(entry, dict) and "tok_per_s" in entry:
            print(f"{name:16s} {entry['tok_per_s']} tok/s  {entry['step_ms']}  drafts {entry.get('drafts')}")
            print(*entry.get("shared", ()), *entry.get("stamps", ()), sep="\n  ")


if __name__ == "__main__":
    main()
