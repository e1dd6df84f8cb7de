"""Arms of nano DSpark and a DFlash control: the same text, the same steps, each from the shipped nano DFlash.

Several of these may run side by side, one a GPU: the one with --write-text writes the text, the others wait
for it; without --steps or --seconds a process takes the steps that another's first arm took.
Example: python benchmarks/gpu_drafter_pair.py --arms fast-heads --write-text --steps 600 --share S --out O
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.provenance import checkpoint_hash, describe_run
from lean_laguna.engine.loading import resolve_device
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter, save_drafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.train.calibration import calibrate, visited_blocks
from lean_laguna.train.dataset import load_meta, load_tokens
from lean_laguna.train.drafter import train_drafter
from lean_laguna.train.drafter_eval import evaluate_further, evaluate_kinds
from lean_laguna.train.generated import load_generated, save_generated
from lean_laguna.train.recipe import DrafterRecipe, load_recipe
from lean_laguna.train.recipe_files import find_recipe
from lean_laguna.train.selfgen import generate_text
from lean_laguna.train.stages import held_out_text

SHARED = ("optimizer", "selfgen", "warm_start", "batch_rows", "anchors", "short_block", "long_every", "seed")
KEPT = ("config.json", "model.safetensors", "train_log.jsonl")


def arms() -> dict[str, DrafterRecipe]:
    """Return the recipes; the control has DFlash's own loss, or DSpark's."""
    fast = load_recipe(DrafterRecipe, find_recipe("nano/dspark"))
    model = fast.model | {"dflash_config": fast.model["dflash_config"] | {"sample_from_anchor": True}}
    dflash = load_recipe(DrafterRecipe, find_recipe("nano/dflash"))
    dflash = replace(dflash, **{name: getattr(fast, name) for name in SHARED})
    return {
        "fast-heads": fast,
        "fast-heads-ce03": replace(fast, terms=replace(fast.terms, ce=0.3)),
        "shifted": replace(fast, model=model, short_block=fast.short_block - 1),  # as many drafts
        "dflash": dflash,
        "dflash-l1": replace(dflash, terms=replace(fast.terms, confidence=0.0)),
    }


def wait_for(path: Path, seconds: float) -> None:
    """Wait until another process has written a file."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"'{path}' did not come within {seconds:.0f} s")
        time.sleep(0.5)


def train_arm(name, recipe, limit, common, held_out, out) -> dict[str, object]:
    """Train, store, and measure what was stored."""
    folder, target = out / name, common["target"]
    few = {
        kind: replace(t, tokens=t.tokens[:4], prefix_lengths=t.prefix_lengths[:4])
        for kind, t in held_out.items()
    }
    with tempfile.TemporaryDirectory() as work:
        train_drafter(
            replace(recipe, val_every_s=1e9, save_every_s=1e9), **common, held_out=few, work=Path(work),
            out=folder, **limit, echo=lambda kind, values: None, where=name,
        )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    found: dict[str, object] = {name: lines[-1][name] for name in ("step", "elapsed_s")} | {
        "recipe": asdict(recipe)
    }
    found["compile"] = [line["what"] for line in lines if line["event"] == "compile"]
    stored = load_drafter(folder, target.config, device=target.lm_head.weight.device)
    found |= evaluate_kinds(stored, target, held_out, recipe.num_eval_draft_tokens)
    found |= evaluate_further(stored, target, held_out, recipe.num_eval_draft_tokens)
    for file in folder.iterdir():
        if file.name not in KEPT:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    return found


