"""Matrix products whose rows do not depend on their neighbours, on a CPU.

A BLAS picks its blocking from the number of rows, so one row alone and the same row among eight may differ in
the last bit. Here every product runs in tiles of a fixed number of rows, so a row's bits depend on that row
and on the weight alone: prefill, decode and verification agree. Whether this machine's BLAS keeps a row's
bits in any slot of a tile is checked once for each shape, with random data; where it does not, the rows of
that shape run one by one.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F

ROW_TILE = 8
# Weights of a product from which a BLAS no longer does well by eight rows at once; cut into panels
# from there on.
PANEL_FROM = 3 << 17
_PANEL = 256


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a weight, each row's bits independent of the others.

    Args:
        x: Rows, [T, K].
        weight: [N, K], contiguous or a transposed view of a contiguous [K, N].

    Returns:
        [T, N] in the dtype of ``x``.
    """
    if not x.is_cpu:
        return F.linear(x, weight)
    num_rows = x.shape[0]
    columns, inner = weight.shape
    if weight.numel() >= PANEL_FROM and columns % _PANEL == 0 and weight.is_contiguous():
        return _panels(x, weight.view(-1, _PANEL, inner))
    transposed = weight.t()
    tile = _row_tile(inner, columns, weight.stride(0) == 1, x.dtype, torch.get_num_threads())
    if num_rows == tile:
        return torch.mm(x, transposed)
    padded = -num_rows % tile
    if padded:
        x = F.pad(x, (0, 0, 0, padded))
    out = x.new_empty(num_rows + padded, columns)
    for i in range(0, num_rows, tile):
        torch.mm(x[i : i + tile], transposed, out=out[i : i + tile])
    return out[:num_rows] if padded else out


def is_tiled(weight: torch.Tensor) -> bool:
    """Whether ``linear`` runs a weight [N, K] as one product of a tile."""
    columns, inner = weight.shape
    if weight.numel() >= PANEL_FROM and columns % _PANEL == 0 and weight.is_contiguous():
        return False
    is_transposed = weight.stride(0) == 1
    return _row_tile(inner, columns, is_transposed, weight.dtype, torch.get_num_threads()) == ROW_TILE


def is_batched(rows: int, inner: int, columns: int, b: torch.Tensor) -> bool:
    """Whether ``batched_matmul`` runs [B, rows, inner] by ``b`` [B, inner, columns] as one ``torch.bmm``."""
    is_transposed = b.stride(1) == 1
    mode = _batch_mode(rows, inner, columns, is_transposed, b.dtype, torch.get_num_threads())
    return mode == "batched"


def _panels(x: torch.Tensor, panels: torch.Tensor) -> torch.Tensor:
    """Multiply rows [T, K] by a weight cut into panels [C, N / C, K], to [T, N]."""
    num_rows, count = x.shape[0], panels.shape[0]
    padded = -num_rows % ROW_TILE
    if padded:
        x = F.pad(x, (0, 0, 0, padded))
    transposed = panels.transpose(1, 2)
    tiles = [batched_matmul(tile.expand(count, -1, -1), transposed) for tile in x.split(ROW_TILE)]
    outs = [tile.transpose(0, 1).reshape(ROW_TILE, -1) for tile in tiles]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out[:num_rows] if padded else out


def batched_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply matrices pairwise, each row's bits independent of its slot, its neighbours and the batch.

    Args:
        a: [B, M, K].
        b: [B, K, N].

    Returns:
        [B, M, N].
    """
    if not a.is_cpu:
        return torch.bmm(a, b)
    how = _batch_mode(*a.shape[1:], b.shape[2], b.stride(1) == 1, a.dtype, torch.get_num_threads())
    if how == "batched":
        return torch.bmm(a, b)
    if how == "one by one":
        return torch.stack([torch.mm(a[i], b[i]) for i in range(a.shape[0])])
    return torch.stack([torch.cat([torch.mm(row[None], b[i]) for row in a[i]]) for i in range(a.shape[0])])


@functools.cache
def _row_tile(inner: int, columns: int, is_transposed: bool, dtype: torch.dtype, num_threads: int) -> int:
    """Rows per tile for one shape of weight: ``ROW_TILE`` where rows keep their bits in any slot, else 1."""
    del num_threads  # A BLAS cuts a product up between threads, so the answer holds for this number of them.
    weight = _random(columns, inner, dtype=dtype)
    if is_transposed:
        weight = weight.t().contiguous().t()
    if _keeps_rows(_random(ROW_TILE, inner, dtype=dtype), weight.t()):
        return ROW_TILE
    _report(f"{inner} x {columns}")
    return 1


@functools.cache
def _batch_mode(
    rows: int, inner: int, columns: int, is_transposed: bool, dtype: torch.dtype, num_threads: int
) -> str:
    """How batches of one shape keep their rows' bits: "batched", "one by one", or "row by row"."""
    del num_threads
    a, b = _random(19, rows, inner, dtype=dtype), _random(19, inner, columns, dtype=dtype)
    if is_transposed:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    if not all(_keeps_rows(a[i], b[i]) for i in range(3)):
        _report(f"{rows} x {inner} x {columns}")
        return "row by row"
    alone = torch.stack([torch.mm(a[i], b[i]) for i in range(a.shape[0])])
    for count in (1, 2, 3, 4, 7, 12, 19):
        if not torch.equal(torch.bmm(a[:count], b[:count]), alone[:count]):
            return "one by one"
    return "batched"


def _keeps_rows(rows: torch.Tensor, transposed: torch.Tensor) -> bool:
    """Whether each row of a product keeps its bits in every slot, beside a loud neighbour."""
    expected = torch.mm(rows, transposed)
    for shift in range(1, rows.shape[0]):
        moved = rows.roll(shift, 0)
        moved[0] = 1e4 * moved[1].flip(0)
        if not torch.equal(torch.mm(moved, transposed)[1:], expected.roll(shift, 0)[1:]):
            return False
    return True


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _report(shape: str) -> None:
    print(
        f"lean-laguna: this CPU's BLAS mixes the rows of {shape} products with {torch.get_num_threads()} "
        "threads, so these run row by row; output stays exact, but this is slower (fewer threads may help: "
        "OMP_NUM_THREADS)",
        file=sys.stderr,
    )
