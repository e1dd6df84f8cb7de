"""The spellings of a drafter's config.json, read into one set of fields; DSpark's heads: ``dspark_config``.

Not the config itself (``drafter_config``) and not the tensors (``models.drafter_checkpoint``).
Source: vLLM 0.33 laguna_dflash.py and qwen3_dflash.py (Laguna native), z-lab dflash 0.1.0 model.py,
speculators 0.9.0 models/dflash/config.py, DeepSpec modeling/dspark/qwen3/config.py;
where they disagree the function says which is followed and why.
"""

from __future__ import annotations

from typing import Any

from lean_laguna.core.drafter_fields import draft_value, read_causal, read_rope, refuse_foreign
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.json_fields import Fields

DEFAULT_BLOCK_SIZE = {"laguna": 16, "z-lab": 16, "speculators": 8, "deepspec": 7}

# What transformers' Qwen3Config fills in where a saved config leaves a key out.
_QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def parse_laguna(config: Fields) -> dict[str, Any]:
    """Read Poolside's native format: a Laguna config with ``dflash_config``.

    Raises:
        ConfigError: A value is missing, wrong or describes a network that this package does not run.
    """
    dflash = config.section("dflash_config")
    refuse_foreign(config)
    num_layers = config.count("num_hidden_layers")
    windows = _laguna_windows(config, num_layers)
    heads = _laguna_heads(config, num_layers)
    vocab_size = config.count("vocab_size")
    draft_vocab_size = config.count("draft_vocab_size", vocab_size)
    if draft_vocab_size != vocab_size:
        raise config.wrong(
            "draft_vocab_size", f"vocab_size ({vocab_size}): this format shares the target's lm_head"
        )
    hidden_size = config.count("hidden_size")
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.count("num_key_value_heads"),
        "head_dim": config.count("head_dim", hidden_size // heads),
        "intermediate_size": config.count("intermediate_size"),
        "layer_windows": windows,
        "layer_causal": read_causal(config, dflash, tuple(window is not None for window in windows)),
        "draft_block_size": draft_value(config, dflash, "block_size").count(
            "block_size", DEFAULT_BLOCK_SIZE["laguna"]
        ),
        "target_layer_ids": _laguna_taps(config, dflash),
        "num_target_layers": config.count("num_target_layers") if "num_target_layers" in config else None,
        "mask_token_id": draft_value(config, dflash, "mask_token_id").count("mask_token_id", minimum=0),
        "rope": read_rope(
            config, "sliding_attention" if windows[0] is not None else "full_attention", 500000.0
        ),
        "gating": _laguna_gating(config),
        "has_aux_norms": True,
        "norm_context": True,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": config.count("max_position_embeddings", 131072),
        "rms_norm_eps": config.number("rms_norm_eps", 1e-6),
    }


def parse_zlab(config: Fields) -> dict[str, Any]:
    """Read z-lab's format: a Qwen3 config with ``dflash_config``.

    Raises:
        ConfigError: A value is missing, wrong or describes a network that this package does not run.
    """
    dflash = config.section("dflash_config")
    for key, neutral in (
        ("input_embedding_scale", 1),
        ("output_multiplier", 1),
        ("final_logit_softcapping", 0),
    ):
        found = draft_value(config, dflash, key)
        if found.get(key, neutral) != neutral:
            raise found.wrong(key, f"{neutral} or absent")
    fields = _qwen3(config)
    is_sliding = _qwen3_layer_types(config, fields["num_hidden_layers"])
    window = _qwen3_window(config)
    if any(is_sliding) and window is None:
        raise config.wrong("use_sliding_window", "true where 'layer_types' has sliding_attention")
    taps = draft_value(config, dflash, "target_layer_ids").ids("target_layer_ids")
    if taps is None:
        taps = _zlab_default_taps(config.count("num_target_layers"), fields["num_hidden_layers"])
    return fields | {
        "layer_windows": tuple(window if sliding else None for sliding in is_sliding),
        "layer_causal": read_causal(config, dflash, is_sliding),
        "draft_block_size": draft_value(config, dflash, "block_size").count(
            "block_size", DEFAULT_BLOCK_SIZE["z-lab"]
        ),
        "target_layer_ids": taps,
        "num_target_layers": config.count("num_target_layers") if "num_target_layers" in config else None,
        "mask_token_id": draft_value(config, dflash, "mask_token_id").count("mask_token_id", minimum=0),
        "draft_vocab_size": fields["vocab_size"],
    }


