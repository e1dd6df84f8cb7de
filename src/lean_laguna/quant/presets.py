"""compressed-tensors' named schemes, as old configs use them in place of a group.

Source: compressed-tensors 0.20, quantization/quant_scheme.py, PRESET_SCHEMES.
"""

from __future__ import annotations

import dataclasses

from lean_laguna.core.errors import ConfigError, nearest
from lean_laguna.quant.scheme import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    NVFP4,
    WeightScheme,
    packed_integer,
)

_GROUP = 128
PRESETS = {
    "NVFP4A16": NVFP4,
    "NVFP4": dataclasses.replace(NVFP4, activations="static"),
    "FP8": FP8_TENSOR,
    "FP8_DYNAMIC": FP8_CHANNEL,
    "FP8_BLOCK": FP8_BLOCK,
    "W4A16": packed_integer(4, _GROUP),
    "W4A16_ASYM": packed_integer(4, _GROUP, symmetric=False),
    "W8A16": packed_integer(8, _GROUP),
    "W8A8": INT8_CHANNEL,
    "INT8": INT8_CHANNEL,
}


def preset(name: str, where: str) -> WeightScheme:
    """Return a named scheme.

    Raises:
        ConfigError: There is none of that name, or it is not supported.
    """
    if name.upper() not in PRESETS:
        raise ConfigError(f"{where}: scheme '{name}' is not supported{nearest(name.upper(), PRESETS)}")
    return PRESETS[name.upper()]
