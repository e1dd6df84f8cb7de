"""The layers of a Laguna target: parameters under Hugging Face's names, and the two ways to run them.

``run`` is the served path: packed rows, paged keys, in place, row-invariant on a CPU. ``dense`` is the
differentiable path over whole sequences. Shapes: T packed tokens, D hidden, H query heads, J kv heads, P head
size, E experts, F expert width.

Source: transformers, models/laguna/modeling_laguna.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lean_laguna.core.model_config import Gating, LagunaConfig
from lean_laguna.kernels import dispatch
from lean_laguna.kernels.elementwise import scalar
from lean_laguna.models.dense_attention import Attend
from lean_laguna.models.packing import lay_out_experts, pack_rows

# Training runs up to so many experts densely, which compiles; more are visited one by one.
_DENSE_TRAINING_EXPERTS = 32


@dataclass(frozen=True)
class LayerStep:
    """What a layer needs of a forward pass besides the rows.

    Attributes:
        plan: Attention of the layer's KV group.
        cos: [T, 1, R].
        signed_sin: [T, 1, R], negated in its first half.
    """

    plan: dispatch.AttentionPlan
    cos: torch.Tensor
    signed_sin: torch.Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., D]."""
        return dispatch.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys, partial rotation and a softplus output gate.

    Attributes:
        kv_scales: What an FP8 cache's codes of keys and of values are multiplied by.
    """

    def __init__(self, config: LagunaConfig, layer: int):
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.num_heads = config.num_attention_heads_per_layer[layer]
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = head_dim
        self.gating: Gating = config.gating[layer]
        self.q_proj = nn.Linear(hidden, self.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        if self.gating != "off":
            gates = self.num_heads * (1 if self.gating == "per-head" else head_dim)
            self.g_proj = nn.Linear(hidden, gates, bias=False)
        self._packed: torch.Tensor | None = None
        self.kv_scales = (1.0, 1.0)

    @property
    def packed(self) -> torch.Tensor:
        """The joint input projections q | k | v | gate, [N, D]."""
        assert self._packed is not None, "pack() comes first"
        return self._packed

    def projections(self) -> list[torch.Tensor]:
        """Weights [N, D] that read the layer's input: q, k, v and the gate's."""
        names = ["q_proj", "k_proj", "v_proj"] + (["g_proj"] if self.gating != "off" else [])
        return [getattr(self, name).weight for name in names]

    def pack(self, packed: bool) -> None:
        """Join the input projections for the served path, or forget that they are joined."""
        self._packed = pack_rows(self.projections()) if packed else None
        if packed:
            pack_rows([self.o_proj.weight])

    def run(self, x: torch.Tensor, kv: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """Attend from packed rows, after writing their keys and values.

        Args:
            x: Normed rows [T, D].
            kv: The layer's storage [num_blocks, kv_block_size, 2, J, P]; changed.
            step: Of this pass.

        Returns:
            [T, D].
        """
        heads, kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
        num_rows, plan = x.shape[0], step.plan
        # q | k | v | gate, side by side: k is normed with q and stored with v, so both pairs are one view
        # each.
        joint = dispatch.linear(x, self.packed)
        qk = joint[:, : (heads + kv_heads) * head_dim].view(num_rows, heads + kv_heads, head_dim)
        dispatch.rms_scale_(qk, self.q_norm.eps)
        q, k = qk.split((heads, kv_heads), 1)
        q.mul_(self.q_norm.weight)
        k.mul_(self.k_norm.weight)
        dispatch.rotate_(qk, step.cos, step.signed_sin)
        own = joint[: plan.num_rows, heads * head_dim : (heads + 2 * kv_heads) * head_dim]
        if plan.kept_rows is not None:
            own = own.index_select(0, plan.kept_rows)
        dispatch.store_kv(own, kv, plan.slots, self.kv_scales)
        out = dispatch.paged_attention(q, kv, plan, head_dim**-0.5, self.kv_scales)
        if self.gating != "off":
            gate = dispatch.softplus(joint[:, (heads + 2 * kv_heads) * head_dim :])
            out.mul_(gate.view(num_rows, heads, -1))
        return dispatch.linear(out.view(num_rows, heads * head_dim), self.o_proj.weight)

    def dense(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Attend over whole sequences.

        Args:
            x: Normed rows [B, S, D].
            cos: [B * S, R].
            sin: [B * S, R].
            attend: From q [B, H, S, P], k and v [B, J, S, P] to [B, H, S, P].

        Returns:
            [B, S, D].
        """
        batch, length, _ = x.shape
        heads, head_dim = self.num_heads, self.head_dim
        weights = self.projections()
        parts = F.linear(x, torch.cat(weights)).split([weight.shape[0] for weight in weights], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts[:3])
        q, k = _dense_norm(q, self.q_norm), _dense_norm(k, self.k_norm)
        q = _dense_rotate(q, cos.view(batch, length, 1, -1), sin.view(batch, length, 1, -1)).to(v.dtype)
        k = _dense_rotate(k, cos.view(batch, length, 1, -1), sin.view(batch, length, 1, -1)).to(v.dtype)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        if self.gating != "off":
            gate = F.softplus(parts[3].float()).to(out.dtype)
            out = out * gate.unflatten(-1, (heads, -1))
        return F.linear(out.reshape(batch, length, heads * head_dim), self.o_proj.weight)


