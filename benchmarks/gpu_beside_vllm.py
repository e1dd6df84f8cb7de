"""Our engine and vLLM on one card in one job: same shape, prompts, draft acceptance and way of measuring.

    PYTHONPATH=src python benchmarks/gpu_beside_vllm.py --out FOLDER --vllm-site FOLDER [--plan NAMES]

Each side runs in a process of its own, in turns, ours first and last; the card is empty in between. Both take
random weights in Laguna-XS's shape with near-uniform routing, and accept drafts at given rates, so these are
speeds, not texts. Decode is (n - 1) tokens over the time of n less the time of 1, as seen by the caller.
Writes gpu_beside_vllm.json after every measurement and prints one table last. ``--tiny`` tries our
side on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import vllm_side
from vllm_side import RATES, Generate

DRAFTS = len(RATES)
STREAMS = (4, 2, 8, 16, 1)
OURS = ("plain", "3 drafts", "5 drafts", "drafts", "own choice")
PLAN = "ours,vllm-plain,vllm-drafts,ours-again"
SECONDS = {"ours": 140, "ours-again": 50, "vllm-plain": 180, "vllm-drafts": 200, "vllm-nvfp4": 170}
SECONDS |= {"vllm-fp8": 170, "vllm-nvfp4-drafts": 180, "vllm-fp8-drafts": 180, "vllm-drafts-3": 150}


class Side:
    """One engine in this process: measures, and writes what it has after every measurement."""

    def __init__(self, args: argparse.Namespace, begin: float):
        self.args, self.begin = args, begin
        self.found: dict[str, Any] = {"errors": {}}
        self.vocab = 4096 if args.tiny else 100352
        self.seed = 0

    def left(self) -> float:
        return float(self.args.seconds) - (time.monotonic() - self.begin)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return fresh random prompts: the same ones, in the same order, on either side."""
        self.seed += 1
        draw = random.Random(self.seed)
        return [[draw.randrange(100, self.vocab - 100) for _ in range(length)] for _ in range(count)]

    def measure(self, name: str, body: Callable[[], Any], needs_s: float = 4.0) -> None:
        if self.left() < needs_s:
            self.found["errors"][name] = "skipped: out of time"
            return
        start = time.monotonic()
        try:
            self.found[name] = body()
        except Exception:
            self.found["errors"][name] = traceback.format_exc()[-2000:]
            print(traceback.format_exc()[-1500:], flush=True)
        print(f"{name}: {self.found.get(name)} ({time.monotonic() - start:.1f} s)", flush=True)
        self.write()

    def write(self) -> None:
        self.found["seconds"] = round(time.monotonic() - self.begin, 1)
        self.args.result.write_text(json.dumps(self.found, indent=1, default=str))

    def one_stream(self, generate: Generate, prompt: int, new: int, repeats: int) -> dict[str, Any]:
        """Return time to first token and decode speed of single requests."""
        for warm in (8, 64):
            generate(self.prompts(1, prompt), min(warm, new))
        firsts = [generate(self.prompts(1, prompt), 1) for _ in range(max(3, repeats))]
        rates = [
            (new - 1) / (generate(self.prompts(1, prompt), new) - median(firsts)) for _ in range(repeats)
        ]
        return {
            "ttft_ms": [round(1e3 * s, 1) for s in sorted(firsts)],
            "tok_per_s": [round(r, 1) for r in sorted(rates)],
        }

    def many_streams(self, generate: Generate, count: int) -> list[float]:
        """Return tokens a second of all streams together, after their prompts of 512."""
        prompt, new = (12, 5) if self.args.tiny else (512, 193)
        generate(self.prompts(count, prompt), min(new, 40))
        firsts = [generate(self.prompts(count, prompt), 1) for _ in range(3)]
        return [
            round(count * (new - 1) / (generate(self.prompts(count, prompt), new) - median(firsts)), 1)
            for _ in range(2)
        ]

    def all(
        self,
        ways: dict[str, Generate],
        streams: Sequence[int],
        more: dict[str, Generate] | None = None,
        *,
        has_long: bool = True,
    ) -> None:
        """Measure the issue's figures in the order of their weight; ``more`` ways only with many streams."""
        tiny = self.args.tiny
        short, new, long, few = (20, 8, 60, 4) if tiny else (2048, 513, 32768, 129)
        for label, generate in ways.items():
            self.measure(
                f"{label}: 2048", lambda g=generate: self.one_stream(g, short, new, 2 if tiny else 5)
            )
        for label, generate in ways.items():
            if not has_long or label == "own choice":
                continue
            self.measure(f"{label}: 32768", lambda g=generate: self.one_stream(g, long, few, 2), 10)
        for count in streams:
            for label, generate in (ways | (more or {})).items():
                self.measure(f"{label}: {count} streams", lambda g=generate, n=count: self.many_streams(g, n))


# --- our side


