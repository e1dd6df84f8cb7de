"""What a conversion cost: perplexity and greedy agreement of a target on a text, acceptance of a drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.core.errors import DataError
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.tokenizer import Tokenizer

WINDOW = 512
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TextQuality:
    """Two checkpoints on the same text, in windows of ``WINDOW`` tokens.

    Attributes:
        num_tokens: Tokens predicted.
        perplexity_before: Of the original.
        perplexity_after: Of the converted one.
        greedy_agreement: Share of positions where both find the same token the likeliest.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    greedy_agreement: float


@dataclass(frozen=True)
class DrafterQuality:
    """Mean acceptance length of a drafter before and after, greedy, on the same prompts."""

    num_prompts: int
    num_speculative_tokens: int
    acceptance_length_before: float | None
    acceptance_length_after: float | None


def compare_on_text(
    before: Path,
    after: Path,
    text: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> TextQuality:
    """Score a text by two checkpoints, one after the other, so that only one is in memory.

    Args:
        before: The original target; its tokenizer is used.
        after: The converted one.
        text: Plain text.
        device: Where they run.
        dtype: Of the weights and the arithmetic.
        max_tokens: Use no more of the text's tokens than these.
        progress: Called with tokens scored, tokens to score and which checkpoint it is.

    Raises:
        DataError: The text has fewer than two tokens.
        CheckpointError: A checkpoint cannot be loaded.
    """
    ids = Tokenizer.from_dir(before).encode(text)[:max_tokens]
    if len(ids) < 2:
        raise DataError(f"the text to check on has {len(ids)} tokens; expected at least 2")
    tokens = torch.tensor(ids)
    scores = [
        _score(folder, tokens, device, dtype, progress, num_scored)
        for folder, num_scored in ((before, 0), (after, len(ids)))
    ]
    losses, likeliest = zip(*scores, strict=True)
    return TextQuality(
        losses[0].numel(),
        math.exp(losses[0].mean().item()),
        math.exp(losses[1].mean().item()),
        (likeliest[0] == likeliest[1]).float().mean().item(),
    )


def compare_acceptance(
    target: str,
    before: Path,
    after: Path,
    prompts: Sequence[str],
    *,
    num_speculative_tokens: int = 7,
    max_tokens: int = 64,
    device: str = "auto",
    progress: Progress | None = None,
) -> DrafterQuality:
    """Measure a drafter's mean acceptance length before and after, by greedy generation.

    Args:
        target: The target that it drafts for.
        before: The original drafter.
        after: The converted one.
        prompts: Texts to continue.
        num_speculative_tokens: Draft tokens per step, no more than the drafter's limit.
        max_tokens: Tokens per prompt.
        device: Where they run.
        progress: Called with drafters measured, 2 and which is next.

    Raises:
        CheckpointError: A checkpoint cannot be loaded.
        ConfigError: The drafter is not this target's.
    """
    found = []
    for i, folder in enumerate((before, after)):
        speculation = {"model": str(folder), "num_speculative_tokens": num_speculative_tokens}
        llm = LLM(target, speculative_config=speculation, device=device)
        if progress is not None:
            progress(i, 2, f"{folder.name}: acceptance")
        llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=max_tokens))
        found.append(llm.stats().speculation.mean_acceptance_length)
    return DrafterQuality(len(prompts), num_speculative_tokens, found[0], found[1])


def _score(
    folder: Path,
    tokens: Tensor,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None,
    num_scored: int,
) -> tuple[Tensor, Tensor]:
    """Return losses and likeliest tokens of a text's tokens but the first of each window."""
    model = load_laguna(folder, device=device, dtype=dtype)
    losses, likeliest = [], []
    with torch.inference_mode():
        for i, window in enumerate(tokens.split(WINDOW)):
            if progress is not None:
                progress(num_scored + i * WINDOW, 2 * len(tokens), f"{folder.name}: perplexity")
            if len(window) < 2:
                continue
            given, expected = window[:-1].to(device), window[1:].to(device)
            logits = model.compute_logits(model.forward_dense(given[None]).hidden_states[0])
            losses.append(F.cross_entropy(logits, expected, reduction="none").cpu())
            likeliest.append(logits.argmax(-1).cpu())
    return torch.cat(losses), torch.cat(likeliest)
