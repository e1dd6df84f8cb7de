"""Blocks to train a drafter on: anchors, inputs, labels. Who may see what is in ``block_attention``.

A block at anchor a holds the token at a (known) and masks at a+1, a+2, ...; its drafts are the tokens at a+1,
a+2, ... A mask predicts the token where it stands, or with ``sample_from_anchor`` the one after, and then the
anchor's slot predicts, too. A block sees target states of positions strictly before a: at inference the
anchor's own state does not exist yet.
Source: training.md 1.3-1.5; DeepSpec common.py (contiguous supervision).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lean_laguna.models.dense_attention import reset_positions


@dataclass(frozen=True)
class Blocks:
    """The blocks of B sequences, A each, Q slots each, G of which predict; N = B * A.

    Attributes:
        anchors: [B, A] int64, sorted; invalid ones stand at position 0 and carry no label.
        input_ids: [N, Q] int64, the anchor's token, then masks.
        positions: [N, Q] int64, anchor + slot, counted within the anchor's document.
        labels: [N, G] int64, the tokens after the anchor.
        label_mask: [N, G] bool, a prefix of each block: supervised tokens of the anchor's document.
        previous: [N, G] int64, the tokens before the labels: the anchor's, then the labels but the last.
        document_ids: [B, S] int64, or None where each sequence is one document.
    """

    anchors: Tensor
    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    label_mask: Tensor
    previous: Tensor
    document_ids: Tensor | None = None


def sample_anchors(
    loss_mask: Tensor,
    num_anchors: int,
    generator: torch.Generator,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw anchors without replacement among positions a whose token and successor are both supervised.

    Args:
        loss_mask: [B, S] bool on the CPU, True on tokens that the target wrote.
        num_anchors: A, anchors per sequence.
        generator: CPU generator.
        document_ids: [B, S] on the CPU; the successor must be of the same document.

    Returns:
        anchors [B, A] int64, sorted, and valid [B, A] bool; rows with too few candidates are filled with 0.
    """
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
    if document_ids is not None:
        candidates = candidates & (document_ids[:, :-1] == document_ids[:, 1:])
    keys = torch.rand(candidates.shape, generator=generator).masked_fill_(~candidates, -1.0)
    values, chosen = keys.topk(min(num_anchors, keys.shape[1]), dim=1)
    chosen = chosen.masked_fill(values < 0, keys.shape[1] + 1)
    chosen, _ = chosen.sort(dim=1)
    valid = chosen <= keys.shape[1]
    return chosen.masked_fill(~valid, 0), valid


def make_blocks(
    tokens: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    valid: Tensor,
    num_slots: int,
    mask_token_id: int,
    document_ids: Tensor | None = None,
    *,
    sample_from_anchor: bool = False,
) -> Blocks:
    """Lay out blocks at the given anchors.

    Args:
        tokens: [B, S] int64.
        loss_mask: [B, S] bool.
        anchors: [B, A] int64.
        valid: [B, A] bool.
        num_slots: Q, the anchor's slot included.
        mask_token_id: Token whose embedding fills slots 1..Q-1.
        document_ids: [B, S] int64, or None where each sequence is one document.
        sample_from_anchor: Whether the anchor's slot predicts, too.
    """
    batch, length = tokens.shape
    num_drafts = num_slots if sample_from_anchor else num_slots - 1
    reach = anchors[..., None] + torch.arange(num_drafts + 1, device=tokens.device)  # [B, A, G + 1]
    inside = reach < length
    flat = reach.clamp(max=length - 1).view(batch, -1)
    gathered = tokens.gather(1, flat).view_as(reach)
    supervised = loss_mask.gather(1, flat).view_as(reach) & inside & valid[..., None]
    places = anchors
    if document_ids is not None:
        documents = document_ids.gather(1, flat).view_as(reach)
        supervised &= documents == documents[..., :1]
        places = reset_positions(document_ids).gather(1, anchors)
    label_mask = torch.cumprod(supervised[..., 1:].long(), dim=-1).bool()
    slots = torch.arange(num_slots, device=tokens.device)
    input_ids = torch.where(slots == 0, gathered[..., :1], mask_token_id)
    count = anchors.numel()
    return Blocks(
        anchors,
        input_ids.view(count, num_slots),
        (places[..., None] + slots).view(count, num_slots),
        gathered[..., 1:].reshape(count, -1),
        label_mask.view(count, -1),
        gathered[..., :-1].reshape(count, -1),
        document_ids,
    )
