"""Confidence in drafts: from the head's logits to chances of survival, and how far those can be believed.

A draft survives when it and all before it are accepted. Calibration (sequential temperature scaling) divides
the logit of each position by a temperature, fitted from left to right so that the product is right; how often
drafts are accepted depends on how the target chooses, so greedy and sampled requests have their own.

Source: DSpark (arXiv 2607.05147), section 3.2 and appendix (STS).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_BINS = 20
_GRID = tuple(round(0.1 * 1.04**i, 4) for i in range(119))  # 0.1 to about 10


def survival(logits: Tensor, temperatures: Sequence[float] = ()) -> Tensor:
    """Return the chance that draft k and all before it are accepted, [..., G] float32.

    Args:
        logits: [..., G] of the confidence head.
        temperatures: Per position; those missing at the end repeat the last, none at all are ones.
    """
    divisors = torch.tensor(position_temperatures(temperatures, logits.shape[-1]), device=logits.device)
    return torch.cumprod(torch.sigmoid(logits.float() / divisors), dim=-1)


def position_temperatures(temperatures: Sequence[float], count: int) -> list[float]:
    """Return ``count`` temperatures: those given, the last of them repeated, or ones."""
    last = temperatures[-1] if temperatures else 1.0
    return [*temperatures[:count], *[last] * (count - len(temperatures))]


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


def fit_temperatures(logits: Tensor, accepted: Tensor) -> tuple[float, ...]:
    """Fit a temperature for each position, from left to right.

    Args:
        logits: [N, G] of the confidence head, of blocks as serving meets them.
        accepted: [N] int64, drafts accepted of each block.

    Returns:
        G temperatures.
    """
    found: list[float] = []
    before = torch.ones(len(logits), device=logits.device)
    for k in range(logits.shape[1]):
        happened = accepted > k
        scored = []
        for temperature in _GRID:
            predicted = before * torch.sigmoid(logits[:, k].float() / temperature)
            scored.append((calibration_error(predicted, happened), temperature))
        found.append(min(scored)[1])
        before = before * torch.sigmoid(logits[:, k].float() / found[-1])
    return tuple(found)


def survival_error(logits: Tensor, accepted: Tensor, temperatures: Sequence[float] = ()) -> list[float]:
    """Return the calibration error of each position's survival; blocks as in :func:`fit_temperatures`."""
    chances = survival(logits, temperatures)
    return [calibration_error(chances[:, k], accepted > k) for k in range(logits.shape[1])]
