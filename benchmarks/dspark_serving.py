"""DSpark scheduled by confidence beside seven fixed drafts on a CPU: tokens per second of processor time.

    python benchmarks/dspark_serving.py --out results/dspark_serving_cpu.json

Engines take turns on the same prompts, A B B A. Processor time is counted, which neighbours on the machine
lengthen less than the clock's; engines choose by it, too. What ``auto`` learned in a warm-up it keeps.
``error_of_mean`` says how far off the mean over prompts may be by chance: to tell 0.99 from 1.0 it must be
0.004 or less, which takes 100 to 200 prompts (``--repeats 12 --only 2``), and more on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lean_laguna import LLM, SamplingParams
from lean_laguna.core.files import atomic_write_text
from lean_laguna.core.provenance import checkpoint_hash, describe_run
from lean_laguna.engine import llm_engine
from lean_laguna.models.catalog import resolve_model
from lean_laguna.tasks.prompts import load_prompts

SCHEMA_VERSION = 1
MODES: tuple[tuple[str, str, int | str], ...] = (
    ("dspark 7", "nano-dspark", 7),
    ("dspark scheduled", "nano-dspark", "auto"),
    ("dflash 7", "nano-dflash", 7),
)


def run(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, Any]:
    """Return seconds of processor time and the completion."""
    start = time.process_time()
    output = llm.generate([prompt], params)[0].outputs[0]
    return time.process_time() - start, output


def measure(temperature: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the modes at one temperature."""
    prompts = [one.prompt for one in load_prompts("mixed").first(arguments.num_prompts).prompts]
    engines = {
        name: LLM("nano", speculative_config={"model": model, "num_speculative_tokens": k}, max_num_seqs=1)
        for name, model, k in MODES[: arguments.only]
    }

    def params(seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, max_tokens=arguments.max_tokens, ignore_eos=True, seed=seed
        )

    for llm in engines.values():
        for i, prompt in enumerate(prompts[:4]):
            run(llm, prompt, params(100 + i))
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    steps, accepted, cut, mismatches = (dict.fromkeys(engines, 0) for _ in range(4))
    for i, prompt in enumerate(prompts * arguments.repeats):
        said = {}
        for name in list(engines)[:: 1 if i % 2 else -1]:
            took, output = run(engines[name], prompt, params(i))
            seconds[name].append(took)
            said[name] = output.token_ids
            steps[name] += output.speculation.num_steps
            accepted[name] += output.speculation.num_accepted_tokens
            cut[name] += output.speculation.num_cut_draft_tokens
        for name in engines:
            mismatches[name] += said[name] != said[MODES[0][0]]
    base = seconds[MODES[0][0]]
    found = {}
    for name, llm in engines.items():
        ratios = [a / b for a, b in zip(base, seconds[name], strict=True)]
        found[name] = {
            "tokens_per_cpu_s": round(len(base) * arguments.max_tokens / sum(seconds[name]), 1),
            "speed_over_dspark_7": round(sum(base) / sum(seconds[name]), 3),
            "median_over_prompts": round(statistics.median(ratios), 3),
            "error_of_mean": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
            "mean_acceptance_length": round(1 + accepted[name] / steps[name], 3),
            "num_cut_draft_tokens": cut[name],
            "mismatches": mismatches[name],
            "draft_length": llm.stats().draft_length_reason,
        }
        print(f"T={temperature} {name}: {found[name]}", flush=True)
    return found


def main() -> None:
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--only", type=int, default=len(MODES), help="so many of the modes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    llm_engine.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    content = {
        "schema_version": SCHEMA_VERSION,
        "kind": "dspark-serving-cpu",
        **describe_run(),
        "models": {
            name: checkpoint_hash(resolve_model(name)) for name in ("nano", "nano-dspark", "nano-dflash")
        },
        "max_tokens": arguments.max_tokens,
        "num_prompts": arguments.num_prompts * arguments.repeats,
        **{f"T={temperature}": measure(temperature, arguments) for temperature in arguments.temperatures},
    }
    if arguments.out is not None:
        atomic_write_text(arguments.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
