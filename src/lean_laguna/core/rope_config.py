"""Rotary embedding parameters, in every spelling that checkpoints of the family use.

Source: transformers' rope parameters (nested per layer type), the flat ``rope_parameters`` with
``swa_rope_parameters``, and the older ``rope_theta`` with ``rope_scaling``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.json_fields import is_count, is_finite_number

_DEFAULTS = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_NESTED = ("full_attention", "global_attention", "sliding_attention")
_KNOWN = frozenset(
    """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings beta_fast
    beta_slow attention_factor mscale mscale_all_dim truncate
    """.split()
)
_YARN_ONLY = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
# Scores grow with the square of the factor on cos and sin; formulas stay between 0.5 and 5 at any context.
LEAST_ATTENTION_FACTOR, MOST_ATTENTION_FACTOR = 0.01, 100.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer type.

    Attributes:
        rope_theta: Base of the frequencies.
        partial_rotary_factor: Share of a head's dimensions that rotate, in (0, 1].
        rope_type: ``default`` or ``yarn``.
        factor: YaRN's context extension, at least 1.
        original_max_position_embeddings: Context before extension, for YaRN.
        beta_fast: Rotations over the original context above which a dimension is kept as it is.
        beta_slow: Rotations below which a dimension is interpolated.
        attention_factor: The final factor on cos and sin; None takes YaRN's formula.
        mscale: Numerator weight of the formula, where both mscales are given.
        mscale_all_dim: Denominator weight of the formula.
        truncate: Round the ramp's ends to whole dimensions.
    """

    rope_theta: float
    partial_rotary_factor: float = 1.0
    rope_type: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that rotate."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def attention_scaling(self) -> float:
        """Factor on cos and sin: the explicit ``attention_factor``, else YaRN's 0.1 ln(factor) + 1."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters as transformers spells them."""
        written: dict[str, Any] = {
            "rope_type": self.rope_type,
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        if self.rope_type == "yarn":
            for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
                written[name] = getattr(self, name)
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                if getattr(self, name) is not None:
                    written[name] = getattr(self, name)
            if not self.truncate:
                written["truncate"] = False
        return written

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str) -> RopeConfig:
        """Build from one layer type's parameters.

        Raises:
            ConfigError: Names the place, the key, the value found and the values accepted.
        """
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "yarn"):
            raise ConfigError(f"{where}: 'rope_type' must be 'default' or 'yarn', found {kind!r}")
        unknown = sorted(set(given) - _KNOWN)
        if unknown:
            raise ConfigError(f"{where}: unknown key '{unknown[0]}'; known: {', '.join(sorted(_KNOWN))}")
        untyped = [name for name in _YARN_ONLY if given.get(name) is not None]
        if untyped and "rope_type" not in given and "type" not in given:
            raise ConfigError(
                f"{where}: 'rope_type' is missing; with '{untyped[0]}' it must be 'yarn', or "
                f"'{untyped[0]}' must be left out"
            )
        partial = _number(given, "partial_rotary_factor", where, 1.0)
        if partial > 1:
            raise ConfigError(f"{where}: 'partial_rotary_factor' must be in (0, 1], found {partial!r}")
        theta = _number(given, "rope_theta", where)
        if theta <= 1:
            raise ConfigError(f"{where}: 'rope_theta' must be a number above 1, found {theta!r}")
        if kind == "default":
            return cls(rope_theta=theta, partial_rotary_factor=partial)
        original = given.get("original_max_position_embeddings")
        if not is_count(original, 1):
            raise ConfigError(
                f"{where}: 'original_max_position_embeddings' must be a whole number from 1 for yarn, "
                f"found {original!r}"
            )
        optional = {
            name: _number(given, name, where)
            for name in ("attention_factor", "mscale", "mscale_all_dim")
            if given.get(name) is not None
        }
        factor = _number(given, "factor", where)
        if factor < 1:
            raise ConfigError(f"{where}: 'factor' must be a number from 1, found {factor!r}")
        truncate = given.get("truncate")
        if not isinstance(truncate, bool | None):
            raise ConfigError(f"{where}: 'truncate' must be true or false, found {truncate!r}")
        rope = cls(
            rope_theta=theta,
            partial_rotary_factor=partial,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_number(given, "beta_fast", where, 32.0),
            beta_slow=_number(given, "beta_slow", where, 1.0),
            truncate=truncate is not False,
            **optional,
        )
        rope._check_attention_scaling(where)
        return rope

    def _check_attention_scaling(self, where: str) -> None:
        """Refuse a factor on cos and sin from which no attention could come, only NaN or one key."""
        found, formula = self.attention_scaling, _mscale(self.factor, 1.0)
        if is_attention_factor(found):
            return
        least, most = LEAST_ATTENTION_FACTOR, MOST_ATTENTION_FACTOR
        bounds = f"from {least:g} to {most:g} (YaRN's formula gives {formula:.6g})"
        if self.attention_factor is not None:
            raise ConfigError(f"{where}: 'attention_factor' must be a number {bounds}, found {found!r}")
        raise ConfigError(
            f"{where}: 'mscale' {self.mscale!r} over 'mscale_all_dim' {self.mscale_all_dim!r} must give a "
            f"factor {bounds}, found {found:.6g}"
        )


