"""KV pages as the Triton kernels read them: keys and values apart, the layers of a group side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lean_laguna.models.kv_cache import KVGroup


class PagedPools:
    """Storage of keys and values of every group; block 0 of each is never read.

    Attributes:
        groups: The KV groups, the target's first.
        num_blocks: Per group, the null block included.
        kv_block_size: Positions per block.
        dtype: Of keys and values of groups that name none.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        kv_block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.groups, self.num_blocks = tuple(groups), tuple(num_blocks)
        self.kv_block_size, self.dtype = kv_block_size, dtype
        self._pools = [
            tuple(
                torch.zeros(
                    group.num_layers,
                    blocks,
                    kv_block_size,
                    group.num_kv_heads,
                    group.head_dim,
                    dtype=group.dtype or dtype,
                    device=device,
                )
                for _ in "kv"
            )
            for group, blocks in zip(self.groups, self.num_blocks, strict=True)
        ]

    def group(self, group: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a group, [L, num_blocks, kv_block_size, J, P] each."""
        keys, values = self._pools[group]
        return keys, values

    def layer(self, group: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer of a group, [num_blocks, kv_block_size, J, P] each."""
        keys, values = self._pools[group]
        return keys[layer], values[layer]
