"""Sizes and speeds as people write and read them."""

from __future__ import annotations

import re

from lean_laguna.core.errors import ConfigError

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_TOO_MUCH = 1e18  # of any unit: a slip of the pen; hundreds of digits are no float
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str, what: str) -> int:
    """Return a number of bytes: ``24GiB``, ``24GB``, ``24G`` (GiB, as in systemd), or bytes without a unit.

    Raises:
        ConfigError: It is not a size; names ``what``.
    """
    match = _SIZE.fullmatch(text)
    if match is None or not 0 < float(match[1]) < _TOO_MUCH:
        raise ConfigError(f"{what} must be a size such as 24GiB, 96GB or 12884901888, found {text!r:.100}")
    base = 1000 if match[4] and not match[3] else 1024
    size = int(float(match[1]) * base ** _POWERS[match[2].lower()])
    if not size:
        raise ConfigError(f"{what} must be at least one byte, such as 24GiB, found {text!r:.100}")
    return size


def parse_bandwidth(text: str, what: str) -> float:
    """Return bytes per second: ``273`` or ``273GB/s``, ``4.8TB/s``.

    Raises:
        ConfigError: It is not a bandwidth; names ``what``.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(gb/s|tb/s|)\s*", text, re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < _TOO_MUCH:
        raise ConfigError(f"{what} must be a bandwidth in GB/s such as 273, or 4.8TB/s, found {text!r:.100}")
    return float(match[1]) * (1e12 if match[2].lower() == "tb/s" else 1e9)


def gib(num_bytes: float) -> str:
    """Return a size of memory with its unit, the binary one as memory is sold."""
    if abs(num_bytes) < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    if abs(num_bytes) < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


def gb(num_bytes: float) -> str:
    """Return an amount of traffic with its unit, the decimal one as bandwidth is stated."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.1f} kB"
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e9:.2f} GB"


def per_s(bytes_per_s: float) -> str:
    """Return a bandwidth with its unit."""
    return f"{bytes_per_s / 1e12:.2f} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.0f} GB/s"


def count(number: float) -> str:
    """Return a number of weights in short."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}" if unit == "B" else f"{number / limit:.1f} {unit}"
    return f"{number:.0f}"
