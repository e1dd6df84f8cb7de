"""A drafter as training begins: fresh weights, or another drafter's, and the refusal of what does not fit."""

from __future__ import annotations

import torch

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import load_drafter, make_drafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.recipe import DrafterRecipe

_HEADS = ("markov_w1", "markov_w2", "confidence_weight", "confidence_bias")
_LIKE_THE_SOURCE = ("target_layer_ids", "mask_token_id", "layer_windows", "layer_causal")


def check_start(recipe: DrafterRecipe, target: LagunaConfig, where: str) -> DFlashConfig:
    """Refuse what cannot be trained, from configs alone: no weights are read, no device is touched.

    Args:
        recipe: Of the drafter.
        target: Config of its target.
        where: Name of the recipe for errors.

    Returns:
        The drafter's config.

    Raises:
        ConfigError: The recipe's drafter does not fit the target, the warm start does not fit the recipe, or
            blocks or evaluation do not fit the drafter.
    """
    config = DFlashConfig.from_dict(recipe.model, where)
    config.check_target(target, where)
    if config.has_own_lm_head:
        raise ConfigError(
            f"{where}: 'draft_vocab_size' is {config.draft_vocab_size}; a drafter is trained with its "
            f"target's lm_head, so it must be {config.vocab_size}"
        )
    if recipe.terms.confidence > 0 and (config.dspark is None or not config.dspark.has_confidence):
        raise ConfigError(f"{where}: 'terms.confidence' is set, but the drafter has no confidence head")
    if recipe.short_block <= config.first_slot:
        raise ConfigError(
            f"{where}: 'short_block' is {recipe.short_block}, which leaves no draft; 2 is the least"
        )
    if recipe.num_eval_draft_tokens > config.max_draft_tokens:
        raise ConfigError(
            f"{where}: 'num_eval_draft_tokens' is {recipe.num_eval_draft_tokens}, and this drafter makes "
            f"{config.max_draft_tokens} drafts at most"
        )
    if recipe.warm_start:
        source = DFlashConfig.from_file(resolve_model(recipe.warm_start))
        source.check_target(target, recipe.warm_start)
        _check_warm_start(config, source, recipe.warm_start, where)
    return config


def build_drafter(
    recipe: DrafterRecipe, target: LagunaForCausalLM, device: torch.device, where: str
) -> DFlashDrafter:
    """Make a drafter with float32 weights for this target: fresh ones, or a warm start's where it has them.

    Raises:
        ConfigError: As for :func:`check_start`.
    """
    config = check_start(recipe, target.config, where)
    drafter = make_drafter(config)
    drafter.init_weights(generator=torch.Generator().manual_seed(recipe.seed))
    if recipe.warm_start:
        theirs = load_drafter(resolve_model(recipe.warm_start), target.config).state_dict()
        mine = drafter.state_dict()
        drafter.load_state_dict(mine | {name: theirs[name] for name in mine if name in theirs})
    return drafter.to(device)


def _check_warm_start(config: DFlashConfig, source: DFlashConfig, name: str, where: str) -> None:
    """Refuse a source that lacks weights of the block, or has them in other shapes; heads may be new."""
    with torch.device("meta"):
        mine, theirs = (make_drafter(of).state_dict() for of in (config, source))
    for tensor, value in mine.items():
        found = theirs.get(tensor)
        if found is None and tensor in _HEADS:
            continue
        if found is None or found.shape != value.shape:
            shape = "nothing" if found is None else f"shape {list(found.shape)}"
            raise ConfigError(
                f"{where}: 'warm_start' {name} has {shape} for {tensor}, where the recipe's drafter has "
                f"shape {list(value.shape)}"
            )
    for field in _LIKE_THE_SOURCE:
        ours, given = getattr(config, field), getattr(source, field)
        if ours != given:
            raise ConfigError(
                f"{where}: 'warm_start' {name} was trained with '{field}' {given}, and the recipe's drafter "
                f"has {ours}"
            )
