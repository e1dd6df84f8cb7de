"""How kernels are launched: tiles by weight shape, the number of token columns, prefetch and early launch.

Nothing here may depend on the number of live rows: it is read on the device, by the kernels themselves.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime import driver

# Token rows of every step buffer; and of one request, for which columns there is a tile everywhere.
from lean_laguna.core.engine_sizes import MAX_ROWS as MAX_ROWS
from lean_laguna.core.engine_sizes import WIDE as WIDE

GROUP_COLUMNS = 32
"""Columns that a program has registers for, where it also chooses tokens or keeps several parts of K."""


def is_interpreting() -> bool:
    """Say whether Triton runs on the CPU, one program after another."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class Tile:
    """Shape of one program's work; a function of kernel, dtype, K and N alone.

    Attributes:
        block_n: Weight rows a program owns at a time.
        block_k: K elements a warp group takes at a time.
        split: Parts of K taken side by side inside a program: ``warps``, or 1.
        warps: Warps of a program.
        stages: Depth of the software pipeline.
        prefetch: Share of the program's weights that it asks into L2 before its inputs are ready, 0 to 1.
    """

    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    prefetch: float = 0.0

    def by_warp(self) -> Tile:
        """Return the tile of packed weights: each warp its own part of K, whatever the columns.

        Whole programs may run on another matrix instruction at 16 columns than at 8, which sums packed
        columns in another order.
        """
        if self.split > 1:
            return self
        return replace(self, split=self.warps, block_k=max(16, self.block_k // self.warps))

    def with_prefetch(self, share: float) -> Tile:
        """Return the same tile with another prefetch share."""
        return replace(self, prefetch=share)


@dataclass(frozen=True)
class Launch:
    """What all launches of a step share.

    Attributes:
        cols: Token columns of every product: 1 (steps of one row), 8 (of at most 8 rows), 16, 32 or 64.
        pdl: Programmatic dependent launch, and L2 prefetch before inputs are ready (sm_90 and later).
        programs: Programs that share out the routed experts' first products; about four a multiprocessor.
        attention_programs: Programs that share out the splits of the context.
    """

    cols: int = WIDE
    pdl: bool = False
    programs: int = 528
    attention_programs: int = 264

    @property
    def tile_cols(self) -> int:
        """Columns of a Triton tile: the matrix instructions take no fewer than 8."""
        return max(self.cols, 8)

    @property
    def group_cols(self) -> int:
        """Columns of a tile where many are taken in groups, each by a program of its own."""
        return min(self.tile_cols, GROUP_COLUMNS)

    @property
    def num_groups(self) -> int:
        """Groups of columns: programs that read the same weights, once from memory and then from L2."""
        return self.tile_cols // self.group_cols

    @property
    def tile_rows(self) -> int:
        """Rows of a Triton tile that holds all rows of a step at once."""
        return max(self.cols, WIDE)

    @property
    def can_prefetch(self) -> bool:
        """Whether kernels may ask for data before their inputs are ready."""
        return self.pdl and not is_interpreting()

    def options(self, warps: int) -> dict[str, Any]:
        """Return Triton's launch options."""
        return {"num_warps": warps, "launch_pdl": True} if self.pdl else {"num_warps": warps}

    def prefetched(self, tile: Tile, row_bytes: int) -> int:
        """Return how many bytes of each weight row to prefetch, a multiple of 512; 0 without early launch.

        Rows that do not start on 16 bytes are not prefetched: the instruction takes no others.
        """
        return int(row_bytes * tile.prefetch) // 512 * 512 if self.can_prefetch and row_bytes % 16 == 0 else 0


def starts_early(device: torch.device) -> bool:
    """Say whether a kernel can start before the one ahead of it has ended: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; an H200's where there is no GPU."""
    if is_interpreting() or device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    found: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return found


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
