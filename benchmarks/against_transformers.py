"""Our decode without a drafter beside ``transformers`` generate: same weights, float32, one run.

    python benchmarks/against_transformers.py --out results/against_transformers.json

Both sides greedily extend the same prompts by the same number of tokens. Repeats are interleaved A B B A
after a warm-up. Decode speed is (tokens - 1) / (time of the last token - time of the first), so prefill
counts for neither side; the first token's time comes from a streamer on the ``transformers`` side and from
the engine's clock on ours. Each side gets 1 thread or 2, whichever suits it better. Outputs are compared
token by token; a difference is reported with the reference's top-2 margin there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lean_laguna import LLM, SamplingParams
from lean_laguna.core.files import atomic_write_text
from lean_laguna.core.provenance import checkpoint_hash, describe_run
from lean_laguna.models.catalog import resolve_model
from lean_laguna.tasks.prompts import load_prompts

SCHEMA_VERSION = 1


class TokenClock:
    """A ``transformers`` streamer that keeps the time of each token; the first call carries the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Note the time of one token."""
        if self._seen_prompt:
            self.times_s.append(time.perf_counter())
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing to finish."""


def main() -> int:
    """Measure, print a table, write the file; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=4, help="measured rounds; a multiple of 2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from transformers import LagunaForCausalLM

    folder = resolve_model(arguments.model)
    llm = LLM(str(folder), dtype="float32", device="cpu")
    reference = LagunaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [llm.tokenizer.encode(p.prompt) for p in load_prompts("mixed").prompts[: arguments.num_prompts]]

    def ours(prompt: list[int]) -> tuple[list[int], float]:
        params = SamplingParams(
            temperature=0.0, max_tokens=arguments.max_tokens, min_tokens=arguments.max_tokens
        )
        output = llm.generate([prompt], params)[0]
        ids, times = output.outputs[0].token_ids, output.times
        assert times.first_token_s is not None
        assert times.last_token_s is not None
        return list(ids), (len(ids) - 1) / (times.last_token_s - times.first_token_s)

    def theirs(prompt: list[int]) -> tuple[list[int], float]:
        clock = TokenClock()
        with torch.inference_mode():
            found = reference.generate(
                torch.tensor([prompt]),
                max_new_tokens=arguments.max_tokens,
                min_new_tokens=arguments.max_tokens,
                do_sample=False,
                streamer=clock,
                pad_token_id=9,
            )
        ids = found[0, len(prompt) :].tolist()
        return ids, (len(ids) - 1) / (clock.times_s[-1] - clock.times_s[0])

    sides = {"lean_laguna": ours, "transformers": theirs}
    threads = {name: _best_threads(side, prompts[0]) for name, side in sides.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[list[int]]] = {}
    order = ["lean_laguna", "transformers", "transformers", "lean_laguna"]
    for turn in range(2 * arguments.repeats):
        name = order[turn % 4]
        torch.set_num_threads(threads[name])
        results = [sides[name](prompt) for prompt in prompts]
        speeds[name].append(statistics.median(speed for _, speed in results))
        texts[name] = [ids for ids, _ in results]
    differences = [
        _difference(reference, prompt, mine, other)
        for prompt, mine, other in zip(prompts, texts["lean_laguna"], texts["transformers"], strict=True)
        if mine != other
    ]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": "against_transformers",
        **describe_run(),
        "model": {"name": arguments.model, "sha256": checkpoint_hash(folder)},
        "num_threads": threads,
        "num_prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "decode_tok_per_s": {
            name: {"median": medians[name], "runs": values} for name, values in speeds.items()
        },
        "ratio": medians["lean_laguna"] / medians["transformers"],
        "num_identical": len(prompts) - len(differences),
        "differences": differences,
    }
    for name, values in speeds.items():
        print(f"{name:14} {medians[name]:8.1f} tok/s   runs {', '.join(f'{v:.1f}' for v in values)}")
    print(f"ratio {result['ratio']:.2f}; {result['num_identical']}/{len(prompts)} outputs identical")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("kind", "ratio", "num_identical", "num_prompts")}))
    return 0


def _best_threads(side: Callable[[list[int]], tuple[list[int], float]], prompt: list[int]) -> int:
    """Return 1 or 2, whichever is faster here; the runs warm the side up."""
    speeds = {}
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        side(prompt)
        speeds[num_threads] = side(prompt)[1]
    return max(speeds, key=lambda num_threads: speeds[num_threads])


def _difference(reference: Any, prompt: list[int], mine: list[int], other: list[int]) -> dict[str, Any]:
    """Describe the first difference: position, both tokens, and the reference's top-2 margin."""
    at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + other[:at]])).logits[0, -1]
    top = logits.topk(2).values
    return {"position": at, "ours": mine[at], "theirs": other[at], "top2_margin": float(top[0] - top[1])}


if __name__ == "__main__":
    raise SystemExit(main())
