"""FlexAttention of blocks, compiled on this device, against a mask made by hand; its leaks, its time.

The mask by hand is filled in by the rule's own words, entry by entry, and attended with in float64. Then
laguna-nano's drafter is run: what a block gives may not change with tokens or target states at or after its
anchor. Last, a whole pass of loss and gradients at the nano recipe's size is timed for each way to attend.
Example: python benchmarks/gpu_flex_check.py --out "$OUT"
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.provenance import describe_run
from lean_laguna.engine.loading import resolve_device
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.train.block_attention import BlockAttention
from lean_laguna.train.blocks import make_blocks, sample_anchors
from lean_laguna.train.drafter_forward import TargetStates, block_hidden, drafter_loss
from lean_laguna.train.recipe import DrafterRecipe, load_recipe
from lean_laguna.train.recipe_files import find_recipe

BATCH, LENGTH, ANCHORS, HEADS, KV_HEADS, SIZE = 2, 200, 32, 4, 2, 32


def rule_by_hand(anchors, slots, length, window, causal, documents) -> Tensor:
    """Return [B, A * Q, S + A * Q] bool, one entry after the other."""
    rows = anchors.shape[1] * slots
    seen = torch.zeros(len(anchors), rows, length + rows, dtype=torch.bool)
    for b, (j, a), k in product(range(len(anchors)), enumerate(anchors[0].tolist()), range(slots)):
        a = int(anchors[b, j])
        for i in range(a):
            inside = window is None or i >= a + k - (window - 1)
            seen[b, j * slots + k, i] = inside and bool(documents[b, i] == documents[b, a])
        for t in range(slots):
            ordered = t <= k or not causal
            seen[b, j * slots + k, length + j * slots + t] = ordered and (
                window is None or abs(t - k) < window
            )
    return seen


def compare(device, window, causal, slots, kind) -> dict[str, object]:
    """Return the largest differences of output and gradients, as shares of the largest value."""
    generator = torch.Generator().manual_seed(slots)
    places = torch.rand(BATCH, LENGTH - slots, generator=generator).topk(ANCHORS, 1).indices
    anchors = places.sort(1).values
    documents = (torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH // 2]])).long()
    shapes = (
        (BATCH * ANCHORS, slots, HEADS),
        *[(BATCH * LENGTH, KV_HEADS)] * 2,
        *[(BATCH * ANCHORS, slots, KV_HEADS)] * 2,
    )
    parts = [torch.randn(*shape, SIZE, generator=generator).to(kind) for shape in shapes]
    weight = torch.randn(*shapes[0], SIZE, generator=generator)

    mine = [part.to(device).clone().requires_grad_() for part in parts]
    way = "flex" if device.type == "cuda" else "sdpa"  # on a CPU flex has no gradients
    attend = BlockAttention(anchors.to(device), LENGTH, (window,), (causal,), documents.to(device), way)
    out = attend(0, *mine)
    (out.float() * weight.to(device)).sum().backward()

    theirs = [part.double().requires_grad_() for part in parts]
    q, ck, cv, bk, bv = theirs
    seen = rule_by_hand(anchors, slots, LENGTH, window, causal, documents)[:, None]
    rows = ANCHORS * slots

    def keys(context: Tensor, own: Tensor) -> Tensor:
        both = torch.cat(
            [context.view(BATCH, LENGTH, KV_HEADS, SIZE), own.reshape(BATCH, rows, KV_HEADS, SIZE)], 1
        )
        return both.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2)

    queries = q.reshape(BATCH, rows, HEADS, SIZE).transpose(1, 2)
    scores = (queries @ keys(ck, bk).transpose(2, 3)) * SIZE**-0.5
    expected = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ keys(cv, bv)
    expected = expected.transpose(1, 2).reshape(q.shape)
    (expected * weight.double()).sum().backward()

    names = ("out", "dq", "dck", "dcv", "dbk", "dbv")
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
    found = {}
    for name, (ours, right) in zip(names, pairs, strict=True):
        found[name] = float(
            (ours.detach().double().cpu() - right.detach()).abs().max() / right.detach().abs().max()
        )
    return {
        "window": window,
        "causal": causal,
        "slots": slots,
        "dtype": str(kind).removeprefix("torch."),
    } | found


def leaks(target, device) -> dict[str, object]:
    """Change all that lies at or after one block's anchor, and see whose rows change."""
    drafter = load_drafter(resolve_model("nano-dflash"), target.config, device=device)
    c, generator = drafter.config, torch.Generator().manual_seed(1)
    tokens = torch.randint(13, 4000, (2, 256), generator=generator)
    taps = torch.randn(2, 256, len(c.target_layer_ids), c.hidden_size, generator=generator).to(device)
    anchors = torch.arange(40, 232, 2).expand(2, -1).contiguous()  # blocks of 8 overlap

    def rows(tokens: Tensor, taps: Tensor) -> Tensor:
        valid = torch.ones_like(anchors, dtype=torch.bool)
        blocks = make_blocks(
            tokens, torch.ones_like(tokens, dtype=torch.bool), anchors, valid, 8, c.mask_token_id
        )
        blocks = replace(blocks, anchors=anchors.to(device), positions=blocks.positions.to(device))
        with torch.no_grad():
            hidden = block_hidden(drafter, target.embed(blocks.input_ids.to(device)), taps, blocks, "flex")
        return hidden.view(2, anchors.shape[1], -1)

    before = rows(tokens, taps)
    changed_before = kept_after = 0
    for j in range(0, anchors.shape[1], 7):
        a = int(anchors[0, j])
        other_tokens, other_taps = tokens.clone(), taps.clone()
        other_tokens[:, a + 1 :] = torch.randint(
            13, 4000, other_tokens[:, a + 1 :].shape, generator=generator
        )
        other_taps[:, a:] = torch.randn(other_taps[:, a:].shape, generator=generator).to(device)
        differs = (rows(other_tokens, other_taps) != before).any(-1)  # [2, A]
        changed_before += int(differs[:, : j + 1].sum())
        kept_after += int((~differs[:, j + 1 :]).sum())
    return {"blocks_changed_by_their_future": changed_before, "later_blocks_unchanged": kept_after}


