"""What the config formats of DFlash drafters share: causal flags, rotary embedding, what is refused."""

from __future__ import annotations

from collections.abc import Mapping

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.json_fields import Fields
from lean_laguna.core.rope_config import RopeConfig


def refuse_foreign(config: Fields) -> None:
    """Refuse networks that this package does not run rather than run them wrongly.

    Raises:
        ConfigError: Names the key, what was found and what is accepted.
    """
    for key in ("attention_bias", "qkv_bias", "mlp_bias", "swa_attention_sink_enabled"):
        if config.get(key, False):
            raise config.wrong(key, "false or absent")
    if config.get("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", "'silu'")


def draft_value(config: Fields, dflash: Fields, key: str) -> Fields:
    """Return the section that holds ``key``: ``dflash_config`` first, then the top level."""
    return dflash if key in dflash else config


def read_causal(config: Fields, dflash: Fields, is_sliding: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return, per layer, whether a block row sees earlier block rows only.

    Read from ``is_causal`` or ``causal``, on top or in ``dflash_config``; absent, sliding layers are causal
    and full ones are not, as in z-lab's package and vLLM 0.33 (vLLM 0.25 takes an absent flag as not causal).
    """
    found: dict[str, bool] = {}
    for section in (config, dflash):
        for key in ("is_causal", "causal"):
            if key in section:
                if not isinstance(section.get(key), bool):
                    raise section.wrong(key, "true or false")
                found[f"{section.where}: '{key}'"] = section.get(key)
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} = {str(value).lower()}" for name, value in found.items())
        raise ConfigError(f"causal flags contradict each other: {listed}; expected one value")
    return (next(iter(found.values())),) * len(is_sliding) if found else is_sliding


def read_rope(config: Fields, layer_type: str, default_theta: float, *, partial: bool = True) -> RopeConfig:
    """Return the one rotary embedding of a drafter's layers.

    A rope dict of its own wins. Without one the top-level ``rope_theta`` holds for sliding layers too:
    Poolside's drafters rotate theirs with 500000, not with the 10000 that LagunaConfig would fill in.
    """
    given = config.section("rope_parameters").values or config.section("rope_scaling").values
    if any(isinstance(value, Mapping) for value in given.values()):
        order = (layer_type, "sliding_attention", "full_attention", "global_attention")
        given = next((given[name] for name in order if isinstance(given.get(name), Mapping)), {})
    if layer_type == "sliding_attention" and "swa_rope_parameters" in config:
        given = config.section("swa_rope_parameters").values
    filled = {"rope_theta": config.get("rope_theta", default_theta)}
    if "partial_rotary_factor" in config:
        filled["partial_rotary_factor"] = config.get("partial_rotary_factor")
    filled |= given
    if not partial:
        filled.pop("partial_rotary_factor", None)
    return RopeConfig.from_dict(filled, f"{config.where}: rope_parameters")
