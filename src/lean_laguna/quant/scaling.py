"""Which weights share a scale: weights cut into tiles of a scheme's strategy, and scales spread over them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.quant.scheme import WeightScheme
from lean_laguna.quant.scratch import Scratch

_BITS = {2: torch.int16, 4: torch.int32}


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


def magnitude_bits(weight: Tensor, scratch: Scratch) -> Tensor:
    """Return the bits of a weight's magnitudes as whole numbers, which order as the magnitudes do.

    Comparing them is several times faster than comparing 16-bit floats.
    """
    kind = _BITS[weight.element_size()]
    bits = scratch.take("magnitudes", weight.shape, weight, kind)
    return torch.bitwise_and(weight.view(kind), torch.iinfo(kind).max, out=bits)


def largest_by_tile(weight: Tensor, scheme: WeightScheme, scratch: Scratch) -> Tensor:
    """Return the largest magnitudes [A, B] of a weight's tiles, in its type; all weights finite."""
    tiles = tiled(magnitude_bits(weight, scratch), scheme)
    return tiles.amax(3).amax(1).view(weight.dtype)


def over(values: Tensor, number: float) -> Tensor:
    """Return values over a number, rounded once: by a plain number, a GPU multiplies with the reciprocal."""
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def quotients(weight: Tensor, scales: Tensor, scheme: WeightScheme, scratch: Scratch) -> Tensor:
    """Return each weight [N, K] over its tile's entry of ``scales`` [A, B], rounded to the weight's type.

    Returns:
        float32 [N, K] in scratch memory.
    """
    rows, columns = weight.shape
    values = scratch.take("values", weight.shape, weight, torch.float32).copy_(weight)
    height, width = tile_size(rows, columns, scheme)
    divisors = scales.float()
    if rows % height or columns % width:
        divisors = divisors.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        values.div_(divisors)
    else:
        tiled(values, scheme).div_(divisors[:, None, :, None])
    if weight.dtype != torch.float32:
        values.copy_(scratch.take("rounded", weight.shape, weight, weight.dtype).copy_(values))
    return values
