"""Models of a published shape with random weights: for timing only, never for text.

Norms are one, correction biases zero and everything else normal, so routing is close to uniform: what vLLM's
``load_format: dummy`` leaves after its own weights are redrawn so. Weights are drawn where they will be used,
and are the same for the same seed, shape, device kind and number format.
"""

from __future__ import annotations

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import CheckpointError, ConfigError, nearest
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.shapes import SHAPES, drafter_shape, laguna_shape
from lean_laguna.models.tokenizer import Tokenizer

STD = 0.02
ALIASES = {"laguna-s": "laguna-s-2.1"}


def target_config(shape: str) -> LagunaConfig:
    """Return a target's configuration: of a published shape, or of a checkpoint here by name or folder.

    Raises:
        ConfigError: Neither; names what there is. Or the checkpoint's configuration is wrong.
    """
    name = ALIASES.get(shape, shape)
    if name in SHAPES:
        return laguna_shape(name)
    try:
        folder = resolve_model(shape)
    except CheckpointError:
        known = (*SHAPES, *ALIASES)
        raise ConfigError(
            f"shape '{shape}' is neither a published shape ({', '.join(known)}) nor a checkpoint here"
            f"{nearest(shape, known)}"
        ) from None
    return LagunaConfig.from_file(folder)


def drafter_config(drafter: str, shape: str) -> DFlashConfig:
    """Return a drafter's configuration: ``dummy`` is the shape's published one, else as for a target."""
    if drafter == "dummy":
        return drafter_shape(ALIASES.get(shape, shape))
    return DFlashConfig.from_file(resolve_model(drafter))


def dummy_target(
    config: LagunaConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LagunaForCausalLM:
    """Return a target with random weights, in evaluation mode, without gradients."""
    with torch.device("meta"):
        model = LagunaForCausalLM(config)
    _materialise(model, dtype, device)
    model.reset_parameters(STD, torch.Generator(device).manual_seed(seed))
    return model


def dummy_drafter(
    config: DFlashConfig, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> DFlashDrafter:
    """Return a drafter with random weights, in evaluation mode, without gradients."""
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    _materialise(drafter, dtype, device)
    if drafter.d2t is not None:
        drafter.d2t.zero_()
    drafter.init_weights(STD, torch.Generator(device).manual_seed(seed))
    return drafter


def _materialise(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    model.requires_grad_(False).eval()
    model.to(dtype).to_empty(device=device)


def dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer whose token i is written ``<i>``: nobody takes that for a model's text."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, "<0>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)
