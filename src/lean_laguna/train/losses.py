"""Drafter losses: what a slot's proposal is worth, weighted over the slots of a block.

Slot k = 0..G-1 proposes the token after the anchor and k drafts. It is held against the text's token (cross
entropy) and, where the target's own distribution is at hand, against that (L1, KL and what is made of them).
The vocabulary projections run in chunks, so that no more than one chunk of logits exists at a time.

Source: training.md 1.7 and 2.2; DeepSpec deepspec/trainer/loss.py; speculators 0.9.0 losses/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lean_laguna.train.recipe import DrafterRecipe, LossTerms

Logits = Callable[[Tensor], Tensor]
_LEAST_OVERLAP = 1e-5
_LK_RATE = 3.0  # Source: LK losses (arXiv 2602.23881), the hybrid's best setting


def decay_weights(num_draft_tokens: int, loss_decay: float, device: torch.device | None = None) -> Tensor:
    """Return exp(-k / loss_decay) for k = 0..G-1, [G] float32: early drafts matter most.

    Source: DFlash, section on training; DSpark, eq. 9.
    """
    return torch.exp(-torch.arange(num_draft_tokens, device=device, dtype=torch.float32) / loss_decay)


def dpace_weights(acceptance: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """Return the detached D-PACE weights, [N, G] float32.

    u_j = sum over m >= j of the product over i <= m of ((1 - alpha) q_i + alpha): how much of the expected
    accepted length depends on slot j, smoothed by ``alpha``. Slots outside the mask neither get nor give
    weight.

    Args:
        acceptance: [N, G] probability that a draft is accepted, or of the label where only that is known.
        mask: [N, G] bool, a prefix of each block.
        alpha: Smoothing in 0..1.

    Source: speculators 0.9.0, losses/utils.py (D-PACE).
    """
    survival = torch.cumprod((1.0 - alpha) * acceptance.detach().float() + alpha, dim=1) * mask
    return survival.flip(1).cumsum(1).flip(1) * mask


@dataclass(frozen=True)
class SlotTerms:
    """What is known of each slot's proposal, [N, G] each.

    Attributes:
        nll: Negative log-likelihood of the label, float32.
        correct: Whether the likeliest token is the label.
        l1: Sum over words of |q - p|, float32; None without the target's distribution.
        kl: KL divergence from p to q, float32; None likewise.
        agrees: Whether the likeliest tokens of q and p are one; None likewise.
    """

    nll: Tensor
    correct: Tensor
    l1: Tensor | None = None
    kl: Tensor | None = None
    agrees: Tensor | None = None

    @property
    def overlap(self) -> Tensor:
        """Sum over words of min(p, q), [N, G] in 0..1: the acceptance of rejection sampling."""
        assert self.l1 is not None
        return (1.0 - 0.5 * self.l1).clamp(0.0, 1.0)


def slot_terms(
    rows: tuple[Tensor, ...],
    labels: Tensor,
    compute_logits: Callable[..., Tensor],
    teacher: Tensor | None = None,
    teacher_logits: Logits | None = None,
    *,
    temperature: float = 1.0,
    chunk_rows: int = 65_536,
) -> SlotTerms:
    """Score every slot's proposal; logits of a chunk are recomputed in the backward pass.

    Args:
        rows: Tensors [N, G, ...] that ``compute_logits`` makes a chunk's logits [R, V] of.
        labels: [N, G] int64.
        compute_logits: From chunks [R, ...] of ``rows`` to [R, V].
        teacher: [N, G, D] final-normed target rows, whose logits are the target's at these slots; or None.
        teacher_logits: [R, D] to [R, V]; without gradients.
        temperature: Both distributions are compared at this temperature.
        chunk_rows: Rows of logits at once.
    """
    flat = tuple(part.reshape(-1, *part.shape[2:]) for part in rows)
    flat_labels = labels.reshape(-1)
    flat_teacher = None if teacher is None else teacher.reshape(-1, teacher.shape[-1])

    def score(label: Tensor, taught: Tensor | None, *parts: Tensor) -> tuple[Tensor, ...]:
        logits = compute_logits(*parts).float()
        best = logits.argmax(-1)
        scored = (F.cross_entropy(logits, label, reduction="none"), best == label)
        if taught is None:
            return scored
        assert teacher_logits is not None
        with torch.no_grad():
            log_p = torch.log_softmax(teacher_logits(taught).float() / temperature, dim=-1)
            p = log_p.exp()
        log_q = torch.log_softmax(logits / temperature, dim=-1)
        l1 = (log_q.exp() - p).abs().sum(-1)
        kl = (p * (log_p - log_q)).sum(-1)
        return (*scored, l1, kl, best == p.argmax(-1))

    scored: list[tuple[Tensor, ...]] = []
    for start in range(0, len(flat_labels), chunk_rows):
        part = slice(start, start + chunk_rows)
        taught = None if flat_teacher is None else flat_teacher[part]
        parts = [rows[part] for rows in flat]
        if len(flat_labels) > chunk_rows and torch.is_grad_enabled():
            scored.append(checkpoint(score, flat_labels[part], taught, *parts, use_reentrant=False))
        else:
            scored.append(score(flat_labels[part], taught, *parts))
    return SlotTerms(*(torch.cat(values).view_as(labels) for values in zip(*scored, strict=True)))


def weighted_mean(
    values: Tensor, weights: Tensor, mask: Tensor, mean_over: Logits = lambda total: total
) -> Tensor:
    """Return sum(w * values) / sum(w) over the mask, a scalar; the scale of the weights does not matter.

    Args:
        values: [N, G].
        weights: [N, G] or broadcast to it.
        mask: [N, G] bool.
        mean_over: The mean of a value over processes: then the processes' results average to the mean over
            all slots of all of them.
    """
    kept = weights * mask
    return (values * kept).sum() / mean_over(kept.sum()).clamp_min(1e-6)


def block_loss(
    terms: SlotTerms,
    mask: Tensor,
    recipe: DrafterRecipe,
    confidence: Tensor | None = None,
    mean_over: Logits = lambda total: total,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of a batch of blocks and its parts.

    Args:
        terms: Of every slot.
        mask: [N, G] bool, the slots that count.
        recipe: Which terms, and how slots are weighted.
        confidence: [N, G] logits of the confidence head, or None.
        mean_over: As for :func:`weighted_mean`.

    Returns:
        The loss, a scalar, and its terms by name, unweighted and detached.
    """
    decayed = decay_weights(mask.shape[1], recipe.loss_decay, mask.device).expand(mask.shape)
    if recipe.loss == "dpace":
        likely = torch.exp(-terms.nll) if terms.l1 is None else terms.overlap
        weights = dpace_weights(likely, mask, recipe.dpace_alpha)
    else:
        weights = decayed
    total = terms.nll.new_zeros(())
    parts: dict[str, Tensor] = {}
    for name, weight, values in _distances(terms, recipe.terms):
        mean = weighted_mean(values, weights, mask, mean_over)
        parts[name] = mean.detach()
        total = total + weight * mean
    if confidence is not None and recipe.terms.confidence > 0:
        wanted = acceptance_targets(terms, recipe.terms.confidence_target)
        scores = F.binary_cross_entropy_with_logits(confidence, wanted, reduction="none")
        # Decayed whatever the other terms do: D-PACE is made of the acceptance that this term predicts.
        mean = weighted_mean(scores, decayed, mask, mean_over)
        parts["confidence"] = mean.detach()
        total = total + recipe.terms.confidence * mean
    return total, parts


