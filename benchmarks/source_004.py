"""Source 004's training run on the nano pair, on a CPU: 64 steps, effective batch 8, 8 anchors, warm start.

Its 60 conversations are recipes/tiny/prompts.jsonl, answered by laguna-nano; a share of them is held out. Two
layouts: shifted, as the source's trainer lays blocks out, so that a DFlash start, whose masks predict where
they are, must learn to look one token further; and DFlash's own, where step 0 is the DFlash drafter.
Acceptance on the held-out answers, walked as serving walks, is measured before, at every fourth step and
after; the training batches' figures stand beside the source's.
Example: python benchmarks/source_004.py --out results/source_004.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.provenance import describe_run
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.train.document_stages import run_responses, split_documents
from lean_laguna.train.documents import pack, read_documents
from lean_laguna.train.drafter import train_drafter
from lean_laguna.train.drafter_eval import evaluate_documents
from lean_laguna.train.drafter_start import build_drafter
from lean_laguna.train.recipe import DrafterRecipe, load_recipe
from lean_laguna.train.recipe_files import find_recipe
from lean_laguna.train.responses import ResponseOptions
from lean_laguna.train.text_source import PackedSource

STEPS = 64
# Step: CE, L1, confidence BCE, expected accepted length of a training batch. Source: 004's table.
SOURCE = {
    4: (6.133, 1.845, 0.886, 1.15), 16: (5.152, 1.670, 0.449, 1.45), 32: (3.743, 1.374, 0.547, 2.07),
    48: (3.218, 1.224, 0.513, 2.47), 64: (3.033, 1.186, 0.510, 2.59),
}  # fmt: skip


def answers(path: Path) -> None:
    """Have laguna-nano answer the prompts; a file that is there already is kept."""
    run_responses(
        find_recipe("tiny/dspark").with_name("prompts.jsonl"), resolve_model("nano"), path,
        ResponseOptions(temperature=0.8, max_tokens=200), device="cpu", drafter="nano-dflash", is_given=False,
        report=lambda line: print(line, flush=True),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=Path, help="answers of an earlier run")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        documents = args.documents or Path(folder) / "answers.jsonl"
        answers(documents)
        target = load_laguna(resolve_model("nano"), dtype=torch.float32).requires_grad_(False)
        recipe = replace(
            load_recipe(DrafterRecipe, find_recipe("tiny/dspark")), val_every_s=0.0, save_every_s=1e9
        )
        read = read_documents(
            documents, vocab_size=target.config.vocab_size, max_length=recipe.length,
            min_supervised=recipe.min_supervised,
        )  # fmt: skip
        kept, held_out = split_documents(read, recipe)
        rows = pack(kept, recipe.length)
        result: dict[str, object] = {
            "run": describe_run(), "documents": len(kept), "held_out": len(held_out),
            "rows": len(rows.tokens), "steps": args.steps,
            "source_004": {str(step): row for step, row in SOURCE.items()},
        }  # fmt: skip
        if args.out.exists():  # of a run that was cut short
            result = json.loads(args.out.read_text())
        for name, is_shifted in (("shifted", True), ("as_dflash", False)):
            if name in result:
                continue
            layout = recipe.model["dflash_config"] | {"sample_from_anchor": is_shifted}
            start = replace(recipe, model=recipe.model | {"dflash_config": layout})
            drafter = build_drafter(start, target, torch.device("cpu"), name).requires_grad_(False)
            before = evaluate_documents(drafter, target, held_out, recipe.num_eval_draft_tokens)
            began = time.process_time()
            train_drafter(
                start, target=target, text=PackedSource(rows, torch.device("cpu")), held_out=held_out,
                work=Path(folder) / name, out=Path(folder) / f"{name}-out", provenance={}, steps=args.steps,
                echo=lambda kind, values: None, where=name,
            )  # fmt: skip
            result[name] = {"cpu_s": round(time.process_time() - began, 1)} | curves(
                Path(folder) / f"{name}-out" / "train_log.jsonl", before
            )
            atomic_write_json(args.out, result)
            print(name, json.dumps(result[name]["held_out_tau"]), flush=True)


def curves(log: Path, before: dict[str, float]) -> dict[str, object]:
    """Return the steps of a log, and the held-out acceptance length by step."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    names = ("step", "ce", "l1", "confidence", "loss", "grad_norm", "tau_prob", "eal")
    steps = [{name: event[name] for name in names} for event in events if event["event"] == "step"]
    tau = {
        event["step"]: event["documents_tau_chain"] for event in events if event["event"] in ("val", "final")
    }
    return {"steps": steps, "held_out_tau": {0: before["documents_tau_chain"]} | tau}


if __name__ == "__main__":
    main()
