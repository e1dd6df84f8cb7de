"""Two claims about long prompts, checked on the shipped models and written to a file.

    python benchmarks/long_context.py --out results/long_context.json

1. One 1,500-token generation, far across the sliding window: the same tokens with and without the drafter.
2. A second request that shares a 300-token prefix with the first, its start taken from the prefix cache: the
   same tokens and the same acceptance as in an engine without the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lean_laguna import LLM, SamplingParams
from lean_laguna.core.files import atomic_write_text
from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import CompletionOutput
from lean_laguna.tasks.prompts import load_prompts

LONG_TOKENS = 1500
PREFIX_TOKENS = 300
DRAFTER: dict[str, Any] = {"model": "nano-dflash", "num_speculative_tokens": 7}


def main() -> int:
    """Check both claims; exit status 1 where one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    long_runs = [_long_generation(temperature) for temperature in (0.0, 0.8)]
    shared = _shared_prefix()
    holds = all(run["identical"] for run in long_runs) and shared["identical"] and shared["same_acceptance"]
    result = {
        "schema_version": 1,
        "kind": "long_context",
        **describe_run(),
        "long": long_runs,
        "prefix": shared,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(arguments.out, json.dumps(result, indent=1) + "\n")
    for run in long_runs:
        print(f"{run['num_tokens']} tokens at T = {run['temperature']}: identical = {run['identical']}")
    print(
        f"shared prefix: {shared['num_cached_tokens']} tokens cached; identical = {shared['identical']}; "
        f"acceptance {shared['mean_acceptance_length_cached']:.3f} with the cache, "
        f"{shared['mean_acceptance_length_uncached']:.3f} without"
    )
    print(json.dumps({"kind": "long_context", "holds": holds}))
    return 0 if holds else 1


def _long_generation(temperature: float) -> dict[str, Any]:
    prompt = load_prompts("mixed").prompts[-1].prompt
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=LONG_TOKENS, ignore_eos=True)
    plain = LLM("nano").generate(prompt, params)[0].outputs[0]
    drafted = LLM("nano", speculative_config=DRAFTER).generate(prompt, params)[0].outputs[0]
    return {
        "temperature": temperature,
        "num_tokens": len(plain.token_ids),
        "identical": plain.token_ids == drafted.token_ids and plain.text == drafted.text,
        "mean_acceptance_length": _mean_acceptance_length(drafted),
    }


def _shared_prefix() -> dict[str, Any]:
    first, second = _prompts_with_shared_prefix()
    params = SamplingParams(temperature=0.0, max_tokens=128)
    outputs = {}
    cached_tokens = 0
    for caching in (True, False):
        llm = LLM("nano", speculative_config=DRAFTER, enable_prefix_caching=caching)
        llm.generate([first], params)
        output = llm.generate([second], params)[0]
        outputs[caching] = output.outputs[0]
        cached_tokens += output.num_cached_tokens
    with_cache, without = outputs[True], outputs[False]
    return {
        "num_prefix_tokens": PREFIX_TOKENS,
        "num_cached_tokens": cached_tokens,
        "identical": with_cache.token_ids == without.token_ids,
        "same_acceptance": with_cache.speculation == without.speculation and cached_tokens > 0,
        "mean_acceptance_length_cached": _mean_acceptance_length(with_cache),
        "mean_acceptance_length_uncached": _mean_acceptance_length(without),
    }


def _prompts_with_shared_prefix() -> tuple[list[int], list[int]]:
    tokenizer = LLM("nano").tokenizer
    texts = [prompt.prompt for prompt in load_prompts("mixed").prompts]
    shared = tokenizer.encode("\n\n\n".join(texts))[:PREFIX_TOKENS]
    return shared + tokenizer.encode("\n\n\n" + texts[0]), shared + tokenizer.encode("\n\n\n" + texts[1])


def _mean_acceptance_length(output: CompletionOutput) -> float:
    assert output.speculation is not None
    length = output.speculation.mean_acceptance_length
    assert length is not None
    return length


if __name__ == "__main__":
    sys.exit(main())
