"""Published models as shapes without weights, by name: for planning, byte counts and synthetic weights.

Where a checkpoint is at hand its own ``config.json`` counts, not these. What the publisher never stated is
marked below; none of it changes a byte count of the target.

Source: the config.json files of poolside/Laguna-XS.2 (the revision with the longer context), XS-2.1 and
S-2.1 (the BF16 repository), and of their DFlash drafters, as public ports and tests quote them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import ConfigError, nearest
from lean_laguna.core.model_config import Gating, LagunaConfig, MlpType
from lean_laguna.core.rope_config import RopeConfig

VOCAB_SIZE, HEAD_DIM, KV_HEADS, WINDOW = 100352, 128, 8, 512
YARN_32_ATTENTION_FACTOR = 1.3465735902799727
YARN_128_ATTENTION_FACTOR = 1.4852030263919618


@dataclass(frozen=True)
class _Family:
    """What sets one published model apart from its siblings.

    Attributes:
        repository: Where it was published.
        hidden_size: D.
        num_hidden_layers: Decoder layers; every fourth, from the first, is a full-attention layer.
        sliding_heads: Query heads of sliding layers; full ones have 48.
        dense_size: Width of the first layer's MLP.
        num_experts_per_tok: A.
        expert_size: F, and the width of the shared expert.
        full_rope: Rotary embedding of full-attention layers.
        max_position_embeddings: Context limit.
        num_draft_layers: Layers of its DFlash drafter.
        taps: Target layers that the drafter reads.
    """

    repository: str
    hidden_size: int
    num_hidden_layers: int
    sliding_heads: int
    dense_size: int
    num_experts_per_tok: int
    expert_size: int
    full_rope: RopeConfig
    max_position_embeddings: int
    num_draft_layers: int
    taps: tuple[int, ...]


def _yarn(factor: float, original: int, beta_fast: float, attention_factor: float) -> RopeConfig:
    return RopeConfig(
        500000.0,
        0.5,
        "yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        attention_factor=attention_factor,
    )


_XS_TAPS = (1, 13, 25, 33, 39)
_FAMILIES = {
    # The inside of XS.2's own drafter was not published in readable form: that of XS-2.1 stands in.
    "laguna-xs": _Family(
        "poolside/Laguna-XS.2", 2048, 40, 64, 8192, 8, 512,
        _yarn(64.0, 4096, 64.0, 1.0), 262144, 5, _XS_TAPS,
    ),
    # Revisions differ in attention_factor: 1.0 or the value that YaRN's formula gives, which is taken here.
    "laguna-xs-2.1": _Family(
        "poolside/Laguna-XS-2.1", 2048, 40, 64, 8192, 8, 512,
        _yarn(32.0, 8192, 64.0, YARN_32_ATTENTION_FACTOR), 262144, 5, _XS_TAPS,
    ),
    "laguna-s-2.1": _Family(
        "poolside/Laguna-S-2.1", 3072, 48, 72, 12288, 10, 1024,
        _yarn(128.0, 8192, 32.0, YARN_128_ATTENTION_FACTOR), 1048576, 6, (1, 10, 19, 29, 38, 47),
    ),
}  # fmt: skip
SHAPES = tuple(_FAMILIES)


@functools.cache
def laguna_shape(name: str) -> LagunaConfig:
    """Return the target's configuration.

    Args:
        name: One of ``SHAPES``.

    Raises:
        ConfigError: No such shape.
    """
    family = _family(name)
    layers = family.num_hidden_layers
    mlp_layer_types: list[MlpType] = ["dense" if i == 0 else "sparse" for i in range(layers)]
    gating: list[Gating] = ["per-head" for _ in range(layers)]
    is_full = [i % 4 == 0 for i in range(layers)]
    return LagunaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=family.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads_per_layer=tuple(48 if full else family.sliding_heads for full in is_full),
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        layer_types=tuple("full_attention" if full else "sliding_attention" for full in is_full),
        sliding_window=WINDOW,
        intermediate_size=family.dense_size,
        mlp_layer_types=tuple(mlp_layer_types),
        num_experts=256,
        num_experts_per_tok=family.num_experts_per_tok,
        moe_intermediate_size=family.expert_size,
        shared_expert_intermediate_size=family.expert_size,
        moe_routed_scaling_factor=2.5,
        router_logit_softcapping=0.0,
        norm_topk_prob=True,
        gating=tuple(gating),
        rms_norm_eps=1e-6,
        full_rope=family.full_rope,
        sliding_rope=RopeConfig(10000.0),
        max_position_embeddings=family.max_position_embeddings,
        bos_token_id=2,
        eos_token_ids=(2, 24),
        pad_token_id=9,
        where=name,
    )


@functools.cache
def drafter_shape(name: str) -> DFlashConfig:
    """Return the configuration of the target's DFlash drafter.

    Args:
        name: One of ``SHAPES``: the target's name.

    Raises:
        ConfigError: No such shape.
    """
    family = _family(name)
    return DFlashConfig(
        format="laguna",
        hidden_size=family.hidden_size,
        num_hidden_layers=family.num_draft_layers,
        num_attention_heads=family.sliding_heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=family.dense_size,
        layer_windows=(WINDOW,) * family.num_draft_layers,
        layer_causal=(True,) * family.num_draft_layers,
        draft_block_size=16,
        target_layer_ids=family.taps,
        num_target_layers=family.num_hidden_layers,
        mask_token_id=12,
        rope=RopeConfig(500000.0),
        gating="per-head",
        has_aux_norms=True,
        norm_context=True,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        max_position_embeddings=family.max_position_embeddings,
        rms_norm_eps=1e-6,
    )


def repository_of(name: str) -> str:
    """Return the repository that a shape was published as.

    Raises:
        ConfigError: No such shape.
    """
    return _family(name).repository


def _family(name: str) -> _Family:
    if name not in _FAMILIES:
        raise ConfigError(f"unknown shape '{name}'{nearest(name, SHAPES)}")
    return _FAMILIES[name]