def parse_speculators(config: Fields) -> dict[str, Any]:
    """Read the speculators format: drafting keys on top, the network under ``transformer_layer_config``.

    Full-attention layers are bidirectional whatever ``sliding_window_non_causal`` says, as in the package
    that trains them; vLLM 0.33 applies the flag to them too.

    Raises:
        ConfigError: A value is missing, wrong or describes a network that this package does not run.
    """
    aux_ids = config.ids("aux_hidden_state_layer_ids")
    if aux_ids is None:
        raise ConfigError(
            f"{config.where}: 'aux_hidden_state_layer_ids' is missing; expected counts of completed target "
            "layers"
        )
    if min(aux_ids) < 1:
        raise config.wrong(
            "aux_hidden_state_layer_ids", "numbers from 1 (layers completed); 0, the embedding, is not run"
        )
    network = config.section("transformer_layer_config")
    if not network.values:
        raise ConfigError(
            f"{config.where}: 'transformer_layer_config' is missing; it describes the drafter's layers"
        )
    fields = _qwen3(network)
    is_sliding = _qwen3_layer_types(network, fields["num_hidden_layers"])
    window = _qwen3_window(network)
    windows = tuple(window if sliding else None for sliding in is_sliding)
    non_causal = config.get("sliding_window_non_causal", False)
    if not isinstance(non_causal, bool):
        raise config.wrong("sliding_window_non_causal", "true or false")
    return fields | {
        "layer_windows": windows,
        "layer_causal": tuple(window is not None and not non_causal for window in windows),
        "draft_block_size": config.count("block_size", DEFAULT_BLOCK_SIZE["speculators"]),
        "target_layer_ids": tuple(layer - 1 for layer in aux_ids),
        "num_target_layers": config.count("num_target_layers") if "num_target_layers" in config else None,
        "mask_token_id": config.count("mask_token_id", minimum=0),
        "draft_vocab_size": config.count("draft_vocab_size", 32000),
    }


def parse_deepspec(config: Fields) -> dict[str, Any]:
    """Read DeepSpec's format: a Qwen3 config with the drafting keys on top, blocks bidirectional.

    Raises:
        ConfigError: A value is missing, wrong or describes a network that this package does not run.
    """
    dflash = config.section("dflash_config")
    fields = _qwen3(config)
    is_sliding = _qwen3_layer_types(config, fields["num_hidden_layers"])
    window = _qwen3_window(config)
    taps = draft_value(config, dflash, "target_layer_ids").ids("target_layer_ids")
    if taps is None:
        raise ConfigError(f"{config.where}: 'target_layer_ids' is missing; expected 0-based target layers")
    has_flag = any(key in part for part in (config, dflash) for key in ("is_causal", "causal"))
    causal = read_causal(config, dflash, is_sliding) if has_flag else (False,) * len(is_sliding)
    return fields | {
        "layer_windows": tuple(window if sliding else None for sliding in is_sliding),
        "layer_causal": causal,
        "draft_block_size": draft_value(config, dflash, "block_size").count(
            "block_size", DEFAULT_BLOCK_SIZE["deepspec"]
        ),
        "target_layer_ids": taps,
        "num_target_layers": config.count("num_target_layers") if "num_target_layers" in config else None,
        "mask_token_id": draft_value(config, dflash, "mask_token_id").count("mask_token_id", minimum=0),
        "draft_vocab_size": fields["vocab_size"],
    }


def _laguna_heads(config: Fields, num_layers: int) -> int:
    per_layer = config.get("num_attention_heads_per_layer")
    if per_layer is None:
        return config.count("num_attention_heads")
    if not isinstance(per_layer, list | tuple) or len(per_layer) != num_layers or len(set(per_layer)) != 1:
        raise config.wrong(
            "num_attention_heads_per_layer", f"one number repeated num_hidden_layers ({num_layers}) times"
        )
    return Fields({"num_attention_heads": per_layer[0]}, config.where).count("num_attention_heads")


