"""What a drafter computes in training and evaluation: its target's states, its block rows, its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.blocks import BlockAttention, Blocks
from lean_laguna.train.losses import decay_weights, dpace_weights, slot_nll, weighted_mean
from lean_laguna.train.recipe import DrafterRecipe


@torch.no_grad()
def capture(target: LagunaForCausalLM, tokens: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """Return the raw residuals after the given target layers, without gradients.

    Args:
        target: The target.
        tokens: [B, S] int64.
        layer_ids: Decoder layers, 0-based.

    Returns:
        [B, S, m, D], bfloat16 on a GPU.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        aux = target.forward_dense(tokens, tap_layer_ids=layer_ids, attention="sdpa").aux_hidden_states
    assert aux is not None
    return aux


def block_hidden(drafter: DFlashDrafter, embeds: Tensor, aux: Tensor, blocks: Blocks) -> Tensor:
    """Run the drafter over blocks of B sequences.

    Args:
        drafter: The network.
        embeds: [N, Q, D] target embeddings of the block inputs.
        aux: [B, S, m, D] target taps.
        blocks: From :func:`lean_laguna.train.blocks.make_blocks`.

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
