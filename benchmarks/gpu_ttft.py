"""Time to first token of one request by prompt length, and whether bits depend on how a prompt is computed.

    PYTHONPATH=src python benchmarks/gpu_ttft.py --build bf16 --out FILE [--lengths 1,64,256]

Random weights in Laguna-XS's shape. Times are from ``add_request`` to the step that brought the token, with
captured launches and without them. Bits are those of the logits of the first token: launched one by one, a
block of prompt a step, and behind a cached prefix. ``--profile`` adds kernels by time for some lengths.
``--tiny`` tries the script itself under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_prompts import ChunkPrompts
from lean_laguna.engine.llm import LLM

CHECKED = (1, 200, 300, 700, 1500, 2048, 2112, 5000, 10300)


class Bench:
    """One engine, and what its prompts take."""

    def __init__(self, args: argparse.Namespace):
        self.tiny, self.seed = args.tiny, 0
        options: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 30, "max_model_len": 40960}
        if args.tiny:
            options = {"max_model_len": 64, "prefill_chunk_size": 16}
        drafts = {"model": "nano-dflash" if args.tiny else "dummy"} if args.drafts else None
        shape = "nano" if args.tiny else "laguna-xs"
        self.llm = LLM(
            shape,
            load_format="auto" if args.tiny else "dummy",
            shape=None if args.tiny else shape,
            scheme=None if args.tiny else args.build,
            kernels="triton" if args.tiny else args.kernels,
            max_num_seqs=1,
            enable_prefix_caching=True,
            speculative_config=drafts,
            **options,
        )
        self.engine: Any = self.llm.engine
        if args.tiny:  # on a CPU prompts go through the decode kernels otherwise
            groups = self.engine.programs.pools.groups
            used = [i for i, group in enumerate(groups) if group.num_layers]
            limits = self.engine.scheduler.limits
            self.engine._prompts = ChunkPrompts(self.engine.programs, used, limits, 64)
        self.prompts = self.engine._prompts
        self.vocab = self.engine.target.config.vocab_size
        self.logits: list[torch.Tensor] = []

    def prompt(self, length: int) -> list[int]:
        """Return a fresh random prompt."""
        self.seed += 1
        draw = random.Random(self.seed)
        return [draw.randrange(100, self.vocab - 100) for _ in range(length)]

    def first_token_ms(self, ids: list[int]) -> float:
        """Return the time to the first token of a request for one."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        state = self.engine.add_request(ids, params, num_speculative_tokens=0)
        while self.engine.has_unfinished:
            self.engine.step()
        times = state.snapshot().times
        return 1e3 * (times.first_token_s - times.arrival_s)

    def times(self, lengths: list[int]) -> dict[str, list[float]]:
        """Return the least and the median time of a few prompts of each length."""
        found = {}
        for length in lengths:
            self.first_token_ms(self.prompt(length))
            times = [self.first_token_ms(self.prompt(length)) for _ in range(1 if self.tiny else 5)]
            found[str(length)] = [round(min(times), 2), round(median(times), 2)]
        return found

    def behind_prefix(self, prefix: int, suffixes: list[int]) -> dict[str, list[float]]:
        """Return the same of suffixes behind a prefix that is cached."""
        found, shared = {}, self.prompt(prefix)
        self.first_token_ms(shared + self.prompt(1))
        for length in suffixes:
            times = [self.first_token_ms(shared + self.prompt(length)) for _ in range(5)]
            found[f"{length} behind {prefix}"] = [round(min(times), 2), round(median(times), 2)]
        return found

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Launch kernels one by one, not as graphs."""
        graphs, self.prompts._graphs = self.prompts._graphs, {}
        yield
        self.prompts._graphs = graphs

    @contextmanager
    def a_block_a_step(self) -> Iterator[None]:
        """Compute one block of a prompt a step."""
        limits = self.engine.scheduler.limits
        self.engine.scheduler.limits = dataclasses.replace(limits, prefill_rows=0)
        yield
        self.engine.scheduler.limits = limits

    def bits(self) -> dict[str, Any]:
        """Say for which lengths the first token's logits differ, by way of computing the prompt."""
        lengths = [3, 20] if self.tiny else list(CHECKED)
        self.engine.watch_logits(lambda sequence, found: self.logits.append(found.clone()))
        ways: dict[str, Any] = {"one by one": self.one_by_one, "a block a step": self.a_block_a_step}
        found: dict[str, Any] = {name: [] for name in (*ways, "again, cached")}
        for length in lengths:
            ids = self.prompt(length)
            want = self.watched(ids)
            found["again, cached"] += [] if torch.equal(self.watched(ids), want) else [length]
            for name, way in ways.items():
                self.engine.reset_prefix_cache()
                with way():
                    found[name] += [] if torch.equal(self.watched(ids), want) else [length]
            assert want.isfinite().all()
        return {"lengths": lengths, "differ": found}

    def watched(self, ids: list[int]) -> torch.Tensor:
        """Return the logits [1, V] of the token after a prompt."""
        self.logits.clear()
        self.first_token_ms(ids)
        return self.logits[-1].cpu()

    def profile(self, length: int) -> dict[str, Any]:
        """Return milliseconds and launches by kernel of one prompt."""
        self.first_token_ms(self.prompt(length))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.first_token_ms(self.prompt(length))
        kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for event in profile.key_averages():
            kernels[event.key[:60]][0] += event.self_device_time_total / 1e3
            kernels[event.key[:60]][1] += event.count
        longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:16]
        total = sum(ms for ms, _ in kernels.values())
        return {"all": round(total, 2)} | {key: [round(ms, 3), int(n)] for key, (ms, n) in longest}


def main() -> None:
    """Measure one build."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="bf16")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--lengths", help="with commas (1,16,64,256,1024,2048,8192)")
    parser.add_argument("--profile", default="")
    parser.add_argument("--drafts", action="store_true", help="with a drafter, whose context is written too")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    start = time.monotonic()
    bench = Bench(args)
    found = describe_run() | {"build": args.build, "synthetic": True, "kernels": bench.engine.kernels}
    found["load_s"] = round(time.monotonic() - start, 1)
    usual = "1,20" if args.tiny else "1,16,64,256,1024,2048,8192"
    lengths = [int(length) for length in (args.lengths or usual).split(",")]
    found["ttft_ms"] = bench.times(lengths)
    with bench.one_by_one():
        found["ttft_ms, one by one"] = bench.times([n for n in lengths if n <= 2048])
    if not args.tiny:
        found |= bench.behind_prefix(2048, [1, 64]) | bench.behind_prefix(30720, [1, 64, 256])
        found["gib_reserved"] = round(torch.cuda.memory_reserved() / 2**30, 2)
    found["profile"] = {length: bench.profile(int(length)) for length in args.profile.split(",") if length}
    found["bits"] = bench.bits()
    args.out.write_text(json.dumps(found, indent=1))
    for name in found:
        if name not in ("argv", "versions", "machine", "profile"):
            print(f"{name}: {found[name]}")
    for length, kernels in found["profile"].items():
        print(f"{length} tokens, ms and launches")
        for key, value in kernels.items():
            print(f"  {key}: {value}")


if __name__ == "__main__":
    main()