def _laguna_windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; ``sliding_windows`` repeats ``sliding_window`` and may be absent."""
    types = config.get("layer_types")
    if types is None:
        raise ConfigError(
            f"{config.where}: 'layer_types' is missing; expected {num_layers} times 'sliding_attention' or "
            "'full_attention'"
        )
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise config.wrong("layer_types", f"a list of num_hidden_layers ({num_layers}) layer types")
    if set(types) not in ({"sliding_attention"}, {"full_attention"}):
        raise config.wrong("layer_types", "'sliding_attention' for all layers or 'full_attention' for all")
    if types[0] == "full_attention":
        return (None,) * num_layers
    listed = config.get("sliding_windows")
    if listed is None:
        return (config.count("sliding_window"),) * num_layers
    if not isinstance(listed, list | tuple) or len(listed) != num_layers or len(set(listed)) != 1:
        raise config.wrong("sliding_windows", f"one window repeated num_hidden_layers ({num_layers}) times")
    window = Fields({"sliding_windows": listed[0]}, config.where).count("sliding_windows")
    if "sliding_window" in config and config.count("sliding_window") != window:
        raise config.wrong("sliding_window", f"what 'sliding_windows' says ({window})")
    return (window,) * num_layers


def _laguna_taps(config: Fields, dflash: Fields) -> tuple[int, ...]:
    taps = draft_value(config, dflash, "target_layer_ids").ids("target_layer_ids")
    counted = config.ids("eagle_aux_hidden_state_layer_ids")
    from_counted = tuple(layer - 1 for layer in counted) if counted else None
    if taps is None and from_counted is None:
        raise ConfigError(
            f"{config.where}: 'dflash_config.target_layer_ids' is missing; expected the 0-based target "
            "layers whose output the drafter reads"
        )
    if taps is not None and from_counted is not None and taps != from_counted:
        raise config.wrong(
            "eagle_aux_hidden_state_layer_ids", f"target_layer_ids plus one ({[layer + 1 for layer in taps]})"
        )
    result = taps if taps is not None else from_counted
    assert result is not None
    return result


def _laguna_gating(config: Fields) -> str:
    spellings: dict[Any, str] = {
        True: "per-head", "per-head": "per-head", "per_head": "per-head",
        "per-element": "per-element", "per_element": "per-element",
        False: "off", "off": "off", "disabled": "off",
    }  # fmt: skip
    found = config.get("gating_types", [config.values.get("gating", True)])
    if not isinstance(found, list) or not all(isinstance(value, bool | str | None) for value in found):
        raise config.wrong(
            "gating_types" if "gating_types" in config else "gating", "per-head, per-element or false"
        )
    given = set(found)
    if len(given) != 1:
        raise config.wrong("gating_types", "the same for all layers of a drafter")
    value = given.pop()
    value = False if value is None else value
    if value not in spellings:
        raise config.wrong(
            "gating_types" if "gating_types" in config else "gating", "per-head, per-element or false"
        )
    return spellings[value]


def _zlab_default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Spread as many taps as there are draft layers over the target.

    Source: z-lab dflash 0.1.0 model.py, build_target_layer_ids.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + j * (num_target_layers - 4) / (num_taps - 1)) for j in range(num_taps))


def _qwen3(config: Fields) -> dict[str, Any]:
    refuse_foreign(config)
    heads = config.count("num_attention_heads", _QWEN3_DEFAULTS["num_attention_heads"])
    counts = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "head_dim",
        "max_position_embeddings",
    )
    return {key: config.count(key, _QWEN3_DEFAULTS[key]) for key in counts} | {
        "num_attention_heads": heads,
        "num_key_value_heads": config.count("num_key_value_heads", _QWEN3_DEFAULTS["num_key_value_heads"]),
        "rms_norm_eps": config.number("rms_norm_eps", _QWEN3_DEFAULTS["rms_norm_eps"]),
        # Qwen3's rotary embedding knows no partial factor; speculators drops Laguna's, too.
        "rope": read_rope(config, "sliding_attention", _QWEN3_DEFAULTS["rope_theta"], partial=False),
        "gating": "off",
        "has_aux_norms": False,
        "norm_context": False,
    }


def _qwen3_layer_types(config: Fields, num_layers: int) -> tuple[bool, ...]:
    types = config.get("layer_types")
    if types is None:
        first = config.count("max_window_layers", _QWEN3_DEFAULTS["max_window_layers"], minimum=0)
        return tuple(_qwen3_window(config) is not None and i >= first for i in range(num_layers))
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise config.wrong("layer_types", f"a list of num_hidden_layers ({num_layers}) layer types")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.wrong("layer_types", "made of 'full_attention' and 'sliding_attention'")
    return tuple(kind == "sliding_attention" for kind in types)


def _qwen3_window(config: Fields) -> int | None:
    """Return the window; transformers drops it unless ``use_sliding_window`` is true."""
    if not config.get("use_sliding_window", False):
        return None
    return config.count("sliding_window", _QWEN3_DEFAULTS["sliding_window"])
