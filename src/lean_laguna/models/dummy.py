"""Models of a published shape with random weights: for timing only, never for text.

Norms are one, correction biases zero and everything else normal, so routing is close to uniform: what vLLM's
``load_format: dummy`` leaves after its own weights are redrawn so. Weights are drawn where they will be used,
and are the same for the same seed, shape, device kind and number format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.dspark_config import DEFAULT_MARKOV_RANK, DSparkHeads
from lean_laguna.core.errors import CheckpointError, ConfigError, nearest
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.packed_parameters import materialise
from lean_laguna.models.shapes import SHAPES, drafter_shape, laguna_shape
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.models.unset import on_meta
from lean_laguna.quant.builds import build, class_of
from lean_laguna.quant.packed import PackedWeight
from lean_laguna.quant.random_weight import random_weight
from lean_laguna.quant.scheme import WeightScheme

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
    """Return a drafter's configuration: ``dummy`` is the shape's published one, else as for a target.

    ``dummy-dspark`` is that with DSpark's heads of their usual width.
    """
    if drafter in ("dummy", "dummy-dspark"):
        found = drafter_shape(ALIASES.get(shape, shape))
        return found if drafter == "dummy" else replace(found, dspark=DSparkHeads(DEFAULT_MARKOV_RANK))
    return DFlashConfig.from_file(resolve_model(drafter))


def dummy_target(
    config: LagunaConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    scheme: str = "bf16",
) -> LagunaForCausalLM:
    """Return a target with random weights, in evaluation mode, without gradients.

    Args:
        config: The target.
        dtype: Of weights that are not quantised.
        device: Where they are drawn.
        seed: Of the draw.
        scheme: How weights are stored, by a name of ``quant.builds``; quantised ones are kept packed, for
            kernels that take them so.

    Raises:
        ConfigError: No such scheme, or the shape does not fit it.
    """
    model = on_meta(lambda: LagunaForCausalLM(config))
    model.to(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    model.packed_weights = _random_weights(model, build(scheme), generator)
    joint = model.read_together() if device.type == "cuda" else None
    materialise(model, device, model.packed_weights, joint)
    model.reset_parameters(STD, generator)
    return model


def _random_weights(
    model: LagunaForCausalLM, schemes: Mapping[str, WeightScheme], generator: torch.Generator
) -> dict[str, PackedWeight]:
    packed: dict[str, PackedWeight] = {}
    for name, parameter in model.named_parameters():
        scheme = schemes.get(class_of(name) or "")
        if scheme is not None:
            shape, is_pair = tuple(parameter.shape), name.endswith("gate_up_proj")
            heights = (shape[-2] // 2,) * 2 if is_pair else (shape[-2],)
            packed[name] = random_weight(scheme, shape, heights, STD, generator)
    return packed


def dummy_drafter(
    config: DFlashConfig, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> DFlashDrafter:
    """Return a drafter with random weights, in evaluation mode, without gradients."""
    drafter = on_meta(lambda: DFlashDrafter(config) if config.dspark is None else DSparkDrafter(config))
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
