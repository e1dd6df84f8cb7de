"""A drafter as training begins: fresh weights, or another drafter's, and the refusal of what does not fit."""

from __future__ import annotations

import torch

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import ConfigError
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import load_drafter, make_drafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.recipe import DrafterRecipe


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
