"""Confidence in drafts: from the head's logits to chances of survival, and how far those can be believed.

A draft survives when it and all before it are accepted. Calibration divides the logit of each position by a
temperature (the paper's sequential scaling) and adds a bias: the head is trained on the overlap of two
distributions, which is not how often a draft with shared noise, or a greedy one, is accepted. That depends on
how the target chooses, so greedy and sampled requests have their own.

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
    """Fit temperature and bias of each position by the likelihood of what happened to blocks that reached it.

    Args:
        logits: [N, G] of the confidence head, of blocks as serving meets them.
        accepted: [N] int64, drafts accepted of each block.

    Returns:
        G temperatures and biases, rounded as they are stored.
    """
    temperatures, biases = [], []
    for k in range(logits.shape[1]):
        reached = accepted >= k
        slope, bias = _fit_one(logits[reached, k].double(), (accepted[reached] > k).double())
        temperatures.append(round(1.0 / slope, 4))
        biases.append(round(bias, 4))
    return Calibration(tuple(temperatures), tuple(biases))


def _fit_one(logits: Tensor, happened: Tensor) -> tuple[float, float]:
    """Return slope and bias of a logistic regression, pulled towards 1 and 0; Newton's method."""
    features = torch.stack([logits, torch.ones_like(logits)], dim=1)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = start.clone()
    for _ in range(_NEWTON_STEPS):
        chances = torch.sigmoid(features @ found)
        slope = features.T @ (happened - chances) - _RIDGE * (found - start)
        curvature = (features * (chances * (1 - chances))[:, None]).T @ features + _RIDGE * torch.eye(
            2, dtype=torch.float64
        )
        step = torch.linalg.solve(curvature, slope)
        found = found + step.clamp(-1.0, 1.0)
    return max(_LEAST_SLOPE, float(found[0])), max(-_LARGEST_BIAS, min(_LARGEST_BIAS, float(found[1])))


def survival_error(logits: Tensor, accepted: Tensor, calibration: Calibration = Calibration()) -> list[float]:
    """Return the calibration error of each position's survival; blocks as in :func:`fit_calibration`."""
    chances = calibration.survival(logits)
    return [calibration_error(chances[:, k], accepted > k) for k in range(logits.shape[1])]
