"""The keys of drafters' config.json: slips of the pen are errors, and values must be of their key's kind.

Whatever a format does not use is checked, too: a value that makes no sense says that the file is not what it
seems. What the used ones mean is read in ``drafter_formats`` and ``dspark_config``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from lean_laguna.core.errors import ConfigError, reject_unknown
from lean_laguna.core.json_fields import is_count, is_finite_number

# From this likeness on, a key that is not known is a known one misspelt.
_MISSPELT = 0.84


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return is_count(value, 0)


def _is_number(value: Any) -> bool:
    return is_finite_number(value) and value >= 0


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(own, str) for own in value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(is_finite_number(own) for own in value)


def _is_wholes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(is_count(own, 0) for own in value)


def _is_token(value: Any) -> bool:
    return _is_whole(value) or (_is_wholes(value) and len(value) > 0)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_any(value: Any) -> bool:
    return True


_Kind = tuple[Callable[[Any], bool], str]
_TEXT, _FLAG = (_is_text, "a text"), (_is_flag, "true or false")
_WHOLE, _NUMBER = (_is_whole, "a whole number from 0"), (_is_number, "a finite number from 0")
_OBJECT, _ANY = (_is_object, "a JSON object"), (_is_any, "anything")
_KINDS: tuple[tuple[_Kind, str], ...] = (
    (
        _TEXT,
        """model_type dtype torch_dtype transformers_version _name_or_path name_or_path hidden_act
        speculators_version speculators_model_type markov_head_type rope_style qk_norm_type""",
    ),
    (
        _FLAG,
        """use_cache tie_word_embeddings output_attentions output_hidden_states return_dict is_encoder_decoder
        torchscript use_bfloat16 tie_encoder_decoder use_sliding_window attention_bias qkv_bias mlp_bias
        norm_topk_prob output_router_logits moe_apply_router_weight_on_input swa_attention_sink_enabled
        enable_confidence_head confidence_head_with_markov sample_from_anchor causal is_causal
        sliding_window_non_causal has_no_defaults_at_init is_decoder add_cross_attention""",
    ),
    (
        _WHOLE,
        """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        intermediate_size max_position_embeddings max_window_layers sliding_window block_size
        draft_vocab_size num_target_layers mask_token_id target_hidden_size num_anchors max_anchors
        markov_rank num_experts num_experts_per_tok moe_intermediate_size
        shared_expert_intermediate_size decoder_sparse_step chunk_size_feed_forward pretraining_tp""",
    ),
    (
        _NUMBER,
        """rms_norm_eps rope_theta initializer_range attention_dropout router_aux_loss_coef
        partial_rotary_factor moe_routed_scaling_factor moe_router_logit_softcapping
        input_embedding_scale output_multiplier final_logit_softcapping""",
    ),
    ((_is_texts, "a list of texts"), "architectures layer_types mlp_layer_types"),
    (
        (_is_wholes, "a list of whole numbers from 0"),
        """target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids sliding_windows
        num_attention_heads_per_layer mlp_only_layers""",
    ),
    (
        (_is_numbers, "a list of numbers"),
        "greedy_temperatures sampled_temperatures greedy_biases sampled_biases",
    ),
    ((_is_token, "a token id, or a list of them"), "bos_token_id eos_token_id pad_token_id"),
    (
        _OBJECT,
        """dflash_config dspark_config transformer_layer_config speculators_config rope_parameters
        swa_rope_parameters auto_map id2label label2id quantization_config provenance""",
    ),
    (_ANY, "gating gating_types rope_scaling problem_type"),
)
_CHECKS = {key: kind for kind, keys in _KINDS for key in keys.split()}
_HEADS = """markov_rank markov_head_type enable_confidence_head confidence_head_with_markov
    sample_from_anchor greedy_temperatures sampled_temperatures greedy_biases sampled_biases num_anchors"""
_DRAFTING = """target_layer_ids mask_token_id block_size num_target_layers causal is_causal layer_types
    sliding_window input_embedding_scale output_multiplier final_logit_softcapping"""
_OWN = (*_HEADS.split(), *_DRAFTING.split(), *(f"dspark_{key}" for key in f"{_HEADS} {_DRAFTING}".split()))
_KNOWN = {*_CHECKS, *_OWN}
_SECTIONS = ("dflash_config", "dspark_config")


def check_names(given: Mapping[str, Any], where: str) -> None:
    """Refuse keys that are known ones misspelt, and unknown ones where drafting is configured.

    Other unknown keys on top are publishers' notes and are ignored, as transformers does.

    Raises:
        ConfigError: Names the key and the nearest known one.
    """
    for part, place in _parts(given, where):
        for key in part:
            meant = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=_MISSPELT)
            if key not in _KNOWN and meant:
                raise ConfigError(
                    f"{place}: unknown key '{key}'; did you mean '{meant[0]}'? Rename it, or remove it"
                )
    for name in _SECTIONS:
        section = given.get(name)
        if isinstance(section, Mapping):
            reject_unknown(section, _OWN, f"{where}: {name}")


def check_values(given: Mapping[str, Any], where: str) -> None:
    """Refuse values that cannot be their key's, used or not; null is always taken.

    Raises:
        ConfigError: Names the key, what was found and what is accepted.
    """
    for part, place in _parts(given, where):
        for key, value in part.items():
            is_right, accepted = _CHECKS.get(key.removeprefix("dspark_"), _ANY)
            if value is not None and not is_right(value):
                raise ConfigError(f"{place}: '{key}' must be {accepted}, found {value!r}")
    kinds = given.get("mlp_layer_types")
    if kinds is not None and set(kinds) - {"dense"}:
        raise ConfigError(
            f"{where}: 'mlp_layer_types' must be 'dense' for all layers of a drafter, found {list(kinds)}"
        )


def _parts(given: Mapping[str, Any], where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the objects whose keys are those of a config, and where each stands."""
    names = (*_SECTIONS, "transformer_layer_config")
    inner = [(given.get(name), f"{where}: {name}") for name in names]
    return [(given, where), *((part, place) for part, place in inner if isinstance(part, Mapping))]
