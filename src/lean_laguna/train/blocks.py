"""Blocks to train a DFlash drafter on: anchors, inputs, labels, and who may see what.

A block at anchor a holds the token at a (known) and masks at a+1, a+2, ...; slot k predicts the token at a +
k. It sees target states of positions strictly before a: at inference the anchor's own state does not exist
yet. Source: training.md 1.3-1.5; DeepSpec common.py (contiguous supervision); vLLM (window per query).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of B sequences, A each, Q slots each; N = B * A.

    Attributes:
        anchors: [B, A] int64, sorted; invalid ones stand at position 0 and carry no label.
        input_ids: [N, Q] int64, the anchor's token, then masks.
        positions: [N, Q] int64, anchor + slot.
        labels: [N, Q - 1] int64, the tokens of slots 1..Q-1.
        label_mask: [N, Q - 1] bool, a prefix of each block: supervised tokens of the anchor's document.
    """

    anchors: Tensor
    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    label_mask: Tensor


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw anchors without replacement among positions a whose token and successor are both supervised.

    Args:
        loss_mask: [B, S] bool on the CPU, True on tokens that the target wrote.
        num_anchors: A, anchors per sequence.
        generator: CPU generator.

    Returns:
        anchors [B, A] int64, sorted, and valid [B, A] bool; rows with too few candidates are filled with 0.
    """
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
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
    """
    batch, length = tokens.shape
    slots = torch.arange(num_slots, device=tokens.device)
    positions = anchors[..., None] + slots  # [B, A, Q]
    inside = positions < length
    flat = positions.clamp(max=length - 1).view(batch, -1)
    gathered = tokens.gather(1, flat).view_as(positions)
    supervised = loss_mask.gather(1, flat).view_as(positions) & inside & valid[..., None]
    if document_ids is not None:
        documents = document_ids.gather(1, flat).view_as(positions)
        supervised &= documents == documents[..., :1]
    label_mask = torch.cumprod(supervised[..., 1:].long(), dim=-1).bool()
    input_ids = torch.where(slots == 0, gathered, mask_token_id)
    count = anchors.numel()
    return Blocks(
        anchors,
        input_ids.view(count, num_slots),
        positions.view(count, num_slots),
        gathered[..., 1:].reshape(count, -1),
        label_mask.view(count, -1),
    )


def context_mask(anchors: Tensor, num_slots: int, length: int, window: int | None) -> Tensor:
    """Return which context positions each block row sees, [B, A * Q, S] bool.

    Row (a, k) sees i < a, and with a window i > a + k - window.
    """
    batch = anchors.shape[0]
    keys = torch.arange(length, device=anchors.device)
    rows = anchors[..., None] + torch.arange(num_slots, device=anchors.device)
    seen = (keys < anchors[..., None, None]).expand(-1, -1, num_slots, -1)
    if window is not None:
        seen = seen & (keys > rows[..., None] - window)
    return seen.reshape(batch, -1, length)


def block_mask(num_slots: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """Return which rows of its own block each row sees, [Q, Q] bool."""
    slots = torch.arange(num_slots, device=device)
    distance = slots[:, None] - slots
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance < window) & (distance > -window)
    return seen


@dataclass(frozen=True)
class BlockAttention:
    """The ``attend`` that ``DFlashDrafter.forward_dense`` asks for, over B sequences of S context rows.

    Scores against the context and against the own block are softmaxed together, in float32.

    Attributes:
        anchors: [B, A] int64.
        length: S.
        layer_windows: Per draft layer, its window or None.
        layer_causal: Per draft layer, causal inside the block.
        document_ids: [B, S] int64 or None.
    """

    anchors: Tensor
    length: int
    layer_windows: tuple[int | None, ...]
    layer_causal: tuple[bool, ...]
    document_ids: Tensor | None = None

    def __call__(
        self, layer: int, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor
    ) -> Tensor:
        """Attend; q [N, Q, H, P], context k, v [B * S, J, P], block k, v [N, Q, J, P] -> [N, Q, H, P]."""
        num_blocks, slots, heads, size = q.shape
        batch, per_sequence = self.anchors.shape
        kv_heads = context_k.shape[1]
        window = self.layer_windows[layer]
        groups = heads // kv_heads
        q = q * size**-0.5
        # b sequence, n block in it, q slot, j kv head, g query heads of one kv head, p size, s context
        # position, t block row
        grouped = q.view(batch, per_sequence, slots, kv_heads, groups, size)
        keys = context_k.view(batch, self.length, kv_heads, size)
        values = context_v.view(batch, self.length, kv_heads, size)
        own_keys = block_k.view(batch, per_sequence, slots, kv_heads, size)
        own_values = block_v.view(batch, per_sequence, slots, kv_heads, size)
        far = torch.einsum("bnqjgp,bsjp->bjgnqs", grouped, keys)
        near = torch.einsum("bnqjgp,bntjp->bjgnqt", grouped, own_keys)
        seen_far = context_mask(self.anchors, slots, self.length, window)
        if self.document_ids is not None:
            own = self.document_ids.gather(1, self.anchors)[..., None, None]
            same = (self.document_ids[:, None, None, :] == own).expand(-1, -1, slots, -1)
            seen_far = seen_far & same.reshape(seen_far.shape)
        seen_far = seen_far.view(batch, 1, 1, per_sequence, slots, self.length)
        seen_near = block_mask(slots, window, self.layer_causal[layer], q.device)
        low = torch.finfo(torch.float32).min
        scores = torch.cat(
            [far.float().masked_fill(~seen_far, low), near.float().masked_fill(~seen_near, low)], dim=-1
        )
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        far_weights, near_weights = weights[..., : self.length], weights[..., self.length :]
        out = torch.einsum("bjgnqs,bsjp->bnqjgp", far_weights, values) + torch.einsum(
            "bjgnqt,bntjp->bnqjgp", near_weights, own_values
        )
        return out.reshape(num_blocks, slots, heads, size)