def acceptance_targets(terms: SlotTerms, kind: str) -> Tensor:
    """Return what the confidence head shall predict, [N, G] float32 without gradients.

    ``overlap`` is the acceptance of rejection sampling; ``coupled`` a lower bound on that of draws with
    shared Gumbel noise, sum(min) / sum(max); ``greedy`` whether the likeliest tokens agree.
    """
    if kind == "greedy":
        assert terms.agrees is not None
        return terms.agrees.float()
    overlap = terms.overlap.detach()
    return overlap / (2.0 - overlap) if kind == "coupled" else overlap


def _distances(terms: SlotTerms, wanted: LossTerms) -> list[tuple[str, float, Tensor]]:
    """Return name, weight and [N, G] values of the terms with a weight."""
    found = [("ce", wanted.ce, terms.nll)]
    if wanted.needs_teacher:
        assert terms.l1 is not None
        assert terms.kl is not None
        overlap = 1.0 - 0.5 * terms.l1
        share = torch.exp(-_LK_RATE * overlap.detach())
        found += [
            ("l1", wanted.l1, terms.l1),
            ("kl", wanted.kl, terms.kl),
            ("lk", wanted.lk, -torch.log(overlap.clamp_min(_LEAST_OVERLAP))),
            ("lk_hybrid", wanted.lk_hybrid, share * terms.kl + (1.0 - share) * 0.5 * terms.l1),
        ]
    return [(name, weight, values) for name, weight, values in found if weight > 0]
