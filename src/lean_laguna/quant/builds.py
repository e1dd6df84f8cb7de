"""Ways to store a Laguna target, by name: which class of module has which scheme.

Classes: ``attention``, ``experts``, ``shared``, ``dense``, ``head``; others are never quantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lean_laguna.core.errors import ConfigError, nearest
from lean_laguna.quant.presets import PRESETS
from lean_laguna.quant.scheme import FP8_BLOCK, NVFP4, WeightScheme

_INT4, _INT8 = PRESETS["W4A16"], PRESETS["W8A16"]
_MLP = ("experts", "shared")
BUILDS: Mapping[str, Mapping[str, WeightScheme]] = {
    "bf16": {},
    "fp8": dict.fromkeys(_MLP, FP8_BLOCK),
    "int8": dict.fromkeys(_MLP, _INT8),
    "int4": dict.fromkeys(_MLP, _INT4),
    "nvfp4": dict.fromkeys(_MLP, NVFP4),
    "nvfp4-routed": {"experts": NVFP4},
    "nvfp4-fp8-attention": {**dict.fromkeys(_MLP, NVFP4), "attention": FP8_BLOCK},
    "nvfp4-attention": dict.fromkeys((*_MLP, "attention"), NVFP4),
    "nvfp4-all": {**dict.fromkeys((*_MLP, "attention"), NVFP4), "dense": FP8_BLOCK, "head": FP8_BLOCK},
    "fp8-all": dict.fromkeys((*_MLP, "attention", "dense", "head"), FP8_BLOCK),
}
"""Poolside publishes ``bf16``, ``fp8``, ``int4`` and ``nvfp4``; ``nvfp4-attention`` is a third party's."""

_CLASSES = (
    (re.compile(r"\.self_attn\.[qkvog]_proj\.weight$"), "attention"),
    (re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$"), "experts"),
    (re.compile(r"\.mlp\.shared_experts\.(gate|up|down)_proj\.weight$"), "shared"),
    (re.compile(r"\.mlp\.(gate|up|down)_proj\.weight$"), "dense"),
    (re.compile(r"^lm_head\.weight$"), "head"),
)


def build(name: str) -> Mapping[str, WeightScheme]:
    """Return a build's scheme by class of module.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in BUILDS:
        raise ConfigError(f"unknown scheme '{name}'{nearest(name, BUILDS)}")
    return BUILDS[name]


def class_of(parameter: str) -> str | None:
    """Return the class of a target's parameter, by its name in our model; None where none is quantised."""
    return next((kind for pattern, kind in _CLASSES if pattern.search(parameter)), None)
