"""The same training on one GPU and, with torchrun and FSDP2, on two: do the loss curves agree?

Three runs of `lean-laguna train drafter` on the same documents: one process on each of two GPUs side by
side, whose difference is what this machine's own noise does to a curve, then two processes together. The
documents are written by laguna-nano here, greedily and sampled.
Example: python benchmarks/gpu_processes.py --data runs/nano/data --out "$OUT"
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import torch

from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.provenance import describe_run
from lean_laguna.engine.loading import resolve_device
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.train.dataset import load_tokens
from lean_laguna.train.recipe import SelfgenRecipe
from lean_laguna.train.recipe_files import find_recipe
from lean_laguna.train.selfgen import generate_text

LOSS_TOLERANCE = 0.02  # of the loss of one process, every logged step: bfloat16 sums in another order
RECIPE_CHANGES = {
    "length": "320",
    "batch_rows": "16",
    "log_every": "5",
    "attention": '"sdpa"',
    "long_every": "6",
}


def write_recipe(path: Path, rows: int, anchors: int) -> None:
    """Write the nano DSpark recipe for documents; smaller batches, a line of the log every five steps."""
    text = find_recipe("nano/dspark").read_text()
    body, _, tables = text.partition("\n[")
    changes = RECIPE_CHANGES | {"batch_rows": str(rows), "anchors": str(anchors)}
    kept = [line for line in body.splitlines() if line.partition(" =")[0] not in changes]
    path.write_text(
        "\n".join(kept + [f"{name} = {value}" for name, value in changes.items()]) + "\n\n[" + tables
    )
    tomllib.loads(path.read_text())


def write_documents(path: Path, data: Path, device: torch.device, count: int, length: int) -> None:
    """Have laguna-nano continue prefixes of its training text."""
    target = load_laguna(resolve_model("nano"), dtype=torch.float32, device=device).requires_grad_(False)
    recipe = replace(SelfgenRecipe(), num_sequences=count, batch=count, length=length, seed=5)
    text = generate_text(target, load_tokens(data, "train"), recipe)
    lines = []
    for i, (row, prefix) in enumerate(zip(text.tokens.tolist(), text.prefix_lengths.tolist(), strict=True)):
        mask = [0] * prefix + [1] * (len(row) - prefix)
        lines.append(json.dumps({"id": str(i), "input_ids": row, "loss_mask": mask}) + "\n")
    path.write_text("".join(lines))


def start(name: str, processes: int, gpus: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start one training."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [
        "-m",
        "lean_laguna",
        "train",
        "drafter",
        "--recipe",
        str(args.work / "recipe.toml"),
        "--target",
    ]
    command += ["nano", "--documents", str(args.work / "documents.jsonl"), "--out", str(args.work / name)]
    command += ["--steps", str(args.steps), "--resume", "no", "--device", args.device]
    log = (args.work / f"{name}.log").open("w")
    return subprocess.Popen(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus}, stdout=log, stderr=log, text=True
    )


def curve(folder: Path) -> list[dict[str, float]]:
    """Return step, loss, gradient norm and rate of the logged steps."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "tok_per_s", "eal")
    return [{name: line[name] for name in names} for line in lines if line["event"] == "step"]


def compare(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest differences, as shares of the first curve."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    pairs = list(zip(one, other, strict=True))
    return {
        f"{name}_{what}": found
        for name in ("loss", "grad_norm")
        for what, found in (
            ("largest", max(abs(b[name] / a[name] - 1) for a, b in pairs)),
            ("mean", sum(abs(b[name] / a[name] - 1) for a, b in pairs) / len(pairs)),
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/nano/data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder of what is not kept (OUT/work)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--documents", type=int, default=512)
    parser.add_argument("--length", type=int, default=320, help="tokens of a document")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--anchors", type=int, default=96)
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one run")
    args = parser.parse_args()
    args.work = args.work or args.out / "work"
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    write_recipe(args.work / "recipe.toml", args.rows, args.anchors)
    write_documents(
        args.work / "documents.jsonl", args.data, resolve_device(args.device), args.documents, args.length
    )
    print(f"{time.monotonic() - began:6.1f} s documents written", flush=True)
    results: dict[str, object] = {
        "run": describe_run(), "steps": args.steps, "documents": args.documents, "batch_rows": args.rows,
        "anchors": args.anchors, "loss_tolerance": LOSS_TOLERANCE, "curves": {},
    }  # fmt: skip
    first, second = args.gpus
    for group in ((("one", 1, first), ("again", 1, second)), (("two", 2, f"{first},{second}"),)):
        started = [(name, start(name, count, gpus, args)) for name, count, gpus in group]
        for name, process in started:
            try:
                code = process.wait(timeout=args.limit)
            except subprocess.TimeoutExpired:
                process.kill()
                code = -1
            if code:
                results[f"{name}_failed"] = (args.work / f"{name}.log").read_text()[-3000:]
            else:
                results["curves"][name] = curve(args.work / name)
            print(f"{time.monotonic() - began:6.1f} s {name}: {'failed' if code else 'done'}", flush=True)
            atomic_write_json(args.out / "processes.json", results)
    curves = results["curves"]
    for name in ("again", "two"):
        if "one" in curves and name in curves:
            results[f"{name}_against_one"] = compare(curves["one"], curves[name])
    if "two_against_one" in results:
        results["agrees"] = results["two_against_one"]["loss_largest"] <= LOSS_TOLERANCE
    atomic_write_json(args.out / "processes.json", results)
    print(
        json.dumps({name: value for name, value in results.items() if name not in ("curves", "run")}),
        flush=True,
    )


if __name__ == "__main__":
    main()
