"""What a Laguna target is, read from a checkpoint's ``config.json`` in any spelling of the family.

Not the engine's configuration (``config``) nor a drafter's (``drafter_config``).

Source: the config keys of poolside/Laguna-XS.2, XS-2.1 and S-2.1, and transformers' LagunaConfig.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.rope_config import RopeConfig, read_ropes

LayerType = Literal["full_attention", "sliding_attention"]
MlpType = Literal["dense", "sparse"]
Gating = Literal["per-head", "per-element", "off"]

_GATINGS: dict[Any, Gating] = {
    True: "per-head",
    "per-head": "per-head",
    "per_head": "per-head",
    "per-element": "per-element",
    "per_element": "per-element",
    False: "off",
    None: "off",
    "none": "off",
    "off": "off",
}
_LAYER_TYPES = {
    "full_attention": "full_attention",
    "global_attention": "full_attention",
    "sliding_attention": "sliding_attention",
}
# Architectures of the family that this engine does not run: key, values that mean "not used", what it is.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("attention_bias", (False, None), "biases on the attention projections"),
    ("qkv_bias", (False, None), "biases on the attention projections"),
    ("mlp_bias", (False, None), "biases in the feed-forward layers"),
    ("swa_attention_sink_enabled", (False, None), "attention sinks"),
    ("attention_sink_enabled", (False, None), "attention sinks"),
    ("moe_apply_router_weight_on_input", (False, None), "router weights applied to the experts' input"),
    ("moe_router_use_sigmoid", (True, None), "a router without sigmoid scores"),
    ("moe_router_score_func", ("sigmoid", None), "a router with another score function"),
    ("qk_norm_type", ("rmsnorm", None), "another normalisation of queries and keys"),
    ("hidden_act", ("silu", None), "another activation"),
    ("rope_style", ("rotate-half", None), "another rotary layout"),
)
# Keys that do not change what the model computes at inference.
_INERT = frozenset(
    "architectures auto_map model_type torch_dtype dtype transformers_version use_cache initializer_range "
    "attention_dropout output_router_logits router_aux_loss_coef _name_or_path name_or_path output_attentions "
    "output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type "
    "tie_encoder_decoder num_attention_heads pretraining_tp".split()
)
_READ = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads_per_layer num_key_value_heads head_dim "
    "layer_types sliding_window intermediate_size mlp_layer_types mlp_only_layers decoder_sparse_step num_experts "
    "num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size moe_routed_scaling_factor "
    "moe_router_logit_softcapping norm_topk_prob gating gating_types rms_norm_eps max_position_embeddings "
    "tie_word_embeddings bos_token_id eos_token_id pad_token_id rope_parameters swa_rope_parameters rope_theta "
    "rope_scaling partial_rotary_factor quantization_config quantization".split()
)


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

    def __post_init__(self) -> None:
        """Refuse shapes that do not fit together.

        Raises:
            ConfigError: Names the field, the value found and the values accepted.
        """
        self._check_counts("config")

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
        reader = _Reader(given, where)
        reader.refuse_other_architectures()
        num_layers = reader.count("num_hidden_layers")
        layer_types = reader.layer_types(num_layers)
        full_rope, sliding_rope = read_ropes(given, where, "sliding_attention" in layer_types)
        mlp_layer_types = reader.mlp_layer_types(num_layers)
        is_sparse = "sparse" in mlp_layer_types
        config = cls(
            vocab_size=reader.count("vocab_size"),
            hidden_size=reader.count("hidden_size"),
            num_hidden_layers=num_layers,
            num_attention_heads_per_layer=reader.heads(num_layers),
            num_key_value_heads=reader.count("num_key_value_heads"),
            head_dim=reader.head_dim(),
            layer_types=layer_types,
            sliding_window=reader.window(layer_types),
            intermediate_size=reader.count("intermediate_size") if "dense" in mlp_layer_types else
            reader.count("intermediate_size", 1),
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
        )
        config._check_counts(where)
        return config

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
                raise ConfigError(f"{where}: '{name}' must have num_hidden_layers = {layers} entries, found {len(found)}")
        for i, heads in enumerate(self.num_attention_heads_per_layer):
            if heads < 1 or heads % self.num_key_value_heads:
                raise ConfigError(
                    f"{where}: 'num_attention_heads_per_layer'[{i}] must be a multiple of num_key_value_heads = "
                    f"{self.num_key_value_heads}, found {heads}"
                )
        if "sparse" in self.mlp_layer_types:
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"{where}: '{name}' must be at least 1, found {getattr(self, name)}")
            if self.num_experts_per_tok > self.num_experts:
                raise ConfigError(
                    f"{where}: 'num_experts_per_tok' must be at most num_experts = {self.num_experts}, "
                    f"found {self.num_experts_per_tok}"
                )
        for rope, kind in ((self.full_rope, "full_attention"), (self.sliding_rope, "sliding_attention")):
            if rope.rotary_dim(self.head_dim) < 2 or rope.rotary_dim(self.head_dim) % 2:
                raise ConfigError(
                    f"{where}: '{kind}' partial_rotary_factor = {rope.partial_rotary_factor} must leave an even number "
                    f"of rotary dimensions of head_dim = {self.head_dim}, found {rope.rotary_dim(self.head_dim)}"
                )


def config_path(path: str | Path) -> Path:
    """Return the ``config.json`` of a folder, or the file itself."""
    path = Path(path)
    return path / "config.json" if path.is_dir() or path.suffix != ".json" else path


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Parse a ``config.json``.

    Raises:
        CheckpointError: The file is missing or not a JSON object.
    """
    file = config_path(path)
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: not found; a checkpoint folder holds config.json and *.safetensors") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, found {type(given).__name__}")
    return given


