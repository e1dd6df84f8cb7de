"""Time of a drafter's training step in the shape of Laguna XS 2.1's, and its share of the matmul peak.

Five layers, one packed sequence of 8192 tokens, 3072 anchors, blocks of 8; random target states, and frozen
random embedding and head in bfloat16, float32 masters, autocast. Each way to attend runs in a process of
its own: a compiler that breaks the CUDA context takes only that one along. Not timed: the target's own pass.
Example: python benchmarks/gpu_train_step.py --out "$OUT"
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.dspark_config import DSparkHeads
from lean_laguna.core.provenance import describe_run
from lean_laguna.models.drafter_checkpoint import make_drafter
from lean_laguna.models.shapes import drafter_shape
from lean_laguna.train.blocks import make_blocks, sample_anchors
from lean_laguna.train.drafter_forward import TargetStates, drafter_loss
from lean_laguna.train.recipe import DrafterRecipe, LossTerms, OptimizerRecipe, SelfgenRecipe

CASES = (("dspark", "flex"), ("dflash", "flex"), ("dspark", "sdpa"))
PAPER = LossTerms(ce=0.1, l1=0.9, confidence=1.0)


@dataclass(frozen=True)
class Case:
    """One measurement: which drafter, how it attends, how large."""

    family: str
    attention: str
    config: DFlashConfig
    length: int
    anchors: int
    device: torch.device


def make_case(family: str, attention: str, is_small: bool) -> Case:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(drafter_shape("laguna-xs-2.1"), draft_block_size=8)
    if family == "dspark":
        config = replace(config, dspark=DSparkHeads(256))
    if is_small:
        small = {
            "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "layer_windows": (32,) * 5, "vocab_size": 500, "draft_vocab_size": 500,
            "max_position_embeddings": 512,
        }  # fmt: skip
        return Case(family, attention, replace(config, **small), 256, 48, device)
    return Case(family, attention, config, 8192, 3072, device)


def step_flop(case: Case) -> dict[str, float]:
    """Return the useful floating-point operations of a step; what is recomputed does not count."""
    c = case.config
    rows, context = case.anchors * c.draft_block_size, case.length
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * q + 2 * kv + c.num_attention_heads + 3 * c.intermediate_size)
    taps = len(c.target_layer_ids) * c.hidden_size**2
    keys = c.window + c.draft_block_size
    parts = {
        "block": 6 * rows * c.num_hidden_layers * layer,
        "context": 6 * context * (taps + c.num_hidden_layers * c.hidden_size * 2 * kv),
        "attention": 3.5 * 4 * rows * keys * q * c.num_hidden_layers,
    }
    proposals = case.anchors * c.max_draft_tokens
    parts["head"] = 4 * proposals * c.hidden_size * c.vocab_size  # frozen: forward and to its input
    if c.dspark is not None:
        parts["teacher"] = 2 * proposals * c.hidden_size * c.vocab_size
        parts["markov"] = 6 * proposals * c.dspark.markov_rank * c.vocab_size
    return parts


def matmul_peak(device: torch.device, size: int) -> float:
    """Return measured operations per second of a large bfloat16 product on random data."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, device, 10)


def seconds(call, device: torch.device, repeats: int) -> float:
    for _ in range(3):
        call()
    wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - started) / repeats


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, repeats: int) -> dict[str, object]:
    """Time whole steps: loss, backward, clipping, AdamW."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    c, device = case.config, case.device
    drafter = make_drafter(c)
    drafter.init_weights()
    drafter.to(device)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=kind) * 0.02

    embedding, head = random(c.vocab_size, c.hidden_size), random(c.vocab_size, c.hidden_size)
    taps = random(1, case.length, len(c.target_layer_ids), c.hidden_size)
    states = TargetStates(taps, random(1, case.length, c.hidden_size) * 50)
    recipe = DrafterRecipe({}, OptimizerRecipe(), SelfgenRecipe(), loss="decay")
    if case.family == "dspark":
        recipe = replace(recipe, terms=PAPER)
    tokens = torch.randint(c.vocab_size, (1, case.length), device=device)
    documents = torch.arange(case.length)[None] // (case.length // 4)
    loss_mask = torch.ones(1, case.length, dtype=torch.bool)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(0)
    parts: list[Tensor] = []

    def step() -> None:
        anchors, valid = sample_anchors(loss_mask, case.anchors, generator, documents)
        blocks = make_blocks(
            tokens, loss_mask.to(device), anchors.to(device), valid.to(device), c.draft_block_size,
            c.mask_token_id, documents.to(device),
        )  # fmt: skip
        embeds = embedding[blocks.input_ids]
        loss, _, _ = drafter_loss(drafter, head, embeds, states, blocks, recipe, case.attention)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parts[:] = [loss.detach()]

    started = time.perf_counter()
    step()
    wait(device)
    first_s = time.perf_counter() - started
    step_s = seconds(step, device, repeats)
    flop = step_flop(case)
    peak = matmul_peak(device, 8192 if device.type == "cuda" else 256)
    found: dict[str, object] = {
        "family": case.family, "attention": case.attention, "device": device.type, "tokens": case.length,
        "anchors": case.anchors, "parameters": sum(p.numel() for p in drafter.parameters()),
        "first_step_s": first_s, "step_s": step_s, "tokens_per_s": case.length / step_s,
        "block_rows_per_s": case.anchors * c.draft_block_size / step_s, "flop": flop,
        "tflop_per_s": sum(flop.values()) / step_s / 1e12, "matmul_peak_tflop_per_s": peak / 1e12,
        "share_of_peak": sum(flop.values()) / step_s / peak, "loss": float(parts[0]),
    }  # fmt: skip
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "peak_bytes": torch.cuda.max_memory_allocated()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("FAMILY", "ATTENTION"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="a smoke test for a CPU")
    parser.add_argument("--only", nargs="+", choices=["/".join(case) for case in CASES])
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(make_case(*args.one, args.small), args.repeats)), flush=True)
        return
    found: dict[str, Any] = describe_run(None) | {"errors": {}, "cases": []}
    for family, attention in CASES:
        if args.only and f"{family}/{attention}" not in args.only:
            continue
        if attention == "flex" and not torch.cuda.is_available():
            attention = "dense"
        argv = [sys.executable, __file__, "--one", family, attention, "--repeats", str(args.repeats)]
        argv += ["--small"] * args.small
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            found["errors"][f"{family}/{attention}"] = done.stderr[-2000:]
            print(done.stderr[-2000:], flush=True)
        else:
            found["cases"].append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(found["cases"][-1]), flush=True)
        if args.out is not None:  # after each: a limit that strikes leaves those before
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "train_step.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
