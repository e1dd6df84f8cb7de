"""Training a DFlash drafter on its frozen target's own text; target states are captured online, never stored."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.models.dense_attention import Backend
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import save_drafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.blocks import BlockAttention, Blocks, make_blocks, sample_anchors
from lean_laguna.train.compiling import CompileMode, choose_compiled
from lean_laguna.train.loop import RunLog, train
from lean_laguna.train.losses import decay_weights, dpace_weights, slot_nll, weighted_mean
from lean_laguna.train.metrics import (
    accepted_lengths,
    conditional_accuracy,
    distinct_ngram_share,
    expected_acceptance_length,
    position_accuracy,
    tau_chain,
)
from lean_laguna.train.recipe import DrafterRecipe
from lean_laguna.train.schedule import Budget
from lean_laguna.train.selfgen import Generated


def build_drafter(
    recipe: DrafterRecipe, target: LagunaForCausalLM, device: torch.device, where: str
) -> DFlashDrafter:
    """Make a drafter with fresh float32 weights for this target.

    Raises:
        ConfigError: The recipe's drafter does not fit the target.
    """
    config = DFlashConfig.from_dict(recipe.model, where)
    config.check_target(target.config, where)
    drafter = DFlashDrafter(config)
    drafter.init_weights(generator=torch.Generator().manual_seed(recipe.seed))
    return drafter.to(device)


def block_hidden(drafter: DFlashDrafter, embeds: Tensor, aux: Tensor, blocks: Blocks) -> Tensor:
    """Run the drafter over blocks of B sequences.

    Args:
        drafter: The network.
        embeds: [N, Q, D] target embeddings of the block inputs.
        aux: [B, S, m, D] target taps.
        blocks: From :func:`make_blocks`.

    Returns:
        [N, Q - 1, D], the final-normed rows of slots 1..Q-1.
    """
    batch, length = aux.shape[:2]
    config = drafter.config
    attend = BlockAttention(blocks.anchors, length, config.layer_windows, config.layer_causal)
    positions = torch.arange(length, device=aux.device).repeat(batch)
    hidden = drafter.forward_dense(embeds, blocks.positions, aux.flatten(0, 1), positions, attend)
    return hidden[:, 1:]


def drafter_loss(
    drafter: DFlashDrafter, head: Tensor, embeds: Tensor, aux: Tensor, blocks: Blocks, recipe: DrafterRecipe
) -> tuple[Tensor, Tensor]:
    """Return the weighted cross-entropy of a batch of blocks (scalar) and the slots' correctness [N, Q - 1].

    Args:
        drafter: The network.
        head: [V, D] the target's frozen lm_head.
        embeds: [N, Q, D].
        aux: [B, S, m, D].
        blocks: Anchors, labels and masks.
        recipe: Which weighting.
    """
    with torch.autocast(aux.device.type, torch.bfloat16, enabled=aux.device.type == "cuda"):
        hidden = block_hidden(drafter, embeds, aux, blocks)
        nll, correct = slot_nll(hidden, blocks.labels, lambda rows: F.linear(rows, head), chunk_rows=1 << 20)
    mask = blocks.label_mask
    if recipe.loss == "dpace":
        weights = dpace_weights(torch.exp(-nll), mask, recipe.dpace_alpha)
    else:
        weights = decay_weights(nll.shape[1], recipe.loss_decay, nll.device).expand_as(nll)
    return weighted_mean(nll, weights, mask), correct


class DrafterTask:
    """Drafter training as the loop sees it; owns the drafter, borrows the frozen target."""

    def __init__(
        self,
        drafter: DFlashDrafter,
        target: LagunaForCausalLM,
        recipe: DrafterRecipe,
        text: Generated,
        held_out: dict[str, Generated],
        out: Path,
        provenance: dict[str, str],
    ) -> None:
        """Set up; ``held_out`` maps ``greedy`` and ``sampled`` to text that is only evaluated on."""
        self._drafter, self._target, self._recipe = drafter, target, recipe
        self._text, self._held_out, self._out, self._provenance = text, held_out, out, provenance
        self._head = target.lm_head.weight.detach()
        self._order, self._order_epoch = torch.empty(0, dtype=torch.int64), -1
        self._loss = drafter_loss
        self._capture = capture

    @property
    def module(self) -> nn.Module:
        """The drafter."""
        return self._drafter

    @property
    def tokens_per_step(self) -> int:
        """Block rows per optimiser step, most steps."""
        return self._recipe.batch_rows * self._recipe.anchors * self._recipe.short_block

    def warm_up(self, mode: CompileMode, report: Callable[[str], None]) -> None:
        """Choose compiled or eager for the target's capture and for the drafter's step."""
        device = self._head.device
        tokens = self._text.tokens[self._rows(0).to(device)].long()
        for rotary in (*self._target.rotary.values(), self._drafter.rotary):
            rotary.inverse_on(device)  # filled here: a first use inside a compiled step would compile it twice

        def probe_capture(function: Callable[..., Tensor]) -> None:
            function(self._target, tokens, self._drafter.config.target_layer_ids)

        self._capture = choose_compiled(
            (_capture_flex, capture), probe_capture,
            name="target capture", device=device, mode=mode, report=report,
        )  # fmt: skip

        def probe(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
            loss, _ = function(self._drafter, self._head, *self._inputs(0), self._recipe)
            loss.backward()  # type: ignore[no-untyped-call]
            self._drafter.zero_grad(set_to_none=True)

        self._loss = choose_compiled(
            (drafter_loss,), probe, name="drafter step", device=device, mode=mode, report=report
        )
        self._drafter.zero_grad(set_to_none=True)

    def loss(self, step: int) -> Tensor:
        """Return the weighted loss of the step's blocks."""
        loss, _ = self._loss(self._drafter, self._head, *self._inputs(step), self._recipe)
        return loss

    def after_step(self, progress: float) -> None:
        """Nothing follows a step."""

    def validate(self) -> dict[str, float]:
        """Evaluate on held-out prefixes, greedy and sampled."""
        result: dict[str, float] = {}
        for kind, text in self._held_out.items():
            found = evaluate(self._drafter, self._target, text, self._recipe.num_eval_draft_tokens)
            result |= {f"{kind}_{name}": value for name, value in found.items()}
        return result

    def export(self) -> None:
        """Write the bf16 drafter in Laguna's native format."""
        save_drafter(self._drafter, self._out, dtype=torch.bfloat16, provenance=self._provenance)

    def _rows(self, step: int) -> Tensor:
        """Return which sequences a step reads, [B] int64 on the CPU: every epoch covers the text in a new order."""
        count, rows = len(self._text.tokens), self._recipe.batch_rows
        per_epoch = max(1, count // rows)
        epoch, index = divmod(step, per_epoch)
        if self._order_epoch != epoch:
            generator = torch.Generator().manual_seed(self._recipe.seed * 7919 + epoch)
            self._order, self._order_epoch = torch.randperm(count, generator=generator), epoch
        return self._order[index * rows : (index + 1) * rows]

    def _inputs(self, step: int) -> tuple[Tensor, Tensor, Blocks]:
        recipe, config = self._recipe, self._drafter.config
        rows = self._rows(step)
        tokens = self._text.tokens[rows.to(self._text.tokens.device)].long()
        is_long = recipe.long_every > 0 and step % recipe.long_every == recipe.long_every - 1
        slots = config.draft_block_size if is_long else min(recipe.short_block, config.draft_block_size)
        loss_mask = self._text.written_mask(rows)
        generator = torch.Generator().manual_seed(recipe.seed * 104_729 + step)
        anchors, valid = sample_anchors(loss_mask, recipe.anchors, generator)
        device = tokens.device
        blocks = make_blocks(
            tokens, loss_mask.to(device), anchors.to(device), valid.to(device), slots, config.mask_token_id
        )
        with torch.no_grad():
            aux = self._capture(self._target, tokens, config.target_layer_ids)
            embeds = self._target.embed(blocks.input_ids)
        return embeds, aux.clone(), blocks


def capture(target: LagunaForCausalLM, tokens: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """Return the raw residuals after the given target layers, [B, S, m, D], without gradients."""
    return _capture(target, tokens, layer_ids, "sdpa")


def _capture_flex(target: LagunaForCausalLM, tokens: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    return _capture(target, tokens, layer_ids, "auto")


def _capture(
    target: LagunaForCausalLM, tokens: Tensor, layer_ids: tuple[int, ...], attention: Backend
) -> Tensor:
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        aux = target.forward_dense(tokens, tap_layer_ids=layer_ids, attention=attention).aux_hidden_states
    assert aux is not None
    return aux


@torch.no_grad()
def evaluate(
    drafter: DFlashDrafter, target: LagunaForCausalLM, text: Generated, num_draft_tokens: int, rows: int = 16
) -> dict[str, float]:
    """Measure acceptance at every position of held-out text written by the target.

    A draft is accepted when it equals the text's token: the target's argmax for greedy text, its sample
    otherwise; the drafter then samples with the same noise, as the engine does.

    Args:
        drafter: The network.
        target: Its target.
        text: Sequences with their noise, all of one kind.
        num_draft_tokens: G.
        rows: Sequences at once.

    Returns:
        tau_chain, eal, pos_acc_k and cond_acc_k for k = 1..G, distinct 8-gram share.
    """
    prefix = int(text.prefix_lengths[0])
    written = text.tokens.shape[1] - prefix
    lengths, corrects, masks = [], [], []
    for start in range(0, len(text.tokens), rows):
        correct, mask = _correct_slots(
            drafter, target, text, start, min(start + rows, len(text.tokens)), num_draft_tokens
        )
        lengths.append(accepted_lengths(correct, mask).view(-1, written))
        corrects.append(correct)
        masks.append(mask)
    accepted, correct, mask = torch.cat(lengths), torch.cat(corrects), torch.cat(masks)
    full = mask.all(dim=1)  # anchors too near the end would understate L
    result = {
        "tau_chain": tau_chain(accepted, 0, written),
        "eal": expected_acceptance_length(accepted_lengths(correct[full])),
        "distinct_8gram": distinct_ngram_share(text.tokens[:, prefix:]),
    }
    for k, (pos, cond) in enumerate(
        zip(position_accuracy(correct, mask), conditional_accuracy(correct, mask), strict=True), 1
    ):
        result[f"pos_acc_{k}"], result[f"cond_acc_{k}"] = pos, cond
    return result


def _correct_slots(
    drafter: DFlashDrafter,
    target: LagunaForCausalLM,
    text: Generated,
    start: int,
    stop: int,
    num_draft_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Propose at every written position of rows start..stop; returns correct and mask, [N, G] bool each."""
    tokens = text.tokens[start:stop].long()
    device, prefix = tokens.device, int(text.prefix_lengths[0])
    loss_mask = text.written_mask(slice(start, stop)).to(device)
    anchors = torch.arange(prefix, tokens.shape[1], device=device).expand(len(tokens), -1).contiguous()
    blocks = make_blocks(
        tokens, loss_mask, anchors, torch.ones_like(anchors, dtype=torch.bool),
        num_draft_tokens + 1, drafter.config.mask_token_id,
    )  # fmt: skip
    aux = capture(target, tokens, drafter.config.target_layer_ids)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = block_hidden(drafter, target.embed(blocks.input_ids), aux, blocks)
        logits = target.compute_logits(hidden.flatten(0, 1)).float()
    if text.temperature > 0:
        # [B, S, V], by the position the drafted token would stand at: the noise its target token was chosen with.
        noise = text.noise(start, stop)
        at = blocks.positions[:, 1:].clamp(max=tokens.shape[1] - 1)
        sequence = torch.arange(len(tokens), device=device).repeat_interleave(anchors.shape[1])[:, None]
        logits = logits + text.temperature * noise[sequence, at].flatten(0, 1)
    correct = logits.argmax(-1).view_as(blocks.labels) == blocks.labels
    return correct & blocks.label_mask, blocks.label_mask


def train_drafter(
    recipe: DrafterRecipe,
    *,
    target: LagunaForCausalLM,
    text: Generated,
    held_out: dict[str, Generated],
    work: Path,
    out: Path,
    provenance: dict[str, str],
    seconds: float | None = None,
    steps: int | None = None,
    compile_mode: CompileMode = "auto",
    where: str = "drafter recipe",
) -> tuple[DFlashDrafter, dict[str, float]]:
    """Train a drafter on text its target wrote.

    Args:
        recipe: Shape, loss, optimiser.
        target: The target, on the training device; frozen.
        text: From :func:`lean_laguna.train.selfgen.generate_text`, on the training device.
        held_out: ``greedy`` and ``sampled`` evaluation text.
        work: Where ``state.pt`` lives; resumed from if it is there.
        out: Where the bf16 drafter and the log go.
        provenance: Written into the checkpoint: target hash, data hash and the like.
        seconds: Time from this call to the end of training, compilation included; or
        steps: Optimiser steps in all.
        compile_mode: Whether to try ``torch.compile``.
        where: Name of the recipe for errors.

    Returns:
        The drafter and the final evaluation's figures.

    Raises:
        ConfigError: The drafter does not fit the target.
        DataError: Training diverged.
    """
    started = time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    log = RunLog(out / "train_log.jsonl")
    target.requires_grad_(False)
    drafter = build_drafter(recipe, target, text.tokens.device, where)
    task = DrafterTask(drafter, target, recipe, text, held_out, out, provenance)
    parameters = sum(p.numel() for p in drafter.parameters())
    log.write(
        "start",
        parameters=parameters,
        sequences=len(text.tokens),
        torch=torch.__version__,
        recipe=asdict(recipe),
    )
    task.warm_up(compile_mode, lambda line: log.write("compile", what=line))
    spent = time.monotonic() - started
    budget = Budget(seconds=None if seconds is None else max(1.0, seconds - spent), steps=steps)
    result = train(
        task, recipe.optimizer, budget, work, log,
        val_every_s=recipe.val_every_s, save_every_s=recipe.save_every_s,
    )  # fmt: skip
    return drafter, result