def our_way(llm: Any, num_drafts: int | None) -> Generate:
    """Return how to generate with our engine, at a number of drafts or as many as it chooses."""
    from lean_laguna.core.types import SamplingParams

    def generate(prompts: Sequence[list[int]], new: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(list(prompts), params, num_speculative_tokens=num_drafts)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return seconds

    return generate


def ours(args: argparse.Namespace, begin: float) -> None:
    """Measure our engine without drafts, with seven, and with as many as it chooses."""
    from lean_laguna.core.provenance import describe_run
    from lean_laguna.engine.llm import LLM

    side = Side(args, begin)
    side.found |= describe_run(None) | {"synthetic": True, "prefill_chunk_size": args.chunk}
    shape = "nano" if args.tiny else "laguna-xs"
    llm = LLM(
        shape,
        load_format="dummy",
        shape=shape,
        kernels=args.kernels,
        max_model_len=256 if args.tiny else 33792,
        max_num_seqs=16,
        kv_cache_memory_bytes=None if args.tiny else 16 << 30,
        enable_prefix_caching=False,
        prefill_chunk_size=None if args.tiny else args.chunk or None,
        speculative_config={
            "model": "nano-dflash" if args.tiny else "dummy",
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": RATES,
        },
    )

    def way(num_drafts: int | None) -> Generate:
        return our_way(llm, num_drafts)

    side.found["kernels"] = llm.engine.kernels
    way(0)(side.prompts(1, 16), 2)
    side.found["first_token_s"] = round(time.monotonic() - begin, 1)
    ways = {"plain": way(0), "drafts": way(DRAFTS)}
    is_again = args.side == "ours-again"
    if not is_again:
        side.measure("card", lambda: card(llm))
        ways["own choice"] = way(None)
    side.all(ways, () if is_again else STREAMS, {"3 drafts": way(3), "5 drafts": way(5)})
    side.found["chosen"] = llm.stats().draft_length_reason
    # Only the second time do all drafting requests draft seven.
    counted = "tokens_per_step" if is_again else "tokens_per_step_of_all_ways"
    side.found[counted] = llm.stats().speculation.mean_acceptance_length
    side.write()


def card(llm: Any) -> dict[str, Any]:
    """Return how fast this card reads, and what one row's step has to read."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from lean_laguna.engine.gpu_profile import read_bandwidth, step_bytes

    rate = read_bandwidth(llm.engine.programs.device)
    num_bytes = sum(step_bytes(llm.engine.programs, 2048).values())
    return {"read_tb_s": round(rate / 1e12, 3), "bytes": num_bytes, "wall_tok_per_s": round(rate / num_bytes)}


# --- vLLM's side


def vllm(args: argparse.Namespace, begin: float) -> None:
    """Measure vLLM with CUDA graphs, with a drafter or without, quantised or not."""
    side = Side(args, begin)
    side.found["synthetic"] = True
    has_drafter, quantised = "drafts" in args.side, args.side.removeprefix("vllm-").split("-")[0]
    num_drafts = int(args.side[-1]) if args.side[-1].isdigit() and has_drafter else DRAFTS
    is_quantised = quantised in ("nvfp4", "fp8")
    llm, generate, side.found["vllm"] = vllm_side.start(
        quantised if is_quantised else "plain",
        vllm_side.quantization(quantised) if is_quantised else None,
        num_drafts if has_drafter else 0,
        max_model_len=33792,
        max_num_seqs=16,
        gpu_memory_utilization=0.85,
        disable_log_stats=False,
        compilation_config={
            "cudagraph_capture_sizes": [n * (1 + num_drafts if has_drafter else 1) for n in (1, 2, 4, 8, 16)]
        },
    )
    generate(side.prompts(1, 16), 2)
    side.found["first_token_s"] = round(time.monotonic() - begin, 1)
    side.write()
    is_main = not has_drafter or num_drafts == DRAFTS
    ways = {"drafts" if has_drafter else "plain": generate}
    side.all(ways, STREAMS if is_main else STREAMS[:3], has_long=is_main)
    with contextlib.suppress(Exception):
        counters = {
            m.name: m.value for m in llm.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")
        }
        steps = counters.get("vllm:spec_decode_num_drafts", 0)
        side.found["counters"] = counters
        if steps:
            side.found["tokens_per_step"] = 1 + counters["vllm:spec_decode_num_accepted_tokens"] / steps
    side.write()


# --- both


def card_state() -> str:
    """Return what the card says of its memory, clocks and heat."""
    fields = "memory.used,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return "no card"


def run_all(args: argparse.Namespace) -> None:
    """Run the plan's sides one after another, and print the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"rates": RATES, "sides": {}, "card_before": {}}
    for name in args.plan.split(","):
        result, log = args.out / f"{name}.json", args.out / f"{name}.log"
        result.unlink(missing_ok=True)
        found["card_before"][name] = card_state()
        seconds = SECONDS[name] * args.scale
        command = [sys.executable, __file__, "--side", name, "--result", str(result)]
        command += ["--seconds", str(seconds - 8), "--kernels", args.kernels, "--chunk", str(args.chunk)]
        command += ["--tiny"] * args.tiny
        environment = dict(os.environ)
        if name.startswith("vllm"):
            environment |= {"VLLM_USE_DEEP_GEMM": "0", "HF_HUB_OFFLINE": "1"}
            environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONPATH": str(args.vllm_site)}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # its import takes half a minute from source
        start = time.monotonic()
        with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=seconds, check=False
            )
        took = round(time.monotonic() - start, 1)
        side = json.loads(result.read_text()) if result.exists() else {"errors": {"start": "no result"}}
        found["sides"][name] = side | {"process_s": took}
        print(f"-- {name}: {took} s, errors {list(side['errors'])}", flush=True)
        if side["errors"] or "plain: 2048" not in side:
            print(log.read_text()[-1500:], flush=True)
        (args.out / "gpu_beside_vllm.json").write_text(json.dumps(found, indent=1, default=str))
    show(found["sides"])


