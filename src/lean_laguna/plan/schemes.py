"""Ways to store a Laguna target, by name: what is quantised how, for shapes that have no checkpoint yet."""

from __future__ import annotations

import dataclasses
import functools

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.plan.inventory import Inventory, from_modules
from lean_laguna.plan.modules import Module, target_modules
from lean_laguna.quant.builds import build
from lean_laguna.quant.scheme import WeightScheme

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
        name: One of ``quant.builds.BUILDS``.

    Raises:
        ConfigError: No such way, or the shape does not fit it.
    """
    chosen = build(name)

    def scheme_of(module: Module) -> WeightScheme | None:
        return chosen.get(module.module_class) if module.is_linear else None

    inventory = from_modules(target_modules(config), scheme_of, "BF16")
    # Every quantised build that poolside publishes brings scales for FP8 keys and values.
    return dataclasses.replace(inventory, has_fp8_kv=bool(chosen))
