"""A drafter's config.json in each of the formats, every flag explicit so that no engine guesses.

The other direction is ``drafter_formats``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lean_laguna.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from lean_laguna.core.drafter_config import DFlashConfig

FORMATS = ("laguna", "z-lab", "speculators", "deepspec")


def write_config(config: DFlashConfig, format: str, target_name: str | None = None) -> dict[str, Any]:
    """Return the config.json of a drafter in a format.

    Args:
        config: The drafter.
        format: One of ``FORMATS``.
        target_name: Name or path of the target, for the format that records it.

    Raises:
        ConfigError: No such format, or one that cannot say what this drafter computes.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown drafter format {format!r}{nearest(format, FORMATS)}")
    reasons = _reasons(config, format)
    if reasons:
        raise ConfigError(
            f"this drafter ({config.format} format) cannot be written as {_title(format)}: {reasons[0]}"
        )
    if format == "speculators":
        return _speculators(config, target_name)
    return {"laguna": _laguna, "z-lab": _zlab, "deepspec": _deepspec}[format](config)


def _title(format: str) -> str:
    return "Laguna native" if format == "laguna" else format


def _reasons(config: DFlashConfig, format: str) -> list[str]:
    """Return why a format cannot express the drafter; empty where it can."""
    is_mixed = len(set(config.layer_windows)) > 1
    is_default = all(
        causal == (window is not None)
        for causal, window in zip(config.layer_causal, config.layer_windows, strict=True)
    )
    if format == "laguna":
        facts = [
            (is_mixed, "its layers are not all full or all sliding with one window"),
            (len(set(config.layer_causal)) > 1, "its layers are not all causal or all bidirectional"),
            (not config.has_aux_norms, "it has no norm per tapped layer (aux_hidden_norms)"),
            (not config.norm_context, "its layers do not norm the context"),
            (config.has_own_lm_head, "it has a vocabulary of its own"),
        ]
        return [reason for holds, reason in facts if holds]
    facts = [
        (config.has_aux_norms, "it has a norm per tapped layer (aux_hidden_norms), which that format drops"),
        (config.norm_context, "its layers norm the context, which that format does not do"),
        (config.gating != "off", "its attention has an output gate, which that format drops"),
        (
            len({window for window in config.layer_windows if window}) > 1,
            "its sliding layers differ in their window",
        ),
        (
            config.rope.rope_type != "default" or config.rope.partial_rotary_factor != 1.0,
            "its rotary embedding is not the plain one",
        ),
    ]
    if format == "speculators":
        facts.append(
            (
                any(
                    causal
                    for causal, window in zip(config.layer_causal, config.layer_windows, strict=True)
                    if window is None
                ),
                "its full-attention layers are causal inside the block, and that format's never are",
            )
        )
        flags = {
            causal for causal, window in zip(config.layer_causal, config.layer_windows, strict=True) if window
        }
        facts.append((len(flags) > 1, "its sliding layers are not all causal or all bidirectional"))
    else:
        facts.append((config.has_own_lm_head, "it has a vocabulary of its own"))
        mixed_flags = len(set(config.layer_causal)) > 1 and not is_default
        facts.append((mixed_flags, "its layers are not all causal or all bidirectional"))
    if format == "z-lab":
        facts.append((config.dspark is not None, "it has DSpark's heads"))
    if format == "deepspec":
        facts.append((config.dspark is None, "it has no DSpark heads"))
        facts.append((not config.sample_from_anchor, "its blocks do not sample from the anchor"))
        facts.append((any(config.layer_causal), "its blocks are causal, and that format's are not"))
    return [reason for holds, reason in facts if holds]


def _laguna(config: DFlashConfig) -> dict[str, Any]:
    layer_type = "full_attention" if config.window is None else "sliding_attention"
    name = "DFlashLagunaForCausalLM" if config.dspark is None else "LagunaDSparkModel"
    written: dict[str, Any] = {
        "architectures": [name],
        "model_type": "laguna",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_attention_heads_per_layer": [config.num_attention_heads] * config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "gating": False if config.gating == "off" else config.gating,
        "layer_types": [layer_type] * config.num_hidden_layers,
        "mlp_layer_types": ["dense"] * config.num_hidden_layers,
        # vLLM goes by these two, and takes 256 experts where nothing is said.
        "mlp_only_layers": list(range(config.num_hidden_layers)),
        "num_experts": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.rope_theta,
        "rope_parameters": {layer_type: config.rope.to_dict()},
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "block_size": config.draft_block_size,
        "dflash_config": _dflash(config),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
    }
    if config.dspark is not None:
        written["dspark_config"] = config.dspark.to_dict()
    if config.window is not None:
        written["sliding_window"] = config.window
        written["sliding_windows"] = [config.window] * config.num_hidden_layers
    if config.num_target_layers is not None:
        written["num_target_layers"] = config.num_target_layers
    return written


def _dflash(config: DFlashConfig) -> dict[str, Any]:
    written: dict[str, Any] = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
    }
    if len(set(config.layer_causal)) == 1:  # otherwise each kind of layer has its default
        written["causal"] = config.causal
    return written | {"sample_from_anchor": config.sample_from_anchor}


def _qwen3(config: DFlashConfig) -> dict[str, Any]:
    """Return the keys of transformers' Qwen3 config."""
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.layer_windows]
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": kinds,
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.rope_theta,
        "rope_parameters": config.rope.to_dict(),
        "tie_word_embeddings": False,
    }


def _zlab(config: DFlashConfig) -> dict[str, Any]:
    written = {"architectures": ["DFlashDraftModel"]} | _qwen3(config)
    written |= {"block_size": config.draft_block_size, "dflash_config": _dflash(config)}
    if config.num_target_layers is not None:
        written["num_target_layers"] = config.num_target_layers
    return written


def _deepspec(config: DFlashConfig) -> dict[str, Any]:
    assert config.dspark is not None
    written = {"architectures": ["Qwen3DSparkModel"]} | _qwen3(config) | _dflash(config)
    written |= {"block_size": config.draft_block_size} | config.dspark.to_dict()
    if config.num_target_layers is not None:
        written["num_target_layers"] = config.num_target_layers
    return written


def _speculators(config: DFlashConfig, target_name: str | None) -> dict[str, Any]:
    kind = "dflash" if config.dspark is None else "dspark"
    is_bidirectional = not any(config.layer_causal)
    written: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "block_size": config.draft_block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": is_bidirectional,
        "causal": not is_bidirectional,
        "tie_word_embeddings": False,
        "transformer_layer_config": _qwen3(config),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.max_draft_tokens}],
            "verifier": {"name_or_path": target_name, "architectures": ["LagunaForCausalLM"]},
        },
    }
    if config.num_target_layers is not None:  # a key of ours: the format has none, and ignores this one
        written["num_target_layers"] = config.num_target_layers
    return written | (config.dspark.to_dict() if config.dspark is not None else {})
