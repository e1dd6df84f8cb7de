"""What a Laguna target is, read from a checkpoint's ``config.json`` in any spelling of the family.

Not the engine's configuration (``config``) nor a drafter's (``drafter_config``).

Source: the config keys of poolside/Laguna-XS.2, XS-2.1 and S-2.1, and transformers' LagunaConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from lean_laguna.core.config_reader import (
    ConfigReader,
    Gating,
    LayerType,
    MlpType,
    config_path,
    read_config_json,
)
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.rope_config import RopeConfig, read_ropes

__all__ = [
    "Gating",
    "LagunaConfig",
    "LayerType",
    "MlpType",
    "RopeConfig",
    "config_path",
    "read_config_json",
]


@dataclass(frozen=True)
class LagunaConfig:
    """Shape and constants of a Laguna target; every per-layer tuple has ``num_hidden_layers`` entries.

    Attributes:
        vocab_size: Token ids the embedding holds.
        hidden_size: Width D of the residual stream.
        num_hidden_layers: Decoder layers.
        num_attention_heads_per_layer: Query heads of each layer, a multiple of ``num_key_value_heads``.
        num_key_value_heads: Key/value heads of every layer.
        head_dim: Width P of a head.
        layer_types: ``full_attention`` or ``sliding_attention`` per layer.
        sliding_window: Keys a sliding layer sees, itself included.
        intermediate_size: Width of a dense layer's MLP.
        mlp_layer_types: ``dense`` or ``sparse`` per layer.
        num_experts: Routed experts of a sparse layer.
        num_experts_per_tok: Experts that a token visits.
        moe_intermediate_size: Width F of an expert.
        shared_expert_intermediate_size: Width of the shared expert.
        moe_routed_scaling_factor: Factor on the routed experts' sum.
        router_logit_softcapping: tanh cap on router logits; 0 is none.
        norm_topk_prob: Divide the chosen scores by their sum.
        gating: Output gate of each layer's attention: ``per-head``, ``per-element`` or ``off``.
        rms_norm_eps: Epsilon of every RMSNorm.
        full_rope: Rotary embedding of full-attention layers.
        sliding_rope: Rotary embedding of sliding layers.
        max_position_embeddings: Context limit in tokens.
        tie_word_embeddings: The output head is the embedding.
        bos_token_id: Beginning of sequence, if any.
        eos_token_ids: Tokens that end a sequence.
        pad_token_id: Padding, if any.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads_per_layer: tuple[int, ...]
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    intermediate_size: int
    mlp_layer_types: tuple[MlpType, ...]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    moe_routed_scaling_factor: float
    router_logit_softcapping: float
    norm_topk_prob: bool
    gating: tuple[Gating, ...]
    rms_norm_eps: float
    full_rope: RopeConfig
    sliding_rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    where: InitVar[str] = "config"

    def __post_init__(self, where: str) -> None:
        """Refuse shapes that do not fit together.

        Args:
            where: File name for messages.

        Raises:
            ConfigError: Names the field, the value found and the values accepted.
        """
        self._check_counts(where)

    def rope(self, layer_type: LayerType) -> RopeConfig:
        """Return the rotary embedding of a layer type."""
        return self.full_rope if layer_type == "full_attention" else self.sliding_rope

    @classmethod
    def from_file(cls, path: str | Path) -> LagunaConfig:
        """Read a ``config.json``, given as file or as the folder that holds it.

        Raises:
            CheckpointError: The file is missing or not JSON.
            ConfigError: A field is wrong; names file, field, value found and values accepted.
        """
        return cls.from_dict(read_config_json(path), str(config_path(path)))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str = "config.json") -> LagunaConfig:
        """Build from a checkpoint's config, whichever spelling it uses.

        Args:
            given: The parsed JSON object.
            where: File name for messages.

        Raises:
            ConfigError: A field is wrong or describes an architecture this engine does not run; names the
                file, the field, the value found and the values accepted.
        """
        reader = ConfigReader(given, where)
        reader.refuse_other_architectures()
        num_layers = reader.count("num_hidden_layers")
        layer_types = reader.layer_types(num_layers)
        full_rope, sliding_rope = read_ropes(given, where, "sliding_attention" in layer_types)
        mlp_layer_types = reader.mlp_layer_types(num_layers)
        is_sparse = "sparse" in mlp_layer_types
        return cls(
            vocab_size=reader.count("vocab_size"),
            hidden_size=reader.count("hidden_size"),
            num_hidden_layers=num_layers,
            num_attention_heads_per_layer=reader.heads(num_layers),
            num_key_value_heads=reader.count("num_key_value_heads"),
            head_dim=reader.head_dim(),
            layer_types=layer_types,
            sliding_window=reader.window(layer_types),
            intermediate_size=reader.count("intermediate_size")
            if "dense" in mlp_layer_types
            else reader.count("intermediate_size", 1),
            mlp_layer_types=mlp_layer_types,
            num_experts=reader.count("num_experts", None if is_sparse else 0, minimum=0),
            num_experts_per_tok=reader.count("num_experts_per_tok", None if is_sparse else 0, minimum=0),
            moe_intermediate_size=reader.count("moe_intermediate_size", None if is_sparse else 0, minimum=0),
            shared_expert_intermediate_size=reader.count(
                "shared_expert_intermediate_size", None if is_sparse else 0, minimum=0
            ),
            moe_routed_scaling_factor=reader.number("moe_routed_scaling_factor", 1.0),
            router_logit_softcapping=reader.number("moe_router_logit_softcapping", 0.0),
            norm_topk_prob=reader.flag("norm_topk_prob", True),
            gating=reader.gating(num_layers),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            full_rope=full_rope,
            sliding_rope=sliding_rope,
            max_position_embeddings=reader.count("max_position_embeddings"),
            tie_word_embeddings=reader.flag("tie_word_embeddings", False),
            bos_token_id=reader.token("bos_token_id"),
            eos_token_ids=reader.tokens("eos_token_id"),
            pad_token_id=reader.token("pad_token_id"),
            where=where,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a ``config.json`` that transformers' LagunaConfig reads."""
        full_heads = [
            heads
            for heads, kind in zip(self.num_attention_heads_per_layer, self.layer_types, strict=True)
            if kind == "full_attention"
        ]
        written: dict[str, Any] = {
            "architectures": ["LagunaForCausalLM"],
            "model_type": "laguna",
            "num_attention_heads": (full_heads or list(self.num_attention_heads_per_layer))[0],
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            written[field.name] = list(value) if isinstance(value, tuple) else value
        for name in ("full_rope", "sliding_rope", "gating"):
            del written[name]
        written["moe_router_logit_softcapping"] = written.pop("router_logit_softcapping")
        eos = written.pop("eos_token_ids")
        written["eos_token_id"] = (eos[0] if len(eos) == 1 else eos) if eos else None
        modes = set(self.gating)
        first = self.gating[0]
        written["gating"] = {"per-head": True, "per-element": "per-element", "off": False}[first]
        if len(modes) > 1:
            written["gating_types"] = [mode.replace("-", "_") for mode in self.gating]
        written["rope_parameters"] = {
            "full_attention": self.full_rope.to_dict(),
            "sliding_attention": self.sliding_rope.to_dict(),
        }
        return written

    def _check_counts(self, where: str) -> None:
        layers = self.num_hidden_layers
        for name in ("num_attention_heads_per_layer", "layer_types", "mlp_layer_types", "gating"):
            found = getattr(self, name)
            if len(found) != layers:
                raise ConfigError(
                    f"{where}: '{name}' must have num_hidden_layers = {layers} entries, found {len(found)}"
                )
        for i, heads in enumerate(self.num_attention_heads_per_layer):
            if heads < 1 or heads % self.num_key_value_heads:
                raise ConfigError(
                    f"{where}: 'num_attention_heads_per_layer'[{i}] must be a multiple of "
                    f"num_key_value_heads = {self.num_key_value_heads}, found {heads}"
                )
        if "sparse" in self.mlp_layer_types:
            for name in (
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
            ):
                if getattr(self, name) < 1:
                    raise ConfigError(f"{where}: '{name}' must be at least 1, found {getattr(self, name)}")
            if self.num_experts_per_tok > self.num_experts:
                raise ConfigError(
                    f"{where}: 'num_experts_per_tok' must be at most num_experts = {self.num_experts}, "
                    f"found {self.num_experts_per_tok}"
                )
        for rope, kind in ((self.full_rope, "full_attention"), (self.sliding_rope, "sliding_attention")):
            rotary = rope.rotary_dim(self.head_dim)
            if rotary < 2 or rotary % 2:
                raise ConfigError(
                    f"{where}: '{kind}' partial_rotary_factor = {rope.partial_rotary_factor} must leave an "
                    f"even number of rotary dimensions of head_dim = {self.head_dim}, found {rotary}"
                )