class MLP(nn.Module):
    """Gated feed-forward of a dense layer, and the shared expert."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self._packed: torch.Tensor | None = None

    def pack(self, packed: bool) -> None:
        """Join gate and up for the served path, or forget that they are joined."""
        self._packed = pack_rows([self.gate_proj.weight, self.up_proj.weight]) if packed else None
        if packed:
            pack_rows([self.down_proj.weight])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Transform packed rows [T, D]."""
        assert self._packed is not None, "pack() comes first"
        return dispatch.linear(dispatch.silu_and_mul(dispatch.linear(x, self._packed)), self.down_proj.weight)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """Transform [..., D], differentiably."""
        gate, up = F.linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight))).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight)


class Router(nn.Module):
    """Router weight and the correction bias, which steers the choice of experts only."""

    e_score_correction_bias: nn.Parameter

    def __init__(self, config: LagunaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        self.top_k = config.num_experts_per_tok
        self.cap = config.router_logit_softcapping
        self.norm_topk = config.norm_topk_prob

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose from logits [T, E] float32: weights [T, A] float32 and expert ids [T, A]."""
        return dispatch.route(
            logits, self.e_score_correction_bias.float(), self.top_k, self.cap, self.norm_topk
        )


class Experts(nn.Module):
    """The routed experts' weights."""

    def __init__(self, config: LagunaConfig):
        super().__init__()
        experts, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))


class SparseMoe(nn.Module):
    """Routed experts plus a shared one."""

    def __init__(self, config: LagunaConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.scaling = config.moe_routed_scaling_factor
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self._packed: torch.Tensor | None = None

    @property
    def packed(self) -> torch.Tensor:
        """The joint input projections shared gate | shared up | router, [N, D]."""
        assert self._packed is not None, "pack() comes first"
        return self._packed

    def pack(self, packed: bool) -> None:
        """Lay weights out for the served path, or forget that they are."""
        self._packed = None
        if not packed:
            return
        for parameter in (self.experts.gate_up_proj, self.experts.down_proj):
            lay_out_experts(parameter)
        shared = self.shared_experts
        self._packed = pack_rows([shared.gate_proj.weight, shared.up_proj.weight, self.gate.weight])
        pack_rows([shared.down_proj.weight])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Transform packed rows [T, D]."""
        joint = dispatch.linear(x, self.packed)
        shared_gate_up, logits = joint.split((joint.shape[1] - self.num_experts, self.num_experts), 1)
        weights, expert_ids = self.gate.route(logits.float())
        experts = self.experts
        routed = dispatch.moe_experts(x, experts.gate_up_proj, experts.down_proj, weights, expert_ids)
        shared = dispatch.linear(dispatch.silu_and_mul(shared_gate_up), self.shared_experts.down_proj.weight)
        # As transformers has it: routing weights rounded to the model's dtype, and the sum scaled.
        return routed.mul_(scalar(self.scaling, routed.dtype)).add_(shared)

    def dense(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Transform [B, S, D], differentiably.

        Returns:
            [B, S, D] and the chosen expert ids [B * S, A].
        """
        rows = x.reshape(-1, x.shape[-1])
        logits = F.linear(rows, self.gate.weight).float()
        weights, expert_ids = self.gate.route(logits)
        weights = weights.to(rows.dtype)
        if self.num_experts <= _DENSE_TRAINING_EXPERTS:
            routed = self._dense_bank(rows, weights, expert_ids)
        else:
            routed = self._visit(rows, weights, expert_ids)
        return (routed * self.scaling + self.shared_experts.dense(rows)).view_as(x), expert_ids

    def _dense_bank(
        self, rows: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        joint = F.linear(rows, gate_up.flatten(0, 1)).unflatten(-1, gate_up.shape[:2])
        gate, up = joint.chunk(2, dim=-1)
        by_expert = weights.new_zeros(rows.shape[0], self.num_experts).scatter(1, expert_ids, weights)
        hidden = F.silu(gate) * up * by_expert.to(joint.dtype).unsqueeze(-1)
        return F.linear(hidden.flatten(1), down.permute(1, 0, 2).flatten(1))

    def _visit(self, rows: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(rows)
        for expert in expert_ids.unique().tolist():
            row, slot = (expert_ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows[row], self.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.experts.down_proj[expert]) * weights[row, slot].unsqueeze(
                -1
            )
            total = total.index_add(0, row, out.to(total.dtype))
        return total


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LagunaConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        is_sparse = config.mlp_layer_types[layer] == "sparse"
        self.mlp: SparseMoe | MLP = (
            SparseMoe(config) if is_sparse else MLP(config.hidden_size, config.intermediate_size)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def pack(self, packed: bool) -> None:
        """Join weights for the served path, or forget that they are joined."""
        self.self_attn.pack(packed)
        self.mlp.pack(packed)

    def run(self, residual: torch.Tensor, kv: torch.Tensor, step: LayerStep) -> None:
        """Advance the residual stream [T, D] in place."""
        residual.add_(self.self_attn.run(self.input_layernorm(residual), kv, step))
        residual.add_(self.mlp.run(self.post_attention_layernorm(residual)))

    def dense(
        self, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual stream [B, S, D] after the layer, and expert ids [B * S, A] if sparse."""
        normed = _dense_norm(residual, self.input_layernorm)
        residual = residual + self.self_attn.dense(normed, cos, sin, attend)
        normed = _dense_norm(residual, self.post_attention_layernorm)
        if isinstance(self.mlp, SparseMoe):
            out, expert_ids = self.mlp.dense(normed)
            return residual + out, expert_ids
        return residual + self.mlp.dense(normed), None


def _dense_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype) * norm.weight


def _dense_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    part = x[..., :rotary]
    first, second = part.chunk(2, dim=-1)
    rotated = part * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), dim=-1)
