"""Lay weights side by side, so that one product serves several projections, without a second copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lean_laguna.kernels.linear import PANEL_FROM


def pack_rows(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move projections that read the same input into one weight; the parameters become views of it.

    Args:
        parameters: Weights [N_i, K] or [E, N_i, K]; each keeps its name, shape and values, and its old
            storage is released.

    Returns:
        The joint weight [N, K].
    """
    width = parameters[0].shape[-1]
    heights = [parameter.numel() // width for parameter in parameters]
    total = sum(heights)
    first = parameters[0]
    # Wide and small: transposed, which a BLAS multiplies faster by few rows; large: rows as they are, in
    # panels.
    is_wide = width < total and width * total < PANEL_FROM
    if len(parameters) == 1 and not is_wide and first.is_contiguous():
        return first
    joint = first.new_empty(width, total).t() if is_wide else first.new_empty(total, width)
    at = 0
    for parameter, height in zip(parameters, heights, strict=True):
        _move(parameter, joint[at : at + height].unflatten(0, parameter.shape[:-1]))
        at += height
    return joint


def lay_out_experts(parameter: torch.Tensor) -> None:
    """Lay each expert's weight [E, N, K] transposed in memory, expert by expert; shape and values stay."""
    _move(
        parameter,
        parameter.new_empty(parameter.shape[0], parameter.shape[2], parameter.shape[1]).transpose(1, 2),
    )


def _move(parameter: torch.Tensor, view: torch.Tensor) -> None:
    with torch.no_grad():
        view.copy_(parameter)
    parameter.data = view