def times(target, device, is_small) -> dict[str, float | str]:
    """Return milliseconds of a loss and its gradients at the nano recipe's size, for each way to attend."""
    recipe = load_recipe(DrafterRecipe, find_recipe("nano/dspark"))
    drafter = load_drafter(resolve_model("nano-dspark"), target.config, device=device).requires_grad_(True)
    c, rows = drafter.config, 2 if is_small else recipe.batch_rows
    generator = torch.Generator().manual_seed(2)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = torch.randint(13, 4000, (rows, recipe.selfgen.length), generator=generator)
    written = torch.ones_like(tokens, dtype=torch.bool)
    states = TargetStates(
        torch.randn(*tokens.shape, len(c.target_layer_ids), c.hidden_size, device=device).to(kind),
        torch.randn(*tokens.shape, c.hidden_size, device=device).to(kind),
    )  # fmt: skip
    found: dict[str, float | str] = {}
    slots = recipe.short_block
    for attention in ("dense", "sdpa", "flex"):
        anchors, valid = (part.to(device) for part in sample_anchors(written, recipe.anchors, generator))
        blocks = make_blocks(tokens.to(device), written.to(device), anchors, valid, slots, c.mask_token_id)
        embeds = target.embed(blocks.input_ids).detach()

        def step(given=(embeds, states, blocks, recipe, attention)) -> None:
            loss, _, _ = drafter_loss(drafter, target.lm_head.weight, *given)
            loss.backward()
            drafter.zero_grad(set_to_none=True)

        try:
            found[attention] = milliseconds(step, device)
        except Exception as error:  # the others still count
            found[attention] = f"{type(error).__name__}: {str(error)[:300]}"
        print(attention, found[attention], flush=True)
    return found


def milliseconds(call, device) -> float:
    repeats = 5 if device.type == "cuda" else 1
    for _ in range(3 if device.type == "cuda" else 1):
        call()
    wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return round((time.perf_counter() - started) / repeats * 1e3, 2)


def wait(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a smoke test for a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = resolve_device(args.device)
    torch.set_float32_matmul_precision("highest")
    # Every case is a program of its own; one that fell back to eager would prove nothing.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    results: dict[str, object] = {"run": describe_run()}
    target = load_laguna(resolve_model("nano"), dtype=torch.float32, device=device).requires_grad_(False)

    def keep(name: str, make) -> None:
        try:
            results[name] = make()
        except Exception as error:  # each part stands alone
            results[name] = f"{type(error).__name__}: {str(error)[:1500]}"
        print(name, json.dumps(results[name]), flush=True)
        atomic_write_json(args.out / "flex_check.json", results)

    keep("times", lambda: times(target, device, args.small))
    keep("leaks", lambda: leaks(target, device))
    half, whole = torch.bfloat16, torch.float32
    cases = [
        (5, True, 7, whole),
        (None, False, 8, half),
        (40, True, 8, half),
        (5, False, 8, half),
        (None, True, 8, half),
    ]
    for index, case in enumerate(cases[:: 4 if args.small else 1]):
        keep(f"case_{index}", lambda case=case: compare(device, *case))


if __name__ == "__main__":
    main()
