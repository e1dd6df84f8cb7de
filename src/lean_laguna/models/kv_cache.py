"""KV pages of all layers, by group: layers of a group share block tables.

Who owns which block is the engine's business (``engine.block_pool``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVGroup:
    """Layers whose pages have one shape and one lifetime.

    Attributes:
        name: ``full``, ``sliding``, ``draft_full`` or ``draft_sliding``.
        num_layers: Layers in the group; 0 is allowed.
        num_kv_heads: J.
        head_dim: P.
        window: Keys a layer sees, itself included; None sees all.
        dtype: What its keys and values are stored as; None: as the cache says.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    dtype: torch.dtype | None = None

    def block_bytes(self, kv_block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers of the group; ``dtype`` where it has none of its own."""
        itemsize = (self.dtype or dtype).itemsize
        return self.num_layers * kv_block_size * 2 * self.num_kv_heads * self.head_dim * itemsize


class KVCache:
    """Storage of keys and values; block 0 of each group is the null block and stays zero.

    A layer's storage is [num_blocks, kv_block_size, 2, J, P]: key and value of a token lie side by side, so
    one copy writes both and one gather reads both.

    Attributes:
        groups: As given.
        num_blocks: Of each group.
        kv_block_size: Tokens per KV page.
        dtype: Of keys and values of groups that name none.
        num_changes: Per group, a count that grows whenever its pages are handed out to be written: while it
            stands still, so do they.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        kv_block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        assert len(groups) == len(num_blocks), "one block count per group"
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.kv_block_size = kv_block_size
        self.dtype = dtype
        self.num_changes = [0] * len(self.groups)
        self._layers = [
            [
                torch.zeros(
                    (blocks, kv_block_size, 2, group.num_kv_heads, group.head_dim),
                    dtype=group.dtype or dtype,
                    device=device,
                )
                for _ in range(group.num_layers)
            ]
            for group, blocks in zip(self.groups, self.num_blocks, strict=True)
        ]

    def dtype_of(self, group: int) -> torch.dtype:
        """What a group's keys and values are stored as."""
        return self.groups[group].dtype or self.dtype

    def storage(self, group: int, layer: int) -> torch.Tensor:
        """Storage of the group's ``layer``-th layer, [num_blocks, kv_block_size, 2, J, P], to be written."""
        self.num_changes[group] += 1
        return self._layers[group][layer]

    def pages(self, group: int) -> Sequence[torch.Tensor]:
        """Storage of every layer of a group, as ``storage`` gives one's, only to be read."""
        return self._layers[group]

    def layer(self, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, each [num_blocks, kv_block_size, J, P]."""
        storage = self.storage(group, layer)
        return storage[:, :, 0], storage[:, :, 1]

    def write(self, group: int, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values in place.

        Args:
            group: Index of the group.
            layer: Index of the layer within its group.
            slots: Flat slots [T] int64; those in the null block are dropped.
            k: Keys [T, J, P].
            v: Values [T, J, P].
        """
        self.num_changes[group] += 1
        kept = slots >= self.kv_block_size
        rows = torch.stack((k, v), dim=1)[kept].to(self.dtype)
        self._layers[group][layer].view(-1, *rows.shape[1:]).index_copy_(0, slots[kept], rows)

    def write_layers(self, group: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store keys and values of every layer of a group, in place.

        Args:
            group: Index of the group.
            slots: Flat slots [T] int64; those in the null block are dropped.
            kv: [T, L, 2, J, P], L the group's layers.
        """
        self.num_changes[group] += 1
        kept = slots >= self.kv_block_size
        if not bool(kept.all()):
            slots, kv = slots[kept], kv[kept]
        kv = kv.to(self.dtype)
        for layer, storage in enumerate(self._layers[group]):
            storage.view(-1, *kv.shape[2:]).index_copy_(0, slots, kv[:, layer])