def calibrate_arm(name, common, text, out) -> dict[str, object]:
    """Fit the confidences on half of further held-out text; the other half says how well. Keeps blocks."""
    target = common["target"]
    stored = load_drafter(out / name, target.config, device=target.lm_head.weight.device)
    if not isinstance(stored, DSparkDrafter):
        return {}
    figures: dict[str, object] = calibrate(stored, target, text)
    save_drafter(stored, out / name, dtype=torch.bfloat16, provenance=common["provenance"])
    for kind, sample in text.items():
        logits, accepted, owners = visited_blocks(stored, target, sample)
        np.savez_compressed(
            out / f"{name}_{kind}_blocks.npz", logits=logits.half(), accepted=accepted, owners=owners
        )
        figures[f"{kind}_blocks"] = len(accepted)
    return figures | {"heads": asdict(stored.heads)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/nano/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=Path, required=True, help="folder that the processes share")
    parser.add_argument("--arms", nargs="+", required=True)
    parser.add_argument("--begin-with", type=Path, help="drafter to go on from, instead of the recipe's")
    parser.add_argument("--text-seed", type=int, help="of the training text, instead of the recipe's")
    parser.add_argument("--write-text", action="store_true")
    parser.add_argument("--text-seconds", type=float, default=28.0)
    parser.add_argument("--seconds", type=float, help="of the first arm's training")
    parser.add_argument(
        "--steps", type=int, help="of each arm; without either, another's steps are waited for"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="little text, small batches: a smoke test")
    args = parser.parse_args()
    began = time.monotonic()
    for folder in (args.out, args.share):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    device = resolve_device(args.device)
    target = load_laguna(resolve_model("nano"), dtype=torch.float32, device=device).requires_grad_(False)
    recipes = arms()
    if args.small:
        selfgen = replace(
            recipes["fast-heads"].selfgen, num_sequences=8, length=96, batch=8, eval_sequences=4
        )
        small = {"selfgen": selfgen, "batch_rows": 2, "anchors": 4, "long_every": 2}
        recipes = {name: replace(recipe, **small) for name, recipe in recipes.items()}

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    selfgen, text_path, steps_path = (
        recipes["fast-heads"].selfgen,
        args.share / "text.pt",
        args.share / "steps.json",
    )
    if args.write_text:
        stream, deadline = load_tokens(args.data, "train"), time.monotonic() + args.text_seconds
        training = selfgen if args.text_seed is None else replace(selfgen, seed=args.text_seed)
        save_generated(generate_text(target, stream, training, deadline=deadline, report=say), text_path)
    wait_for(text_path, 120)
    text = load_generated(text_path, device)
    held_out = held_out_text(target, args.data, selfgen)
    say("held-out text written")
    provenance = {
        "target_sha256": checkpoint_hash(resolve_model("nano")),
        "data_sha256": load_meta(args.data)["sha256"]["train"],
    }
    common = {"target": target, "text": text, "provenance": provenance}
    shipped = load_drafter(resolve_model("nano-dflash"), target.config, device=device)
    start = evaluate_kinds(shipped, target, held_out, 7)
    say(f"start: {short(start)}")
    limit = {"seconds": args.seconds} if args.steps is None else {"steps": args.steps}
    for name in args.arms:
        if args.seconds is None and "seconds" in limit:
            wait_for(steps_path, 240)
            limit = json.loads(steps_path.read_text())
        recipe = recipes[name]
        if args.begin_with is not None:
            recipe = replace(recipe, warm_start=str(args.begin_with))
        found = train_arm(name, recipe, limit, common, held_out, args.out)
        if "seconds" in limit:
            limit = {"steps": found["step"]}
            atomic_write_json(steps_path, limit)
        result = {
            "run": describe_run(),
            "provenance": provenance,
            "sequences": len(text.tokens),
            "start": start,
        }
        atomic_write_json(args.out / f"{name}.json", result | {"arm": found})
        say(f"{name}: {short(found)}")
        if name.startswith(("dflash",)):
            continue
        further = replace(selfgen, seed=selfgen.seed + 1000, eval_sequences=2 * selfgen.eval_sequences)
        found |= calibrate_arm(name, common, held_out_text(target, args.data, further), args.out)
        atomic_write_json(args.out / f"{name}.json", result | {"arm": found})
        say(f"{name}: {short(found)}")


def short(found) -> str:
    names = [
        n for n in found if n.endswith(("tau_chain", "_acc_1", "_ece_after")) or n in ("step", "elapsed_s")
    ]
    return ", ".join(f"{name} {found[name]:.3f}" for name in names if "cond" not in name)


if __name__ == "__main__":
    main()
