"""Training a drafter on its frozen target's own text; target states are captured, never stored."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import ConfigError
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import load_drafter, make_drafter, save_drafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.block_attention import AttentionKind
from lean_laguna.train.blocks import Blocks, make_blocks, sample_anchors
from lean_laguna.train.compiling import CompileMode, choose_compiled, fastest
from lean_laguna.train.drafter_eval import evaluate_kinds
from lean_laguna.train.drafter_forward import TargetStates, capture, drafter_loss
from lean_laguna.train.generated import Generated
from lean_laguna.train.loop import Echo, RunLog, print_event, train
from lean_laguna.train.metrics import accepted_lengths
from lean_laguna.train.recipe import DrafterRecipe
from lean_laguna.train.run_state import STATE
from lean_laguna.train.schedule import Budget

# On the H200 a compiled capture ended in CUBLAS_STATUS_EXECUTION_FAILED and broke the CUDA context for good;
# eager does 850,000 block rows a second there.
DEFAULT_COMPILE: CompileMode = "off"


def build_drafter(
    recipe: DrafterRecipe, target: LagunaForCausalLM, device: torch.device, where: str
) -> DFlashDrafter:
    """Make a drafter with float32 weights for this target: fresh ones, or a warm start's where it has them.

    Raises:
        ConfigError: The recipe's drafter does not fit the target, or the warm start does not fit the recipe.
    """
    config = DFlashConfig.from_dict(recipe.model, where)
    config.check_target(target.config, where)
    if config.has_own_lm_head:
        raise ConfigError(
            f"{where}: 'draft_vocab_size' is {config.draft_vocab_size}; a drafter is trained with its "
            f"target's lm_head, so it must be {config.vocab_size}"
        )
    if recipe.terms.confidence > 0 and (config.dspark is None or not config.dspark.has_confidence):
        raise ConfigError(f"{where}: 'terms.confidence' is set, but the drafter has no confidence head")
    drafter = make_drafter(config)
    drafter.init_weights(generator=torch.Generator().manual_seed(recipe.seed))
    if recipe.warm_start:
        _take_weights(drafter, load_drafter(resolve_model(recipe.warm_start), target.config), recipe, where)
    return drafter.to(device)


def _take_weights(drafter: DFlashDrafter, source: DFlashDrafter, recipe: DrafterRecipe, where: str) -> None:
    """Copy the block's weights, and the heads where the source has them; all or nothing of the block."""
    theirs = source.state_dict()
    heads = ("markov_w1", "markov_w2", "confidence_weight", "confidence_bias")
    mine = {
        name: value for name, value in drafter.state_dict().items() if name in theirs or name not in heads
    }
    for name, value in mine.items():
        found = theirs.get(name)
        if found is None or found.shape != value.shape:
            shape = "nothing" if found is None else f"shape {list(found.shape)}"
            raise ConfigError(
                f"{where}: 'warm_start' {recipe.warm_start} has {shape} for {name}, where the recipe's "
                f"drafter has shape {list(value.shape)}"
            )
    for field in ("target_layer_ids", "mask_token_id", "layer_windows", "layer_causal"):
        ours, given = getattr(drafter.config, field), getattr(source.config, field)
        if ours != given:
            raise ConfigError(
                f"{where}: 'warm_start' {recipe.warm_start} was trained with '{field}' {given}, and the "
                f"recipe's drafter has {ours}"
            )
    drafter.load_state_dict(drafter.state_dict() | {name: theirs[name] for name in mine})


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
        self._attention: AttentionKind = "dense"
        self._details: dict[str, Tensor] = {}

    @property
    def module(self) -> nn.Module:
        """The drafter."""
        return self._drafter

    @property
    def tokens_per_step(self) -> int:
        """Block rows per optimiser step, most steps."""
        recipe = self._recipe
        return recipe.batch_rows * recipe.anchors * recipe.short_block * recipe.accumulate

    def warm_up(self, mode: CompileMode, report: Callable[[str], None]) -> None:
        """Choose how blocks attend, and compiled or eager for the capture and for the drafter's step."""
        device = self._head.device
        tokens = self._text.tokens[self._rows(0).to(device)].long()
        for rotary in (*self._target.rotary.values(), self._drafter.rotary):
            rotary.inverse_on(device)  # a first use inside a compiled step would compile it twice

        def probe_capture(function: Callable[..., TargetStates]) -> None:
            function(self._target, tokens, self._drafter.config.target_layer_ids)

        self._capture = choose_compiled(
            (capture,), probe_capture, name="target capture", device=device, mode=mode, report=report
        )
        self._attention = self._choose_attention(device, report)

        def probe(function: Callable[..., Any]) -> None:
            loss, _, _ = function(self._drafter, self._head, *self._inputs(0), self._recipe, self._attention)
            loss.backward()
            self._drafter.zero_grad(set_to_none=True)

        self._loss = choose_compiled(
            (drafter_loss,), probe, name="drafter step", device=device, mode=mode, report=report
        )
        self._drafter.zero_grad(set_to_none=True)

    def _choose_attention(self, device: torch.device, report: Callable[[str], None]) -> AttentionKind:
        """Return the recipe's way, or the faster of the two plain ones; on a CPU the lighter one."""
        wanted = self._recipe.attention
        if wanted in ("dense", "sdpa", "flex"):
            return cast(AttentionKind, wanted)
        if wanted != "auto":
            raise ConfigError(f"'attention' is '{wanted}'; accepted: auto, dense, sdpa, flex")
        if device.type == "cpu":
            return "sdpa"
        kinds: tuple[AttentionKind, ...] = ("dense", "sdpa")

        def probe(kind: AttentionKind) -> None:
            loss, _, _ = drafter_loss(self._drafter, self._head, *self._inputs(0), self._recipe, kind)
            loss.backward()
            self._drafter.zero_grad(set_to_none=True)

        return fastest(kinds, probe, name="attention of blocks", device=device, report=report)

    def loss(self, step: int) -> Tensor:
        """Return the weighted loss of a batch of blocks."""
        loss, parts, terms = self._loss(
            self._drafter, self._head, *self._inputs(step), self._recipe, self._attention
        )
        mask = self._last_mask
        self._details = parts | {"acceptance": ((terms.correct & mask).sum(0) / mask.sum(0).clamp_min(1))}
        self._details["eal"] = (accepted_lengths(terms.correct, mask) + 1).float().mean()
        if terms.l1 is not None:
            overlap = terms.overlap.detach() * mask
            self._details["tau_prob"] = 1 + torch.cumprod(overlap, 1).sum(1).mean()
        return loss

    def details(self) -> dict[str, Any]:
        """Return the last batch's loss terms, acceptance per draft (the text as the judge) and lengths."""
        return {
            name: [round(v, 4) for v in value.tolist()] if value.ndim else round(float(value), 4)
            for name, value in self._details.items()
        }

    def after_step(self, progress: float) -> None:
        """Nothing follows a step."""

    def validate(self) -> dict[str, float]:
        """Evaluate on held-out prefixes, greedy and sampled."""
        return evaluate_kinds(self._drafter, self._target, self._held_out, self._recipe.num_eval_draft_tokens)

    def export(self) -> None:
        """Write the bf16 drafter in Laguna's native format."""
        save_drafter(self._drafter, self._out, dtype=torch.bfloat16, provenance=self._provenance)

    def _rows(self, step: int) -> Tensor:
        """Return which sequences a step reads, [B] int64 on the CPU: each epoch has an order of its own."""
        count, rows = len(self._text.tokens), self._recipe.batch_rows
        per_epoch = max(1, count // rows)
        epoch, index = divmod(step, per_epoch)
        if self._order_epoch != epoch:
            generator = torch.Generator().manual_seed(self._recipe.seed * 7919 + epoch)
            self._order, self._order_epoch = torch.randperm(count, generator=generator), epoch
        return self._order[index * rows : (index + 1) * rows]

    def _inputs(self, step: int) -> tuple[Tensor, TargetStates, Blocks]:
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
            tokens, loss_mask.to(device), anchors.to(device), valid.to(device), slots, config.mask_token_id,
            sample_from_anchor=config.sample_from_anchor,
        )  # fmt: skip
        self._last_mask = blocks.label_mask
        with torch.no_grad():
            states = self._capture(self._target, tokens, config.target_layer_ids)
            embeds = self._target.embed(blocks.input_ids)
        return embeds, TargetStates(states.taps.clone(), states.last.clone()), blocks


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
    compile_mode: CompileMode = DEFAULT_COMPILE,
    echo: Echo = print_event,
    where: str = "drafter recipe",
) -> tuple[DFlashDrafter, dict[str, float]]:
    """Train a drafter on text its target wrote.

    Args:
        recipe: Shape, loss, optimiser.
        target: The target, on the training device; frozen.
        text: From :func:`lean_laguna.train.selfgen.generate_text`, on the training device.
        held_out: ``greedy`` and ``sampled`` evaluation text.
        work: Folder of the state; resumed from if there is one.
        out: Where the bf16 drafter and the log go.
        provenance: Written into the checkpoint: target hash, data hash and the like.
        seconds: Time from this call to the end of training, compilation included; or
        steps: Optimiser steps in all.
        compile_mode: Whether to try ``torch.compile``.
        echo: Receives the log's events.
        where: Name of the recipe for errors.

    Returns:
        The drafter and the final evaluation's figures.

    Raises:
        ConfigError: The drafter does not fit the target.
        DataError: Training diverged.
    """
    started = time.monotonic()
    log = RunLog(out / "train_log.jsonl", echo)
    log.open(is_resumed=(work / STATE).exists())
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
        provenance=provenance,
    )
    task.warm_up(compile_mode, lambda line: log.write("compile", what=line))
    spent = time.monotonic() - started
    budget = Budget(seconds=None if seconds is None else max(1.0, seconds - spent), steps=steps)
    result = train(
        task, recipe.optimizer, budget, work, log,
        val_every_s=recipe.val_every_s, save_every_s=recipe.save_every_s, accumulate=recipe.accumulate,
    )  # fmt: skip
    return drafter, result
