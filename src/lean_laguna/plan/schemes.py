"""Ways to store a Laguna target, by name: what is quantised how, for shapes that have no checkpoint yet."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from lean_laguna.core.errors import ConfigError, nearest
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.plan.inventory import Inventory, from_modules
from lean_laguna.plan.modules import Module, ModuleClass, target_modules
from lean_laguna.quant.presets import PRESETS
from lean_laguna.quant.scheme import FP8_BLOCK, NVFP4, WeightScheme

_INT4, _INT8 = PRESETS["W4A16"], PRESETS["W8A16"]
_MLP: tuple[ModuleClass, ...] = ("experts", "shared")
SCHEMES: Mapping[str, Mapping[ModuleClass, WeightScheme]] = {
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
TITLES = {
    "bf16": "BF16",
    "fp8": "FP8 experts + shared",
    "int8": "INT8 experts + shared",
    "int4": "INT4 experts + shared",
    "nvfp4": "NVFP4 experts + shared",
    "nvfp4-routed": "NVFP4 routed experts",
    "nvfp4-fp8-attention": "NVFP4 + FP8 attention",
    "nvfp4-attention": "NVFP4 + NVFP4 attention",
    "nvfp4-all": "NVFP4 + FP8 head",
    "fp8-all": "FP8 everything",
}


@functools.lru_cache(maxsize=16)
def stored_as(config: LagunaConfig, name: str) -> Inventory:
    """Describe the weights of a target stored in a named way.

    Args:
        config: The target.
        name: One of ``SCHEMES``.

    Raises:
        ConfigError: No such way, or the shape does not fit it.
    """
    if name not in SCHEMES:
        raise ConfigError(f"unknown scheme '{name}'{nearest(name, SCHEMES)}")
    chosen = SCHEMES[name]

    def scheme_of(module: Module) -> WeightScheme | None:
        return chosen.get(module.module_class) if module.is_linear else None

    inventory = from_modules(target_modules(config), scheme_of, "BF16")
    # Every quantised build that poolside publishes brings scales for FP8 keys and values.
    return dataclasses.replace(inventory, has_fp8_kv=bool(chosen))
