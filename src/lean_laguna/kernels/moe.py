"""Routing and experts, each row's bits its own."""

from __future__ import annotations

import torch

from lean_laguna.kernels.elementwise import sigmoid, silu_and_mul, softcap
from lean_laguna.kernels.linear import linear


def route(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, cap: float = 0.0, norm_topk: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by biased sigmoid scores and weigh them by the unbiased ones.

    Args:
        logits: Router logits, [T, E] float32.
        bias: Correction bias used for the choice only, [E] float32.
        top_k: Experts A per token.
        cap: tanh cap on the logits; 0 is none.
        norm_topk: Divide the chosen scores by their sum.

    Returns:
        Weights [T, A] float32 and expert ids [T, A] int64, best first; equal scores go to the lower id.

    Source: transformers, LagunaTopKRouter.
    """
    scores = sigmoid(softcap(logits, cap) if cap > 0 else logits)
    # A stable sort, not topk: topk leaves open which of two equal scores it takes.
    expert_ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = scores.gather(1, expert_ids)
    if norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, expert_ids


def moe_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
) -> torch.Tensor:
    """Run each row through its experts, only those that a row chose, and add up in ascending expert id.

    Args:
        x: Rows, [T, D].
        gate_up: [E, 2F, D], gate first.
        down: [E, D, F].
        weights: [T, A] float32.
        expert_ids: [T, A] int64.

    Returns:
        [T, D] float32.
    """
    num_rows, top_k = expert_ids.shape
    ascending, order = expert_ids.sort(dim=-1)
    weights = weights.gather(1, order)
    # Rows of an expert lie together, in row order.
    by_expert = torch.argsort(ascending.view(-1), stable=True)
    counts = torch.bincount(ascending.view(-1), minlength=gate_up.shape[0]).tolist()
    rows = x.index_select(0, by_expert // top_k)
    out = x.new_empty(num_rows * top_k, down.shape[1])
    first = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(first, first + count)
            out[part] = linear(silu_and_mul(linear(rows[part], gate_up[expert])), down[expert])
            first += count
    terms = torch.empty_like(out, dtype=torch.float32)
    terms[by_expert] = out.float()
    terms = terms.view(num_rows, top_k, -1) * weights.unsqueeze(-1)
    total = terms[:, 0].clone()
    for i in range(1, top_k):
        total += terms[:, i]
    return total


def dense_experts(
    gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Finish a bank of experts that all rows ran through: two products for the whole bank.

    For a small bank this beats visiting experts one by one: an expert with weight 0 adds an exact zero.

    Args:
        gate_up: What the bank's first product gave, [T, E, 2F], gate first.
        down: [D, E * F].
        weights: [T, E], 0 for experts not chosen.

    Returns:
        [T, D].
    """
    hidden = silu_and_mul(gate_up).mul_(weights.unsqueeze(-1))
    return linear(hidden.view(gate_up.shape[0], -1), down)
