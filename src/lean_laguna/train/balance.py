"""Aux-loss-free load balancing of routed experts, and how even the load is.

Source: DeepSeek-V3, section 2.1.2; training.md 7.5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expert_loads(expert_ids: list[Tensor], num_experts: int) -> Tensor:
    """Count the tokens of each expert, [L, E] float32, from one [T, A] int tensor per sparse layer."""
    counts = [
        torch.zeros(num_experts, device=ids.device).scatter_add_(
            0, ids.reshape(-1).long(), torch.ones(ids.numel(), device=ids.device)
        )
        for ids in expert_ids
    ]
    return torch.stack(counts)


@torch.no_grad()
def update_biases(biases: list[Tensor], loads: Tensor, step_size: float) -> None:
    """Raise the bias of experts below the mean load and lower the others', in place.

    Args:
        biases: One [E] float32 per sparse layer, used for selection only.
        loads: [L, E].
        step_size: u; 0 leaves the biases as they are.
    """
    if step_size == 0.0:
        return
    changes = step_size * torch.sign(loads.mean(dim=1, keepdim=True) - loads)
    for bias, change in zip(biases, changes, strict=True):
        bias.add_(change.to(bias.dtype))


def max_violation(loads: Tensor) -> float:
    """Return max over loads [L, E] of load / mean load of the layer - 1 (MaxVio): 0 is perfect balance."""
    return float((loads.max(dim=1).values / loads.mean(dim=1).clamp_min(1e-9)).max() - 1.0)


def dead_experts(loads: Tensor) -> int:
    """Return how many experts received no token at all; ``loads`` is [L, E]."""
    return int((loads == 0).sum())
