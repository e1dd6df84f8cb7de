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
    # Small, on a CPU: transposed, which a BLAS multiplies faster by few rows, and to the same bits whatever
    # their number; large: rows as they are, in panels.
    is_transposed = first.is_cpu and width * total < PANEL_FROM
    if len(parameters) == 1 and not is_transposed and first.is_contiguous():
        return first
    joint = first.new_empty(width, total).t() if is_transposed else first.new_empty(total, width)
    at = 0
    for parameter, height in zip(parameters, heights, strict=True):
        _move(parameter, joint[at : at + height].unflatten(0, parameter.shape[:-1]))
        at += height
    return joint


def stack_rows(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move projections into one weight, row after row, as the GPU kernels read it.

    Args:
        parameters: Weights [N_i, K]; each becomes a view of the joint weight and keeps its values.

    Returns:
        The joint weight [N, K], K contiguous; where they already lie so, without moving anything.
    """
    first, end, width = parameters[0], 0, parameters[0].shape[-1]
    is_stacked = all(parameter.is_contiguous() for parameter in parameters)
    for parameter in parameters:
        end = end or parameter.data_ptr()
        is_stacked = is_stacked and parameter.data_ptr() == end
        end += parameter.nbytes
    total = sum(parameter.shape[0] for parameter in parameters)
    if is_stacked and first.untyped_storage().data_ptr() == parameters[-1].untyped_storage().data_ptr():
        return first.detach().as_strided((total, width), (width, 1))
    joint, at = first.new_empty(total, width), 0
    for parameter in parameters:
        _move(parameter, joint[at : at + parameter.shape[0]])
        at += parameter.shape[0]
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
