"""laguna-nano-dspark in one run on one GPU: ablations, the drafter, a DFlash control, and what they accept.

Everything starts from the shipped nano DFlash drafter and reads the same self-generated text. Short arms say
which loss to use; the best DSpark arm and the best DFlash arm are then trained for the same number of steps.
Example: python benchmarks/gpu_dspark.py --data runs/nano/data --out "$OUT" --budget 340
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lean_laguna.core.provenance import checkpoint_hash, describe_run
from lean_laguna.engine.loading import resolve_device
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter, save_drafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.train.calibration import calibrate
from lean_laguna.train.dataset import load_meta, load_tokens
from lean_laguna.train.drafter import train_drafter
from lean_laguna.train.drafter_eval import evaluate, evaluate_further
from lean_laguna.train.recipe import DrafterRecipe, LossTerms, load_recipe
from lean_laguna.train.recipe_files import find_recipe
from lean_laguna.train.selfgen import generate_text
from lean_laguna.train.stages import held_out_text

# Shares of what the text leaves of the budget. The rest is for evaluation and files.
ARM_SHARE, FINAL_SHARE, CONTROL_SHARE = 0.055, 0.30, 0.25
FINAL_RESERVE_S = 25.0
TEXT_SHARE = 0.15


def arms(dspark: DrafterRecipe, dflash: DrafterRecipe) -> dict[str, DrafterRecipe]:
    """Return the ablations of training.md 5.2 and the losses of the issue."""
    spark = dspark.terms
    soft = LossTerms(ce=0.0, kl=1.0)
    return {
        "dflash-ce-dpace": dflash,
        "dflash-kl-dpace": replace(dflash, terms=soft),
        "dspark-paper": replace(dspark, loss="decay"),
        "dspark-paper-dpace": dspark,
        "dspark-ce05": replace(dspark, terms=replace(spark, ce=0.5)),
        "dspark-kl-dpace": replace(dspark, terms=replace(soft, confidence=1.0)),
        "dspark-lk-hybrid": replace(dspark, terms=LossTerms(ce=0.0, lk_hybrid=1.0, confidence=1.0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/nano/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=340.0, help="seconds in all")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--target", default="nano")
    parser.add_argument("--dspark", default="nano/dspark")
    parser.add_argument("--dflash", default="nano/dflash")
    parser.add_argument("--only", nargs="*", help="names of the arms to run")
    parser.add_argument("--small", action="store_true", help="little text, small batches: a smoke test")
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    device = resolve_device(args.device)
    folder = resolve_model(args.target)
    target = load_laguna(folder, dtype=torch.float32, device=device).requires_grad_(False)
    dspark, dflash = recipes(args)
    say(started, "target loaded")
    text = generate_text(
        target, load_tokens(args.data, "train"), dspark.selfgen,
        deadline=started + TEXT_SHARE * args.budget, report=lambda line: say(started, line),
    )  # fmt: skip
    held_out = held_out_text(target, args.data, dspark.selfgen)
    few = {kind: first(sample, 96) for kind, sample in held_out.items()}
    say(started, "held-out text written")
    provenance = {
        "target_sha256": checkpoint_hash(folder),
        "data_sha256": load_meta(args.data)["sha256"]["train"],
    }
    common = {"target": target, "text": text, "provenance": provenance}
    left = args.budget - (time.monotonic() - started) - FINAL_RESERVE_S
    shipped = load_drafter(resolve_model(dflash.warm_start), target.config, device=device)
    results: dict[str, object] = {
        "run": describe_run(), "provenance": provenance, "sequences": len(text.tokens),
        "start": figures(shipped, target, held_out), "arms": {},
    }  # fmt: skip
    say(started, f"shipped drafter: {short(results['start'])}")
    log = (args.out / "arms.jsonl").open("w")
    chosen: dict[str, str] = {}
    everything = arms(dspark, dflash)
    for name, recipe in everything.items():
        if args.only and name not in args.only:
            continue
        found = one_arm(name, recipe, few, common, ARM_SHARE * left, log)
        results["arms"][name] = found | {"recipe": asdict(recipe)}
        family = name.partition("-")[0]
        if family not in chosen or score(found) > score(results["arms"][chosen[family]]):
            chosen[family] = name
        say(started, f"{name}: {short(found)}")
        write(args.out, results)
    log.close()
    steps = None
    for family, share in (("dspark", FINAL_SHARE), ("dflash", CONTROL_SHARE)):
        if family not in chosen:
            continue
        limit = {"seconds": share * left} if steps is None else {"steps": steps}
        made = final(family, everything[chosen[family]], held_out, common, limit, args.out)
        results[family] = made | {"arm": chosen[family]}
        steps = made["steps"] if steps is None else steps
        say(started, f"{family} ({chosen[family]}): {short(made)}")
        write(args.out, results)
    results["seconds"] = time.monotonic() - started
    write(args.out, results)
    say(started, "done")


def recipes(args: argparse.Namespace) -> tuple[DrafterRecipe, DrafterRecipe]:
    """Return the DSpark recipe, and the DFlash one brought to the same start, text and optimiser."""
    dspark = load_recipe(DrafterRecipe, find_recipe(args.dspark))
    dflash = load_recipe(DrafterRecipe, find_recipe(args.dflash))
    if args.small:
        selfgen = replace(dspark.selfgen, num_sequences=24, length=128, batch=8, eval_sequences=4)
        dspark = replace(dspark, selfgen=selfgen, batch_rows=4, anchors=8)
    shared = (
        "optimizer",
        "selfgen",
        "warm_start",
        "batch_rows",
        "anchors",
        "short_block",
        "long_every",
        "seed",
    )
    return dspark, replace(dflash, **{name: getattr(dspark, name) for name in shared})


def one_arm(name, recipe, few, common, seconds, log) -> dict[str, float]:
    """Train for a short time and measure on a part of the held-out text."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _, found = train_drafter(
            replace(recipe, val_every_s=1e9, save_every_s=1e9), **common, held_out=few, work=work / "work",
            out=work / "out", seconds=seconds, echo=lambda kind, values: None, where=name,
        )  # fmt: skip
        for line in (work / "out" / "train_log.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] in ("step", "compile", "final"):
                log.write(json.dumps({"arm": name} | event) + "\n")
    log.flush()
    return found


def final(family, recipe, held_out, common, limit, out) -> dict[str, object]:
    """Train the chosen recipe, calibrate, export and measure it whole."""
    folder = out / family
    few = {kind: first(text, 4) for kind, text in held_out.items()}
    with tempfile.TemporaryDirectory() as work:
        drafter, _ = train_drafter(
            replace(recipe, val_every_s=1e9), **common, held_out=few,
            work=Path(work), out=folder, **limit, echo=lambda kind, values: None, where=family,
        )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    found: dict[str, object] = {"steps": lines[-1]["step"], "elapsed_s": lines[-1]["elapsed_s"]}
    target = common["target"]
    if isinstance(drafter, DSparkDrafter):
        found |= calibrate(drafter, target, held_out)
        found["heads"] = asdict(drafter.heads)
        save_drafter(drafter, folder, dtype=torch.bfloat16, provenance=common["provenance"])
    # Measured as it is stored.
    stored = load_drafter(folder, target.config, device=target.lm_head.weight.device)
    found |= figures(stored, target, held_out)
    found |= evaluate_further(stored, target, held_out, recipe.num_eval_draft_tokens)
    for name in folder.iterdir():
        if name.name not in ("config.json", "model.safetensors", "train_log.jsonl"):
            shutil.rmtree(name) if name.is_dir() else name.unlink()
    return found


def figures(drafter, target, held_out) -> dict[str, float]:
    found = {}
    for kind, text in held_out.items():
        found |= {f"{kind}_{name}": value for name, value in evaluate(drafter, target, text, 7).items()}
    return found


def first(text, count):
    return replace(text, tokens=text.tokens[:count], prefix_lengths=text.prefix_lengths[:count])


def score(found) -> float:
    """Greedy and sampled length alike: the larger their product, the better."""
    return found["greedy_tau_chain"] * found["sampled_tau_chain"]


def short(found) -> str:
    names = [n for n in found if n.endswith(("tau_chain", "_ece_after")) or n == "steps"]
    return ", ".join(f"{name} {found[name]:.3f}" for name in names)


def write(out: Path, results) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")


def say(started: float, line: str) -> None:
    print(f"{time.monotonic() - started:7.1f} s  {line}", flush=True)


if __name__ == "__main__":
    main()
