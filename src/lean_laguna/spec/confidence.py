"""Confidence in drafts: from the head's logits to chances of survival, and how far those can be believed.

A draft survives when it and all before it are accepted. Calibration divides the logit of each position by a
temperature and adds a bias: the head is trained on the overlap of two distributions, which is not how often a
draft with shared noise, or a greedy one, is accepted. That depends on how the target chooses, so greedy and
sampled requests have their own. Positions are fitted from left to right (the paper's sequential scaling),
each to the survival that it and those before it predict together: verification is decided by that.

Source: DSpark (arXiv 2607.05147), section 3.2 and appendix (STS).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 10
_NEWTON_STEPS = 30
_RIDGE = 2.0  # pulls towards the uncalibrated head where a position is seldom reached
_LEAST_SLOPE, _LARGEST_BIAS = 0.02, 8.0


@dataclass(frozen=True)
class Calibration:
    """How the confidence logits of each position are read: sigmoid(logit / temperature + bias).

    Attributes:
        temperatures: Per position; those missing at the end repeat the last, none at all are ones.
        biases: Per position; likewise, zeros.
    """

    temperatures: tuple[float, ...] = ()
    biases: tuple[float, ...] = ()

    def padded(self, count: int) -> tuple[list[float], list[float]]:
        """Return temperatures and biases of ``count`` positions."""
        return _padded(self.temperatures, count, 1.0), _padded(self.biases, count, 0.0)

    def survival(self, logits: Tensor) -> Tensor:
        """Return the chance of each draft and all before it, [..., G] float32, of logits [..., G]."""
        temperatures, biases = (
            torch.tensor(values, device=logits.device) for values in self.padded(logits.shape[-1])
        )
        return torch.cumprod(torch.sigmoid(logits.float() / temperatures + biases), dim=-1)


def _padded(values: Sequence[float], count: int, default: float) -> list[float]:
    last = values[-1] if values else default
    return [*values[:count], *[last] * (count - len(values))]


def calibration_error(predicted: Tensor, happened: Tensor, num_bins: int = NUM_BINS) -> float:
    """Return the expected calibration error: the gap between predictions and what happened, over bins.

    Args:
        predicted: [N] in 0..1.
        happened: [N] bool.
        num_bins: Bins of equal width.
    """
    bins = (predicted * num_bins).long().clamp(max=num_bins - 1)
    gaps = predicted.new_zeros(num_bins).index_add(0, bins, predicted - happened.float())
    return float(gaps.abs().sum() / max(1, len(predicted)))


def fit_calibration(logits: Tensor, accepted: Tensor) -> Calibration:
    """Fit temperature and bias of each position by the likelihood of which blocks survived it.

    Args:
        logits: [N, G] of the confidence head, of blocks as serving meets them.
        accepted: [N] int64, drafts accepted of each block.

    Returns:
        G temperatures and biases, rounded as they are stored; a position that no block reached keeps its own.
    """
    temperatures, biases = [], []
    before = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    for k in range(logits.shape[1]):
        position = logits[:, k].double()
        slope, bias = 1.0, 0.0
        if bool((accepted >= k).any()):
            slope, bias = _fit_one(position, before, (accepted > k).double())
        before = before * torch.sigmoid(position * slope + bias)
        temperatures.append(round(1.0 / slope, 4))
        biases.append(round(bias, 4))
    return Calibration(tuple(temperatures), tuple(biases))


def _fit_one(logits: Tensor, before: Tensor, survived: Tensor) -> tuple[float, float]:
    """Return slope and bias that make ``before`` times their sigmoid likeliest, pulled towards 1 and 0.

    Fisher scoring; ``before`` [N] are the chances to reach the position, ones at the first: a plain logistic
    regression there.
    """
    features = torch.stack([logits, torch.ones_like(logits)], dim=1)
    start = logits.new_tensor([1.0, 0.0])
    found = start.clone()
    for _ in range(_NEWTON_STEPS):
        chances = torch.sigmoid(features @ found)
        survival = (before * chances).clamp(max=1.0 - 1e-9)
        weight = (1.0 - chances) / (1.0 - survival)
        slope = features.T @ (weight * (survived - survival)) - _RIDGE * (found - start)
        curvature = (features * (weight * (1.0 - chances) * survival)[:, None]).T @ features
        curvature += _RIDGE * torch.eye(2, dtype=logits.dtype, device=logits.device)
        found = found + torch.linalg.solve(curvature, slope).clamp(-1.0, 1.0)
    return max(_LEAST_SLOPE, float(found[0])), max(-_LARGEST_BIAS, min(_LARGEST_BIAS, float(found[1])))


def survival_error(chances: Tensor, accepted: Tensor) -> list[float]:
    """Return the calibration error of each position's survival.

    Args:
        chances: [N, G] from :meth:`Calibration.survival`.
        accepted: [N] int64, drafts accepted of each block.
    """
    return [calibration_error(chances[:, k], accepted > k) for k in range(chances.shape[1])]


def fit_and_check(logits: Tensor, accepted: Tensor, owners: Tensor) -> tuple[Calibration, Tensor]:
    """Fit a calibration on all blocks, and predict each half of them by a fit on the other half.

    Args:
        logits: [N, G], as for :func:`fit_calibration`.
        accepted: [N] int64.
        owners: [N] int64, the text a block is of; texts are dealt to the halves in turn, whole.

    Returns:
        The calibration, and [N, G] chances of survival, each from blocks of other texts; from all where there
        is but one text.
    """
    whole = fit_calibration(logits, accepted)
    is_even = owners % 2 == 0
    if not bool(is_even.any()) or bool(is_even.all()):
        return whole, whole.survival(logits)
    chances = torch.empty_like(logits, dtype=torch.float32)
    for half in (is_even, ~is_even):
        chances[half] = fit_calibration(logits[~half], accepted[~half]).survival(logits[half])
    return whole, chances
