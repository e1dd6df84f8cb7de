"""Bytes that a pass of the target reads from memory, and the speed that no engine can go beyond.

At one to sixteen rows a pass is bound by memory: its time is at least its bytes over the bandwidth. A pass
reads every weight once except those of routed experts that no row visits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.plan.inventory import Inventory
from lean_laguna.plan.modules import ModuleClass

PARTS = ("attention", "experts", "shared", "dense", "router", "norms", "head", "kv", "embedding")
SOURCE_PARTS = ("attention", "experts", "shared")
"""What the DGX Spark recipe for Laguna-XS 2.1 counts: no head, dense layer, router, norms, keys or values."""
CODE_ACCEPTANCE = (0.90, 0.81, 0.73, 0.62, 0.52, 0.46)
"""Share of drafts accepted up to each position, measured on code with XS-2.1 and its DFlash (same recipe)."""
TAIL_ACCEPTANCE = 0.86
"""Assumed chance that a draft beyond the measured positions is accepted, given the one before it was."""
_WHOLE: tuple[ModuleClass, ...] = ("attention", "shared", "dense", "router", "norms", "head", "other")


@dataclass(frozen=True)
class Workload:
    """What a pass computes.

    Attributes:
        num_rows: Rows verified together: one, or an anchor and its drafts.
        context: Positions whose keys and values are read.
        overlap: Share of a row's experts that the rows before it visit anyway; 0 is uniform routing.
        kv_element_bytes: Bytes of one key or value element.
    """

    num_rows: int = 1
    context: int = 2048
    overlap: float = 0.0
    kv_element_bytes: int = 2


def distinct_experts(num_experts: int, per_token: int, num_rows: int, overlap: float = 0.0) -> float:
    """Return how many experts of a layer some row is expected to visit.

    Args:
        num_experts: Of the layer.
        per_token: That each row visits.
        num_rows: Rows of the pass.
        overlap: As in ``Workload``; 0.38 was published for another model (Cohere, 2026).
    """
    if not num_experts:
        return 0.0
    independent = 1 + (num_rows - 1) * (1 - overlap)
    return num_experts * (1.0 - math.pow(1.0 - per_token / num_experts, independent))


def kv_read_bytes(config: LagunaConfig, context: int, element_bytes: int = 2) -> int:
    """Return the bytes of keys and values that a pass over one sequence reads, a window if sliding."""
    positions = sum(
        context if kind == "full_attention" else min(context, config.sliding_window)
        for kind in config.layer_types
    )
    return positions * 2 * config.num_key_value_heads * config.head_dim * element_bytes


def pass_bytes(config: LagunaConfig, inventory: Inventory, work: Workload) -> dict[str, float]:
    """Return the bytes that one pass reads, by ``PARTS``."""
    share = 0.0
    if config.num_experts:
        experts = distinct_experts(
            config.num_experts, config.num_experts_per_tok, work.num_rows, work.overlap
        )
        share = experts / config.num_experts
    parts: dict[str, float] = {kind: float(inventory.read_bytes(kind)) for kind in _WHOLE}
    embedding = inventory.read_bytes("embedding")
    if config.tie_word_embeddings:
        parts["head"] += embedding
    parts["experts"] = share * inventory.read_bytes("experts")
    parts["kv"] = float(kv_read_bytes(config, work.context, work.kv_element_bytes))
    parts["embedding"] = work.num_rows * embedding / config.vocab_size
    parts["norms"] += parts.pop("other")
    return {part: parts[part] for part in PARTS}


def draft_bytes(
    config: LagunaConfig, inventory: Inventory, drafter: Inventory, drafter_config: DFlashConfig
) -> float:
    """Return the bytes that one pass of the drafter reads: its weights, and the head that it borrows."""
    own = sum(group.read_bytes for group in drafter.groups)
    if drafter_config.has_own_lm_head:
        return float(own)
    head = inventory.read_bytes("embedding" if config.tie_word_embeddings else "head")
    return float(own + head)


def counted(parts: Mapping[str, float], names: Sequence[str] = PARTS) -> float:
    """Return the bytes of some parts."""
    return math.fsum(parts[name] for name in names)


def acceptance(rates: Sequence[float], num_draft_tokens: int) -> list[float]:
    """Return the share of drafts accepted up to each position, continued beyond those given."""
    found = list(rates[:num_draft_tokens])
    while len(found) < num_draft_tokens:
        found.append((found[-1] if found else 1.0) * TAIL_ACCEPTANCE)
    return found


def tokens_per_step(rates: Sequence[float], num_draft_tokens: int) -> float:
    """Return the mean acceptance length: the drafts accepted, and the target's own token."""
    return 1.0 + math.fsum(acceptance(rates, num_draft_tokens))
