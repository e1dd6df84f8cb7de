"""A target's and a drafter's modules as the GPU kernels read their weights, without a second copy.

Projections of one input are moved side by side once; the modules' parameters become views of the joint ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import Gating, LagunaConfig
from lean_laguna.engine.gpu_packed import WeightStore
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dflash_layers import DFlashLayer
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.laguna_layers import MLP, Attention, DecoderLayer, SparseMoe
from lean_laguna.models.rope import inverse_frequencies
from lean_laguna.spec.confidence import Calibration

if TYPE_CHECKING:
    from lean_laguna.core.rope_config import RopeConfig
    from lean_laguna.kernels.triton.attention import AttentionShape
    from lean_laguna.kernels.triton.weights import (
        AttentionWeights,
        DrafterWeights,
        LayerWeights,
        SparkWeights,
        SparseWeights,
        TargetWeights,
    )

_ROWS_AT_ONCE = 4096  # of an embedding, where a float32 copy of all of it would take too much


def why_not(target: Any, drafter: Any, device: torch.device) -> str | None:
    """Say why these models cannot run on the Triton kernels; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU they run under Triton's interpreter only (TRITON_INTERPRET=1)"
    reason = _why_not_card(device) if device.type == "cuda" else None
    if reason is not None:
        return reason
    if type(target) is not LagunaForCausalLM:
        return f"they run Laguna targets, not {type(target).__name__}"
    reason = _why_not_target(target.config)
    if reason is None and drafter is not None:
        if type(drafter) not in (DFlashDrafter, DSparkDrafter):
            return f"they run DFlash and DSpark drafters with plain weights, not {type(drafter).__name__}"
        reason = _why_not_drafter(drafter.config)
    return reason


def _why_not_card(device: torch.device) -> str | None:
    """Say why a GPU cannot run the Triton kernels."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "the GPU is older than sm_80"
    if capability <= (9, 0):  # which every Triton knows that runs these kernels
        return None
    from lean_laguna.kernels.triton.compiling import why_not_built

    return why_not_built(device)


def why_not_cuda(weight: Tensor) -> str | None:
    """Say why the CUDA C++ kernels cannot be built for weights of this kind on a GPU; None where they can."""
    if weight.dtype != torch.bfloat16:
        return f"they run bfloat16, not {str(weight.dtype).removeprefix('torch.')}"
    from lean_laguna.kernels.cuda.compiler import CompilationError, nvrtc

    try:
        nvrtc()
    except CompilationError as error:
        return str(error)
    return None


def drop_stack(device: torch.device) -> None:
    """Give back the stack that a context keeps for every thread; nothing where it is not CUDA's."""
    from lean_laguna.kernels.cuda import driver

    with contextlib.suppress(OSError, RuntimeError):
        driver.stack_size(device, 0)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _why_not_target(config: LagunaConfig) -> str | None:
    if "per-element" in config.gating:
        return "the target's attention gate is per element"
    if not _is_power_of_two(config.head_dim):
        return f"head_dim {config.head_dim} is not a power of two"
    return None


def _why_not_drafter(config: DFlashConfig) -> str | None:
    if config.gating == "per-element":
        return "the drafter's attention gate is per element"
    if len(set(config.layer_windows)) > 1 or len(set(config.layer_causal)) > 1:
        return "the drafter's layers are not all of one kind"
    if not _is_power_of_two(config.head_dim):
        return f"the drafter's head_dim {config.head_dim} is not a power of two"
    return None


def target_weights(
    target: LagunaForCausalLM, max_positions: int, *, is_by_lane: bool = False
) -> TargetWeights:
    """Lay a target's weights out for the kernels, in place.

    Args:
        target: The module; its parameters become views.
        max_positions: Positions of the rotary tables.
        is_by_lane: Packed codes in the order that the CUDA C++ step takes, where the shape allows.
    """
    from lean_laguna.kernels.triton.weights import TargetWeights

    config, embed = target.config, target.model.embed_tokens.weight.detach()
    tables = {
        kind: _rotary(config.rope(kind), config.head_dim, max_positions, embed)
        for kind in set(config.layer_types)
    }
    # Not under inference mode, whose tensors could never be trained on.
    with torch.inference_mode(False), torch.no_grad():
        is_by_lane = is_by_lane and _takes_packed(embed.device)
        store = WeightStore(target, target.packed_weights, embed.dtype, is_by_lane=is_by_lane)
        layers = tuple(
            _target_layer(config, i, layer, tables[config.layer_types[i]], store)
            for i, layer in enumerate(target.layers)
        )
        head = store.one("lm_head.weight")
        store.tell()
    return TargetWeights(embed, layers, target.model.norm.weight.detach(), head, config.rms_norm_eps)


