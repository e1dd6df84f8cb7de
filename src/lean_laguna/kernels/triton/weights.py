"""Weights as the kernels take them: projections of one input side by side, experts fused.

Prepared once at load. A ``Weight`` is packed or plain; embeddings, norms and the router are plain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.formats import Weight


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention.

    Attributes:
        shape: Heads, rotation and window.
        input_norm: [D].
        qkv: [shape.width, D] rows of q, k, v and the per-head gate, unless that is in ``gate``.
        q_norm: [P].
        k_norm: [P].
        out: [D, H * P].
        gate: [H, D] rows of the per-head gate where they are stored unlike the others.
    """

    shape: AttentionShape
    input_norm: Tensor
    qkv: Weight
    q_norm: Tensor
    k_norm: Tensor
    out: Weight
    gate: Weight | None = None


@dataclass(frozen=True)
class DenseWeights:
    """A dense MLP: norm [D], gate_up [2F, D] gate rows first, down [D, F]."""

    norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class SparseWeights:
    """A MoE block.

    Attributes:
        norm: [D].
        router_gate_up: [E + 2 * FS, D] router rows, then the shared expert's gate and up rows, unless those
            are in ``shared_gate_up``.
        bias: [E] float32.
        gate_up: [E, 2F, D].
        down: [E, D, F].
        shared_down: [D, FS].
        top_k: Experts a token.
        scaling: Factor of the routed sum.
        softcap: tanh bound of the router's logits, 0 for none.
        norm_topk: Divide a token's weights by their sum.
        shared_gate_up: [2 * FS, D] the shared expert's gate and up rows where they are packed.
    """

    norm: Tensor
    router_gate_up: Tensor
    bias: Tensor
    gate_up: Weight
    down: Weight
    shared_down: Weight
    top_k: int
    scaling: float
    softcap: float = 0.0
    norm_topk: bool = True
    shared_gate_up: Weight | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer and the rotary tables (cos, sin) that its kind shares."""

    attention: AttentionWeights
    mlp: DenseWeights | SparseWeights
    rotary: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TargetWeights:
    """A Laguna target: embed [V, D], layers, norm [D], head [V, D], RMSNorm epsilon."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Weight
    eps: float


@dataclass(frozen=True)
class SparkWeights:
    """What a DSpark drafter has besides DFlash's weights.

    Attributes:
        before: [V, r], a row for each previous token.
        bias: [V', r], from such a row to a bias on the drafter's words.
        confidence: [D] weights of the confidence head for the block's states, or None.
        confidence_bias: [1], or None.
        after: [V] float32 the part of a confidence logit that the token before decides, or None.
        scales: [2, MAX_ROWS] float32 what each draft's confidence logit is multiplied by; greedy, sampled.
        offsets: [2, MAX_ROWS] float32 what is added then.
        is_shifted: A row is for the token after it, so an anchor's row has a draft and the last row none.
        max_drafts: Drafts of the longest block.
    """

    before: Tensor
    bias: Weight
    confidence: Tensor | None
    confidence_bias: Tensor | None
    after: Tensor | None
    scales: Tensor
    offsets: Tensor
    is_shifted: bool
    max_drafts: int


@dataclass(frozen=True)
class DrafterWeights:
    """A DFlash or DSpark drafter; embedding and head are the target's.

    Attributes:
        layers: Decoder layers, all of one attention shape, dense.
        norm: [D] final norm.
        aux_norms: [m, D] norms of the captured hidden states, or None where they enter as they are.
        fc: [D, m * D].
        hidden_norm: [D].
        context_norms: [L, D] input norms of the layers where the context goes through them, or None.
        context_kv: [L * 2 * J * P, D] key and value rows of every layer.
        k_norms: [L, P].
        mask_token: What stands for a token to fill in.
        eps: RMSNorm epsilon.
        spark: Of a DSpark drafter, or None.
    """

    layers: tuple[LayerWeights, ...]
    norm: Tensor
    aux_norms: Tensor | None
    fc: Weight
    hidden_norm: Tensor
    context_norms: Tensor | None
    context_kv: Weight
    k_norms: Tensor
    mask_token: int
    eps: float
    spark: SparkWeights | None = None


def rotary_tables(inv_freq: Tensor, max_len: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position, [max_len, rotary_dim / 2] each.

    Args:
        inv_freq: [rotary_dim / 2] float32.
        max_len: Positions.
        scale: YaRN's attention factor.
        dtype: Of the model; float32 values are rounded to it, as Hugging Face does.
    """
    angle = torch.arange(max_len, device=inv_freq.device, dtype=torch.float32)[:, None] * inv_freq[None, :]
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)
