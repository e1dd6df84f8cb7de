"""Scales and codes that would silently give wrong weights are refused: zero, not finite, upside down."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.core.errors import CheckpointError
from lean_laguna.quant.nvfp4 import E2M1_MAX, E4M3_MAX
from lean_laguna.quant.scheme import WeightScheme


def check_scale(scale: Tensor, part: str, scheme: WeightScheme, where: str) -> None:
    """Refuse scales of one weight that cannot be right.

    A divisor is 2688 / largest weight, a factor is largest weight / largest code: both readings of a scale
    meet at 1, far from any weight that a network has, so that a scale on the other side is its reciprocal.

    Args:
        scale: As stored, of any shape.
        part: Last part of the tensor's name.
        scheme: Of the weight.
        where: File and tensor, for errors.

    Raises:
        CheckpointError: One is zero, negative, not finite, or all are upside down; names the tensor.
    """
    values = scale.float()
    low, high = torch.aminmax(values)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(f"{where}: scales must be finite, found {_odd(values, ~values.isfinite())}")
    if not low > 0:
        raise CheckpointError(f"{where}: scales must be above 0, found {_odd(values, values <= 0)}")
    if part == "weight_global_scale" and low < 1:
        implied = E4M3_MAX * E2M1_MAX / low.item()
        raise CheckpointError(
            f"{where}: {low.item():.6g} would make weights as large as {implied:.3g}; "
            "expected a divisor, 2688 / largest weight: this looks like its reciprocal"
        )
    factors = ("weight_scale", "weight_scale_inv") if scheme.number != "fp4" else ("weight_scale_2",)
    if part in factors and low > 1:
        raise CheckpointError(
            f"{where}: every scale is above 1 (the smallest is {low.item():.6g}); expected factors, "
            "largest weight / largest code: this looks like the reciprocals"
        )


def check_codes(codes: Tensor, where: str) -> None:
    """Refuse e4m3 codes that are no numbers; NaN is the largest byte of either sign.

    Args:
        codes: float8_e4m3fn, of any shape.
        where: File and tensor, for errors.

    Raises:
        CheckpointError: One is NaN; names the tensor.
    """
    found = codes.view(torch.uint8)
    if found.max() == 0xFF or codes.view(torch.int8).max() == 0x7F:
        bad = int(((found & 0x7F) == 0x7F).sum())
        raise CheckpointError(f"{where}: {bad} of {codes.numel()} codes are NaN; expected numbers")


def _odd(values: Tensor, is_odd: Tensor) -> str:
    return f"{values[is_odd].flatten()[0].item():g} among {int(is_odd.sum())} of {values.numel()}"
