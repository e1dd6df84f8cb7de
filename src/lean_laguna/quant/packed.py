"""A linear's weight, or a bank of experts', kept as its codes and scales.

The contract for whoever writes kernels on it:

- ``codes`` are bytes in row-major order. NVFP4 and INT4 hold two columns a byte, the even one in the low
  half; FP8 holds float8_e4m3fn; INT8 a byte each. Integer codes are unsigned, ``2^(bits - 1)`` above their
  value.
- ``scales`` [..., S, C]: entry [i, j] covers ``tile_size`` rows and columns. S is N for rows and groups, the
  number of stacked linears for one scale a tensor; blocks start anew with each stacked linear.
- NVFP4 only: ``global_scales`` [..., L] float32, a divisor for each of the L stacked linears.
- The value is ``code * (scale / global_scale)`` for NVFP4, ``code * scale`` for FP8 and
  ``(code - zero_point) * scale`` for integers: a float32 product of exact factors.

Leading dimension E of every tensor: the experts of a bank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lean_laguna.quant import integer, nvfp4
from lean_laguna.quant.lane_order import Order, restored
from lean_laguna.quant.scaling import tile_size
from lean_laguna.quant.scheme import WeightScheme

# Rows decoded at a time: what a piece takes in float32 stays small beside the model.
PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class PackedWeight:
    """Codes and scales of a weight [N, K], or of a bank [E, N, K].

    Attributes:
        scheme: How codes and scales make numbers.
        shape: (N, K) or (E, N, K).
        codes: [..., N, K] float8_e4m3fn or uint8, or [..., N, ceil(K / 2)] uint8 for 4 bits.
        scales: [..., S, C] float8_e4m3fn for NVFP4, else bfloat16, float16 or float32.
        global_scales: [..., L] float32 divisors, NVFP4 only.
        zero_points: int8 in the shape of ``scales``, asymmetric integers only.
        column_groups: [..., K] int32, the group of each column, where columns were reordered.
        heights: Rows of each of the L linears stacked along N, such as gate and up.
        order: Of the codes in memory.
    """

    scheme: WeightScheme
    shape: tuple[int, ...]
    codes: Tensor
    scales: Tensor
    global_scales: Tensor | None = None
    zero_points: Tensor | None = None
    column_groups: Tensor | None = None
    heights: tuple[int, ...] = ()
    order: Order = "rows"

    def __post_init__(self) -> None:
        if not self.heights:
            object.__setattr__(self, "heights", (self.shape[-2],))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by field."""
        names = ("codes", "scales", "global_scales", "zero_points", "column_groups")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return the same weight on a device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def expert(self, index: int) -> PackedWeight:
        """Return one expert of a bank, as a view."""
        part: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, shape=self.shape[1:], **part)

    def row_scales(self) -> Tensor:
        """Return the factor of each row and tile of columns, [N, C] float32; of one linear, not of a bank."""
        scales = self.scales.float()
        counts = [self.scale_rows(height) for height in self.heights]
        parts = scales.split(counts)
        if self.global_scales is not None:
            parts = tuple(part / divisor for part, divisor in zip(parts, self.global_scales, strict=True))
        return torch.cat([self._spread(part, h) for part, h in zip(parts, self.heights, strict=True)])

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, [N, K] or [E, N, K]."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        self.decode_into(out)
        return out

    def decode_into(self, out: Tensor) -> None:
        """Write the weight into ``out`` [N, K] or [E, N, K] of any float dtype, piece by piece."""
        if len(self.shape) == 3:
            for expert in range(self.shape[0]):
                self.expert(expert).decode_into(out[expert])
            return
        if self.order != "rows":
            codes = restored(self.codes.view(torch.uint8), self.scheme.kind, self.order)
            dataclasses.replace(self, codes=codes.view(self.codes.dtype), order="rows").decode_into(out)
            return
        rows, columns = self.shape
        scales = self.row_scales()
        zero = None
        if self.zero_points is not None:
            counts = [self.scale_rows(height) for height in self.heights]
            zeros = self.zero_points.float().split(counts)
            zero = torch.cat([self._spread(part, h) for part, h in zip(zeros, self.heights, strict=True)])
        step = max(1, PIECE_ELEMENTS // columns)
        for first in range(0, rows, step):
            piece = slice(first, min(first + step, rows))
            values = self._code_values(piece)
            if zero is not None:
                values -= self._by_column(zero[piece])
            out[piece] = values.mul_(self._by_column(scales[piece])).to(out.device)

    def _code_values(self, rows: slice) -> Tensor:
        codes, columns = self.codes[rows], self.shape[-1]
        if self.scheme.number == "fp4":
            return nvfp4.code_values(codes)
        if self.scheme.number == "fp8":
            return codes.float()
        return integer.from_bytes(codes, self.scheme.num_bits, columns).float()

    def _by_column(self, tiles: Tensor) -> Tensor:
        """Spread [n, C] over the columns, [n, K] or what broadcasts to it."""
        columns = self.shape[-1]
        if self.column_groups is not None:
            return tiles.index_select(1, self.column_groups)
        if tiles.shape[1] == 1:
            return tiles
        width = tile_size(self.shape[-2], columns, self.scheme)[1]
        return tiles.repeat_interleave(width, 1)[:, :columns]

    def scale_rows(self, height: int) -> int:
        """Return the rows of scales that a stacked linear of ``height`` rows has."""
        return self.scheme.scale_shape(height, self.shape[-1])[0]

    def _spread(self, part: Tensor, height: int) -> Tensor:
        """Spread a linear's scales [S, C] over its rows, [height, C]."""
        if part.shape[0] == height:
            return part
        tall = tile_size(height, self.shape[-1], self.scheme)[0]
        return part.repeat_interleave(tall, 0)[:height]


def stack_rows(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Return linears of one scheme and input, such as gate and up, stacked along N; each keeps its scales.

    Raises:
        ValueError: They differ in scheme, columns or experts.
    """
    first = parts[0]
    for part in parts:
        if part.scheme != first.scheme or part.shape[-1] != first.shape[-1]:
            raise ValueError(f"{part.scheme.name} [.., {part.shape[-1]}] beside {first.scheme.name}")
        if part.order != first.order:
            raise ValueError(f"codes in order of {part.order} beside {first.order}")
        if part.column_groups is not None:
            raise ValueError("weights with reordered columns")
    joined = {
        name: torch.cat([getattr(part, name) for part in parts], -1 if name == "global_scales" else -2)
        for name in first.tensors()
    }
    rows = sum(part.shape[-2] for part in parts)
    heights = tuple(height for part in parts for height in part.heights)
    shape = (*first.shape[:-2], rows, first.shape[-1])
    return PackedWeight(first.scheme, shape, heights=heights, order=first.order, **joined)


def split_rows(joint: PackedWeight) -> list[PackedWeight]:
    """Return the linears that ``stack_rows`` joined, as views."""
    rows, scale_rows, linears = 0, 0, []
    for i, height in enumerate(joint.heights):
        tall = joint.scale_rows(height)
        places = {
            "codes": (..., slice(rows, rows + height), slice(None)),
            "scales": (..., slice(scale_rows, scale_rows + tall), slice(None)),
            "zero_points": (..., slice(scale_rows, scale_rows + tall), slice(None)),
            "global_scales": (..., slice(i, i + 1)),
        }
        own: dict[str, Any] = {name: tensor[places[name]] for name, tensor in joint.tensors().items()}
        shape = (*joint.shape[:-2], height, joint.shape[-1])
        linears.append(PackedWeight(joint.scheme, shape, order=joint.order, **own))
        rows, scale_rows = rows + height, scale_rows + tall
    return linears


def bank(experts: Sequence[PackedWeight]) -> PackedWeight:
    """Return one weight [E, N, K] of experts [N, K] of one scheme.

    Raises:
        ValueError: They differ in scheme or shape.
    """
    first = experts[0]
    if any(expert.scheme != first.scheme or expert.shape != first.shape for expert in experts):
        raise ValueError(f"experts that differ from {first.scheme.name} {list(first.shape)}")
    joined = {name: torch.stack([getattr(e, name) for e in experts]) for name in first.tensors()}
    shape = (len(experts), *first.shape)
    return PackedWeight(first.scheme, shape, heights=first.heights, order=first.order, **joined)
