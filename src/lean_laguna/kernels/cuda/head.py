"""The head's product on packed weights; what is chosen among it is Triton's, see ``kernels.triton.head``."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.kernels.cuda import products
from lean_laguna.kernels.triton.formats import Packed
from lean_laguna.kernels.triton.launch import WIDE, Launch


class CudaHead:
    """Multiplies rows by a packed head.

    Triton's kernel, which reads a plain head at the memory's speed, is slow to decode a packed one.
    """

    def __init__(self, weight: Packed):
        """Set the result's buffer aside.

        Args:
            weight: [V, D], one that ``products.fits_project`` says yes to.
        """
        self._weight = weight
        self._out = torch.empty(WIDE, weight.shape[0], dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor, num_rows: Tensor, launch: Launch) -> Tensor:
        """Return x @ weight^T [WIDE, V] of the live rows, until the next call.

        Args:
            x: [MAX_ROWS, D] after the final norm.
            num_rows: [1] int32, live rows.
            launch: What the launches of a step share; at most ``WIDE`` columns.
        """
        products.project(x, None, self._weight, self._out, num_rows, 0.0, launch)
        return self._out
