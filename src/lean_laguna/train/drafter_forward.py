"""What a drafter computes in training and evaluation: its target's states, its block rows, its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.models.dense_attention import reset_positions
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.block_attention import AttentionKind, BlockAttention
from lean_laguna.train.blocks import Blocks
from lean_laguna.train.losses import Logits, SlotTerms, block_loss, slot_terms
from lean_laguna.train.recipe import DrafterRecipe

CHUNK_LOGITS = 1 << 29  # rows x words of logits at once on a GPU: 2 GiB in float32
CPU_CHUNK_LOGITS = 1 << 26


@dataclass(frozen=True)
class TargetStates:
    """What a drafter reads of its target, of B sequences.

    Attributes:
        taps: [B, S, m, D] raw residuals after the tapped layers.
        last: [B, S, D] after the final norm, which the lm_head makes logits of.
    """

    taps: Tensor
    last: Tensor


@torch.no_grad()
def capture(
    target: LagunaForCausalLM, tokens: Tensor, layer_ids: tuple[int, ...], document_ids: Tensor | None = None
) -> TargetStates:
    """Run the target over whole sequences, without gradients.

    Args:
        target: The target.
        tokens: [B, S] int64.
        layer_ids: Decoder layers, 0-based.
        document_ids: [B, S] int64, or None where each sequence is one document.

    Returns:
        Its states, bfloat16 on a GPU.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        out = target.forward_dense(
            tokens, document_ids=document_ids, tap_layer_ids=layer_ids, attention="sdpa"
        )
    assert out.aux_hidden_states is not None
    return TargetStates(out.aux_hidden_states, out.hidden_states)


def block_hidden(
    drafter: DFlashDrafter, embeds: Tensor, aux: Tensor, blocks: Blocks, attention: AttentionKind = "dense"
) -> Tensor:
    """Run the drafter over blocks of B sequences.

    Args:
        drafter: The network.
        embeds: [N, Q, D] target embeddings of the block inputs.
        aux: [B, S, m, D] target taps.
        blocks: From :func:`lean_laguna.train.blocks.make_blocks`.
        attention: How blocks attend.

    Returns:
        [N, G, D], the final-normed rows that predict.
    """
    batch, length = aux.shape[:2]
    config = drafter.config
    attend = BlockAttention(
        blocks.anchors, length, config.layer_windows, config.layer_causal, blocks.document_ids, attention
    )
    if blocks.document_ids is None:
        positions = torch.arange(length, device=aux.device).repeat(batch)
    else:
        positions = reset_positions(blocks.document_ids).flatten()
    hidden = drafter.forward_dense(embeds, blocks.positions, aux.flatten(0, 1), positions, attend)
    return hidden[:, config.first_slot :]


def draft_logits(drafter: DFlashDrafter, head: Tensor, hidden: Tensor, *markov: Tensor) -> Tensor:
    """Return the logits of proposals, [..., V], the bias by the previous token's row included.

    Args:
        drafter: The network.
        head: [V, D] the target's lm_head.
        hidden: [..., D] from :func:`block_hidden`.
        *markov: For DSpark, [..., r] rows of the tokens before the drafts.
    """
    logits = F.linear(hidden, head)
    if isinstance(drafter, DSparkDrafter):
        logits = logits + drafter.markov_bias(markov[0])
    return logits


def proposal_rows(drafter: DFlashDrafter, hidden: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
    """Return what :func:`draft_logits` reads of each slot, the tokens before the drafts being the text's."""
    if isinstance(drafter, DSparkDrafter):
        return hidden, drafter.markov_rows(previous)
    return (hidden,)


def drafter_loss(
    drafter: DFlashDrafter,
    head: Tensor,
    embeds: Tensor,
    states: TargetStates,
    blocks: Blocks,
    recipe: DrafterRecipe,
    attention: AttentionKind = "dense",
    mean_over: Logits = lambda total: total,
) -> tuple[Tensor, dict[str, Tensor], SlotTerms]:
    """Return the loss of a batch of blocks (scalar), its parts, and what is known of each slot.

    Args:
        drafter: The network.
        head: [V, D] the target's frozen lm_head.
        embeds: [N, Q, D].
        states: Of the target.
        blocks: Anchors, labels and masks.
        recipe: Terms and weighting.
        attention: How blocks attend.
        mean_over: The mean of a value over processes; see :func:`lean_laguna.train.losses.weighted_mean`.
    """
    on_gpu = embeds.is_cuda
    chunk = max(1, (CHUNK_LOGITS if on_gpu else CPU_CHUNK_LOGITS) // head.shape[0])
    with torch.autocast(embeds.device.type, torch.bfloat16, enabled=on_gpu):
        hidden = block_hidden(drafter, embeds, states.taps, blocks, attention)
        rows = proposal_rows(drafter, hidden, blocks.previous)
        teacher = teacher_rows(states.last, blocks) if recipe.terms.needs_teacher else None
        terms = slot_terms(
            rows,
            blocks.labels,
            lambda *parts: draft_logits(drafter, head, *parts),
            teacher,
            lambda part: F.linear(part, head),
            temperature=recipe.terms.temperature,
            chunk_rows=chunk,
        )
        has_confidence = isinstance(drafter, DSparkDrafter) and drafter.confidence_weight is not None
        confidence = None
        if has_confidence and recipe.terms.confidence > 0:
            assert isinstance(drafter, DSparkDrafter)
            confidence = drafter.confidence_logits(*rows)
    loss, parts = block_loss(terms, blocks.label_mask, recipe, confidence, mean_over)
    return loss, parts, terms


def teacher_rows(last: Tensor, blocks: Blocks) -> Tensor:
    """Return the target rows whose logits are for the labels, [N, G, D]: those one position before."""
    batch, length, width = last.shape
    num_drafts = blocks.labels.shape[1]
    at = blocks.anchors[..., None] + torch.arange(num_drafts, device=last.device)
    at = at.clamp(max=length - 1).view(batch, -1)
    sequence = torch.arange(batch, device=last.device)[:, None]
    return last[sequence, at].view(-1, num_drafts, width)
