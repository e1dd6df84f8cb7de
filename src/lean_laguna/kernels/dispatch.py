"""The kernels that models call: the right implementation for the device and for whether gradients are wanted.

With gradients, plain differentiable operations (torch.compile fuses them); without, on a CPU, the
row-invariant ``reference``; without, on a GPU, plain operations until the Triton twins are there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lean_laguna.kernels import reference
from lean_laguna.kernels.reference import (
    ROW_TILE,
    AttentionPlan,
    Tiles,
    moe_experts,
    paged_attention,
    plan_attention,
    rms_scale,
    rms_scale_,
    rotate_,
    softplus,
    store_kv,
)

__all__ = [
    "ROW_TILE",
    "AttentionPlan",
    "Tiles",
    "apply_rotary",
    "linear",
    "moe_experts",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rms_scale",
    "rms_scale_",
    "rotate_",
    "route",
    "silu_and_mul",
    "softplus",
    "store_kv",
]


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply rows [T, K] by a weight [N, K] to [T, N]; see ``reference.linear``."""
    if torch.is_grad_enabled() or not x.is_cpu:
        return F.linear(x, weight)
    return reference.linear(x, weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise [..., D] by its root mean square; see ``reference.rms_norm``."""
    if torch.is_grad_enabled() or not x.is_cpu:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return reference.rms_norm(x, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of [..., 2F]; see ``reference.silu_and_mul``."""
    if torch.is_grad_enabled() or not gate_up.is_cpu:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return reference.silu_and_mul(gate_up)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate R of the P dimensions of [T, H, P] with cos and sin [T, R]; see ``reference.apply_rotary``."""
    if torch.is_grad_enabled() or not x.is_cpu:
        rotary = cos.shape[-1]
        cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
        part = x[..., :rotary]
        first, second = part.chunk(2, dim=-1)
        rotated = part * cos + torch.cat((-second, first), dim=-1) * sin
        return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), dim=-1)
    return reference.apply_rotary(x, cos, sin)


def route(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, cap: float = 0.0, norm_topk: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and their weights from router logits [T, E]; see ``reference.route``."""
    if torch.is_grad_enabled() or not logits.is_cpu:
        scores = torch.sigmoid(torch.tanh(logits / cap) * cap if cap > 0 else logits)
        expert_ids = torch.topk(scores.detach() + bias, top_k, dim=-1)[1]
        weights = scores.gather(1, expert_ids)
        return (weights / weights.sum(-1, keepdim=True) if norm_topk else weights), expert_ids
    return reference.route(logits, bias, top_k, cap, norm_topk)
