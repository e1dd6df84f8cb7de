"""What vLLM sets aside for keys and values of the same model, and the flags that make it do so.

vLLM lays layers out in groups of equal size: the smallest kind of layer sets the size, every group has its
own block table, and one block is a page in each layer of a group. Layers of a Laguna DFlash drafter count as
full ones, whatever their window. Checked against the log of the published DGX Spark recipe for Laguna-XS 2.1.

Source: vLLM 0.25 and later, v1/core/kv_cache_utils.py (groups, concurrency), v1/kv_cache_interface.py (pages
of a sequence), models/laguna_dflash.py.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig

GIB = 2**30
BLOCK_SIZE = 16
UNEVEN = 1.5
"""Below this ratio of layers of both kinds, the larger number is the size of a group."""
OVERHEAD_BYTES, UNIFIED_OVERHEAD_BYTES = 4 * GIB, 11 * GIB
"""Assumed for all but weights, keys and values. The recipe's figures leave 11 GiB on a DGX Spark."""


@dataclass(frozen=True)
class VLLMMemory:
    """vLLM's arithmetic for one target and maybe a drafter.

    Attributes:
        num_full_groups: Groups of layers that keep the whole context.
        num_sliding_groups: Groups that keep a window.
        layers_per_group: Layers of the largest group.
        page_bytes: Of one block in one layer.
        window: Of sliding layers.
        max_num_batched_tokens: Rows of a step.
        max_model_len: The checkpoint's limit.
    """

    num_full_groups: int
    num_sliding_groups: int
    layers_per_group: int
    page_bytes: int
    window: int
    max_num_batched_tokens: int
    max_model_len: int

    @classmethod
    def of(
        cls,
        config: LagunaConfig,
        drafter: DFlashConfig | None,
        *,
        element_bytes: int,
        max_num_batched_tokens: int = 8192,
    ) -> VLLMMemory:
        """Group the layers of a target and a drafter.

        Args:
            config: The target.
            drafter: The drafter, or None.
            element_bytes: Of a key or value: 1 for FP8, else 2.
            max_num_batched_tokens: vLLM's flag.
        """
        num_full = sum(kind == "full_attention" for kind in config.layer_types)
        num_sliding = config.num_hidden_layers - num_full
        if drafter is not None:
            sliding = 0 if drafter.format == "laguna" else sum(w is not None for w in drafter.layer_windows)
            num_sliding += sliding
            num_full += drafter.num_hidden_layers - sliding
        counts = [count for count in (num_full, num_sliding) if count]
        size = max(counts) if max(counts) < min(counts) * UNEVEN else min(counts)
        return cls(
            -(-num_full // size),
            -(-num_sliding // size),
            size,
            2 * BLOCK_SIZE * config.num_key_value_heads * config.head_dim * element_bytes,
            config.sliding_window,
            max_num_batched_tokens,
            config.max_position_embeddings,
        )

    def blocks(self, context: int) -> tuple[int, int]:
        """Return the blocks that one sequence of a length needs, of full and of sliding groups."""
        kept = min(self.window - 1 + self.max_num_batched_tokens, context)
        # One more where a window does not start with its block.
        sliding = -(-kept // BLOCK_SIZE) + 1
        return -(-context // BLOCK_SIZE) * self.num_full_groups, sliding * self.num_sliding_groups

    def kv_bytes(self, context: int, num_seqs: int) -> int:
        """Return the least ``--kv-cache-memory-bytes`` for so many sequences of a length."""
        blocks = 1 + num_seqs * sum(self.blocks(context))  # one is the null block
        return blocks * self._block_bytes

    def concurrency(self, context: int, kv_bytes: int) -> float:
        """Return what vLLM logs as the maximum concurrency for a context."""
        return (kv_bytes // self._block_bytes) / sum(self.blocks(context))

    def longest_context(self, num_seqs: int, budget_bytes: int) -> int:
        """Return the longest context of so many streams within a budget."""
        return bisect.bisect_right(
            range(1, self.max_model_len + 1), budget_bytes, key=lambda length: self.kv_bytes(length, num_seqs)
        )

    def most_streams(self, context: int, budget_bytes: int) -> int:
        """Return how many streams of a context fit into a budget."""
        return max(0, (budget_bytes // self._block_bytes - 1) // sum(self.blocks(context)))

    def flags(self, context: int, num_seqs: int) -> list[str]:
        """Return the flags that make vLLM hold exactly this."""
        return [
            f"--max-model-len {context}",
            f"--max-num-seqs {num_seqs}",
            f"--max-num-batched-tokens {self.max_num_batched_tokens}",
            f"--kv-cache-memory-bytes {self.kv_bytes(context, num_seqs)}",
        ]

    @property
    def _block_bytes(self) -> int:
        return self.page_bytes * self.layers_per_group