class _Reader:
    """Reads typed fields of one config and words the errors."""

    def __init__(self, given: Mapping[str, Any], where: str):
        self.given, self.where = given, where

    def fail(self, field: str, found: Any, accepted: str) -> ConfigError:
        return ConfigError(f"{self.where}: '{field}' must be {accepted}, found {found!r}")

    def refuse_other_architectures(self) -> None:
        names = self.given.get("architectures") or []
        kind = self.given.get("model_type")
        words = " ".join([str(kind), *map(str, names)]).lower()
        if "dflash" in words or "dspark" in words or "dflash_config" in self.given:
            raise ConfigError(
                f"{self.where}: this is a drafter ({', '.join(map(str, names)) or kind}), not a target; pass it as the "
                "speculative model, and the target as the model"
            )
        if kind != "laguna":
            raise self.fail("model_type", kind, "'laguna'")
        for field, accepted, what in _REFUSED:
            found = self.given.get(field)
            if not any(found is value or (found == value and type(found) is type(value)) for value in accepted):
                shown = " or ".join(repr(value) for value in accepted if value is not None)
                raise ConfigError(
                    f"{self.where}: '{field}' = {found!r} asks for {what}, which is not supported; accepted: {shown}"
                )
        unknown = sorted(set(self.given) - _INERT - _READ - {field for field, _, _ in _REFUSED})
        if unknown:
            warnings.warn(f"{self.where}: keys without meaning here are ignored: {', '.join(unknown)}", stacklevel=4)

    def count(self, field: str, default: int | None = None, minimum: int = 1) -> int:
        found = self.given.get(field)
        if found is None:
            if default is None:
                raise ConfigError(f"{self.where}: '{field}' is missing; it must be a whole number from {minimum}")
            return default
        if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
            raise self.fail(field, found, f"a whole number from {minimum}")
        return found

    def number(self, field: str, default: float) -> float:
        found = self.given.get(field)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found < 0:
            raise self.fail(field, found, "a finite number from 0")
        return float(found)

    def flag(self, field: str, default: bool) -> bool:
        found = self.given.get(field)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.fail(field, found, "true or false")
        return found

    def token(self, field: str) -> int | None:
        found = self.tokens(field)
        return found[0] if found else None

    def tokens(self, field: str) -> tuple[int, ...]:
        found = self.given.get(field)
        values = [] if found is None else found if isinstance(found, list) else [found]
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
            raise self.fail(field, found, "a token id, a list of token ids or null")
        return tuple(values)

    def per_layer(self, field: str, num_layers: int) -> Sequence[Any] | None:
        found = self.given.get(field)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != num_layers:
            shown = f"{len(found)} entries" if isinstance(found, list) else found
            raise self.fail(field, shown, f"a list with num_hidden_layers = {num_layers} entries")
        return found

    def head_dim(self) -> int:
        return self.count("head_dim", 128)

    def heads(self, num_layers: int) -> tuple[int, ...]:
        found = self.per_layer("num_attention_heads_per_layer", num_layers)
        if found is None:
            return (self.count("num_attention_heads"),) * num_layers
        if any(isinstance(heads, bool) or not isinstance(heads, int) or heads < 1 for heads in found):
            raise self.fail("num_attention_heads_per_layer", found, "a list of head counts from 1")
        return tuple(found)

    def layer_types(self, num_layers: int) -> tuple[LayerType, ...]:
        found = self.per_layer("layer_types", num_layers) or ["full_attention"] * num_layers
        for i, kind in enumerate(found):
            if kind not in _LAYER_TYPES:
                raise self.fail(f"layer_types[{i}]", kind, "'full_attention' or 'sliding_attention'")
        return tuple(_LAYER_TYPES[kind] for kind in found)  # type: ignore[misc]

    def window(self, layer_types: Sequence[str]) -> int:
        return self.count("sliding_window", None if "sliding_attention" in layer_types else 512)

    def mlp_layer_types(self, num_layers: int) -> tuple[MlpType, ...]:
        found = self.per_layer("mlp_layer_types", num_layers)
        if found is not None:
            for i, kind in enumerate(found):
                if kind not in ("dense", "sparse"):
                    raise self.fail(f"mlp_layer_types[{i}]", kind, "'dense' or 'sparse'")
            return tuple(found)
        only = self.given.get("mlp_only_layers")
        if only is None:
            only = [0]
        if not isinstance(only, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in only):
            raise self.fail("mlp_only_layers", only, "a list of layer numbers")
        step = self.count("decoder_sparse_step", 1)
        return tuple("sparse" if i not in only and (i + 1) % step == 0 else "dense" for i in range(num_layers))

    def gating(self, num_layers: int) -> tuple[Gating, ...]:
        accepted = "true, 'per-head', 'per-element' or false"
        types = self.per_layer("gating_types", num_layers)
        field = "gating" if types is None else "gating_types"
        # transformers' default where the key is missing; the checkpoint loader checks it against g_proj's shape.
        values = [self.given.get("gating", True)] * num_layers if types is None else types
        for value in values:
            if not isinstance(value, bool | str | None) or value not in _GATINGS:
                raise self.fail(field, value, accepted)
        return tuple(_GATINGS[value] for value in values)
