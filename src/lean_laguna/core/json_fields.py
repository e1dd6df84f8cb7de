"""Typed reads from a parsed JSON object, with errors that a user can act on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from lean_laguna.core.errors import ConfigError

MAX_COUNT = 2**30
"""No width, length, count or id of a checkpoint is larger; beyond it matrices cannot even be described."""
MAX_MODULES = 2**16
"""No network has more layers, or experts in a layer; building a list of them must end."""


def is_count(value: Any, minimum: int, maximum: int = MAX_COUNT) -> TypeGuard[int]:
    """Return whether a parsed value is a whole number from ``minimum`` to ``maximum``."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def largest_count(field: str) -> int:
    """Return the largest value that a count of this name may have."""
    return MAX_MODULES if field in ("num_hidden_layers", "num_experts") else MAX_COUNT


def count_limit(value: Any, maximum: int = MAX_COUNT) -> str:
    """Return the upper limit as words for a message, where it is what ``value`` offends against."""
    return f", up to {maximum}" if isinstance(value, int) and value > maximum else ""


def is_finite_number(value: Any) -> bool:
    """Return whether a parsed value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with hundreds of digits
        return False


def architectures(given: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config.json names; none where it holds no list of them."""
    found = given.get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else []


class Fields:
    """Reads values from one JSON object; an error names object and key, what was found and what is right."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        """True where the key is present and not null."""
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as it stands; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def section(self, key: str) -> Fields:
        """Return the JSON object under ``key``, empty where absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a JSON object")
        return Fields(value, f"{self.where}: {key}")

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return a whole number of at least ``minimum``."""
        value = self.get(key, default)
        if value is None:
            raise ConfigError(
                f"{self.where}: '{key}' is missing; expected a whole number of at least {minimum}"
            )
        if not is_count(value, minimum, largest_count(key)):
            raise self.wrong(
                key, f"a whole number of at least {minimum}" + count_limit(value, largest_count(key))
            )
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number above zero."""
        value = self.get(key, default)
        if not is_finite_number(value) or not value > 0:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...] | None:
        """Return a non-empty list of whole numbers, or None where the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not value or any(type(item) is not int for item in value):
            raise self.wrong(key, "a non-empty list of layer numbers")
        return tuple(value)

    def wrong(self, key: str, accepted: str) -> ConfigError:
        """Return the error for a value that is not ``accepted``."""
        return ConfigError(f"{self.where}: '{key}' must be {accepted}, found {self.values.get(key)!r}")