def is_attention_factor(value: Any) -> bool:
    """Return whether a parsed value can be a factor on cos and sin."""
    return is_finite_number(value) and LEAST_ATTENTION_FACTOR <= value <= MOST_ATTENTION_FACTOR


def read_ropes(config: Mapping[str, Any], where: str, has_sliding: bool) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of full and of sliding layers from a checkpoint's config.

    Args:
        config: The parsed ``config.json``.
        where: File name for messages.
        has_sliding: Whether a layer is sliding, so that one shared embedding deserves a warning.

    Returns:
        Full-attention and sliding-attention parameters.

    Raises:
        ConfigError: A parameter is missing or wrong.
    """
    given = _object(config, "rope_parameters", where)
    if given is not None and any(
        name in _NESTED or isinstance(value, Mapping) for name, value in given.items()
    ):
        full, sliding = _nested(config, given, where)
    else:
        full, sliding = _flat(config, given, where, has_sliding)
    partial = config.get("partial_rotary_factor")
    read = []
    for name, parameters in (("full_attention", full), ("sliding_attention", sliding)):
        filled = dict(parameters)
        if partial is not None:
            filled.setdefault("partial_rotary_factor", partial)
        if config.get("rope_theta") is not None:
            filled.setdefault("rope_theta", config["rope_theta"])
        read.append(RopeConfig.from_dict(filled, f"{where}: rope_parameters.{name}"))
    return read[0], read[1]


def _object(given: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any] | None:
    """Return the JSON object under a key, or None where it is absent or null."""
    found = given.get(name)
    if not isinstance(found, Mapping | None):
        raise ConfigError(f"{where}: '{name}' must be an object, found {found!r}")
    return found


def _nested(
    config: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping) and name not in _NESTED:
            raise ConfigError(
                f"{where}: 'rope_parameters' has the unknown layer type '{name}'; known: {', '.join(_NESTED)}"
            )
    # Keys that stand loose beside the layer types (XS.2 repeats original_max_position_embeddings) fill gaps
    # only.
    loose = {
        name: value for name, value in given.items() if not isinstance(value, Mapping) and name in _KNOWN
    }
    inside = f"{where}: rope_parameters"
    full = _object(given, "full_attention", inside)
    if full is None:
        full = _object(given, "global_attention", inside)
    sliding = _object(given, "sliding_attention", inside)
    if sliding is None:
        sliding = _object(config, "swa_rope_parameters", where)
    else:
        _require_same(sliding, _object(config, "swa_rope_parameters", where), "swa_rope_parameters", where)

    def filled(parameters: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
        if parameters is None:
            return _default(name, where, name in given)
        return {**loose, **parameters} if parameters.get("rope_type") == "yarn" else parameters

    older, full = _object(config, "rope_scaling", where), filled(full, "full_attention")
    if older != given:
        _require_same(full, older, "rope_scaling", where)
    return full, filled(sliding, "sliding_attention")


def _require_same(
    holds: Mapping[str, Any], other: Mapping[str, Any] | None, other_name: str, where: str
) -> None:
    """Refuse a second place that says otherwise: engines differ in which of the two they believe."""
    for name, value in (other or {}).items():
        key = "rope_type" if name == "type" else name
        found = holds.get(key, holds.get("type") if key == "rope_type" else None)
        if value is not None and value != found:
            raise ConfigError(
                f"{where}: '{other_name}' and 'rope_parameters' contradict each other: '{name}' is "
                f"{value!r} and {found!r}; leave out '{other_name}'"
            )


def _default(name: str, where: str, is_null: bool) -> Mapping[str, Any]:
    """Return what transformers takes for a layer type of which nothing is said; a null may not mean that."""
    default = _DEFAULTS[name]
    if is_null:
        warnings.warn(
            f"{where}: 'rope_parameters' is null for {name}; taken as transformers does: rope_theta "
            f"{default['rope_theta']:.0f}, {default['partial_rotary_factor']:.0%} of each head turned",
            stacklevel=6,
        )
    return default


def _flat(
    config: Mapping[str, Any], given: Mapping[str, Any] | None, where: str, has_sliding: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    scaling = _object(config, "rope_scaling", where)
    sliding = _object(config, "swa_rope_parameters", where)
    if given is None and scaling is None and config.get("rope_theta") is None:
        is_null = "rope_parameters" in config
        full = _default("full_attention", where, is_null)
        return full, sliding or _default("sliding_attention", where, is_null and has_sliding)
    if given:
        _require_same({**(scaling or {}), **given}, scaling, "rope_scaling", where)
    full = {**(scaling or {}), **(given or {})}
    if "rope_theta" not in full and config.get("rope_theta") is None:
        raise ConfigError(f"{where}: 'rope_theta' is missing; give it beside or in rope_parameters")
    if sliding is None:
        if has_sliding:
            warnings.warn(
                f"{where}: no swa_rope_parameters and no rope_parameters per layer type; sliding "
                "layers use the rotary embedding of full layers",
                stacklevel=5,
            )
        sliding = full
    return full, sliding


def _number(given: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    found = given.get(name)
    if found is None:
        if default is None:
            raise ConfigError(f"{where}: '{name}' is missing; it must be a number above 0")
        return default
    if not is_finite_number(found) or found <= 0:
        raise ConfigError(f"{where}: '{name}' must be a number above 0, found {found!r}")
    return float(found)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
