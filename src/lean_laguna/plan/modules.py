"""The modules of a Laguna target or a drafter, by name and class, from its configuration alone.

Names are those of the published checkpoints; ``module_class`` also knows the other spellings of the family.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig

ModuleClass = Literal[
    "attention", "experts", "shared", "dense", "router", "norms", "head", "embedding", "drafter", "other"
]
CLASSES: tuple[ModuleClass, ...] = (
    "attention", "experts", "shared", "dense", "router", "norms", "head", "embedding", "drafter", "other",
)  # fmt: skip

_RULES: tuple[tuple[re.Pattern[str], ModuleClass], ...] = (
    (re.compile(r"(^|\.)embed_tokens$"), "embedding"),
    (re.compile(r"(^|\.)lm_head$"), "head"),
    (re.compile(r"norm$"), "norms"),
    (re.compile(r"\.self_attn\.[qkvog]_proj$"), "attention"),
    (re.compile(r"\.self_attn\.(k|v|q)_scale$"), "other"),
    (re.compile(r"\.mlp\.shared_experts?\."), "shared"),
    (re.compile(r"\.mlp\.(gate|experts|gate\.)\.?e_score_correction_bias$"), "router"),
    (re.compile(r"\.mlp\.gate$"), "router"),
    (re.compile(r"\.mlp\.switch_mlp\."), "experts"),
    (re.compile(r"\.mlp\.(gate|up|down)_proj$"), "dense"),
)


def module_class(name: str) -> ModuleClass:
    """Return the class of a target's module, such as ``model.layers.3.mlp.experts.7.up_proj``."""
    if ".mlp.experts." in name and not name.endswith("_bias"):  # nearly all of them, found fast
        return "experts"
    for pattern, kind in _RULES:
        if pattern.search(name):
            return kind
    return "other"


@dataclass(frozen=True, slots=True)
class Module:
    """One weight of a network.

    Attributes:
        name: Its module, without ``.weight``.
        module_class: What it is part of.
        shape: [out, in] of a linear layer, else the vector's length.
        is_linear: A matrix product, so that a quantiser may take it.
    """

    name: str
    module_class: ModuleClass
    shape: tuple[int, ...]
    is_linear: bool = False

    @property
    def num_weights(self) -> int:
        """Values it holds."""
        return self.shape[0] * (self.shape[1] if len(self.shape) == 2 else 1)


@functools.lru_cache(maxsize=4)
def target_modules(config: LagunaConfig) -> tuple[Module, ...]:
    """Return every weight of a target, experts one by one."""
    return tuple(_target_modules(config))


def _target_modules(config: LagunaConfig) -> Iterator[Module]:
    width = config.hidden_size

    def linear(name: str, kind: ModuleClass, out: int, into: int) -> Module:
        return Module(name, kind, (out, into), is_linear=True)

    yield Module("model.embed_tokens", "embedding", (config.vocab_size, width))
    for i in range(config.num_hidden_layers):
        yield from _attention(config, i)
        mlp = f"model.layers.{i}.mlp"
        if config.mlp_layer_types[i] == "dense":
            yield from _mlp(mlp, "dense", width, config.intermediate_size)
            continue
        yield linear(f"{mlp}.gate", "router", config.num_experts, width)
        yield Module(f"{mlp}.experts.e_score_correction_bias", "router", (config.num_experts,))
        for expert in range(config.num_experts):
            yield from _mlp(f"{mlp}.experts.{expert}", "experts", width, config.moe_intermediate_size)
        yield from _mlp(f"{mlp}.shared_expert", "shared", width, config.shared_expert_intermediate_size)
    yield Module("model.norm", "norms", (width,))
    if not config.tie_word_embeddings:
        yield linear("lm_head", "head", config.vocab_size, width)


def _attention(config: LagunaConfig, i: int) -> Iterator[Module]:
    width, head = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads_per_layer[i] * head, config.num_key_value_heads * head
    layer = f"model.layers.{i}"
    gates = {"per-head": q // head, "per-element": q, "off": 0}[config.gating[i]]
    for part, out, into in (("q", q, width), ("k", kv, width), ("v", kv, width), ("o", width, q)):
        yield Module(f"{layer}.self_attn.{part}_proj", "attention", (out, into), is_linear=True)
    if gates:
        yield Module(f"{layer}.self_attn.g_proj", "attention", (gates, width), is_linear=True)
    for name, size in (("self_attn.q_norm", head), ("self_attn.k_norm", head)):
        yield Module(f"{layer}.{name}", "norms", (size,))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Module(f"{layer}.{name}", "norms", (width,))


def _mlp(prefix: str, kind: ModuleClass, width: int, inner: int) -> Iterator[Module]:
    for part in ("gate", "up"):
        yield Module(f"{prefix}.{part}_proj", kind, (inner, width), is_linear=True)
    yield Module(f"{prefix}.down_proj", kind, (width, inner), is_linear=True)


def drafter_modules(config: DFlashConfig) -> Iterator[Module]:
    """Yield every weight of a DFlash drafter; what it borrows from the target is not among them."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    taps = len(config.target_layer_ids)
    gates = {"per-head": config.num_attention_heads, "per-element": q, "off": 0}[config.gating]
    layer = [(q, width), (kv, width), (kv, width), (width, q)]
    layer += [(gates, width)] if gates else []
    layer += [(inner, width), (inner, width), (width, inner)]
    yield Module("fc", "drafter", (width, taps * width), is_linear=True)
    if config.has_own_lm_head:
        yield Module("lm_head", "drafter", (config.draft_vocab_size, width), is_linear=True)
    for j in range(2 + (taps if config.has_aux_norms else 0)):
        yield Module(f"norm.{j}", "drafter", (width,))
    for i in range(config.num_hidden_layers):
        for j, shape in enumerate(layer):
            yield Module(f"layers.{i}.{j}", "drafter", shape, is_linear=True)
        for j, size in enumerate((width, width, head, head)):
            yield Module(f"layers.{i}.norm.{j}", "drafter", (size,))
