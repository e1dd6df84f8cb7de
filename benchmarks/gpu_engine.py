"""The GPU engine in one call: exactness on real weights, speed on a published shape, memory, start, soak.

    PYTHONPATH=src python benchmarks/gpu_engine.py --out FOLDER [--parts nano,xs,...] [--budget SECONDS]

Writes gpu_engine.json after every part and prints a short table last. Runs on random weights are marked
``synthetic``. ``--tiny`` uses small shapes and counts, to try the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import hashlib
import json
import pstats
import random
import time
import traceback
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_memory import Meter, beyond

from lean_laguna.core.engine_sizes import MAX_ROWS, WIDE
from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine import gpu_programs as programs
from lean_laguna.engine.llm import LLM
from lean_laguna.kernels.cuda.layers import CudaLayers
from lean_laguna.plan.engine_memory import EngineLimits, EngineMemory

RATES = (0.90, 0.81, 0.73, 0.62, 0.52, 0.46, 0.40)
PARTS = ("nano", "nano_streams", "speed", "long", "streams", "memory", "hashes", "together", "chunks", "soak")


def tokens(n: int, seed: int, vocab: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, vocab - 100) for _ in range(n)]


class Bench:
    """What has been found, and the clock."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begin = args, time.monotonic()
        self.found: dict[str, Any] = {"errors": {}, "asked": args.kernels, **describe_run(None)}
        self._xs: LLM | None = None
        self.seed = 0
        self.meter = Meter()
        if "memory" in args.parts.split(","):
            self.meter.watch_engine()

    def left(self) -> float:
        return float(self.args.budget) - (time.monotonic() - self.begin)

    def many(self) -> list[int]:
        """Return how many streams are tried at once."""
        return [int(count) for count in self.args.streams.split(",")]

    def until(self, seconds: float) -> float:
        return time.monotonic() + (1e9 if self.args.tiny else seconds)

    def part(self, name: str) -> None:
        if name not in self.args.parts.split(","):
            return
        if self.left() < 10:
            self.found["errors"][name] = "skipped: out of time"
            return
        start = time.monotonic()
        try:
            self.found[name] = getattr(self, name)()
        except Exception:
            self.found["errors"][name] = traceback.format_exc()
            print(f"FAILED {name}\n{traceback.format_exc()[-2500:]}", flush=True)
        print(f"-- {name}: {time.monotonic() - start:.1f} s, {self.left():.0f} s left", flush=True)
        self.write()

    def write(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / "gpu_engine.json").write_text(json.dumps(self.found, indent=1, default=str))

    # --- exactness on real weights

    def nano_engine(self, k: int | str | None, **options: Any) -> LLM:
        speculative = None if k is None else {"model": "nano-dflash", "num_speculative_tokens": k}
        # Under the interpreter a launch costs as many rows as there can be.
        most = 2 if self.args.tiny else 16
        options = {"max_num_seqs": most, "kv_cache_memory_bytes": 2 << 30, **options}
        return LLM("nano", speculative_config=speculative, kernels=self.args.kernels, **options)

    def nano_requests(
        self, llm: LLM, temperature: float, count: int, length: int, **options: Any
    ) -> list[Any]:
        texts = Path(__file__).read_text().split("\n\n")
        requests = []
        for i in range(count):
            ids = llm.tokenizer.encode(texts[i % len(texts)])[: 8 + i % 57]
            ids = [2, *ids, *tokens(1 + i % 5, i, 4096)]
            options |= {"temperature": temperature, "max_tokens": length, "ignore_eos": True, "seed": i}
            requests.append((ids, SamplingParams(**options)))
        return requests

    def hashed(self, llm: LLM, requests: list[Any], until: float, **options: Any) -> tuple[list[Any], float]:
        """Return per request its tokens and the hash of its logits; what is not done in time is None."""
        hashes: dict[int, Any] = {}

        def watch(sequence: Any, logits: torch.Tensor) -> None:
            room = sequence.completion.num_remaining
            rows = logits[:room].contiguous().numpy()
            hashes.setdefault(sequence.sampling.seed, hashlib.sha256()).update(rows)

        engine: Any = llm.engine
        engine.watch_logits(watch)
        start = time.monotonic()
        options = {"num_speculative_tokens": options["k"]} if "k" in options else {}
        states = [engine.add_request(ids, params, **options) for ids, params in requests]
        while engine.has_unfinished and time.monotonic() < until:
            engine.step()
        seconds = time.monotonic() - start
        found = []
        for state, (_, params) in zip(states, requests, strict=True):
            said = state.sequences[0].completion.token_ids
            found.append((tuple(said), hashes[params.seed].hexdigest()) if state.is_finished else None)
            engine.abort(state.request_id)
        return found, seconds

    def nano(self) -> dict[str, Any]:
        """Tokens and logits with a drafter and without, sampled three ways, 16 streams at once."""
        tiny = self.args.tiny
        count, length = (2, 4) if tiny else (self.args.nano_requests, 256)
        result: dict[str, Any] = {"compared": {"tokens": 0, "token_mismatches": 0, "logits_mismatches": 0}}
        end = time.monotonic() + 0.6 * self.left()
        ways = (
            ("T=0", 0.0, {}, count),
            ("T=0.8", 0.8, {}, count),
            ("T=0.8 top_k=20", 0.8, {"top_k": 20}, max(1, count // 8)),
        )
        for label, temperature, options, own_count in ways:
            found: dict[Any, Any] = {}
            for k in (None, *self.args.nano_drafts.split(",")):
                llm = self.nano_engine(k if k in (None, "auto") else int(k))
                requests = self.nano_requests(llm, temperature, own_count, length, **options)
                until = time.monotonic() + (1e9 if tiny else max(5.0, (end - time.monotonic()) / 2))
                found[k], seconds = self.hashed(llm, requests, until)
                num = sum(len(one[0]) for one in found[k] if one)
                result[f"{label} k={k}"] = {
                    "tokens": num,
                    "seconds": round(seconds, 2),
                    "tokens_per_step": llm.stats().speculation.mean_acceptance_length,
                    "draft_length": llm.stats().draft_length_reason,
                }
                del llm
            for k in self.args.nano_drafts.split(","):
                pairs = [(a, b) for a, b in zip(found[None], found[k], strict=True) if a and b]
                compared = {
                    "tokens": sum(len(a[0]) for a, _ in pairs),
                    "token_mismatches": sum(a[0] != b[0] for a, b in pairs),
                    "logits_mismatches": sum(a[1] != b[1] for a, b in pairs),
                }
                result[f"{label} compared k={k}"] = compared
                for key, value in compared.items():
                    result["compared"][key] += value
        return result

    def nano_streams(self) -> dict[str, Any]:
        """So many streams at once, drafts or none: what each says alone, tokens and logits."""
        count, length = (2, 3) if self.args.tiny else (max(self.many()), 128)
        # Its layers are too small for some of the kernels that so wide launches are meant for: Triton's
        # take their place.
        programs.TRITON_ROWS, rows = MAX_ROWS, CudaLayers.most_rows
        CudaLayers.most_rows = lambda *_: MAX_ROWS
        llm = self.nano_engine("auto", max_num_seqs=1)
        requests = self.nano_requests(llm, 0.8, count, length)
        requests = [
            (ids, replace(params, temperature=0.8 * (i % 2))) for i, (ids, params) in enumerate(requests)
        ]
        expected, _ = self.hashed(llm, requests, self.until(60), k=0)
        result: dict[str, Any] = {"mismatches": 0}
        for streams in (2,) if self.args.tiny else self.many():
            del llm
            llm = self.nano_engine("auto", max_num_seqs=streams)
            for k in (0, 3) if self.args.tiny else (*map(int, self.args.drafts.split(",")), None):
                name = f"{streams} streams, k={'auto' if k is None else k}"
                result[name] = self.compared(llm, requests[:streams], expected, k)
                result["mismatches"] += result[name]["mismatches"]
            result[f"{streams} streams, launches"] = llm.engine.programs.most_rows
        programs.TRITON_ROWS, CudaLayers.most_rows = WIDE, rows
        return result

    def compared(self, llm: LLM, requests: list[Any], expected: list[Any], k: int | None) -> dict[str, Any]:
        """Serve requests at once; return how many said something else than alone."""
        before = llm.stats().speculation
        found, seconds = self.hashed(llm, requests, self.until(60), k=k)
        after = llm.stats().speculation
        return {
            "tokens": sum(len(one[0]) for one in found if one),
            "mismatches": sum(one != own or one is None for one, own in zip(found, expected, strict=False)),
            "drafts": after.num_draft_tokens - before.num_draft_tokens,
            "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
            "seconds": round(seconds, 2),
        }

    # --- speed on a published shape

    def xs(self) -> LLM:
        if self._xs is None:
            start = time.monotonic()
            shape = "nano" if self.args.tiny else self.args.shape
            drafter = "nano-dflash" if self.args.tiny else "dummy"
            long = 256 if self.args.tiny else 33792
            self._xs = LLM(
                shape,
                load_format="dummy",
                shape=shape,
                kernels=self.args.kernels,
                max_model_len=long,
                max_num_seqs=2 if self.args.tiny else max(16, *self.many()),
                kv_cache_memory_bytes=None if self.args.tiny else 16 << 30,
                enable_prefix_caching=False,
                prefill_chunk_size=256 if self.args.tiny else self.args.chunk or None,
                speculative_config={
                    "model": drafter,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": RATES,
                },
            )
            loaded = time.monotonic() - start
            self.found["kernels"] = self._xs.engine.kernels
            first_s = self.once(16, 2, 0)[1]
            self.found["start"] = {
                "load_and_compile_s": round(loaded, 1),
                "to_first_token_s": round(loaded + first_s, 1),
                "synthetic": True,
            }
            self.meter.note("first request")
        return self._xs

    def memory(self) -> dict[str, Any]:
        """What is used beyond weights and pages: at the end of what ran before, stage by stage."""
        if "long" not in self.found:
            self.once(100 if self.args.tiny else 32768, 4, None)
        self.meter.note("all requests after the first")
        if not torch.cuda.is_available():
            return {"stages_mib": self.meter.lines}
        engine: Any = self.xs().engine
        found = beyond(self.parameters(), engine.kv_bytes) | {"planned_beyond_gib": self.planned()}
        return found | {"stages_mib": self.meter.lines, "before_any_context_mib": self.meter.before_mib}

    def planned(self) -> float:
        """Return what the plan counts beyond weights and pages, GiB."""
        engine: Any = self.xs().engine
        limits = EngineLimits(prefill_chunk_size=engine.config.prefill_chunk_size)
        memory = EngineMemory(engine.target.config, engine.proposer.drafter.config, limits)
        workspace = memory.workspace(engine.max_model_len, engine.config.max_num_seqs)
        return round(sum(workspace.values()) / 2**30, 2)

    def parameters(self) -> list[torch.Tensor]:
        engine: Any = self._xs.engine if self._xs is not None else None
        return [*engine.target.parameters(), *engine.proposer.drafter.parameters()]

    def once(self, prompt: int, new: int, k: int | None) -> tuple[float, float]:
        """Return decode tok/s of one request, and seconds to its first token."""
        engine = self.xs().engine
        (state,) = self.submit(1, prompt, new, k)
        while engine.has_unfinished:
            engine.step()
        times = state.snapshot().times
        return (new - 1) / max(1e-9, times.last_token_s - times.first_token_s), (
            times.first_token_s - times.arrival_s
        )

    def submit(self, streams: int, prompt: int, new: int, k: int | None) -> list[Any]:
        engine = self.xs().engine
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        self.seed += 1
        return [
            engine.add_request(
                tokens(prompt, 100 * self.seed + i, engine.target.config.vocab_size),
                params,
                num_speculative_tokens=k,
            )
            for i in range(streams)
        ]

    def runs(self, prompt: int, new: int, k: int | None, repeats: int = 3) -> dict[str, Any]:
        self.xs()
        self.once(prompt, min(new, 24), k)
        found = [self.once(prompt, new, k) for _ in range(repeats)]
        return {
            "tok_per_s": [round(rate, 1) for rate, _ in found],
            "ttft_ms": round(1e3 * median(s for _, s in found), 1),
            "synthetic": True,
        }

    def speed(self) -> dict[str, Any]:
        """Batch 1, prompt 2048, 513 tokens: without drafts, and with seven at given rates."""
        prompt, new = (20, 8) if self.args.tiny else (2048, 513)
        self.xs()
        result = {"no drafter": self.runs(prompt, new, 0), "k=7": self.runs(prompt, new, 7)}
        stats = self.xs().stats().speculation
        result["tokens_per_step"] = stats.mean_acceptance_length
        result["auto"] = self.runs(prompt, new, None, 2)
        result["draft_length"] = self.xs().stats().draft_length_reason
        return result

    def long(self) -> dict[str, Any]:
        """Prompt 32768."""
        prompt, new = (100, 4) if self.args.tiny else (32768, 129)
        return {"no drafter": self.runs(prompt, new, 0, 2), "k=7": self.runs(prompt, new, 7, 2)}

    def streams(self) -> dict[str, Any]:
        """Streams at once, 512 tokens of prompt each, all decoding together; the engine's choice last.

        The choice is timed twice: while the engine still measures the lengths, and with what it then knows.
        """
        result: dict[str, Any] = {"synthetic": True}
        self.xs()
        prompt, new = (16, 6) if self.args.tiny else (512, 257)
        for count in (1, 2) if self.args.tiny else self.many():
            for label in (*self.args.drafts.split(","), "auto at first", "auto"):
                if self.left() < 8:
                    break
                k = None if label.startswith("auto") else int(label)
                result[f"{count} streams, k={label}"] = self.rate_of(count, prompt, new, k)
            result[f"{count} streams, chosen"] = self.xs().stats().draft_length_reason
        return result

    def rate_of(self, streams: int, prompt: int, new: int, k: int | None) -> dict[str, float]:
        """Return tokens a second from when all streams decode to when the first ends, and what steps took.

        How many drafts are accepted is a matter of luck in so few steps: a step's time is not.
        """
        engine = self.xs().engine
        states = self.submit(streams, prompt, new, k)

        def said() -> list[int]:
            return [len(state.sequences[0].completion.token_ids) for state in states]

        while min(said()) < 2:
            engine.step()
        start, before, steps = time.perf_counter(), sum(said()), 0
        while not any(state.is_finished for state in states):
            engine.step()
            steps += 1
        seconds, num = max(1e-9, time.perf_counter() - start), sum(said()) - before
        for state in states:
            engine.abort(state.request_id)
        found = {"tok_per_s": num / seconds, "ms": 1e3 * seconds / steps, "tokens": num / steps / streams}
        return {name: round(value, 2) for name, value in found.items()}

    def hashes(self) -> dict[str, Any]:
        """Logits of the shape without drafts, and with the drafter's own drafts verified."""
        llm = self.xs()
        engine: Any = llm.engine
        config = replace(engine.config, speculative=None, kv_cache_memory_bytes=4 << 30, max_model_len=4096)
        if self.args.tiny:
            config = replace(config, kv_cache_memory_bytes=None, max_model_len=128)
        vocab = engine.target.config.vocab_size
        size, length = (9, 4) if self.args.tiny else (700, self.args.hash_tokens)
        found = []
        for proposer in (None, engine.proposer):
            other = type(engine)(
                engine.target, engine.tokenizer, proposer, config, num_speculative_tokens=proposer and 7
            )
            requests = []
            for i in range(3 if self.args.tiny else self.args.hash_requests):
                params = SamplingParams(temperature=0.8 * (i % 2), max_tokens=length, ignore_eos=True, seed=i)
                requests.append((tokens(size + 31 * i, 7000 + i, vocab), params))
            found.append(self.hashed(LLM.from_engine(other), requests, time.monotonic() + 90)[0])
            del other
            gc.collect()
        plain, drafted = found
        return {
            "tokens": sum(len(one[0]) for one in plain if one),
            "mismatches": sum(a != b or a is None for a, b in zip(plain, drafted, strict=True)),
            "hash": hashlib.sha256(repr(plain).encode()).hexdigest()[:16],
            "synthetic": True,
        }

    def together(self) -> dict[str, Any]:
        """Logits of the shape with so many streams at once, drafts or none: what each says alone."""
        engine: Any = self.xs().engine
        tiny, vocab = self.args.tiny, engine.target.config.vocab_size
        length, most = (3, 2) if tiny else (self.args.hash_tokens, max(self.many()))
        config = replace(
            engine.config, speculative=None, max_num_seqs=most, max_model_len=128 if tiny else 1024
        )
        config = replace(config, kv_cache_memory_bytes=None if tiny else 8 << 30)
        llm = LLM.from_engine(type(engine)(engine.target, engine.tokenizer, engine.proposer, config))
        requests = []
        for i in range(most):
            params = SamplingParams(temperature=0.8 * (i % 2), max_tokens=length, ignore_eos=True, seed=i)
            requests.append((tokens(9 + i if tiny else 100 + 13 * i, 9000 + i, vocab), params))
        expected = [self.hashed(llm, [one], self.until(60), k=0)[0][0] for one in requests]
        result: dict[str, Any] = {
            "launches": llm.engine.programs.most_rows,
            "mismatches": 0,
            "synthetic": True,
        }
        for streams in (2,) if tiny else self.many():
            for k in (0, 3) if tiny else map(int, self.args.drafts.split(",")):
                name = f"{streams} streams, k={k}"
                result[name] = self.compared(llm, requests[:streams], expected, k)
                result["mismatches"] += result[name]["mismatches"]
        return result

    def chunks(self) -> dict[str, Any]:
        """Logits after prompts of several blocks, however many a step takes, and from a cached prefix."""
        engine: Any = self.xs().engine
        vocab, tiny = engine.target.config.vocab_size, self.args.tiny
        sizes = (16, 32, 48) if tiny else (2048, 4096, None)
        lengths = (37, 70) if tiny else (5000, 9500)
        prompts = [tokens(size, 40 + size, vocab) for size in lengths]
        prompts.append(prompts[1][: lengths[1] - 30] + tokens(20, 9, vocab))  # its start can be cached
        params = [SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True, seed=i) for i in range(3)]
        config = replace(engine.config, speculative=None, max_model_len=128 if tiny else 12288)
        config = replace(config, kv_cache_memory_bytes=None if tiny else 4 << 30)
        found, cached = [], []
        for size, caches in ((sizes[0], False), *((size, True) for size in sizes)):
            own = replace(config, prefill_chunk_size=size, enable_prefix_caching=caches)
            other = type(engine)(engine.target, engine.tokenizer, None, own)
            requests = list(zip(prompts, params, strict=True))
            found.append(self.hashed(LLM.from_engine(other), requests, self.until(60))[0])
            cached.append(other.stats().num_cached_prompt_tokens)
            del other
            gc.collect()  # its pages are in cycles of references
        mismatches = sum(one is None or one != found[0][i] for run in found for i, one in enumerate(run))
        return {"chunks": sizes, "mismatches": mismatches, "cached_tokens": cached, "synthetic": True}

    # --- soak

    def soak(self) -> dict[str, Any]:
        """Steps at T = 1 with cancellations and limits mixed in; the same bits at the end as at the start."""
        tiny = self.args.tiny
        steps = 30 if tiny else self.args.soak_steps
        llm = self.nano_engine(7)
        check = self.nano_requests(llm, 1.0, 2 if tiny else 16, 6 if tiny else 64)
        before, _ = self.hashed(llm, check, self.until(600))
        allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        start = time.monotonic()
        counts = self.disturbed_steps(llm.engine, steps, start + max(5.0, self.left() - 15))
        seconds = time.monotonic() - start
        after, _ = self.hashed(llm, check, self.until(600))
        grown = torch.cuda.memory_allocated() - allocated if torch.cuda.is_available() else 0
        held = [pool.num_in_use for pool in llm.engine.scheduler.pools]
        found = {**counts, "seconds": round(seconds, 1), "same_bits": before == after}
        return found | {"bytes_grown": grown, "blocks_held": held}

    def disturbed_steps(self, engine: Any, steps: int, until: float) -> dict[str, int]:
        """Take steps that have something to do, while requests of all draft lengths come, end and are cut."""
        tiny, draw = self.args.tiny, random.Random(0)
        counts = {"steps": 0, "aborted": 0, "requests": 0, "tokens": -engine.stats().num_generated_tokens}
        running: list[Any] = []
        profile, is_profiled = cProfile.Profile(), False
        while counts["steps"] < steps and time.monotonic() < until:
            if self.args.profile_host and counts["steps"] >= steps // 2 and not is_profiled:
                is_profiled = True
                profile.enable()
            if len(running) < 20 and (not running or draw.random() < 0.1):
                ids = tokens(draw.randint(1, 12 if tiny else 300), draw.getrandbits(30), 4096)
                params = SamplingParams(
                    temperature=1.0, max_tokens=draw.randint(1, 200), seed=counts["requests"]
                )
                drafts = draw.choice((0, 0, 1, 3, None))
                running.append(engine.add_request(ids, params, num_speculative_tokens=drafts))
                counts["requests"] += 1
            if draw.random() < 0.02:
                engine.abort(running.pop(draw.randrange(len(running))).request_id)
                counts["aborted"] += 1
            if running:
                engine.step()
                counts["steps"] += 1
            running = [state for state in running if not state.is_finished]
        counts["tokens"] += engine.stats().num_generated_tokens
        for state in running:
            engine.abort(state.request_id)
        if is_profiled:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        return counts

    # --- the end

    def report(self) -> None:
        for name in ("errors", "start", *PARTS):
            value = self.found.get(name)
            if isinstance(value, dict):
                print(name)
                for key, entry in value.items():
                    print(f"  {key}: {str(entry)[-600:]}")


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shape", default="laguna-xs")
    parser.add_argument("--chunk", type=int, default=0, help="most prompt rows a step; 0: the engine's own")
    parser.add_argument("--nano-requests", type=int, default=400)
    parser.add_argument("--nano-drafts", default="7", help="draft lengths, or auto, with commas")
    parser.add_argument("--streams", default="1,2,4,8,16", help="at once, in parts with many")
    parser.add_argument(
        "--drafts", default="0,3,5,7", help="draft lengths beside the engine's own, in the same parts"
    )
    parser.add_argument("--hash-requests", type=int, default=3, help="at once, of the hashes part")
    parser.add_argument("--hash-tokens", type=int, default=48, help="of each")
    parser.add_argument("--soak-steps", type=int, default=20_000)
    parser.add_argument("--profile-host", action="store_true", help="where the soak's host time goes")
    parser.add_argument("--kernels", default="triton", help="or cuda: CUDA C++ where it fits")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    bench = Bench(args)
    for name in PARTS:
        bench.part(name)
    with contextlib.suppress(BrokenPipeError):
        bench.report()


if __name__ == "__main__":
    main()
