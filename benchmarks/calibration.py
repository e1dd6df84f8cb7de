"""Fit nano-dspark's confidences on text that its target writes, and check them on text of other documents.

    PYTHONPATH=src python benchmarks/calibration.py --out FOLDER [--apply]

The validation stream is dealt to two halves by document: the target continues prefixes of the first (seeds
from FIT_SEED) for the fit, of the second (from CHECK_SEED) for the check, greedily and at the recipe's
temperature. Blocks are those that serving at seven drafts meets; the check tells of fifteen too. Intervals:
texts drawn anew, 500 times; ``noise``: the error of a calibration without fault on as many blocks.
Writes calibration.json and the drafter with its new calibration, ``nano-dspark``; with ``--apply`` the kinds
that are better than before go into the package's own too. A GPU takes a minute, a CPU an hour.
``--tiny`` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lean_laguna.core.files import atomic_write_json, atomic_write_text, require_writable
from lean_laguna.core.provenance import checkpoint_hash, describe_run
from lean_laguna.engine.loading import resolve_device
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.spec.confidence import NUM_BINS, Calibration, fit_calibration, survival_error
from lean_laguna.train.calibration import SERVED_DRAFTS, score_anchors, walk
from lean_laguna.train.dataset import load_meta, load_tokens
from lean_laguna.train.recipe import DrafterRecipe, load_recipe
from lean_laguna.train.recipe_files import find_recipe
from lean_laguna.train.selfgen import generate_held_out
from lean_laguna.train.tokenizer import EOS_ID

FIT_SEED, CHECK_SEED = 30_000, 40_000
BATCH = 1024  # texts written at once
NUM_DRAWS = 500
KINDS = ("greedy", "sampled")
Anchors = tuple[Tensor, Tensor]


def half_of_documents(stream: Tensor, half: int) -> Tensor:
    """Return every second document of a stream [N], whole: those of the fit (0) or of the check (1)."""
    document = torch.cumsum(stream == EOS_ID, 0)
    return stream[document % 2 == half]


def anchors_of(common: dict[str, Any], kind: str, half: int, count: int) -> Anchors:
    """Let the target write, and score the drafts at every token."""
    recipe, target, drafter = (common[name] for name in ("recipe", "target", "drafter"))
    stream = half_of_documents(common["stream"], half)
    parts = []
    for number, start in enumerate(range(0, count, BATCH)):
        seed = (FIT_SEED, CHECK_SEED)[half] + number
        own = replace(recipe, seed=seed, eval_sequences=min(BATCH, count - start))
        text = generate_held_out(target, stream, own, 0.0 if kind == "greedy" else recipe.temperature)
        parts.append(score_anchors(drafter, target, text, common["rows"]))
    logits, accepted = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(accepted)


def mean_error(chances: Tensor, accepted: Tensor, served: int) -> float:
    """Return the error of survival, mean over the drafts served."""
    return sum(survival_error(chances, accepted)[:served]) / served


def check(anchors: Anchors, calibrations: dict[str, Calibration], served: int) -> dict[str, Any]:
    """Return what serving with so many drafts would see of each calibration."""
    logits, accepted, owners = walk(*anchors, served)
    found: dict[str, Any] = {"blocks": len(accepted), "texts": len(anchors[0])}
    found["accepted"] = round(float(accepted.clamp(max=served).double().mean()), 3)
    generator = torch.Generator().manual_seed(0)
    for name, calibration in calibrations.items():
        chances = calibration.survival(logits)
        errors = survival_error(chances, accepted)[:served]
        found[name] = {
            "mean": round(sum(errors) / served, 4),
            "errors": [round(error, 4) for error in errors],
            "claimed": round(float(chances[:, :served].sum(1).mean()), 3),
        }
        if name == "after":
            draws = bootstrap(chances, accepted, owners, served, generator)
            found[name] |= {"interval_95": draws, "noise": noise(chances, served, generator)}
    return found


def bootstrap(chances: Tensor, accepted: Tensor, owners: Tensor, served: int, generator) -> list[float]:
    """Return the interval of the mean error where texts are drawn anew with all their blocks."""
    num_texts = int(owners.max()) + 1
    counts = torch.bincount(owners, minlength=num_texts).double()
    gaps = torch.zeros(num_texts, served, NUM_BINS, dtype=torch.float64)  # of every text, position and bin
    for k in range(served):
        bins = (chances[:, k] * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        gaps[:, k].index_put_(
            (owners, bins), (chances[:, k] - (accepted > k).float()).double(), accumulate=True
        )
    found = []
    for _ in range(NUM_DRAWS):
        texts = torch.randint(num_texts, (num_texts,), generator=generator)
        found.append(float(gaps[texts].sum(0).abs().sum() / served / counts[texts].sum()))
    found.sort()
    return [round(found[int(share * NUM_DRAWS)], 4) for share in (0.025, 0.975)]


def noise(chances: Tensor, served: int, generator) -> float:
    """Return the mean error of chances that are right: blocks end as they say."""
    found = []
    for _ in range(20):
        uniform = torch.rand(len(chances), 1, generator=generator)
        found.append(mean_error(chances, (uniform < chances).sum(1), served))
    return round(sum(found) / len(found), 4)


def write_calibration(folder: Path, found: dict[str, Calibration]) -> None:
    """Replace the numbers in a drafter's config.json; all else stays."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for kind, calibration in found.items():
        config["dspark_config"][f"{kind}_temperatures"] = list(calibration.temperatures)
        config["dspark_config"][f"{kind}_biases"] = list(calibration.biases)
    atomic_write_text(path, json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("runs/nano/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--fit", type=int, nargs=2, default=(1536, 512), help="texts, greedy and sampled (1536 512)"
    )
    parser.add_argument("--check", type=int, nargs=2, default=(1024, 512), help="likewise (1024 512)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if min(*args.fit, *args.check) < 1:
        parser.error("--fit and --check take numbers of texts from 1")
    made = args.out / "nano-dspark"
    made.mkdir(parents=True, exist_ok=True)  # before the hour's work, not after it
    for file in (args.out / "calibration.json", made / "config.json", made / "model.safetensors"):
        require_writable(file)
    began = time.monotonic()
    device = resolve_device(args.device)
    torch.set_float32_matmul_precision("high")
    target = load_laguna(resolve_model("nano"), dtype=torch.float32, device=device).requires_grad_(False)
    shipped = resolve_model("nano-dspark")
    drafter = load_drafter(shipped, target.config, device=device)
    recipe = load_recipe(DrafterRecipe, find_recipe("nano/dspark")).selfgen
    if args.tiny:
        recipe, args.fit, args.check = replace(recipe, length=112), (4, 4), (4, 4)
    common = {
        "target": target,
        "drafter": drafter,
        "recipe": recipe,
        "stream": load_tokens(args.data, "val"),
        "rows": 16 if device.type == "cuda" else 4,
    }
    result: dict[str, Any] = {
        "run": describe_run(),
        "drafter_sha256": checkpoint_hash(shipped),
        "data_sha256": load_meta(args.data)["sha256"]["val"],
        "seeds": {"fit": FIT_SEED, "check": CHECK_SEED},
    }
    heads, fitted = drafter.heads, {}
    for place, kind in enumerate(KINDS):
        anchors = anchors_of(common, kind, 0, args.fit[place])
        logits, accepted, _ = walk(*anchors, SERVED_DRAFTS)
        fitted[kind] = fit_calibration(logits, accepted)
        calibrations = {
            "head": Calibration(),
            "before": Calibration(getattr(heads, f"{kind}_temperatures"), getattr(heads, f"{kind}_biases")),
            "after": fitted[kind],
        }
        found = {"fit_texts": args.fit[place], "fit_blocks": len(accepted)}
        print(f"{time.monotonic() - began:6.1f} s  {kind}: fitted on {len(accepted):,} blocks", flush=True)
        anchors = anchors_of(common, kind, 1, args.check[place])
        for served in (SERVED_DRAFTS, drafter.config.max_draft_tokens):
            found[f"served_{served}"] = check(anchors, calibrations, served)
        result[kind] = found | {"temperatures": fitted[kind].temperatures, "biases": fitted[kind].biases}
        own = found[f"served_{SERVED_DRAFTS}"]
        print(f"{time.monotonic() - began:6.1f} s  {kind}: {json.dumps(own)}", flush=True)
    atomic_write_json(args.out / "calibration.json", result)
    for name in ("config.json", "model.safetensors"):
        (made / name).write_bytes((shipped / name).read_bytes())
    write_calibration(made, fitted)
    served = {kind: result[kind][f"served_{SERVED_DRAFTS}"] for kind in KINDS}
    better = [kind for kind, own in served.items() if own["after"]["mean"] < own["before"]["mean"]]
    if args.apply and better:
        write_calibration(shipped, {kind: fitted[kind] for kind in better})
        print(f"{' and '.join(better)} written to {shipped}", flush=True)


if __name__ == "__main__":
    main()
