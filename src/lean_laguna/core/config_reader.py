"""Reads the fields of a target's ``config.json``, and refuses what this engine does not run.

What the fields mean is ``model_config``'s business.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.files import parse_json
from lean_laguna.core.json_fields import count_limit, is_count, is_finite_number, largest_count

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
_LAYER_TYPES: dict[str, LayerType] = {
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
    ("use_attention_sinks", (False, None), "attention sinks"),
    ("attention_sinks", (False, None), "attention sinks"),
    ("moe_apply_router_weight_on_input", (False, None), "router weights applied to the experts' input"),
    ("moe_router_use_sigmoid", (True, None), "a router without sigmoid scores"),
    ("moe_router_score_func", ("sigmoid", None), "a router with another score function"),
    ("scoring_func", ("sigmoid", None), "a router with another score function"),
    ("n_group", (1, 0, None), "a router that picks experts by group"),
    ("topk_group", (1, 0, None), "a router that picks experts by group"),
    ("qk_norm_type", ("rmsnorm", None), "another normalisation of queries and keys"),
    ("hidden_act", ("silu", None), "another activation"),
    ("rope_style", ("rotate-half", None), "another rotary layout"),
    ("use_bias", (False, None), "biases"),
    ("use_qk_norm", (True, None), "queries and keys that are not normed"),
    ("qk_norm", (True, None), "queries and keys that are not normed"),
    ("attn_logit_softcapping", (0, 0.0, None), "a cap on attention scores"),
    ("final_logit_softcapping", (0, 0.0, None), "a cap on the logits"),
    ("query_pre_attn_scalar", (None,), "another scale of attention scores"),
    ("attention_multiplier", (None,), "another scale of attention scores"),
    ("embedding_multiplier", (1, 1.0, None), "scaled embeddings"),
    ("residual_multiplier", (1, 1.0, None), "a scaled residual stream"),
    ("logits_scaling", (1, 1.0, None), "scaled logits"),
    ("logit_scale", (1, 1.0, None), "scaled logits"),
    ("clip_qkv", (None,), "clipped projections"),
    ("attention_chunk_size", (None,), "attention in chunks"),
    ("alibi", (False, None), "another position encoding"),
    ("use_parallel_residual", (False, None), "attention and feed-forward side by side"),
    ("q_lora_rank", (None,), "latent attention"),
    ("kv_lora_rank", (None,), "latent attention"),
    ("n_shared_experts", (1, None), "another number of shared experts"),
    ("first_k_dense_replace", (None,), "dense layers named in another way"),
)
# From this likeness on, a key that is not known is a known one misspelt.
_MISSPELT = 0.88
# Keys that do not change what the model computes at inference.
_INERT = frozenset(
    """
    architectures auto_map model_type torch_dtype dtype transformers_version use_cache
    initializer_range attention_dropout output_router_logits router_aux_loss_coef _name_or_path
    name_or_path output_attentions output_hidden_states return_dict chunk_size_feed_forward
    is_encoder_decoder id2label label2id problem_type tie_encoder_decoder num_attention_heads
    pretraining_tp
    """.split()
)
_READ = frozenset(
    """
    vocab_size hidden_size num_hidden_layers num_attention_heads_per_layer num_key_value_heads
    head_dim layer_types sliding_window intermediate_size mlp_layer_types mlp_only_layers
    decoder_sparse_step num_experts num_experts_per_tok moe_intermediate_size
    shared_expert_intermediate_size moe_routed_scaling_factor moe_router_logit_softcapping
    norm_topk_prob gating gating_types rms_norm_eps max_position_embeddings tie_word_embeddings
    bos_token_id eos_token_id pad_token_id rope_parameters swa_rope_parameters rope_theta
    rope_scaling partial_rotary_factor quantization_config quantization
    """.split()
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
        given = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file}: not found; a checkpoint folder holds config.json and *.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, found {type(given).__name__}")
    return given


class ConfigReader:
    """Reads typed fields of one config and words the errors."""

    def __init__(self, given: Mapping[str, Any], where: str):
        self.given, self.where = given, where

    def fail(self, field: str, found: Any, accepted: str) -> ConfigError:
        """Return the error for a field with a wrong value."""
        return ConfigError(f"{self.where}: '{field}' must be {accepted}, found {found!r}")

    def refuse_other_architectures(self) -> None:
        """Raise for a drafter, for another family, and for what this engine does not run."""
        names = self.given.get("architectures") or []
        if not isinstance(names, list):
            raise self.fail("architectures", names, "a list of names")
        kind = self.given.get("model_type")
        words = " ".join([str(kind), *map(str, names)]).lower()
        if "dflash" in words or "dspark" in words or "dflash_config" in self.given:
            raise ConfigError(
                f"{self.where}: this is a drafter ({', '.join(map(str, names)) or kind}), not a "
                "target; pass it as the speculative model, and the target as the model"
            )
        if kind != "laguna":
            raise self.fail("model_type", kind, "'laguna'")
        if names and not any("laguna" in str(name).lower() for name in names):
            raise self.fail("architectures", names, "['LagunaForCausalLM']")
        for field, accepted, what in _REFUSED:
            found = self.given.get(field)
            if not any(
                found is value or (found == value and type(found) is type(value)) for value in accepted
            ):
                shown = " or ".join(repr(value) for value in accepted if value is not None)
                raise ConfigError(
                    f"{self.where}: '{field}' = {found!r} asks for {what}, which is not supported; "
                    f"accepted: {shown}"
                )
        known = _INERT | _READ | {field for field, _, _ in _REFUSED}
        for key in sorted(set(map(str, self.given)) - known):
            # Metadata of publishers and of transformers is ignored, as there; a slip of the pen is not.
            meant = difflib.get_close_matches(key, known, n=1, cutoff=_MISSPELT)
            if meant:
                raise ConfigError(
                    f"{self.where}: unknown key '{key}'; did you mean '{meant[0]}'? Rename it, or remove it"
                )

    def count(self, field: str, default: int | None = None, minimum: int = 1) -> int:
        """Read a whole number."""
        found = self.given.get(field)
        if found is None:
            if default is None:
                raise ConfigError(
                    f"{self.where}: '{field}' is missing; it must be a whole number from {minimum}"
                )
            return default
        if not is_count(found, minimum, largest_count(field)):
            raise self.fail(
                field, found, f"a whole number from {minimum}" + count_limit(found, largest_count(field))
            )
        return found

    def number(self, field: str, default: float) -> float:
        """Read a finite number from 0."""
        found = self.given.get(field)
        if found is None:
            return default
        if not is_finite_number(found) or found < 0:
            raise self.fail(field, found, "a finite number from 0")
        return float(found)

    def flag(self, field: str, default: bool) -> bool:
        """Read true or false."""
        found = self.given.get(field)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.fail(field, found, "true or false")
        return found

    def token(self, field: str) -> int | None:
        """Read one token id, the first of a list."""
        found = self.tokens(field)
        return found[0] if found else None

    def tokens(self, field: str) -> tuple[int, ...]:
        """Read token ids, given as one or as a list."""
        found = self.given.get(field)
        values = [] if found is None else found if isinstance(found, list) else [found]
        if not all(is_count(value, 0) for value in values):
            raise self.fail(field, found, "a token id, a list of token ids or null")
        return tuple(values)

    def per_layer(self, field: str, num_layers: int) -> Sequence[Any] | None:
        """Read a list with one entry per layer, or None where it is missing."""
        found = self.given.get(field)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != num_layers:
            shown = f"{len(found)} entries" if isinstance(found, list) else found
            raise self.fail(field, shown, f"a list with num_hidden_layers = {num_layers} entries")
        return found

    def head_dim(self) -> int:
        """Read the width of a head."""
        return self.count("head_dim", 128)

    def heads(self, num_layers: int) -> tuple[int, ...]:
        """Read the query heads of each layer."""
        found = self.per_layer("num_attention_heads_per_layer", num_layers)
        if found is None:
            return (self.count("num_attention_heads"),) * num_layers
        if not all(is_count(heads, 1) for heads in found):
            raise self.fail("num_attention_heads_per_layer", found, "a list of head counts from 1")
        return tuple(found)

    def layer_types(self, num_layers: int) -> tuple[LayerType, ...]:
        """Read the attention of each layer; without the key all are full."""
        found = self.per_layer("layer_types", num_layers) or ["full_attention"] * num_layers
        for i, kind in enumerate(found):
            if not isinstance(kind, str) or kind not in _LAYER_TYPES:
                raise self.fail(f"layer_types[{i}]", kind, "'full_attention' or 'sliding_attention'")
        return tuple(_LAYER_TYPES[kind] for kind in found)

    def window(self, layer_types: Sequence[str]) -> int:
        """Read the sliding window, needed where a layer slides."""
        return self.count("sliding_window", None if "sliding_attention" in layer_types else 512)

    def mlp_layer_types(self, num_layers: int) -> tuple[MlpType, ...]:
        """Read which layers are sparse, in either spelling."""
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
        return tuple(
            "sparse" if i not in only and (i + 1) % step == 0 else "dense" for i in range(num_layers)
        )

    def gating(self, num_layers: int) -> tuple[Gating, ...]:
        """Read the output gate of each layer, in any spelling."""
        accepted = "true, 'per-head', 'per-element' or false"
        types = self.per_layer("gating_types", num_layers)
        field = "gating" if types is None else "gating_types"
        # transformers' default where the key is missing; the checkpoint loader checks it against g_proj's
        # shape.
        values = [self.given.get("gating", True)] * num_layers if types is None else types
        for value in values:
            if not isinstance(value, bool | str | None) or value not in _GATINGS:
                raise self.fail(field, value, accepted)
        return tuple(_GATINGS[value] for value in values)
