"""The context of a Laguna-S target: 256K to 1M positions and back, by the constants that Poolside publishes.

The weights were trained at 1M; the quantised repositories set 256K. Three values of config.json differ, no
more: YaRN's factor and attention factor of full-attention layers, and the limit. Sliding layers stay.

Source: the configs of poolside/Laguna-S-2.1 (1M) and of its quantised repositories (256K).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_laguna.convert.folder import link_or_copy, whole_folder
from lean_laguna.core.errors import CheckpointError, ConfigError, nearest
from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.model_config import LagunaConfig, config_path, read_config_json
from lean_laguna.models.shapes import YARN_32_ATTENTION_FACTOR, YARN_128_ATTENTION_FACTOR, laguna_shape

SHAPE = "laguna-s-2.1"
_SHAPE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads_per_layer",
    "layer_types",
    "head_dim",
)
_ROPE_FIELDS = (
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)


@dataclass(frozen=True)
class ContextSetting:
    """The three values that make a context.

    Attributes:
        max_position_embeddings: The limit.
        factor: YaRN's extension.
        attention_factor: YaRN's factor on cos and sin.
    """

    max_position_embeddings: int
    factor: float
    attention_factor: float


SETTINGS = {
    "256k": ContextSetting(262144, 32.0, YARN_32_ATTENTION_FACTOR),
    "1m": ContextSetting(1048576, 128.0, YARN_128_ATTENTION_FACTOR),
}


@dataclass(frozen=True)
class ContextChange:
    """What was changed.

    Attributes:
        before: Name of the setting that was found.
        after: Name of the setting that was made.
        config: The new config.json.
    """

    before: str
    after: str
    config: dict[str, Any]


def change_context(given: Mapping[str, Any], after: str, where: str) -> ContextChange:
    """Return a config.json with another context.

    Args:
        given: The parsed config.json.
        after: ``256k`` or ``1m``.
        where: Its path, for errors.

    Raises:
        ConfigError: No such context, a model that the constants are not for, or values that are not published
            ones; names them.
    """
    if after not in SETTINGS:
        raise ConfigError(f"unknown context '{after}'{nearest(after, SETTINGS)}")
    config = LagunaConfig.from_dict(given, where)
    _check_model(config, where)
    before = _setting_of(config, where)
    if before == after:
        raise ConfigError(f"{where}: the context is {after} already")
    written = copy.deepcopy(dict(given))
    setting = SETTINGS[after]
    ropes = written.get("rope_parameters")
    full = ropes.get("full_attention") if isinstance(ropes, dict) else None
    if not isinstance(full, dict):
        raise ConfigError(f"{where}: expected 'rope_parameters.full_attention', as Laguna-S-2.1 spells it")
    full["factor"], full["attention_factor"] = setting.factor, setting.attention_factor
    written["max_position_embeddings"] = setting.max_position_embeddings
    _check_change(config, LagunaConfig.from_dict(written, where), setting, where)
    return ContextChange(before, after, written)


def convert_context(source: Path, destination: Path | None, after: str) -> ContextChange:
    """Change the context of a checkpoint.

    Args:
        source: Checkpoint folder.
        destination: A new folder, whose other files share their bytes with the source's where the disk can;
            None changes the source's config.json in place.
        after: ``256k`` or ``1m``.

    Raises:
        CheckpointError: The config is missing or not JSON.
        ConfigError: As for ``change_context``, or the destination cannot be written.
    """
    change = change_context(read_config_json(source), after, str(config_path(source)))
    if destination is None:
        file = config_path(source)
        if file.is_symlink():
            raise CheckpointError(
                f"{file}: lies in a shared cache, which other programs read; name a new folder instead"
            )
        atomic_write_json(file, change.config)
    else:
        with whole_folder(destination) as folder:
            for file in sorted(source.iterdir()):
                if file.is_file() and file.name != "config.json":
                    link_or_copy(file, folder / file.name)
            atomic_write_json(folder / "config.json", change.config)
    found = _setting_of(LagunaConfig.from_file(destination or source), str(destination or source))
    assert found == after, "the written config was checked before it was written"
    return change


def _check_model(config: LagunaConfig, where: str) -> None:
    """Refuse models that the constants were not published for."""
    expected = laguna_shape(SHAPE)
    for name in _SHAPE_FIELDS:
        if getattr(config, name) != getattr(expected, name):
            found, wanted = (_brief(getattr(c, name)) for c in (config, expected))
            raise ConfigError(
                f"{where}: constants for another context are published for Laguna-S-2.1 alone, whose {name} "
                f"is {wanted}; found {found}"
            )
    for name in _ROPE_FIELDS:
        found, wanted = getattr(config.full_rope, name), getattr(expected.full_rope, name)
        if found != wanted:
            raise ConfigError(
                f"{where}: 'rope_parameters.full_attention.{name}' must be {wanted}, found {found}"
            )


def _setting_of(config: LagunaConfig, where: str) -> str:
    """Return which setting a config has, as a whole."""
    rope = config.full_rope
    for name, setting in SETTINGS.items():
        # Left out, the attention factor is the formula's value, which is the published one.
        if (config.max_position_embeddings, rope.factor, rope.attention_scaling) == (
            setting.max_position_embeddings,
            setting.factor,
            setting.attention_factor,
        ):
            return name
    known = " or ".join(
        f"{s.max_position_embeddings}, {s.factor:g} and {s.attention_factor}" for s in SETTINGS.values()
    )
    raise ConfigError(
        f"{where}: max_position_embeddings, factor and attention_factor are "
        f"{config.max_position_embeddings}, {rope.factor:g} and {rope.attention_scaling}; expected {known}"
    )


def _check_change(before: LagunaConfig, after: LagunaConfig, setting: ContextSetting, where: str) -> None:
    rope = dataclasses.replace(
        before.full_rope, factor=setting.factor, attention_factor=setting.attention_factor
    )
    expected = dataclasses.replace(
        before, full_rope=rope, max_position_embeddings=setting.max_position_embeddings
    )
    if after != expected:
        raise ConfigError(f"{where}: other keys say the same as those changed, such as 'rope_scaling'")


def _brief(value: Any) -> str:
    return f"{list(value[:4])} ..." if isinstance(value, tuple) else str(value)
