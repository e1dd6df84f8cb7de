"""Drafter losses: cross-entropy over block slots with decayed or D-PACE weights, chunked over the vocabulary.

Slot k = 1..G of a block predicts the token at anchor + k; slot 0 is the anchor and carries no loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Logits = Callable[[Tensor], Tensor]


def decay_weights(num_draft_tokens: int, loss_decay: float, device: torch.device | None = None) -> Tensor:
    """Return exp(-(k-1)/loss_decay) for k = 1..G, [G] float32: early slots matter most.

    Source: DFlash, section on training (fill-in layout).
    """
    return torch.exp(-torch.arange(num_draft_tokens, device=device, dtype=torch.float32) / loss_decay)


def dpace_weights(label_probs: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Return the detached D-PACE weights, [N, G] float32.

    u_j = sum over m >= j of the product over i <= m of ((1 - alpha) q_i + alpha): how much of the expected
    accepted length depends on slot j, smoothed by ``alpha``. Slots outside the mask neither get nor give
    weight.

    Args:
        label_probs: [N, G] drafter probability of the label.
        mask: [N, G] bool, a prefix of each block.
        alpha: Smoothing in 0..1.

    Source: speculators 0.9.0, losses/utils.py (D-PACE).
    """
    survival = torch.cumprod((1.0 - alpha) * label_probs.detach().float() + alpha, dim=1) * mask
    return survival.flip(1).cumsum(1).flip(1) * mask


def slot_nll(
    hidden: Tensor, labels: Tensor, compute_logits: Logits, chunk_rows: int = 65_536
) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of each label and whether the argmax is the label.

    The vocabulary projection runs in chunks whose logits are recomputed in the backward pass, so that no more
    than one chunk of logits exists at a time.

    Args:
        hidden: [N, G, D] final-normed drafter rows of slots 1..G.
        labels: [N, G] int64.
        compute_logits: [R, D] to [R, V].
        chunk_rows: Rows of logits at once.

    Returns:
        nll [N, G] float32 (differentiable) and correct [N, G] bool.
    """
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)

    def chunk_nll(part: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = compute_logits(part).float()
        return F.cross_entropy(logits, label, reduction="none"), logits.argmax(-1) == label

    nlls, corrects = [], []
    for start in range(0, len(rows), chunk_rows):
        part, label = rows[start : start + chunk_rows], flat[start : start + chunk_rows]
        if len(rows) > chunk_rows and torch.is_grad_enabled():
            nll, correct = checkpoint(chunk_nll, part, label, use_reentrant=False)
        else:
            nll, correct = chunk_nll(part, label)
        nlls.append(nll)
        corrects.append(correct)
    return torch.cat(nlls).view_as(labels), torch.cat(corrects).view_as(labels)


def weighted_mean(nll: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Return sum(w * nll) / sum(w) over the mask, a scalar; the scale of the weights does not matter."""
    kept = weights * mask
    return (nll * kept).sum() / kept.sum().clamp_min(1e-6)
