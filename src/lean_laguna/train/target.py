"""Pretraining a Laguna target from nothing, by wall-clock budget, with aux-loss-free expert balancing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint import save_laguna
from lean_laguna.models.dense_attention import Backend
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.balance import dead_experts, expert_loads, max_violation, update_biases
from lean_laguna.train.compiling import CompileMode, choose_compiled
from lean_laguna.train.dataset import RowSampler, load_meta, load_tokens, validation_rows
from lean_laguna.train.loop import Echo, RunLog, print_event, train
from lean_laguna.train.recipe import TargetRecipe
from lean_laguna.train.run_state import STATE
from lean_laguna.train.schedule import Budget

MAX_SHARD_BYTES = 15 * 2**20  # files come back from the GPU machine one by one, 16 MiB each at most
LossFunction = Callable[[LagunaForCausalLM, Tensor], tuple[Tensor, Tensor]]


def build_target(recipe: TargetRecipe, device: torch.device, where: str) -> LagunaForCausalLM:
    """Make a target with fresh float32 weights, the same for the same seed.

    Matrices are N(0, init_std^2), those that write to the residual stream divided by sqrt(2 layers); norms
    are one, correction biases zero.
    """
    config = LagunaConfig.from_dict(recipe.model, where)
    model = LagunaForCausalLM(config)
    generator = torch.Generator().manual_seed(recipe.seed)
    residual_std = recipe.init_std / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "correction_bias" in name:
                parameter.zero_()
            elif parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                std = residual_std if ("o_proj" in name or "down" in name) else recipe.init_std
                parameter.normal_(0.0, std, generator=generator)
    return model.to(device)


def correction_biases(model: nn.Module) -> list[Tensor]:
    """Return the router biases [E] of the sparse layers in layer order; they never require gradients."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = [tensor for name, tensor in tensors if "correction_bias" in name]
    for tensor in found:
        tensor.requires_grad_(False)
    return found


