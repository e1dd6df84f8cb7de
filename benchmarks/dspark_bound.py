"""How far tokens passed from slot to slot could carry a drafter, and how far DSpark's carry it, on a CPU.

A DFlash block guesses slot k without the k - 1 tokens before it and without the target's states of them. The
oracle has both: it takes for slot k what the drafter's first slot says at the anchor just before, where all
of that is known. Nothing passed along inside a block should do better while the first slot stays what it is.
Text: held-out prefixes continued by laguna-nano; lengths are walked as serving walks.
Example: python benchmarks/dspark_bound.py --data runs/nano/data --out results/dspark_bound.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.provenance import describe_run
from lean_laguna.engine.loading import resolve_device
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.train.drafter_eval import correct_slots
from lean_laguna.train.metrics import accepted_lengths, conditional_accuracy, run_lengths, tau_chain
from lean_laguna.train.recipe import DrafterRecipe, load_recipe
from lean_laguna.train.recipe_files import find_recipe
from lean_laguna.train.stages import held_out_text

DRAFTS = 7


@torch.inference_mode()
def measure(drafter, target, text, rows: int) -> dict[str, object]:
    """Return the walked length of a drafter and of its oracle, and acceptance by slot of both."""
    written = text.tokens.shape[1] - int(text.prefix_lengths[0])
    parts = [
        correct_slots(drafter, target, text, start, min(start + rows, len(text.tokens)), DRAFTS)
        for start in range(0, len(text.tokens), rows)
    ]
    correct, mask = (torch.cat(both) for both in zip(*parts, strict=True))
    first = correct[:, 0].view(-1, written)  # at anchor a: is the token at a + 1 right?
    ahead = torch.nn.functional.pad(first, (0, DRAFTS - 1)).unfold(1, DRAFTS, 1).reshape(-1, DRAFTS)
    return {
        "length": tau_chain(accepted_lengths(correct, mask).view(-1, written), 0, written),
        "oracle_length": tau_chain(run_lengths(first, DRAFTS), 0, written),
        "accepted_given_all_before": conditional_accuracy(correct, mask),
        "oracle_accepted_given_all_before": conditional_accuracy(ahead & mask, mask),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/nano/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dflash", default="nano-dflash")
    parser.add_argument("--dspark", default="nano-dspark")
    args = parser.parse_args()
    device = resolve_device(args.device)
    target = load_laguna(resolve_model("nano"), dtype=torch.float32, device=device).requires_grad_(False)
    selfgen = load_recipe(DrafterRecipe, find_recipe("nano/dspark")).selfgen
    text = held_out_text(target, args.data, selfgen, args.sequences)
    result: dict[str, object] = {
        "run": describe_run(),
        "sequences": args.sequences,
        "num_draft_tokens": DRAFTS,
    }
    for kind, sample in text.items():
        found = {}
        for name in ("dflash", "dspark"):
            drafter = load_drafter(resolve_model(getattr(args, name)), target.config, device=device)
            found[name] = measure(drafter, target, sample, 4 if device.type == "cpu" else 16)
        plain, spark = found["dflash"], found["dspark"]
        gain = spark["length"] / plain["length"] - 1
        most = plain["oracle_length"] / plain["length"] - 1
        result[kind] = found | {"gain": gain, "most_with_this_first_slot": most, "share_reached": gain / most}
        print(kind, json.dumps(result[kind]), flush=True)
        atomic_write_json(args.out, result)


if __name__ == "__main__":
    main()
