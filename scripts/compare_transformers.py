"""Decode speed of this engine without a drafter against transformers on the same weights.

    python scripts/compare_transformers.py --model nano --out results/transformers.json

Same prompts and threads, interleaved A B B A after warm-up, greedy, float32, batch 1. Needs transformers
(requirements/oracle.txt). The outputs are compared too: the two compute the same function in another order of
sums, so a near-tie may part them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from lean_laguna.backends.base import GenerationResult
from lean_laguna.backends.local import LocalBackend
from lean_laguna.bench.ab import BASELINE, speedup_of
from lean_laguna.bench.parity import Comparer, count_kinds
from lean_laguna.bench.results import describe
from lean_laguna.bench.rounds import Plan, run_rounds
from lean_laguna.bench.statistics import side_metrics
from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.types import RequestTimes, SamplingParams
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.tasks.prompts import load_prompts


class TransformersBackend:
    """transformers' ``generate`` behind the Backend protocol; greedy only."""

    def __init__(self, model: str):
        import transformers

        folder = resolve_model(model)
        self._tokenizer = Tokenizer.from_dir(folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._stamps: list[float] = []

    def generate(
        self, prompts: Any, params: SamplingParams, on_progress: Any = None
    ) -> list[GenerationResult]:
        """Complete one prompt."""
        ids = self._tokenizer.encode(prompts[0])
        self._stamps = []
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=params.max_tokens,
                do_sample=False,
                eos_token_id=list(self._tokenizer.eos_token_ids),
                pad_token_id=self._tokenizer.eos_token_ids[0],
                stopping_criteria=[self._stamp],
            )
        new = tuple(output[0, len(ids) :].tolist())
        ended = bool(new) and new[-1] in self._tokenizer.eos_token_ids
        return [
            GenerationResult(
                text=self._tokenizer.decode(new),
                token_ids=new,
                num_prompt_tokens=len(ids),
                finish_reason="stop" if ended else "length",
                times=RequestTimes(start, self._stamps[0], self._stamps[-1]),
                arrivals_s=tuple(self._stamps),
            )
        ]

    def _stamp(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._stamps.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def info(self) -> dict[str, Any]:
        """Return the engine's name and version."""
        import transformers

        return {"engine": "transformers", "engine_version": transformers.__version__}

    def close(self) -> None:
        """Nothing to free."""


def main() -> int:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("--prompts", default="mixed")
    parser.add_argument("--num-prompts", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    plan = Plan(load_prompts(args.prompts).first(args.num_prompts), params, repeats=args.repeats)
    ours = LocalBackend.load(
        args.model, device="cpu", dtype="float32", max_num_seqs=1, enable_prefix_caching=False
    )
    theirs = TransformersBackend(args.model)
    rounds = run_rounds({BASELINE: theirs, "ours": ours}, plan)
    ratio = speedup_of(rounds.passes(BASELINE), rounds.passes("ours"))
    comparer = Comparer(ours, plan)
    pairs = zip(rounds.passes("ours")[0], rounds.passes(BASELINE)[0], strict=True)
    verdicts = [comparer.compare(i, a, b, "transformers") for i, (a, b) in enumerate(pairs)]
    measured = {
        "sides": {
            name: side_metrics(rounds.passes(side))
            for name, side in (("transformers", BASELINE), ("ours", "ours"))
        },
        "speedup": ratio.to_dict() if ratio else None,
        "outputs": {
            "counts": count_kinds(verdicts),
            "differences": [v.to_dict() for v in verdicts if v.reason],
        },
    }
    if args.out:
        engines = {"transformers": theirs.info(), "ours": ours.info()}
        atomic_write_json(args.out, describe("comparison", plan, measured, engines=engines))
    for name, metrics in measured["sides"].items():
        print(f"{name:14} decode {metrics['decode_tok_per_s']['median']:8.1f} tok/s")
    if ratio:
        spread = f"{min(ratio.values):.2f}-{max(ratio.values):.2f} over the repeats"
        print(f"ours / transformers: {ratio.median:.2f} ({spread})")
    print(f"outputs: {measured['outputs']['counts']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
