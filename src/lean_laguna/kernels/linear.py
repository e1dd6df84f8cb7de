"""Matrix products whose rows do not depend on their neighbours, on a CPU.

A BLAS picks its blocking from the number of rows, so one row alone and the same row among eight may differ in the
last bit. Here every product runs in tiles of a fixed number of rows, so a row's bits depend on that row and on the
weight alone: prefill, decode and verification agree. ``row_tile`` checks once that this machine's BLAS keeps a row's
bits in any slot of a tile; where it does not, rows run one by one.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F

ROW_TILE = 8


@functools.cache
def row_tile(dtype: torch.dtype = torch.float32) -> int:
    """Rows per tile on this CPU: ``ROW_TILE`` where the BLAS keeps rows independent of slot and neighbours, else 1."""
    if _tiles_are_row_invariant(dtype):
        return ROW_TILE
    print(
        f"lean-laguna: this CPU's BLAS mixes rows of a {dtype} product, so rows run one by one; "
        "speculation is exact all the same, but slower",
        file=sys.stderr,
    )
    return 1


@functools.cache
def batches_are_independent(dtype: torch.dtype = torch.float32) -> bool:
    """Whether ``torch.bmm`` gives each matrix of a batch the bits it gets alone, on this CPU."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((16, 32, 64), (24, 32, 64), (16, 64, 32), (24, 64, 32), (48, 128, 64), (72, 64, 128)):
        a = torch.randn(67, rows, inner, generator=generator).to(dtype)
        b = torch.randn(67, inner, columns, generator=generator).to(dtype)
        whole = torch.bmm(a, b)
        for count in (1, 2, 3, 8, 33):
            if not torch.equal(torch.bmm(a[-count:], b[-count:]), whole[-count:]):
                return False
    return True


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a weight, each row's bits independent of the others.

    Args:
        x: Rows, [T, K].
        weight: [N, K], contiguous or a transposed view of a contiguous [K, N].

    Returns:
        [T, N] in the dtype of ``x``.
    """
    num_rows = x.shape[0]
    tile = row_tile(x.dtype)
    transposed = weight.t()
    padded = -num_rows % tile
    if padded:
        x = F.pad(x, (0, 0, 0, padded))
    if num_rows + padded == tile:
        return torch.mm(x, transposed)[:num_rows]
    out = x.new_empty(num_rows + padded, weight.shape[0])
    for i in range(0, num_rows, tile):
        torch.mm(x[i : i + tile], transposed, out=out[i : i + tile])
    return out[:num_rows]


def batched_matmul(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Multiply matrices pairwise, each product's bits independent of the batch.

    Args:
        a: [B, M, K].
        b: [B, K, N].
        scale: Factor on the product.

    Returns:
        [B, M, N].
    """
    if a.device.type != "cpu" or batches_are_independent(a.dtype):
        if scale == 1.0:
            return torch.bmm(a, b)
        return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)
    return torch.stack([torch.mm(a[i], b[i]) for i in range(a.shape[0])]) * scale


def _tiles_are_row_invariant(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    for inner, columns in ((64, 96), (256, 536), (384, 256), (1088, 256), (256, 2192), (32, 64)):
        for transposed in (False, True):
            weight = torch.randn(columns, inner, generator=generator).to(dtype)
            if transposed:
                weight = weight.t().contiguous().t()
            tile = torch.randn(ROW_TILE, inner, generator=generator).to(dtype)
            expected = torch.mm(tile, weight.t())
            for shift in range(1, ROW_TILE):
                moved = tile.roll(shift, 0)
                moved[0] = 1e4 * torch.randn(inner, generator=generator)
                found = torch.mm(moved, weight.t())
                if not torch.equal(found[1:], expected.roll(shift, 0)[1:]):
                    return False
    return True
