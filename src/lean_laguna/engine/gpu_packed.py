"""Quantised weights as the GPU kernels read them: scales by row, divisors by row, codes as they are."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lean_laguna.models.packing import stack_rows as stack_parameters
from lean_laguna.quant.lane_order import PIECE_BYTES, fits, kernel_order, reordered, restored
from lean_laguna.quant.packed import PackedWeight, split_rows, stack_rows
from lean_laguna.quant.scaling import tile_size

if TYPE_CHECKING:
    from lean_laguna.kernels.triton.formats import Packed, Weight


def to_kernels(weight: PackedWeight, dtype: torch.dtype) -> Packed:
    """Lay a packed weight out for the kernels; codes are not copied.

    One scale for a whole linear, and blocks that do not fit the linears stacked in it, become scales of
    single rows.

    Args:
        weight: [N, K] or [E, N, K].
        dtype: The model's, which kernels round decoded weights to.
    """
    from lean_laguna.kernels.triton.formats import Packed

    scheme, (rows, columns) = weight.scheme, weight.shape[-2:]
    tall, wide = tile_size(rows, columns, scheme)
    if scheme.strategy == "tensor" or any(height % tall for height in weight.heights):
        tall = 1
    scales, zeros = weight.scales, weight.zero_points
    if tall != tile_size(rows, columns, scheme)[0]:
        scales = _by_row(scales, weight)
        zeros = None if zeros is None else _by_row(zeros, weight)
    divisors = None
    if weight.global_scales is not None:
        heights = torch.tensor(weight.heights, device=scales.device)
        divisors = weight.global_scales.repeat_interleave(heights, -1, output_size=rows).contiguous()
        scales = scales.contiguous().view(torch.uint8)
    return Packed(
        kind=scheme.kind,
        shape=weight.shape,
        dtype=dtype,
        codes=weight.codes.contiguous().view(torch.uint8),
        scales=scales.contiguous(),
        tall=tall,
        wide=min(wide, columns),
        divisors=divisors,
        zeros=None if zeros is None else zeros.contiguous(),
        columns=weight.column_groups,
        order=weight.order,
    )


def in_lane_order(weight: PackedWeight, *, pairs: bool = False) -> PackedWeight:
    """Reorder codes in place as the lanes of the whole step's warps take them, where the shape allows.

    Args:
        weight: [N, K] or [E, N, K].
        pairs: Its product adds to the residual stream.
    """
    kind = weight.scheme.kind
    order = kernel_order(kind, pairs=pairs)
    rows, columns = weight.shape[-2:]
    has_more = weight.zero_points is not None or weight.column_groups is not None
    is_even = all(height % 8 == 0 for height in weight.heights)
    if weight.order == order or has_more or not is_even or not fits(kind, order, rows, columns):
        return weight
    scales = weight.scales
    if weight.scheme.number != "fp4":
        # The kernels take bfloat16, and FP8's up to 2^7 only.
        if not torch.equal(scales.bfloat16().float(), scales.float()) or float(scales.float().max()) >= 128:
            return weight
        scales = scales.bfloat16()
    codes = weight.codes.view(torch.uint8).flatten(0, -2)
    for piece in codes.split(max(16, PIECE_BYTES // codes.shape[1] // 16 * 16)):
        piece.copy_(reordered(restored(piece, kind, weight.order), kind, order))
    return dataclasses.replace(weight, order=order, scales=scales)


def _by_row(scales: Tensor, weight: PackedWeight) -> Tensor:
    """Spread scales [..., S, C] of stacked linears over their rows, [..., N, C]."""
    parts = scales.split([weight.scale_rows(height) for height in weight.heights], -2)
    tall = [tile_size(height, weight.shape[-1], weight.scheme)[0] for height in weight.heights]
    spread = [
        part.repeat_interleave(size, -2)[..., :height, :]
        for part, size, height in zip(parts, tall, weight.heights, strict=True)
    ]
    return torch.cat(spread, -2)


class WeightStore:
    """A module's linears as kernels take them, by parameter name: packed where they are kept so.

    Attributes:
        decoded: Names of what had to be decoded to be laid side by side.
    """

    def __init__(
        self,
        module: nn.Module,
        packed: dict[str, PackedWeight],
        dtype: torch.dtype,
        *,
        is_by_lane: bool = False,
    ):
        """Take the linears of a module.

        Args:
            module: Its parameters become views of joint weights.
            packed: By parameter name; those laid side by side become views as well.
            dtype: The model's.
            is_by_lane: Lay codes out for the CUDA C++ step, in place, where the shape allows.
        """
        self._is_by_lane = is_by_lane
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._packed, self._dtype = packed, dtype
        self.decoded: list[str] = []

    def one(self, name: str, *, pairs: bool = False, is_head: bool = False) -> Weight:
        """Return a weight as it is; ``pairs``: its product adds to the residual stream."""
        if name in self._packed:
            if self._is_by_lane and not is_head:
                self._packed[name] = in_lane_order(self._packed[name], pairs=pairs)
            return to_kernels(self._packed[name], self._dtype)
        return self._parameters[name].detach().contiguous()

    def plain(self, name: str) -> Tensor:
        """Return a weight that kernels take plain, decoded where it is packed."""
        if name not in self._packed:
            return self._parameters[name].detach()
        self.decoded.append(name)
        return self._packed[name].decode(self._dtype)

    def is_packed(self, *names: str) -> bool:
        """Say whether any of these is kept packed."""
        return any(name in self._packed for name in names)

    def plain_joint(self, *names: str) -> Tensor:
        """Return plain linears of one input side by side; their parameters become views."""
        return stack_parameters([self._parameters[name] for name in names])

    def stored_alike(self, *names: str) -> bool:
        """Say whether all of these are packed in one scheme, or none is packed."""
        return len({self._packed[name].scheme if name in self._packed else None for name in names}) == 1

    def joint(self, *names: str) -> Weight:
        """Return linears of one input side by side; decoded where they are not stored alike."""
        found = [self._packed[name] for name in names if name in self._packed]
        if not found:
            return self.plain_joint(*names)
        if len(found) == len(names):
            try:
                whole = stack_rows(found)
            except ValueError:
                pass
            else:
                whole = in_lane_order(whole) if self._is_by_lane else whole
                self._packed.update(zip(names, split_rows(whole), strict=True))
                return to_kernels(whole, self._dtype)
        self.decoded += [name for name in names if name in self._packed]
        return torch.cat(
            [
                self._packed[name].decode(self._dtype)
                if name in self._packed
                else self._parameters[name].detach()
                for name in names
            ]
        )

    def tell(self) -> None:
        """Say in one line what had to be decoded, if anything."""
        if self.decoded:
            print(
                f"lean-laguna: decoded to {str(self._dtype).removeprefix('torch.')} in memory, being stored "
                f"unlike their neighbours: {len(self.decoded)} linears, such as {self.decoded[0]}",
                file=sys.stderr,
            )
