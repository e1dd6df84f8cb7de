"""Routing of a chunk, and its rows sorted by expert on the device.

Nothing waits for the host: the number of tiles is bounded by the shape. A row's place in the order never
changes its sums. Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaTopKRouter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import cdiv, power_of_two
from lean_laguna.kernels.triton.prefill_tiles import ExpertTile
from lean_laguna.kernels.triton.router import route

ROUTE_ROWS = 16
"""Tokens of a program that routes, a warp each."""
PLACE_PROGRAMS = 128
"""Programs that place pairs; each reads all counts."""


@dataclass(frozen=True)
class ExpertSort:
    """A chunk's (token, expert) pairs by expert; a pair is ``token * A + rank of the expert among its own``.

    Attributes:
        weights: [C * A] float32 routing weight of each pair.
        ranks: [C, E] int8 place of each token among those of its ROUTE_ROWS that chose an expert; -1: it did
            not.
        counts: [C / ROUTE_ROWS, E] int32 tokens of each block of ROUTE_ROWS that chose an expert.
        pairs: [C * A] int32 pairs by expert, then by token.
        tiles: [3, .] int32 expert, first and end place in ``pairs`` of each tile.
        num_tiles: [1] int32.
    """

    weights: Tensor
    ranks: Tensor
    counts: Tensor
    pairs: Tensor
    tiles: Tensor
    num_tiles: Tensor

    @classmethod
    def allocate(cls, rows: int, *, experts: int, top_k: int, device: torch.device | str) -> ExpertSort:
        """Return buffers for chunks of up to ``rows`` tokens and tiles of at least 16 rows."""

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        blocks = cdiv(rows, ROUTE_ROWS)
        return cls(
            weights=torch.zeros(rows * top_k, dtype=torch.float32, device=device),
            ranks=torch.zeros(blocks * ROUTE_ROWS, experts, dtype=torch.int8, device=device),
            counts=ints(blocks, experts),
            pairs=ints(rows * top_k),
            tiles=ints(3, cdiv(rows * top_k, 16) + experts),
            num_tiles=ints(1),
        )


@triton.jit
def _route_kernel(
    scores_ptr,
    bias_ptr,
    weights_ptr,
    ranks_ptr,
    counts_ptr,
    num_tokens_ptr,
    softcap,
    stride,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM_TOPK: tl.constexpr,
):
    DTYPE: tl.constexpr = scores_ptr.dtype.element_ty
    i = tl.arange(0, ROWS)
    e = tl.arange(0, E_BLOCK)[None, :]
    row = tl.program_id(0) * ROWS + i
    # route takes rows E apart; these are further apart.
    at = scores_ptr + (row.to(tl.int64) * stride - i * E)[:, None]
    chosen, weights, _ = route(
        at, bias_ptr, row < tl.load(num_tokens_ptr), softcap, E, E_BLOCK, A, ROWS, SOFTCAP, NORM_TOPK, DTYPE
    )
    chose = chosen.to(tl.int32)
    place = tl.cumsum(chose, 1) - 1
    tl.store(weights_ptr + row[:, None] * A + place, weights, mask=chosen)
    rank = tl.where(chosen, tl.cumsum(chose, 0) - 1, -1)
    inside = e < E
    tl.store(ranks_ptr + row[:, None] * E + e, rank.to(tl.int8), mask=inside)
    tl.store(counts_ptr + tl.program_id(0) * E + e, tl.sum(chose, 0)[None, :], mask=inside)


@triton.jit(do_not_specialize=["num_blocks", "own_blocks"])
def _place_kernel(
    ranks_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_blocks,
    own_blocks,
    PIECE: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
):
    pid = tl.program_id(0)
    e = tl.arange(0, E_BLOCK)
    total = tl.zeros((E_BLOCK,), tl.int32)
    before = tl.zeros((E_BLOCK,), tl.int32)
    for piece in tl.range(0, num_blocks, PIECE, num_stages=1):
        b = piece + tl.arange(0, PIECE)[:, None]
        counts = tl.load(counts_ptr + b * E + e[None, :], mask=(b < num_blocks) & (e < E)[None, :], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(b < pid * own_blocks, counts, 0), 0)
    end = tl.cumsum(total, 0)
    before += end - total
    for own in range(pid * own_blocks, tl.minimum(pid * own_blocks + own_blocks, num_blocks)):
        row = own * ROWS + tl.arange(0, ROWS)
        at = ranks_ptr + row[:, None] * E + e[None, :]
        rank = tl.load(at, mask=(e < E)[None, :], other=-1).to(tl.int32)
        chose = (rank >= 0).to(tl.int32)
        pair = row[:, None] * A + tl.cumsum(chose, 1) - 1
        tl.store(pairs_ptr + before[None, :] + rank, pair, mask=chose > 0)
        before += tl.sum(chose, 0)
    if pid == 0:
        tiles = (total + TILE - 1) // TILE
        first_tile = tl.cumsum(tiles, 0) - tiles
        for i in range(tl.max(tiles, 0)):
            at = tiles_ptr + first_tile + i
            start = end - total + i * TILE
            tl.store(at, e, mask=i < tiles)
            tl.store(at + MAX_TILES, start, mask=i < tiles)
            tl.store(at + 2 * MAX_TILES, tl.minimum(start + TILE, end), mask=i < tiles)
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))


def sort_by_expert(
    scores: Tensor,
    bias: Tensor,
    sort: ExpertSort,
    rows: int,
    num_tokens: Tensor,
    tile: ExpertTile,
    *,
    top_k: int,
    softcap: float = 0.0,
    norm_topk: bool = True,
) -> None:
    """Route a chunk's tokens and sort them by expert.

    Args:
        scores: [C, .] router logits in the model's dtype in the first E columns.
        bias: [E] float32 correction of the choice.
        sort: Written.
        rows: The chunk's padded shape.
        num_tokens: [1] int32, tokens that count; the others choose nothing.
        tile: Of the products that follow.
        top_k: Experts a token.
        softcap: tanh bound of the logits, 0 for none.
        norm_topk: Divide a token's weights by their sum.
    """
    E, blocks = bias.shape[0], cdiv(rows, ROUTE_ROWS)
    _route_kernel[(blocks,)](
        scores,
        bias,
        sort.weights,
        sort.ranks,
        sort.counts,
        num_tokens,
        softcap,
        scores.stride(0),
        E=E,
        E_BLOCK=power_of_two(E),
        A=top_k,
        ROWS=ROUTE_ROWS,
        SOFTCAP=softcap > 0,
        NORM_TOPK=norm_topk,
        num_warps=ROUTE_ROWS,
    )
    own = cdiv(blocks, PLACE_PROGRAMS)
    _place_kernel[(cdiv(blocks, own),)](
        sort.ranks,
        sort.counts,
        sort.pairs,
        sort.tiles,
        sort.num_tiles,
        blocks,
        own,
        PIECE=32,
        E=E,
        E_BLOCK=power_of_two(E),
        A=top_k,
        ROWS=ROUTE_ROWS,
        TILE=tile.rows,
        MAX_TILES=sort.tiles.shape[1],
        num_warps=4,
    )
