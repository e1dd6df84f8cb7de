"""Training a drafter on its frozen target's own text; target states are captured, never stored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lean_laguna.core.errors import ConfigError, DataError
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import make_drafter, save_drafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.block_attention import AttentionKind
from lean_laguna.train.blocks import Blocks, make_blocks, sample_anchors
from lean_laguna.train.compiling import CompileMode, choose_compiled, fastest
from lean_laguna.train.curves import write_curves
from lean_laguna.train.documents import Document
from lean_laguna.train.drafter_eval import evaluate_documents, evaluate_kinds
from lean_laguna.train.drafter_forward import TargetStates, capture, drafter_loss
from lean_laguna.train.drafter_start import build_drafter
from lean_laguna.train.generated import Generated
from lean_laguna.train.loop import Echo, RunLog, print_event, train
from lean_laguna.train.metrics import accepted_lengths
from lean_laguna.train.processes import Processes, join, shard, whole_state
from lean_laguna.train.recipe import DrafterRecipe
from lean_laguna.train.run_state import STATE
from lean_laguna.train.schedule import Budget
from lean_laguna.train.text_source import GeneratedSource, TextBatch, TextSource

# On the H200 a compiled capture ended in CUBLAS_STATUS_EXECUTION_FAILED and broke the CUDA context for good;
# eager does 850,000 block rows a second there.
DEFAULT_COMPILE: CompileMode = "off"
LOG, CURVES = "train_log.jsonl", "curves.html"
HeldOut = dict[str, Generated] | list[Document]


class DrafterTask:
    """Drafter training as the loop sees it; owns the drafter, borrows the frozen target."""

    def __init__(
        self,
        drafter: DFlashDrafter,
        target: LagunaForCausalLM,
        recipe: DrafterRecipe,
        source: TextSource,
        held_out: HeldOut,
        out: Path,
        provenance: dict[str, str],
        processes: Processes = Processes(),  # noqa: B008 (frozen)
    ) -> None:
        """Set up; ``held_out`` is text by kind, or documents, that are only evaluated on."""
        self._drafter, self._target, self._recipe = drafter, target, recipe
        self._source, self._held_out, self._out, self._provenance = source, held_out, out, provenance
        self._processes = processes
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
        tokens = self._source.batch(self._rows(0)).tokens
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
        if self._recipe.attention != "auto":
            return cast(AttentionKind, self._recipe.attention)
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
            self._drafter, self._head, *self._inputs(step), self._recipe, self._attention,
            self._processes.mean,
        )  # fmt: skip
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
        """Evaluate on held-out text."""
        drafter = self.served_drafter()
        if not self._processes.is_first:
            return {}
        count = self._recipe.num_eval_draft_tokens
        if isinstance(self._held_out, dict):
            return evaluate_kinds(drafter, self._target, self._held_out, count)
        return evaluate_documents(drafter, self._target, self._held_out, count)

    def export(self) -> None:
        """Write the bf16 drafter in the format of its recipe."""
        drafter = self.served_drafter()
        if self._processes.is_first:
            save_drafter(
                drafter,
                self._out,
                format=drafter.config.format,
                dtype=torch.bfloat16,
                provenance=self._provenance,
            )

    def served_drafter(self) -> DFlashDrafter:
        """Return a whole copy whose weights are those that are written; every process must call it.

        Rounding them changes which drafts are accepted, so what is measured is what will be served.
        """
        copy = make_drafter(self._drafter.config).requires_grad_(False)
        state = whole_state(self._drafter, self._processes)
        copy.load_state_dict({name: value.to(torch.bfloat16) for name, value in state.items()})
        return copy.to(self._head.device)

    def _rows(self, step: int) -> Tensor:
        """Return which sequences a step reads, [B] int64 on the CPU: each epoch has an order of its own."""
        count, rows = self._source.num_rows, self._recipe.batch_rows
        per_epoch = max(1, count // rows)
        epoch, index = divmod(step, per_epoch)
        if self._order_epoch != epoch:
            generator = torch.Generator().manual_seed(self._recipe.seed * 7919 + epoch)
            self._order, self._order_epoch = torch.randperm(count, generator=generator), epoch
        return self._order[index * rows : (index + 1) * rows]

    def _inputs(self, step: int) -> tuple[Tensor, TargetStates, Blocks]:
        recipe, config = self._recipe, self._drafter.config
        rows, own = self._rows(step), self._processes.own
        whole = self._source.batch(rows)
        is_long = recipe.long_every > 0 and step % recipe.long_every == recipe.long_every - 1
        slots = config.draft_block_size if is_long else min(recipe.short_block, config.draft_block_size)
        generator = torch.Generator().manual_seed(recipe.seed * 104_729 + step)
        # Drawn for the whole batch, so that the number of processes changes nothing.
        anchors, valid = sample_anchors(whole.written, recipe.anchors, generator, whole.document_ids)
        tokens = own(whole.tokens)
        device = tokens.device
        documents = None if whole.document_ids is None else own(whole.document_ids).to(device)
        batch = TextBatch(tokens, own(whole.written), documents)
        blocks = make_blocks(
            tokens, batch.written.to(device), own(anchors).to(device), own(valid).to(device), slots,
            config.mask_token_id, documents, sample_from_anchor=config.sample_from_anchor,
        )  # fmt: skip
        self._last_mask = blocks.label_mask
        with torch.no_grad():
            states = self._source.states(
                own(rows), batch, self._target, config.target_layer_ids, self._capture
            )
            embeds = self._target.embed(blocks.input_ids)
        return embeds, states, blocks


def train_drafter(
    recipe: DrafterRecipe,
    *,
    target: LagunaForCausalLM,
    text: Generated | TextSource,
    held_out: HeldOut,
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
        text: What to read: sequences of :func:`lean_laguna.train.selfgen.generate_text`, on the training
            device, or rows of documents.
        held_out: ``greedy`` and ``sampled`` evaluation text, or documents.
        work: Folder of the state; resumed from if there is one.
        out: Where the bf16 drafter and the log go.
        provenance: Written into the checkpoint: target hash, data hash and the like.
        seconds: Time from this call to the end of training, compilation included; or
        steps: Optimiser steps in all.
        compile_mode: Whether to try ``torch.compile``.
        echo: Receives the log's events.
        where: Name of the recipe for errors.

    Returns:
        The drafter with the weights that were written, and the final evaluation's figures.

    Raises:
        ConfigError: The drafter does not fit the target.
        DataError: Training diverged.
    """
    started = time.monotonic()
    device = target.lm_head.weight.device
    processes = join(device)
    recipe = shared_recipe(recipe, processes.count, seconds, where)
    log = RunLog(out / LOG, echo, is_silent=not processes.is_first)
    log.open(is_resumed=(work / STATE).exists())
    target.requires_grad_(False)
    drafter = build_drafter(recipe, target, device, where)
    parameters = sum(p.numel() for p in drafter.parameters())
    shard(drafter, device, processes)
    source = GeneratedSource(text) if isinstance(text, Generated) else text
    if processes.count > 1 and source.num_rows < recipe.batch_rows:
        raise DataError(
            f"the text fills {source.num_rows} rows, and {processes.count} processes take "
            f"{recipe.batch_rows} at a time; start fewer processes"
        )
    task = DrafterTask(drafter, target, recipe, source, held_out, out, provenance, processes)
    log.write(
        "start",
        parameters=parameters,
        sequences=source.num_rows,
        processes=processes.count,
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
        log_every=recipe.log_every, processes=processes,
    )  # fmt: skip
    if processes.is_first:
        write_curves(log.path, out / CURVES, f"{out.name}: training")
    return task.served_drafter(), result


def shared_recipe(
    recipe: DrafterRecipe, num_processes: int, seconds: float | None, where: str
) -> DrafterRecipe:
    """Return a recipe as several processes share it: a step has the same rows, maybe in fewer batches.

    Args:
        recipe: As for one process.
        num_processes: Each takes an equal part of every batch.
        seconds: A limit in time; None for one in steps.
        where: Name of the recipe for errors.

    Raises:
        ConfigError: They cannot do it alike.
    """
    if num_processes == 1:
        return recipe
    if seconds is not None:
        raise ConfigError("several processes count steps, since their clocks differ; give --steps")
    if recipe.optimizer.kind == "muon":
        raise ConfigError(
            f"{where}: 'optimizer.kind' muon needs whole matrices; use adamw with several processes"
        )
    rows = math.lcm(recipe.batch_rows, num_processes)
    if recipe.accumulate % (rows // recipe.batch_rows):
        raise ConfigError(
            f"{where}: 'batch_rows' ({recipe.batch_rows}) times 'accumulate' ({recipe.accumulate}) must be a "
            f"multiple of the processes, {num_processes}"
        )
    return replace(recipe, batch_rows=rows, accumulate=recipe.accumulate * recipe.batch_rows // rows)
