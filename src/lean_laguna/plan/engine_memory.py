"""What our engine holds in memory: exact for weights and for keys and values, a bound for the rest.

Keys and values are counted by the engine's own planner, so that a plan and an allocation cannot drift apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.engine_sizes import (
    CPU_CHUNK_SIZE,
    FAR_SPLIT_CHUNKS,
    GPU_STEPS_AHEAD,
    MAX_ORDERED_KEYS,
    MAX_ROWS,
    NEAR_SPLITS,
    ORDERED_SLACK,
    SPLIT_KEYS,
    WIDE,
    gpu_chunks,
    rows_of_launch,
)
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
DEVICE_BYTES = 5 * GIB // 8
"""What CUDA's context without a stack, loaded kernels, captured graphs and the libraries' own workspaces take
on a device; assumed, not ours to allocate."""


@dataclass(frozen=True)
class EngineLimits:
    """The engine's settings that memory depends on, with ``EngineConfig``'s names and defaults.

    Attributes:
        dtype: ``bfloat16`` or ``float32``, of unquantised weights, keys and values.
        prefill_chunk_size: Most prompt rows per step; None takes the engine's own.
        kv_block_size: Positions per block.
        enable_prefix_caching: Room for cached ends of prompts.
        kv_cache_dtype: ``auto``, or ``fp8``: the target's keys and values as FP8 codes.
        is_on_gpu: Whether the engine for GPUs runs, which looks ahead and takes larger chunks.
    """

    dtype: str = "bfloat16"
    prefill_chunk_size: int | None = None
    kv_block_size: int = 16
    enable_prefix_caching: bool = True
    is_on_gpu: bool = True
    kv_cache_dtype: str = "auto"

    @property
    def block_size(self) -> int:
        """Prompt rows between the places where a chunk can end."""
        return gpu_chunks(self.prefill_chunk_size)[0] if self.is_on_gpu else self.chunk_size

    @property
    def chunk_size(self) -> int:
        """Most prompt rows per step."""
        return gpu_chunks(self.prefill_chunk_size)[1] if self.is_on_gpu else self._chunk_size_on_cpu

    @property
    def _chunk_size_on_cpu(self) -> int:
        return self.prefill_chunk_size or CPU_CHUNK_SIZE

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
        self.groups = kv_groups(config, drafter, limits.kv_cache_dtype)
        self.max_model_len = config.max_position_embeddings

    def kv(self, context: int, num_seqs: int) -> KVBudget:
        """Return the blocks that the engine allocates for so many sequences of a length.

        Args:
            context: ``max_model_len``, tokens.
            num_seqs: ``max_num_seqs``.
        """
        from lean_laguna.engine.kv_budget import plan_kv_blocks
        from lean_laguna.engine.scheduler import SchedulerLimits

        limits = SchedulerLimits(
            num_seqs,
            self.limits.block_size,
            self.limits.kv_block_size,
            self._max_draft_tokens,
            GPU_STEPS_AHEAD if self.limits.is_on_gpu else 0,
        )
        return plan_kv_blocks(
            self.groups,
            max_model_len=context,
            max_num_seqs=num_seqs,
            rows_per_step=limits.rows_per_step(context),
            kv_block_size=self.limits.kv_block_size,
            dtype=self.limits.torch_dtype,
            enable_prefix_caching=self.limits.enable_prefix_caching,
            budget_bytes=UNBOUNDED,
            is_budget_given=False,
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
        dims = sum(config.rope(kind).rotary_dim(config.head_dim) for kind in set(config.layer_types))
        dims += 0 if drafter is None else drafter.rope.rotary_dim(drafter.head_dim)
        rows = num_seqs * (1 + self._max_draft_tokens)
        if not self.limits.is_on_gpu:
            chunk = max(self.limits.chunk_size, rows)
            taps = 0 if drafter is None else len(drafter.target_layer_ids)
            row = (3 + taps) * config.hidden_size + self._widest_values()
            return {
                # Some values in float32 beside the engine's format.
                "a chunk of prompt": chunk * row * (size + 4),
                # Logits in float32, sampling's copy of them, and noise in float64.
                "logits and noise": rows * config.vocab_size * (4 + 4 + 8),
                # Cosine, sine and signed sine in float32.
                "rotary tables": context * dims * 12,
            }
        block, positions = self.limits.block_size, context + WIDE
        chunk = min(self.limits.chunk_size, _whole(context, block))
        keys = max(_whole(min(positions, MAX_ORDERED_KEYS), block), block + config.sliding_window)
        keys = (keys + ORDERED_SLACK) * 2 * config.num_key_value_heads * config.head_dim
        delta = config.hidden_size
        room = max(
            block * (delta + self._attention_values()) + keys,
            block * (delta + max(self._dense_values(), self._context_values())),
            chunk * (delta + self._experts_values(-(-chunk // (2 * block)))),
            0 if drafter is None else delta * (chunk + block),
        )
        # Residual stream and normalised; what the drafter makes of it in float32.
        stream = chunk * config.hidden_size * (2 * size + (0 if drafter is None else 4))
        return {
            "a chunk of prompt": stream + room * size,
            "the drafter's context projection, joint": self._context_values() * config.hidden_size * size,
            # Of a step's rows, and of a drafter's block.
            "logits": self._rows_of_launch(rows) * config.vocab_size * (4 + 4),
            "rotary tables": positions * dims * size,
            "parts of attention": self._attention_parts(context),
            "device: context, kernels, graphs": DEVICE_BYTES,
        }

    def _rows_of_launch(self, num_rows: int) -> int:
        """Return the rows that launches are made for, as far as a plan can know."""
        takes_many = self.limits.dtype == "bfloat16" and self.limits.kv_cache_dtype == "auto"
        return rows_of_launch(num_rows, MAX_ROWS if takes_many else WIDE)

    def _widest_values(self) -> int:
        """Return the values that one row leaves within a part of a layer."""
        return max(self._attention_values(), self._dense_values(), self._experts_values(1))

    def _attention_values(self) -> int:
        config = self._config
        heads, kv = max(config.num_attention_heads_per_layer), config.num_key_value_heads
        return (2 * heads + 2 * kv) * config.head_dim + heads

    def _dense_values(self) -> int:
        return 3 * self._config.intermediate_size if "dense" in self._config.mlp_layer_types else 0

    def _experts_values(self, pieces: int) -> int:
        """Return the values that one row leaves in a sparse MLP whose output comes in so many pieces."""
        config = self._config
        if "sparse" not in config.mlp_layer_types:
            return 0
        routing = config.num_experts + 3 * config.shared_expert_intermediate_size
        terms = config.num_experts_per_tok * -(-config.hidden_size // pieces)
        return config.num_experts_per_tok * config.moe_intermediate_size + max(routing, terms)

    def _context_values(self) -> int:
        """Return the values of keys and values that a row has in all layers of the drafter."""
        drafter = self._drafter
        return (
            0
            if drafter is None
            else 2 * drafter.num_hidden_layers * drafter.num_key_value_heads * drafter.head_dim
        )

    def _attention_parts(self, context: int) -> int:
        """Return the bytes of partial sums of attention, for 16 rows in float32."""
        config = self._config
        near, far = SPLIT_KEYS * NEAR_SPLITS, SPLIT_KEYS * FAR_SPLIT_CHUNKS
        most = 0
        layers = zip(config.num_attention_heads_per_layer, config.layer_types, strict=True)
        for heads, kind in layers:
            keys = (
                context if kind == "full_attention" else min(context, 2 * config.sliding_window + near // 8)
            )
            splits = -(-min(keys, near) // SPLIT_KEYS) - (-max(0, keys - near) // far)
            most = max(most, heads * splits)
        return WIDE * most * (config.head_dim + 2) * 4

    @property
    def _max_draft_tokens(self) -> int:
        return self._drafter.max_draft_tokens if self._drafter is not None else 0


def _whole(count: int, block: int) -> int:
    """Round up to whole blocks."""
    return -(-count // block) * block


def kv_groups(
    config: LagunaConfig, drafter: DFlashConfig | None, kv_cache_dtype: str = "auto"
) -> tuple[KVGroup, ...]:
    """Return the KV groups that the engine makes for a target and a drafter, without building either."""
    from lean_laguna.engine.kv_budget import stored_groups
    from lean_laguna.models.kv_cache import KVGroup

    shape = (config.num_key_value_heads, config.head_dim)
    num_full = sum(kind == "full_attention" for kind in config.layer_types)
    groups = stored_groups(
        (
            KVGroup("full", num_full, *shape, None),
            KVGroup("sliding", config.num_hidden_layers - num_full, *shape, config.sliding_window),
        ),
        kv_cache_dtype,
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
