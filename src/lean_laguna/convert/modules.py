"""Linears of a checkpoint by what they are for, under the names that checkpoints give them."""

from __future__ import annotations

import re

_PATTERNS = {
    "experts": r"mlp\.experts\.\d+\.(?:gate|up|down)_proj$",
    "shared": r"mlp\.shared_experts?\.(?:gate|up|down)_proj$",
    "attention": r"self_attn\.(?:q|k|v|qkv|o)_proj$",
    "gates": r"self_attn\.g_proj$",
    "dense": r"mlp\.(?:gate|up|down)_proj$",
    "fc": r"fc$",
    "head": r"lm_head$",
}
CLASSES = {name: re.compile(rf"(?:^|\.){pattern}") for name, pattern in _PATTERNS.items()}
_PREFIXES = ("language_model.", "model.")
# Words for several classes at once. ``experts`` is what Poolside's quantised builds hold.
GROUPS = {
    "experts": ("experts", "shared"),
    "attention": ("attention",),
    "dense": ("dense",),
    "gates": ("gates",),
    "head": ("head",),
    "fc": ("fc",),
    "all": tuple(CLASSES),
}
# Linears that a serving engine runs as one: NVFP4 keeps one divisor for them.
_FUSED = re.compile(r"^(.*\.)(?:(gate|up)|([qkv]))_proj$")


def class_of(module: str) -> str | None:
    """Return the class of a module, None for norms, the router, embeddings and whatever else is no linear."""
    return next((name for name, pattern in CLASSES.items() if pattern.search(module)), None)


def fused_set(module: str) -> str:
    """Return a name that modules which are run as one have in common: gate and up; q, k and v."""
    match = _FUSED.match(module)
    if match is None:
        return module
    return f"{match[1]}{'gate_up' if match[2] else 'qkv'}_proj"


def plain_name(module: str) -> str:
    """Return a module's name without prefixes and in one spelling, to compare checkpoints by."""
    for prefix in _PREFIXES:
        module = module.removeprefix(prefix)
    return module.replace(".shared_experts.", ".shared_expert.")
