"""Routing and experts, each row's bits its own.

One definition, three ways to run it that give the same bits: for each row, the sum in ascending expert id of
down_e(silu(gate_e(x)) * up_e(x) * weight), each product in a tile of ``ROW_TILE`` rows. An expert that a row
did not choose has weight 0 and adds an exact zero, so a tile may run experts that some of its rows did not
choose.
"""

from __future__ import annotations

import torch

from lean_laguna.kernels.elementwise import add_up, sigmoid, silu_and_mul, softcap
from lean_laguna.kernels.linear import ROW_TILE, batched_matmul, linear

# Up to so many experts, one product over the whole bank does well.
MAX_BANK = 16
# Up to so many experts in use, running them one by one beats one batched product over the whole bank.
FEW_EXPERTS = 6
# From so many tiles on, grouping rows by expert beats running the bank on every tile.
_MANY_TILES = 5


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
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """Run each row through its experts and add up in ascending expert id.

    Args:
        x: Rows, [T, D].
        gate_up: [E, 2F, D], gate first.
        down: [E, D, F].
        weights: [T, A] float32.
        expert_ids: [T, A] int64.

    Returns:
        [T, D].
    """
    num_tiles = -(-x.shape[0] // ROW_TILE)
    if gate_up.shape[0] > MAX_BANK or num_tiles >= _MANY_TILES or x.shape[0] % ROW_TILE:
        return _by_expert(x, gate_up, down, weights, expert_ids)
    by_expert = x.new_zeros(x.shape[0], gate_up.shape[0]).scatter_(1, expert_ids, weights.to(x.dtype))
    if num_tiles == 1:
        return _on_tile(x, gate_up, down, by_expert, expert_ids)
    tiles = zip(x.split(ROW_TILE), by_expert.split(ROW_TILE), expert_ids.split(ROW_TILE), strict=True)
    return torch.cat([_on_tile(rows, gate_up, down, scale, ids) for rows, scale, ids in tiles])


def _on_tile(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    by_expert: torch.Tensor,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """Run one tile [ROW_TILE, D] with weights [ROW_TILE, E] through a bank."""
    used = set(expert_ids.flatten().tolist())
    if len(used) <= FEW_EXPERTS:
        total: torch.Tensor | None = None
        for expert in sorted(used):
            hidden = silu_and_mul(linear(x, gate_up[expert])).mul_(by_expert.narrow(1, expert, 1))
            term = linear(hidden, down[expert])
            total = term if total is None else total.add_(term)
        assert total is not None, "every row chose an expert"
        return total
    joint = batched_matmul(x.expand(gate_up.shape[0], -1, -1), gate_up.transpose(1, 2))
    hidden = silu_and_mul(joint).mul_(by_expert.t().unsqueeze(-1))
    terms = batched_matmul(hidden, down.transpose(1, 2))
    return add_up(terms.view(1, len(terms), -1), terms.new_empty(1, terms[0].numel())).view_as(terms[0])


def _by_expert(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """Gather the rows of each expert in use, run them in tiles, and bring the terms back to their rows."""
    num_rows, top_k = expert_ids.shape
    ascending, order = expert_ids.sort(dim=-1)
    # Rows of an expert lie together, in row order.
    by_expert = torch.argsort(ascending.view(-1), stable=True)
    counts = torch.bincount(ascending.view(-1), minlength=gate_up.shape[0]).tolist()
    rows = x.index_select(0, by_expert // top_k)
    scale = weights.gather(1, order).view(-1).index_select(0, by_expert).to(x.dtype).unsqueeze(-1)
    terms = x.new_empty(num_rows * top_k, down.shape[1])
    first = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(first, first + count)
            hidden = silu_and_mul(linear(rows[part], gate_up[expert])).mul_(scale[part])
            terms[part] = linear(hidden, down[expert])
            first += count
    by_row = torch.empty_like(terms)
    by_row[by_expert] = terms
    by_row = by_row.view(num_rows, top_k, -1)
    total = by_row[:, 0].clone()
    for i in range(1, top_k):
        total.add_(by_row[:, i])
    return total