def _takes_packed(device: torch.device) -> bool:
    """Say whether the CUDA C++ kernels of packed weights run on a device."""
    from lean_laguna.kernels.cuda.packed_products import takes_packed

    return takes_packed(device)


def _target_layer(
    config: LagunaConfig,
    index: int,
    layer: DecoderLayer,
    rotary: tuple[Tensor, Tensor],
    store: WeightStore,
) -> LayerWeights:
    from lean_laguna.kernels.triton.weights import DenseWeights, LayerWeights

    kind = config.layer_types[index]
    shape = _shape(
        config.num_attention_heads_per_layer[index],
        config.num_key_value_heads,
        config.head_dim,
        config.rope(kind),
        config.sliding_window if kind == "sliding_attention" else None,
        config.gating[index],
    )
    prefix = f"model.layers.{index}."
    attention = _attention(shape, layer.self_attn, layer.input_layernorm.weight, f"{prefix}self_attn.", store)
    norm, mlp, own = layer.post_attention_layernorm.weight.detach(), layer.mlp, f"{prefix}mlp."
    if isinstance(mlp, MLP):
        joint = store.joint(f"{own}gate_proj.weight", f"{own}up_proj.weight")
        return LayerWeights(
            attention, DenseWeights(norm, joint, store.one(f"{own}down_proj.weight", pairs=True)), rotary
        )
    return LayerWeights(attention, _sparse(config, mlp, norm, own, store), rotary)


def _attention(
    shape: AttentionShape, module: Attention, norm: Tensor, prefix: str, store: WeightStore
) -> AttentionWeights:
    from lean_laguna.kernels.triton.weights import AttentionWeights

    names = [f"{prefix}{name}_proj.weight" for name in "qkvg"[: 4 if shape.has_gate else 3]]
    is_apart = shape.has_gate and not store.stored_alike(names[0], names[-1])
    return AttentionWeights(
        shape=shape,
        input_norm=norm.detach(),
        qkv=store.joint(*(names[:-1] if is_apart else names)),
        gate=store.one(names[-1]) if is_apart else None,
        q_norm=module.q_norm.weight.detach(),
        k_norm=module.k_norm.weight.detach(),
        out=store.one(f"{prefix}o_proj.weight", pairs=True),
    )


def _sparse(
    config: LagunaConfig, mlp: SparseMoe, norm: Tensor, prefix: str, store: WeightStore
) -> SparseWeights:
    from lean_laguna.kernels.triton.weights import SparseWeights

    router, shared = f"{prefix}gate.weight", f"{prefix}shared_experts."
    pair = f"{shared}gate_proj.weight", f"{shared}up_proj.weight"
    is_apart = store.is_packed(router, *pair)
    return SparseWeights(
        norm=norm,
        router_gate_up=store.plain(router) if is_apart else store.plain_joint(router, *pair),
        shared_gate_up=store.joint(*pair) if is_apart else None,
        bias=mlp.gate.e_score_correction_bias.detach().float().contiguous(),
        gate_up=store.one(f"{prefix}experts.gate_up_proj"),
        down=store.one(f"{prefix}experts.down_proj", pairs=True),
        shared_down=store.one(f"{shared}down_proj.weight", pairs=True),
        top_k=config.num_experts_per_tok,
        scaling=config.moe_routed_scaling_factor,
        softcap=config.router_logit_softcapping,
        norm_topk=config.norm_topk_prob,
    )


