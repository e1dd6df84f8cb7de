"""What DSpark adds to a DFlash drafter's config: the two heads, their calibration, and the block's layout.

The keys may stand on top, in ``dflash_config``, in ``dspark_config``, or carry the prefix ``dspark_``.
Source: DeepSpec modeling/dspark/qwen3/config.py, speculators 0.9.0 models/dspark/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.json_fields import Fields, architectures, is_finite_number

DEFAULT_MARKOV_RANK = 256


@dataclass(frozen=True)
class DSparkHeads:
    """The heads of a DSpark drafter.

    Attributes:
        markov_rank: Width of the table that turns the previous token into a bias on the logits.
        has_confidence: Whether a head predicts each draft's acceptance.
        confidence_with_markov: Whether that head reads the previous token's row of the table, too.
        greedy_temperatures: Per draft, what the confidence logit is divided by where the target is greedy;
            empty means ones.
        sampled_temperatures: The same where the target samples.
        greedy_biases: Per draft, what is added after that; empty means zeros.
        sampled_biases: The same where the target samples.
    """

    markov_rank: int
    has_confidence: bool = True
    confidence_with_markov: bool = True
    greedy_temperatures: tuple[float, ...] = ()
    sampled_temperatures: tuple[float, ...] = ()
    greedy_biases: tuple[float, ...] = ()
    sampled_biases: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of ``dspark_config``, calibration left out where there is none."""
        written: dict[str, Any] = {
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.has_confidence,
            "confidence_head_with_markov": self.confidence_with_markov,
        }
        for name in ("greedy_temperatures", "sampled_temperatures", "greedy_biases", "sampled_biases"):
            if getattr(self, name):
                written[name] = list(getattr(self, name))
        return written


def names_dspark(given: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a DSpark drafter."""
    if given.get("speculators_model_type") is not None:
        return bool(given["speculators_model_type"] == "dspark")
    return "DSpark" in " ".join(architectures(given)) or given.get("dspark_config") is not None


def read_layout(config: Fields, *, default: bool, is_dspark: bool) -> bool:
    """Return ``sample_from_anchor``: whether slot k predicts the token after its position, not at it.

    Raises:
        ConfigError: Not a truth value, or set for a DFlash drafter, whose masks predict where they stand.
    """
    found = _find(config, "sample_from_anchor")
    value = found.get("sample_from_anchor", default)
    if not isinstance(value, bool):
        raise found.wrong("sample_from_anchor", "true or false")
    if value and not is_dspark:
        raise found.wrong("sample_from_anchor", "false: a DFlash mask predicts the token at its own position")
    return value


def read_heads(config: Fields) -> DSparkHeads:
    """Read the heads.

    Raises:
        ConfigError: A value is wrong, or a head is of a kind that this package does not run.
    """
    kind = _value(config, "markov_head_type", "vanilla")
    if kind != "vanilla":
        raise ConfigError(f"{config.where}: 'markov_head_type' must be 'vanilla', found {kind!r}")
    found = _find(config, "markov_rank")
    key = "markov_rank" if "markov_rank" in found else "dspark_markov_rank"
    rank = found.count(key, DEFAULT_MARKOV_RANK)
    flags = {}
    for name in ("enable_confidence_head", "confidence_head_with_markov"):
        flags[name] = _value(config, name, True)
        if not isinstance(flags[name], bool):
            raise ConfigError(f"{config.where}: '{name}' must be true or false, found {flags[name]!r}")
    return DSparkHeads(
        rank,
        flags["enable_confidence_head"],
        flags["confidence_head_with_markov"],
        _temperatures(config, "greedy_temperatures"),
        _temperatures(config, "sampled_temperatures"),
        _numbers(config, "greedy_biases"),
        _numbers(config, "sampled_biases"),
    )


def _temperatures(config: Fields, key: str) -> tuple[float, ...]:
    values = _numbers(config, key)
    if any(value <= 0 for value in values):
        raise ConfigError(f"{config.where}: '{key}' must be a list of numbers above 0, found {list(values)}")
    return values


def _numbers(config: Fields, key: str) -> tuple[float, ...]:
    value = _value(config, key, [])
    if not isinstance(value, list) or not all(is_finite_number(v) for v in value):
        raise ConfigError(f"{config.where}: '{key}' must be a list of numbers, found {value!r}")
    return tuple(float(v) for v in value)


def _find(config: Fields, key: str) -> Fields:
    """Return the section that holds ``key`` or its prefixed spelling; the top where none does."""
    for section in (config.section("dspark_config"), config.section("dflash_config"), config):
        if key in section or f"dspark_{key}" in section:
            return section
    return config


def _value(config: Fields, key: str, default: Any) -> Any:
    section = _find(config, key)
    return section.get(key, section.get(f"dspark_{key}", default))
