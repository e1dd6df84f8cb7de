"""The served pass of a Laguna target for one tile of one sequence on a CPU: decode and verification.

The operations of ``laguna_layers``, to the same bits, through kernels that were prepared once: at a few rows
Python costs more than arithmetic. A tile has two to sixteen rows, the least that hold what is asked for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.kernels.dispatch import ROW_TILE
from lean_laguna.kernels.elementwise import scalar
from lean_laguna.kernels.kv_mirror import KVMirror, TilePlan
from lean_laguna.kernels.linear import TILE_HEIGHTS
from lean_laguna.kernels.prepared import TileAttention, TileLinear, TileNorm
from lean_laguna.kernels.prepared_moe import TileExperts, TileRouter
from lean_laguna.models.forward_batch import ForwardBatch
from lean_laguna.models.kv_cache import KVCache, KVGroup
from lean_laguna.models.laguna_layers import DecoderLayer, SparseMoe

# A mirror copies what a sequence has cached; beyond this, pages are gathered as for any other batch.
_MAX_MIRROR_BYTES = 256 << 20


@dataclass(frozen=True)
class TileStep:
    """What the layers of one KV group need of a step.

    Attributes:
        plan: Who sees what.
        mirror: Keys and values of the sequence.
        cos: [R or 1, 1, rotating dimensions].
        signed_sin: Both halves of the signed sine, alike.
    """

    plan: TilePlan
    mirror: KVMirror
    cos: torch.Tensor
    signed_sin: tuple[torch.Tensor, ...]


class TileSparse:
    """A sparse layer's feed-forward for one tile."""

    def __init__(self, moe: SparseMoe, rows: int):
        self._joint = joint = TileLinear(moe.packed, rows)
        self._down = TileLinear(moe.shared_experts.down_proj.weight, rows)
        width, router = moe.shared_experts.gate_proj.weight.shape[0], moe.gate
        self._gate, self._up = joint.out[:, :width], joint.out[:, width : 2 * width]
        bias = router.e_score_correction_bias
        self._route = TileRouter(joint.out[:, 2 * width :], bias, router.top_k, router.norm_topk)
        self._scaling = scalar(moe.scaling)
        experts = moe.experts
        self._experts = TileExperts(experts.gate_up_proj, experts.down_proj, self._route.by_expert)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform a tile [R, D]."""
        self._joint(x)
        routed = self._experts(x, self._route())
        return routed.mul_(self._scaling).add_(self._down(F.silu(self._gate).mul_(self._up)))


class TileLayer:
    """One decoder layer for one tile."""

    def __init__(self, layer: DecoderLayer, attention: TileAttention, norm: TileNorm, rows: int):
        own = layer.self_attn
        self._input_weight = layer.input_layernorm.weight
        self._post_weight = layer.post_attention_layernorm.weight
        self._q_weight, self._k_weight = own.q_norm.weight, own.k_norm.weight
        self._norm, self._attention = norm, attention
        self._qkvg = TileLinear(own.packed, rows, attention.joint)
        self._o_proj = TileLinear(own.o_proj.weight, rows)
        self._mlp = (
            TileSparse(layer.mlp, rows).__call__ if isinstance(layer.mlp, SparseMoe) else layer.mlp.run
        )

    def run(self, residual: torch.Tensor, storage: torch.Tensor, step: TileStep, index: int) -> None:
        """Advance the residual stream [R, D] in place, writing the rows' keys and values.

        Args:
            residual: Changed.
            storage: The layer's pages [num_blocks, kv_block_size, 2, J, P]; changed.
            step: Of the layer's group.
            index: Of the layer within its group.
        """
        attention, plan, mirror = self._attention, step.plan, step.mirror
        self._qkvg(self._norm(residual, self._input_weight))
        attention.turn(self._q_weight, self._k_weight, step.cos, step.signed_sin)
        own = attention.own[plan.num_rows]
        pages = storage.view(-1, own.shape[1])
        for piece in plan.slots:
            pages[piece.at : piece.at + piece.count].copy_(own[piece.row : piece.row + piece.count])
        mirror.write(index, attention.own_keys, attention.own_values)
        attended = attention.attend(mirror.keys[index], mirror.values[index], plan.mask, plan.num_chunks)
        residual.add_(self._o_proj(attended))
        residual.add_(self._mlp(self._norm(residual, self._post_weight)))


class TilePass:
    """All layers for one tile of R rows."""

    def __init__(self, config: LagunaConfig, layers: list[DecoderLayer], rows: int):
        norm = TileNorm((rows, config.hidden_size), config.rms_norm_eps)
        shared: dict[tuple[object, ...], TileAttention] = {}
        self.layers = []
        for i, layer in enumerate(layers):
            own, rope = layer.self_attn, config.rope(config.layer_types[i])
            rotary = rope.rotary_dim(own.head_dim)
            key = (own.num_heads, own.gating, rotary)
            if key not in shared:
                joint = torch.empty(rows, own.packed.shape[0])
                shared[key] = TileAttention(
                    joint, own.num_heads, own.num_kv_heads, own.head_dim, rotary, own.q_norm.eps
                )
            self.layers.append(TileLayer(layer, shared[key], norm, rows))

    @staticmethod
    def fits(config: LagunaConfig, layers: list[DecoderLayer], rows: int) -> bool:
        """Whether these layers, packed, run prepared on this machine, with the bits of ``laguna_layers``."""
        weight = layers[0].self_attn.q_proj.weight
        if not weight.is_cpu or weight.dtype != torch.float32 or config.router_logit_softcapping > 0:
            return False
        return all(
            TileAttention.fits(rows, heads, config.num_key_value_heads, config.head_dim)
            for heads in set(config.num_attention_heads_per_layer)
        ) and all(
            TileExperts.fits(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, rows)
            for layer in layers
            if isinstance(layer.mlp, SparseMoe)
        )


class TilePasses:
    """The passes for every height of a tile, and the mirrors they share.

    Made anew whenever the weights' layout changes.
    """

    def __init__(self, config: LagunaConfig, layers: list[DecoderLayer], groups: tuple[KVGroup, ...]):
        self._config, self._layers, self._groups = config, layers, groups
        # By number of threads too: which products keep their rows' bits is known for that number only.
        self._passes: dict[tuple[int, int], TilePass | None] = {}
        self._mirrors = [KVMirror(group.num_layers, group.num_kv_heads, group.head_dim) for group in groups]
        self._mirrored: weakref.ref[KVCache] | None = None

    def plan(self, batch: ForwardBatch, kv_cache: KVCache) -> tuple[int, list[TilePlan | None]] | None:
        """Return the height of the tile for a batch and the plan of each group; None where none will do.

        Raises:
            ValueError: A row sees a position whose page is not kept.
        """
        num_rows = batch.input_ids.shape[0]
        if len(batch.spans) > 1 or num_rows > TILE_HEIGHTS[-1]:
            return None
        height = next(
            (rows for rows in TILE_HEIGHTS if rows >= num_rows and self._pass(rows) is not None), None
        )
        is_plain = all(kv_cache.dtype_of(i) == torch.float32 for i in range(len(self._groups)))
        if height is None or not is_plain:
            return None
        plans: list[TilePlan | None] = []
        num_bytes = 0
        for i, (group, mirror) in enumerate(zip(self._groups, self._mirrors, strict=True)):
            if not group.num_layers:
                plans.append(None)
                continue
            plan = TilePlan.of(batch.spans[0], i, batch.kv_block_size, group.window, height)
            num_bytes += mirror.num_bytes(plan.num_chunks)
            plans.append(plan)
        return (height, plans) if num_bytes <= _MAX_MIRROR_BYTES else None

    def run(
        self,
        residual: torch.Tensor,
        kv_cache: KVCache,
        place: list[tuple[int, int]],
        plans: list[TilePlan | None],
        turns: list[tuple[torch.Tensor, torch.Tensor]],
        tap_layer_ids: tuple[int, ...],
    ) -> dict[int, torch.Tensor]:
        """Run every layer over the residual stream [R, D], in place.

        Args:
            residual: Changed.
            kv_cache: Changed.
            place: KV group and index of each layer.
            plans: From ``plan``, with R as the height.
            turns: Cos and signed sine of each group, [R or 1, 1, rotating dimensions].
            tap_layer_ids: Layers whose output is wanted.

        Returns:
            Copies of the residual stream after the tapped layers.
        """
        tile_pass = self._pass(residual.shape[0])
        assert tile_pass is not None, "plan() chose it"
        steps: list[TileStep | None] = []
        is_known = self._mirrored is not None and self._mirrored() is kv_cache
        for group, (plan, mirror) in enumerate(zip(plans, self._mirrors, strict=True)):
            if plan is None:
                steps.append(None)
                continue
            mirror.prepare(
                plan,
                kv_cache.pages(group),
                kv_cache.kv_block_size,
                kv_cache.num_changes[group] if is_known else -1,
            )
            cos, signed_sin = turns[group]
            steps.append(TileStep(plan, mirror, cos, signed_sin.chunk(2, -1)))
        self._mirrored = weakref.ref(kv_cache)
        taps = {}
        for i, (layer, (group, index)) in enumerate(zip(tile_pass.layers, place, strict=True)):
            step = steps[group]
            assert step is not None, "the group has this layer"
            layer.run(residual, kv_cache.storage(group, index), step, index)
            if i in tap_layer_ids:
                taps[i] = residual.clone()
        for group, mirror in enumerate(self._mirrors):
            mirror.seal(kv_cache.num_changes[group])
        return taps

    def _pass(self, rows: int) -> TilePass | None:
        """Return the pass for so many rows and the present number of threads, or None where there is none."""
        key = torch.get_num_threads(), rows
        if key not in self._passes:
            with torch.inference_mode(False), torch.no_grad():
                # The definition of a row's bits: without it no other height means anything.
                fits = all(TilePass.fits(self._config, self._layers, count) for count in {rows, ROW_TILE})
                self._passes[key] = TilePass(self._config, self._layers, rows) if fits else None
        return self._passes[key]
