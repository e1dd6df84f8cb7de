"""Which weights share a scale: weights cut into tiles of a scheme's strategy, and scales spread over them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lean_laguna.quant.scheme import WeightScheme


def tiled(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """Return a weight [N, K] as [A, a, B, b], where each [., a, ., b] shares a scale [A, B].

    Blocks that stick out are filled with zeros, which change no largest magnitude.
    """
    rows, columns = weight.shape
    height, width = tile_size(rows, columns, scheme)
    below, beside = -rows % height, -columns % width
    if below or beside:
        weight = F.pad(weight, (0, beside, 0, below))
    return weight.view(weight.shape[0] // height, height, weight.shape[1] // width, width)


def tile_size(rows: int, columns: int, scheme: WeightScheme) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if scheme.strategy == "tensor":
        return rows, columns
    if scheme.strategy == "channel":
        return 1, columns
    if scheme.strategy == "block" and scheme.block is not None:
        return scheme.block
    return 1, scheme.group_size or columns


def largest_by_tile(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """Return the largest magnitudes [A, B] of a weight's tiles."""
    return tiled(weight.abs(), scheme).amax((1, 3))


def apply_by_tile(
    operation: Callable[[Tensor, Tensor], Tensor], weight: Tensor, scales: Tensor, scheme: WeightScheme
) -> Tensor:
    """Apply an operation to each weight [N, K] and its tile's entry of ``scales`` [A, B]."""
    rows, columns = weight.shape
    out = operation(tiled(weight, scheme), scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return out[:rows, :columns]
