"""The served pass of a Laguna target for one tile of one sequence on a CPU: decode and verification.

The operations of ``laguna_layers``, to the same bits, through kernels that were prepared once: at eight rows
Python costs more than arithmetic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.kernels.dispatch import ROW_TILE, AttentionPlan
from lean_laguna.kernels.linear import is_batched
from lean_laguna.kernels.prepared import TileAttention, TileExperts, TileLinear, TileNorm, TileRouter
from lean_laguna.models.kv_cache import KVCache
from lean_laguna.models.laguna_layers import DecoderLayer, LayerStep, SparseMoe


class TileSparse:
    """A sparse layer's feed-forward for one tile."""

    def __init__(self, moe: SparseMoe, joint: TileLinear, down: TileLinear, experts: TileExperts):
        self._joint, self._down, self._experts = joint, down, experts
        width, router = moe.shared_experts.gate_proj.weight.shape[0], moe.gate
        self._gate, self._up = joint.out[:, :width], joint.out[:, width : 2 * width]
        bias = router.e_score_correction_bias
        self._route = TileRouter(joint.out[:, 2 * width :], bias, router.top_k, router.norm_topk, moe.scaling)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform a tile [ROW_TILE, D]."""
        self._joint(x)
        routed = self._experts(x, *self._route())
        return routed.add_(self._down(F.silu(self._gate).mul_(self._up)))


class TileLayer:
    """One decoder layer for one tile."""

    def __init__(self, layer: DecoderLayer, qkvg: TileLinear, attention: TileAttention, norm: TileNorm):
        own = layer.self_attn
        self._input_weight = layer.input_layernorm.weight
        self._post_weight = layer.post_attention_layernorm.weight
        self._q_weight, self._k_weight = own.q_norm.weight, own.k_norm.weight
        self._norm, self._qkvg, self._attention = norm, qkvg, attention
        self._o_proj = TileLinear(own.o_proj.weight)
        self._mlp = layer.mlp.run
        if isinstance(layer.mlp, SparseMoe):
            moe = layer.mlp
            self._mlp = TileSparse(
                moe,
                TileLinear(moe.packed),
                TileLinear(moe.shared_experts.down_proj.weight),
                TileExperts(moe.experts.gate_up_proj, moe.experts.down_proj),
            ).__call__

    def run(
        self,
        residual: torch.Tensor,
        kv: torch.Tensor,
        plan: AttentionPlan,
        cos: torch.Tensor,
        signed_sin: tuple[torch.Tensor, ...],
    ) -> None:
        """Advance the residual stream [ROW_TILE, D] in place, writing the rows' keys and values."""
        attention = self._attention
        self._qkvg(self._norm(residual, self._input_weight))
        attention.turn(self._q_weight, self._k_weight, cos, signed_sin)
        own = attention.own[plan.num_rows]
        kv.view(-1, own.shape[1]).index_copy_(0, plan.slots, own)
        attended = attention.attend(kv.view(-1, kv.shape[-1]), plan.batches[0])
        residual.add_(self._o_proj(attended))
        residual.add_(self._mlp(self._norm(residual, self._post_weight)))


class TilePass:
    """All layers for one tile; made anew whenever the weights' layout changes."""

    def __init__(self, config: LagunaConfig, layers: list[DecoderLayer]):
        norm = TileNorm((ROW_TILE, config.hidden_size), config.rms_norm_eps)
        shared: dict[tuple[object, ...], tuple[torch.Tensor, TileAttention]] = {}
        self._layers = []
        for i, layer in enumerate(layers):
            own, rope = layer.self_attn, config.rope(config.layer_types[i])
            qkvg = TileLinear(own.packed)
            key = (own.num_heads, own.gating, rope.rotary_dim(own.head_dim))
            if key not in shared:
                attention = TileAttention(
                    qkvg.out, own.num_heads, own.num_kv_heads, own.head_dim, key[2], own.q_norm.eps
                )
                shared[key] = qkvg.out, attention
            qkvg.out, attention = shared[key]
            self._layers.append(TileLayer(layer, qkvg, attention, norm))

    @staticmethod
    def fits(config: LagunaConfig, layers: list[DecoderLayer]) -> bool:
        """Whether these layers, packed, run prepared on this machine, with the bits of ``laguna_layers``."""
        weight = layers[0].self_attn.q_proj.weight
        if not weight.is_cpu or weight.dtype != torch.float32 or config.router_logit_softcapping > 0:
            return False
        head_dim = config.head_dim
        keys, values = torch.empty(1, 64, head_dim).transpose(1, 2), torch.empty(1, 64, head_dim)
        for heads in set(config.num_attention_heads_per_layer):
            tall = ROW_TILE * heads // config.num_key_value_heads
            if not is_batched(tall, head_dim, 64, keys) or not is_batched(tall, 64, head_dim, values):
                return False
        return all(
            TileExperts.fits(
                layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, layer.mlp.gate.top_k
            )
            for layer in layers
            if isinstance(layer.mlp, SparseMoe)
        )

    def run(
        self,
        residual: torch.Tensor,
        kv_cache: KVCache,
        place: list[tuple[int, int]],
        steps: list[LayerStep | None],
        tap_layer_ids: tuple[int, ...],
    ) -> dict[int, torch.Tensor]:
        """Run every layer over the residual stream [ROW_TILE, D], in place.

        Args:
            residual: Changed.
            kv_cache: Changed.
            place: KV group and index of each layer.
            steps: Of each group; one tile each, with all its pages kept.
            tap_layer_ids: Layers whose output is wanted.

        Returns:
            Copies of the residual stream after the tapped layers.
        """
        halves = [None if step is None else step.signed_sin.chunk(2, -1) for step in steps]
        taps = {}
        for i, (layer, (group, index)) in enumerate(zip(self._layers, place, strict=True)):
            step, sines = steps[group], halves[group]
            assert step is not None, "the group has this layer"
            assert sines is not None, "they come with the step"
            layer.run(residual, kv_cache.storage(group, index), step.plan, step.cos, sines)
            if i in tap_layer_ids:
                taps[i] = residual.clone()
        return taps