def target_loss(model: LagunaForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Score the next token everywhere.

    Args:
        model: The target.
        rows: [B, S + 1] int64.

    Returns:
        nll [B * S] float32 and expert loads [L, E] float32.
    """
    return _target_loss(model, rows, "sdpa")


def _target_loss_flex(model: LagunaForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor]:
    return _target_loss(model, rows, "auto")


def _target_loss(model: LagunaForCausalLM, rows: Tensor, attention: Backend) -> tuple[Tensor, Tensor]:
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        out = model.forward_dense(rows[:, :-1], collect_expert_ids=True, attention=attention)
        logits = F.linear(out.hidden_states.flatten(0, 1), model.lm_head.weight)
    nll = F.cross_entropy(logits.float(), rows[:, 1:].reshape(-1), reduction="none")
    return nll, expert_loads(out.expert_ids, model.config.num_experts)


class TargetTask:
    """Pretraining as the loop sees it; owns the model and reads the data, writes only under ``out``."""

    def __init__(
        self,
        model: LagunaForCausalLM,
        recipe: TargetRecipe,
        train_tokens: Tensor,
        val_tokens: Tensor,
        chars_per_token: Tensor,
        out: Path,
    ) -> None:
        """Set up; ``out`` is the folder the bf16 checkpoint goes to."""
        self._model, self._recipe, self._out = model, recipe, out
        self._sampler = RowSampler(train_tokens, recipe.seq_len, recipe.batch_rows, recipe.seed)
        self._val_tokens, self._chars = val_tokens, chars_per_token
        self._biases = correction_biases(model)
        self._loads = torch.zeros(0)
        self._loss: LossFunction = target_loss

    @property
    def module(self) -> nn.Module:
        """The target."""
        return self._model

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens per optimiser step."""
        return self._recipe.seq_len * self._recipe.batch_rows

    def warm_up(self, mode: CompileMode, report: Callable[[str], None]) -> None:
        """Choose compiled or eager by timing both on a real batch."""
        rows = self._sampler.rows(0)
        for (
            rotary
        ) in self._model.rotary.values():  # a first use inside the compiled step would compile it twice
            rotary.inverse_on(rows.device)

        def probe(function: LossFunction) -> None:
            nll, _ = function(self._model, rows)
            nll.mean().backward()
            self._model.zero_grad(set_to_none=True)

        self._loss = choose_compiled(
            (_target_loss_flex, target_loss),
            probe,
            name="target step",
            device=rows.device,
            mode=mode,
            report=report,
        )
        self._model.zero_grad(set_to_none=True)

    def loss(self, step: int) -> Tensor:
        """Return the mean loss of the step's rows."""
        nll, loads = self._loss(self._model, self._sampler.rows(step))
        self._loads = loads.detach()
        return nll.mean()

    def details(self) -> dict[str, Any]:
        """Nothing but the loss is shown."""
        return {}

    def after_step(self, progress: float) -> None:
        """Move the correction biases; they rest in the last part, so that they fit the final weights."""
        step_size = self._recipe.bias_step if progress < self._recipe.bias_stop else 0.0
        update_biases(self._biases, self._loads, step_size)

    def validate(self) -> dict[str, float]:
        """Score the held-out stream."""
        recipe = self._recipe
        self._model.eval()
        figures = score_target(
            self._model, self._val_tokens, self._chars, recipe.seq_len, recipe.batch_rows, recipe.val_tokens
        )
        self._model.train()
        return figures

    def export(self) -> None:
        """Write the bf16 checkpoint in Hugging Face names, in shards small enough to travel."""
        state = {
            name: tensor if "correction_bias" in name else tensor.bfloat16()
            for name, tensor in self._model.state_dict().items()
        }
        save_laguna(state, self._model.config, self._out, max_shard_bytes=MAX_SHARD_BYTES)


@torch.no_grad()
def score_target(
    model: LagunaForCausalLM,
    tokens: Tensor,
    chars_per_token: Tensor,
    seq_len: int,
    batch_rows: int,
    max_tokens: int,
) -> dict[str, float]:
    """Score a held-out stream: bits per character, top-1, and the balance of the experts.

    Args:
        model: The target.
        tokens: [N] int32 on its device.
        chars_per_token: [V] characters that each id adds to the text.
        seq_len: Tokens per row; each row starts without context.
        batch_rows: Rows at once.
        max_tokens: Tokens to score at most, in rows spread over the stream.
    """
    rows = torch.cat(list(validation_rows(tokens, seq_len, max_tokens)))
    nll_sum = chars = 0.0
    count = right = 0
    loads = torch.zeros(())
    for batch in torch.split(rows, batch_rows):
        nll, hits, batch_loads = _score(model, batch)
        nll_sum += float(nll.double().sum())
        right += int(hits.sum())
        count += nll.numel()
        chars += float(chars_per_token[batch[:, 1:]].sum())
        loads = batch_loads + loads.to(batch_loads.device)
    return {
        "val_bits_per_char": nll_sum / math.log(2) / max(1.0, chars),
        "val_loss": nll_sum / count,
        "val_top1": right / count,
        "val_tokens": float(count),
        "max_violation": max_violation(loads),
        "dead_experts": float(dead_experts(loads)),
    }


def _score(model: LagunaForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return nll [B * S], whether the argmax was right [B * S], and expert loads [L, E]."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        out = model.forward_dense(rows[:, :-1], collect_expert_ids=True, attention="sdpa")
        logits = F.linear(out.hidden_states.flatten(0, 1), model.lm_head.weight).float()
    labels = rows[:, 1:].reshape(-1)
    nll = F.cross_entropy(logits, labels, reduction="none")
    return nll, logits.argmax(-1) == labels, expert_loads(out.expert_ids, model.config.num_experts)


def train_target(
    recipe: TargetRecipe,
    *,
    data: Path,
    work: Path,
    out: Path,
    device: torch.device,
    seconds: float | None = None,
    steps: int | None = None,
    compile_mode: CompileMode = "auto",
    echo: Echo = print_event,
    where: str = "target recipe",
) -> tuple[LagunaForCausalLM, dict[str, float]]:
    """Pretrain a target on prepared tokens.

    Args:
        recipe: Shape, optimiser, batch.
        data: Folder of :func:`lean_laguna.train.prepare.prepare_corpus`.
        work: Folder of the state; resumed from if there is one.
        out: Where the bf16 checkpoint and the log go.
        device: Training device.
        seconds: Time from this call to the end of training, loading and compilation included; or
        steps: Optimiser steps in all.
        compile_mode: Whether to try ``torch.compile``.
        echo: Receives the log's events.
        where: Name of the recipe for errors.

    Returns:
        The target and the final validation's figures.

    Raises:
        ConfigError: The recipe's model does not fit the data.
        DataError: The data is missing or damaged, or training diverged.
    """
    started = time.monotonic()
    meta: dict[str, Any] = load_meta(data)
    model = build_target(recipe, device, where)
    if model.config.vocab_size < meta["vocab_size"]:
        raise ConfigError(
            f"{where}: 'vocab_size' is {model.config.vocab_size}, but the tokenizer of '{data}' "
            f"has {meta['vocab_size']} ids"
        )
    log = RunLog(out / "train_log.jsonl", echo)
    log.open(is_resumed=(work / STATE).exists())
    task = TargetTask(
        model,
        recipe,
        load_tokens(data, "train").to(device),
        load_tokens(data, "val").to(device),
        torch.tensor(meta["chars_per_token"], device=device),
        out,
    )
    parameters = sum(p.numel() for p in model.parameters())
    log.write("start", parameters=parameters, train_tokens=meta["tokens"]["train"], torch=torch.__version__,
              device=_device_name(device), recipe=asdict(recipe), data_sha256=meta["sha256"])  # fmt: skip
    task.warm_up(compile_mode, lambda line: log.write("compile", what=line))
    spent = time.monotonic() - started
    budget = Budget(seconds=None if seconds is None else max(1.0, seconds - spent), steps=steps)
    result = train(
        task, recipe.optimizer, budget, work, log,
        val_every_s=recipe.val_every_s, save_every_s=recipe.save_every_s,
    )  # fmt: skip
    return model, result


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
