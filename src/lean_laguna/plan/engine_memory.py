"""What our engine holds in memory: exact for weights and for keys and values, a bound for the rest.

Keys and values are counted by the engine's own planner, so that a plan and an allocation cannot drift apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.plan.inventory import FLOATS, Inventory

if TYPE_CHECKING:
    import torch

    from lean_laguna.engine.kv_budget import KVBudget
    from lean_laguna.models.kv_cache import KVGroup

GIB = 2**30
UNBOUNDED = 1 << 62
MANY_SEQS = 1 << 20
GROUP_LABELS = {
    "full": "full layers",
    "sliding": "sliding layers",
    "draft_full": "drafter, full",
    "draft_sliding": "drafter, sliding",
}
DEVICE_BYTES = 3 * GIB // 4
"""What CUDA's context, loaded kernels and captured graphs take on a device; assumed, not ours to allocate."""


@dataclass(frozen=True)
class EngineLimits:
    """The engine's settings that memory depends on, with ``EngineConfig``'s names and defaults.

    Attributes:
        dtype: ``bfloat16`` or ``float32``, of unquantised weights, keys and values.
        prefill_chunk_size: Prompt rows per step.
        kv_block_size: Positions per block.
        enable_prefix_caching: Room for cached ends of prompts.
        is_on_gpu: A device with memory of its own for its program.
    """

    dtype: str = "bfloat16"
    prefill_chunk_size: int = 256
    kv_block_size: int = 16
    enable_prefix_caching: bool = True
    is_on_gpu: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number format."""
        import torch

        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]

    @property
    def element_bytes(self) -> int:
        """Bytes of a number."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]


class EngineMemory:
    """Memory of our engine for one target, maybe a drafter, and one set of limits.

    Attributes:
        groups: The engine's KV groups.
        limits: As given.
        max_model_len: The checkpoint's context limit.
    """

    def __init__(self, config: LagunaConfig, drafter: DFlashConfig | None, limits: EngineLimits):
        self._config, self._drafter = config, drafter
        self.limits = limits
        self.groups = kv_groups(config, drafter)
        self.max_model_len = config.max_position_embeddings

    def kv(self, context: int, num_seqs: int, budget_bytes: int | None = None) -> KVBudget:
        """Return the blocks that the engine allocates for so many sequences of a length.

        Args:
            context: ``max_model_len``, tokens.
            num_seqs: ``max_num_seqs``.
            budget_bytes: ``kv_cache_memory_bytes`` where the user sets it; None: as much as is needed.

        Raises:
            ConfigError: Not one sequence fits into the budget.
        """
        from lean_laguna.engine.kv_budget import plan_kv_blocks
        from lean_laguna.engine.scheduler import SchedulerLimits

        limits = SchedulerLimits(
            num_seqs, self.limits.prefill_chunk_size, self.limits.kv_block_size, self._max_draft_tokens
        )
        return plan_kv_blocks(
            self.groups,
            max_model_len=context,
            max_num_seqs=num_seqs,
            rows_per_step=limits.rows_per_step(context),
            kv_block_size=self.limits.kv_block_size,
            dtype=self.limits.torch_dtype,
            enable_prefix_caching=self.limits.enable_prefix_caching,
            budget_bytes=UNBOUNDED if budget_bytes is None else budget_bytes,
            is_budget_given=budget_bytes is not None,
        )

    def longest_context(self, num_seqs: int, room_bytes: int) -> int:
        """Return the longest context of so many streams in the room beside weights; 0 if none fits."""
        return bisect.bisect_right(
            range(1, self.max_model_len + 1),
            room_bytes,
            key=lambda length: self.beside_weights(length, num_seqs),
        )

    def most_streams(self, context: int, room_bytes: int) -> int:
        """Return how many streams of a context fit into the room beside weights; 0 if not one."""
        return bisect.bisect_right(
            range(1, MANY_SEQS), room_bytes, key=lambda number: self.beside_weights(context, number)
        )

    def beside_weights(self, context: int, num_seqs: int) -> int:
        """Return the bytes of keys and values and the workspace."""
        return self.kv(context, num_seqs).total_bytes + sum(self.workspace(context, num_seqs).values())

    def workspace(self, context: int, num_seqs: int) -> dict[str, int]:
        """Return a bound on what else is held, by what it is for."""
        config, drafter, size = self._config, self._drafter, self.limits.element_bytes
        rows = num_seqs * (1 + self._max_draft_tokens)
        chunk = max(self.limits.prefill_chunk_size, rows)
        heads = max(config.num_attention_heads_per_layer) * config.head_dim
        inner = max(config.intermediate_size, config.num_experts_per_tok * config.moe_intermediate_size)
        taps = len(drafter.target_layer_ids) if drafter is not None else 0
        # Residual, normed input and output; query, keys, values and result; gate, up and product in float32.
        row = size * ((4 + taps) * config.hidden_size + 3 * heads) + 3 * 4 * inner
        dims = sum(
            {kind: config.rope(kind).rotary_dim(config.head_dim) for kind in config.layer_types}.values()
        )
        if drafter is not None:
            dims += drafter.rope.rotary_dim(drafter.head_dim)
        found = {
            "activations": chunk * row,
            # Logits in float32, sampling's copy, and the noise of each row in float64.
            "logits and noise": rows * config.vocab_size * (4 + 4 + 8),
            # On a CPU cos, sin and signed sin in float32; on a GPU half of cos and of sin each.
            "rotary tables": context * dims * (size if self.limits.is_on_gpu else 12),
        }
        return found | ({"device: context, kernels, graphs": DEVICE_BYTES} if self.limits.is_on_gpu else {})

    @property
    def _max_draft_tokens(self) -> int:
        return self._drafter.max_draft_tokens if self._drafter is not None else 0


def kv_groups(config: LagunaConfig, drafter: DFlashConfig | None) -> tuple[KVGroup, ...]:
    """Return the KV groups that the engine makes for a target and a drafter, without building either."""
    from lean_laguna.models.kv_cache import KVGroup

    shape = (config.num_key_value_heads, config.head_dim)
    num_full = sum(kind == "full_attention" for kind in config.layer_types)
    groups = (
        KVGroup("full", num_full, *shape, None),
        KVGroup("sliding", config.num_hidden_layers - num_full, *shape, config.sliding_window),
    )
    if drafter is None:
        return groups
    shape = (drafter.num_key_value_heads, drafter.head_dim)
    num_full = sum(window is None for window in drafter.layer_windows)
    return (
        *groups,
        KVGroup("draft_full", num_full, *shape, None),
        KVGroup("draft_sliding", drafter.num_hidden_layers - num_full, *shape, drafter.window),
    )


def loaded_bytes(inventory: Inventory, limits: EngineLimits) -> int:
    """Return what weights take in memory.

    Unquantised ones are kept in the engine's number format; quantised ones as stored on a GPU, and decoded to
    the engine's number format on a CPU.
    """
    return sum(
        group.stored_bytes
        if limits.is_on_gpu and group.number_format not in FLOATS
        else group.num_weights * limits.element_bytes
        for group in inventory.groups
    )


def bytes_by_group(groups: Sequence[KVGroup], budget: KVBudget) -> dict[str, int]:
    """Return the bytes of keys and values per kind of layer; kinds without layers are left out."""
    return {
        group.name: count * size
        for group, count, size in zip(groups, budget.num_blocks, budget.block_bytes, strict=True)
        if group.num_layers
    }