def best(entry: Any, key: str | None = None) -> float | None:
    """Return the median of runs, None where there are none."""
    values = entry.get(key) if isinstance(entry, dict) and key else entry
    return float(median(values)) if isinstance(values, list) and values else None


def show(sides: dict[str, Any]) -> None:
    """Print ours beside vLLM's, line by line, and the ratio that the issue asks for."""
    mine, again = sides.get("ours", {}), sides.get("ours-again", {})
    others = {"plain": sides.get("vllm-plain", {}), "drafts": sides.get("vllm-drafts", {})}
    fewer = sides.get("vllm-drafts-3", {})
    print(f"\n{'one H200, Laguna-XS, random weights':44} {'ours':>9} {'again':>9} {'vLLM':>9} {'ratio':>7}")

    def line(told: str, own: float | None, second: float | None, other: float | None) -> None:
        texts = [f"{v:9.1f}" if v is not None else f"{'-':>9}" for v in (own, second, other)]
        ratio = f"{own / other:7.2f}" if own and other else f"{'-':>7}"
        print(f"{told:44} {' '.join(texts)} {ratio}")

    for length in (2048, 32768):
        for way in ("plain", "drafts", "own choice"):
            key = f"{way}: {length}"
            other = others.get("drafts" if way == "own choice" else way, {}).get(
                key.replace("own choice", "drafts")
            )
            for measured, what in (("tok_per_s", "tok/s"), ("ttft_ms", "ms to first token")):
                values = [best(one.get(key), measured) for one in (mine, again)]
                line(f"{way}, prompt {length}, {what}", *values, best(other, measured))
    for count in sorted(STREAMS):
        for way in OURS:
            own = best(mine.get(f"{way}: {count} streams"))
            other = best(others.get(way, {}).get(f"{way}: {count} streams"))
            line(f"{way}, {count} streams, tok/s in all", own, None, other)
        bests = [
            max(
                (v for way in ways for s in group if (v := best(s.get(f"{way}: {count} streams")))),
                default=None,
            )
            for group, ways in (
                ((mine,), OURS),
                ((*others.values(), fewer), others),
            )
        ]
        line(f"best setting of each, {count} streams", bests[0], None, bests[1])
    for name in ("vllm-drafts-3", "vllm-nvfp4", "vllm-nvfp4-drafts", "vllm-fp8", "vllm-fp8-drafts"):
        for key, value in sides.get(name, {}).items():
            if ": " in key:
                print(f"{name} {key}: {value}")
    wall = mine.get("card", {}).get("wall_tok_per_s")
    plain = best(mine.get("plain: 2048"), "tok_per_s")
    if wall and plain:
        rate = mine["card"]["read_tb_s"]
        print(f"read-only {rate} TB/s, wall {wall} tok/s: plain decode at {plain / wall:.1%} of it")
    told = {n: (s.get("first_token_s"), s.get("tokens_per_step")) for n, s in sides.items()}
    print(f"seconds to first token, tokens a step with drafts: {told}; chosen: {mine.get('chosen')}")


def main() -> None:
    """Run all sides, or one of them in this process."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--plan", default=PLAN, help=f"of {', '.join(SECONDS)}, with commas")
    parser.add_argument("--vllm-site", type=Path, help="folder that vLLM 0.25.1 is installed in")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--chunk", type=int, default=0, help="our most prompt rows a step; 0: our own")
    parser.add_argument("--scale", type=float, default=1.0, help="of every side's time limit")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", help="run one side in this process")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    args = parser.parse_args()
    if args.side is None:
        run_all(args)
    else:
        (vllm if args.side.startswith("vllm") else ours)(args, begin)


if __name__ == "__main__":
    main()
