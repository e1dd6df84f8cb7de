"""Matrix products whose rows do not depend on their neighbours, on a CPU.

A BLAS picks its blocking from the number of rows, so one row alone and the same row among eight may differ in
the last bit. Here a row's bits are by definition those that it has in a tile of ``ROW_TILE`` rows, so they
depend on that row and on the weight alone: prefill, decode and verification agree. Whether this machine's
BLAS keeps a row's bits in any slot of a tile is checked once for each shape, with random data; where it does
not, the rows of that shape run one by one. The same check finds the other heights of a tile that give these
very bits, often all but a single row: a lone row then runs as two, and sixteen rows in one product.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn.functional as F

ROW_TILE = 8
TILE_HEIGHTS = (2, 4, ROW_TILE, 12, 16)
"""Rows that a tile may have, where the check finds the bits of ``ROW_TILE`` rows."""
# Weights of a product from which a BLAS no longer does well by eight rows at once; cut into panels
# from there on.
PANEL_FROM = 1 << 22
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
    heights = _heights(inner, columns, weight.stride(0) == 1, x.dtype, torch.get_num_threads()) or (1,)
    if num_rows in heights:
        return torch.mm(x, transposed)
    tile = heights[-1]
    rest = num_rows % tile
    last = next(height for height in heights if height >= rest) if rest else 0
    padded = last - rest
    if padded:
        x = F.pad(x, (0, 0, 0, padded))
    out = x.new_empty(num_rows + padded, columns)
    for i in range(0, num_rows - rest, tile):
        torch.mm(x[i : i + tile], transposed, out=out[i : i + tile])
    if rest:
        torch.mm(x[-last:], transposed, out=out[-last:])
    return out[:num_rows] if padded else out


def is_tiled(weight: torch.Tensor, rows: int = ROW_TILE) -> bool:
    """Whether ``linear`` runs ``rows`` rows by a weight [N, K] as one product."""
    columns, inner = weight.shape
    if weight.numel() >= PANEL_FROM and columns % _PANEL == 0 and weight.is_contiguous():
        return False
    return rows in _heights(inner, columns, weight.stride(0) == 1, weight.dtype, torch.get_num_threads())


def is_batched(rows: int, inner: int, columns: int, b: torch.Tensor) -> bool:
    """Whether ``batched_matmul`` runs [B, rows, inner] by ``b`` [B, inner, columns] as one ``torch.bmm``."""
    is_transposed = b.stride(1) == 1
    mode = _batch_mode(rows, inner, columns, is_transposed, b.dtype, torch.get_num_threads())
    return mode == "batched"


def agrees(rows: int, others: int, inner: int, columns: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a row has the same bits in batches of [rows, inner] and of [others, inner] by [inner, columns].

    Covers the second matrix laid out either way.
    """
    return _agree(rows, others, inner, columns, dtype, torch.get_num_threads())


def _panels(x: torch.Tensor, panels: torch.Tensor) -> torch.Tensor:
    """Multiply rows [T, K] by a weight cut into panels [C, N / C, K], to [T, N]."""
    num_rows, count = x.shape[0], panels.shape[0]
    height = ROW_TILE
    if num_rows < ROW_TILE:
        height = next(rows for rows in TILE_HEIGHTS if rows >= num_rows and _fits_panels(rows, panels))
    padded = -num_rows % height
    if padded:
        x = F.pad(x, (0, 0, 0, padded))
    transposed = panels.transpose(1, 2)
    tiles = [batched_matmul(tile.expand(count, -1, -1), transposed) for tile in x.split(height)]
    outs = [tile.transpose(0, 1).reshape(height, -1) for tile in tiles]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out[:num_rows] if padded else out


def _fits_panels(rows: int, panels: torch.Tensor) -> bool:
    """Whether so many rows by panels [C, N / C, K] have the bits of ``ROW_TILE`` rows."""
    if rows == ROW_TILE:
        return True
    columns, inner = panels.shape[1:]
    heights = _heights(inner, columns, False, panels.dtype, torch.get_num_threads())
    return rows in heights and is_batched(rows, inner, columns, panels.transpose(1, 2))


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
def _heights(
    inner: int, columns: int, is_transposed: bool, dtype: torch.dtype, num_threads: int
) -> tuple[int, ...]:
    """Heights of a tile, ascending, in which a row of this product keeps the bits of ``ROW_TILE`` rows.

    Empty where rows do not even keep them in the slots of ``ROW_TILE`` rows.
    """
    del num_threads  # A BLAS cuts a product up between threads, so the answer holds for this number of them.
    weight = _random(columns, inner, dtype=dtype)
    if is_transposed:
        weight = weight.t().contiguous().t()
    rows, transposed = _random(2 * ROW_TILE, inner, dtype=dtype), weight.t()
    if not _keeps_rows(rows[:ROW_TILE], transposed):
        _report(f"{inner} x {columns}")
        return ()
    expected = torch.cat([torch.mm(tile, transposed) for tile in rows.split(ROW_TILE)])
    return tuple(
        height
        for height in TILE_HEIGHTS
        if torch.equal(torch.mm(rows[:height], transposed), expected[:height])
        and _keeps_rows(rows[:height], transposed)
    )


@functools.cache
def _agree(rows: int, others: int, inner: int, columns: int, dtype: torch.dtype, num_threads: int) -> bool:
    del num_threads
    a, b = _random(max(rows, others), inner, dtype=dtype), _random(inner, columns, dtype=dtype)
    shared = min(rows, others)
    expected = torch.mm(a[:others], b)[:shared]
    layouts = (b, b.t().contiguous().t())
    return all(
        torch.equal(torch.mm(a[:count], layout)[:shared], expected)
        for count in (rows, others)
        for layout in layouts
    )


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