def drafter_weights(
    drafter: DFlashDrafter, max_positions: int, *, is_by_lane: bool = False
) -> DrafterWeights:
    """Lay a drafter's weights out for the kernels, in place; arguments as for ``target_weights``."""
    from lean_laguna.kernels.triton.weights import DrafterWeights

    config, modules = drafter.config, [layer for layer in drafter.layers if isinstance(layer, DFlashLayer)]
    rotary = _rotary(config.rope, config.head_dim, max_positions, drafter.norm)
    with torch.inference_mode(False), torch.no_grad():
        is_by_lane = is_by_lane and _takes_packed(drafter.norm.device)
        store = WeightStore(drafter, drafter.packed_weights, drafter.norm.dtype, is_by_lane=is_by_lane)
        # Rows of keys and values, before joining makes views of what is packed.
        context_kv = torch.cat([layer.self_attn.kv_weight() for layer in modules])
        layers = tuple(_draft_layer(config, i, layer, rotary, store) for i, layer in enumerate(modules))
        spark = _spark(drafter, store) if isinstance(drafter, DSparkDrafter) else None
        norms = torch.stack([layer.input_layernorm for layer in modules]) if config.norm_context else None
        if drafter.norm.is_cuda:
            for name in drafter.packed_weights:  # nobody else reads them there
                drafter.get_parameter(name).data = drafter.norm.new_empty(0)
        return DrafterWeights(
            layers=layers,
            norm=drafter.norm.detach(),
            aux_norms=None if drafter.aux_hidden_norms is None else drafter.aux_hidden_norms.detach(),
            fc=_plain(drafter.fc.weight),
            hidden_norm=drafter.hidden_norm.detach(),
            context_norms=norms,
            context_kv=context_kv,
            k_norms=torch.stack([layer.self_attn.k_norm for layer in modules]),
            mask_token=config.mask_token_id,
            eps=config.rms_norm_eps,
            spark=spark,
        )


def _spark(drafter: DSparkDrafter, store: WeightStore) -> SparkWeights:
    from lean_laguna.kernels.triton.launch import MAX_ROWS
    from lean_laguna.kernels.triton.weights import SparkWeights

    heads, bias = drafter.heads, drafter.confidence_bias
    greedy = Calibration(heads.greedy_temperatures, heads.greedy_biases).padded(MAX_ROWS)
    sampled = Calibration(heads.sampled_temperatures, heads.sampled_biases).padded(MAX_ROWS)
    device = drafter.fc.weight.device
    before, weight = _plain(drafter.markov_w1), drafter.confidence_weight
    after = None
    if weight is not None:
        after = torch.zeros(len(before), device=device)
        if heads.confidence_with_markov:
            own = weight[0, -heads.markov_rank :].float()
            after = torch.cat([part.float() @ own for part in before.split(_ROWS_AT_ONCE)])
    return SparkWeights(
        before=before,
        bias=store.one("markov_w2", is_head=True),
        confidence=None if weight is None else _plain(weight)[0, : drafter.norm.shape[0]].contiguous(),
        confidence_bias=None if bias is None else bias.detach(),
        after=after,
        scales=1.0 / torch.tensor([greedy[0], sampled[0]], device=device),
        offsets=torch.tensor([greedy[1], sampled[1]], device=device),
        is_shifted=drafter.config.sample_from_anchor,
        max_drafts=drafter.config.max_draft_tokens,
    )


def _draft_layer(
    config: DFlashConfig,
    index: int,
    layer: DFlashLayer,
    rotary: tuple[Tensor, Tensor],
    store: WeightStore,
) -> LayerWeights:
    from lean_laguna.kernels.triton.weights import AttentionWeights, DenseWeights, LayerWeights

    module = layer.self_attn
    shape = _shape(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rope,
        config.window,
        config.gating,
        causal=config.causal,
    )
    prefix = f"layers.{index}."
    projections = ["qkv_proj"] + ([] if module.g_proj is None else ["g_proj"])
    attention = AttentionWeights(
        shape=shape,
        input_norm=layer.input_layernorm.detach(),
        qkv=store.joint(*(f"{prefix}self_attn.{name}.weight" for name in projections)),
        q_norm=module.q_norm.detach(),
        k_norm=module.k_norm.detach(),
        out=store.one(f"{prefix}self_attn.o_proj.weight", pairs=True),
    )
    mlp = DenseWeights(
        layer.post_attention_layernorm.detach(),
        store.one(f"{prefix}gate_up_proj.weight"),
        store.one(f"{prefix}down_proj.weight", pairs=True),
    )
    return LayerWeights(attention, mlp, rotary)


def _shape(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: RopeConfig,
    window: int | None,
    gating: Gating,
    *,
    causal: bool = True,
) -> AttentionShape:
    from lean_laguna.kernels.triton.attention import AttentionShape

    return AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        rope.rotary_dim(head_dim),
        window or 0,
        causal=causal,
        has_gate=gating != "off",
    )


def _rotary(rope: RopeConfig, head_dim: int, max_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    from lean_laguna.kernels.triton.weights import rotary_tables

    inverse = inverse_frequencies(rope, head_dim).to(like.device)
    return rotary_tables(inverse, max_positions, rope.attention_scaling, like.dtype)


def _plain(weight: Tensor) -> Tensor:
    """Return a weight with its last dimension contiguous; on a GPU it always is."""
    return weight.detach().contiguous()
