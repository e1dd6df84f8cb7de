"""Tiles of prefill by kernel class: what ``benchmarks/gpu_prefill.py`` measured fastest on an H200.

A tile fixes the order of sums, so it may follow a chunk's padded shape and a layer's shape, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.formats import Weight
from lean_laguna.kernels.triton.launch import is_interpreting, shared_memory
from lean_laguna.kernels.triton.prefill_words import takes_words


@dataclass(frozen=True)
class AttentionTile:
    """Shape of one program of attention.

    Attributes:
        queries: Queries of one head.
        keys: Keys taken at a time.
        warps: Warps of the program.
        stages: Depth of the software pipeline.
        tensor_maps: Ordered keys come by tensor maps (sm_90 and later), not by addresses.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    tensor_maps: bool = True


@dataclass(frozen=True)
class ExpertTile:
    """Shape of one program of the experts' products.

    Attributes:
        rows: Rows of one expert; both products share it.
        up: Gate columns of the first product; as many up columns beside them.
        down: Columns of the second.
        block_k: K elements taken at a time.
        up_warps: Warps of the first product.
        down_warps: Of the second.
        up_stages: Depth of the software pipeline of the first product.
        down_stages: Of the second.
        halves: Tiles of at most half the rows take half the work.
        tensor_maps: Weights come by tensor maps (sm_90 and later), not by addresses.
        registers: Of a thread at most, so that two programs fit a multiprocessor; None leaves it open.
    """

    rows: int
    up: int
    down: int
    block_k: int
    up_warps: int
    down_warps: int
    up_stages: int
    down_stages: int
    halves: bool = False
    tensor_maps: bool = True
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Return the launch options of both products, but for warps."""
        return {} if self.registers is None else {"maxnreg": self.registers}


@dataclass(frozen=True)
class PrefillTiles:
    """Tiles of a chunk.

    Attributes:
        full: Of attention to everything.
        sliding: Of attention to a window.
        experts: Of the experts' products.
        packed: Likewise, where their weights are packed and can be decoded a word at a time.
    """

    full: AttentionTile = field(default=AttentionTile(64, 64, 4, 3))
    sliding: AttentionTile = field(default=AttentionTile(64, 64, 4, 3))
    experts: ExpertTile = field(default=ExpertTile(128, 128, 256, 64, 8, 8, 4, 4, halves=True))
    packed: ExpertTile = field(default=ExpertTile(128, 64, 128, 128, 8, 8, 2, 2, halves=True, registers=128))

    @classmethod
    def of(cls, device: torch.device) -> PrefillTiles:
        """Return the tiles of a device."""
        if is_interpreting() or device.type != "cuda":
            return cls()
        return cls.fitting(shared_memory(device))

    @classmethod
    def fitting(cls, shared_bytes: int) -> PrefillTiles:
        """Return tiles for a multiprocessor of so much shared memory a program: 227, 163 or 99 KiB."""
        if shared_bytes >= 200 * 1024:
            return cls()
        # There the matrix unit takes decoded weights from registers: too few for larger tiles.
        packed = ExpertTile(64, 32, 64, 128, 4, 4, 2, 2)
        if shared_bytes >= 160 * 1024:
            return cls(experts=ExpertTile(128, 128, 256, 64, 8, 8, 3, 3, halves=True), packed=packed)
        small = AttentionTile(64, 64, 4, 2)
        return cls(small, small, ExpertTile(64, 64, 128, 64, 4, 4, 3, 2), packed)

    def bank(self, gate_up: Weight, down: Weight) -> ExpertTile:
        """Return the tile of a layer's experts."""
        own = self.packed
        fits = takes_words(gate_up, own.up, own.block_k) and takes_words(down, own.down, own.block_k)
        return own if fits and gate_up.shape[1] // 2 % own.up == 0 else self.experts

    def attention(self, shape: AttentionShape) -> AttentionTile:
        """Return the tile of a layer."""
        return self.sliding if shape.window else self.full


def uses_maps(tile: AttentionTile | ExpertTile, device: torch.device) -> bool:
    """Say whether a tile's tensor maps can be used on a device."""
    if not tile.tensor_maps or is_interpreting():
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
