"""Lay the weights of several projections side by side, so that one product serves them all, without a second copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def pack_rows(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Move projections that read the same input into one weight; the parameters become views of it.

    Args:
        parameters: Weights [N_i, K] or [E, N_i, K]; each keeps its name, shape and values, and its old storage is
            released.

    Returns:
        The joint weight [N, K]. Wide ones lie transposed in memory, which a BLAS multiplies faster by few rows.
    """
    width = parameters[0].shape[-1]
    heights = [parameter.numel() // width for parameter in parameters]
    total = sum(heights)
    first = parameters[0]
    joint = first.new_empty(width, total).t() if total > width else first.new_empty(total, width)
    at = 0
    for parameter, height in zip(parameters, heights, strict=True):
        _move(parameter, joint[at : at + height].unflatten(0, parameter.shape[:-1]))
        at += height
    return joint


def pack_columns(bank: nn.Parameter, last: nn.Parameter) -> torch.Tensor:
    """Move the down projections of experts, and of one more expert of the same width, into one weight.

    Args:
        bank: [E, D, F].
        last: [D, F].

    Returns:
        The joint weight [D, (E + 1) F]; both parameters become views of it.
    """
    experts, rows, width = bank.shape
    joint = bank.new_empty(rows, (experts + 1) * width)
    _move(bank, joint[:, : experts * width].unflatten(1, (experts, width)).permute(1, 0, 2))
    _move(last, joint[:, experts * width :])
    return joint


def _move(parameter: nn.Parameter, view: torch.Tensor) -> None:
    with torch.no_grad():
        view.copy_(parameter)
    parameter.data = view
