"""Routed experts of a chunk: rows sorted by expert on the device, then two grouped products.

Nothing waits for the host: the number of tiles is bounded by the shape, and programs past the live ones
leave. A row's sort place never changes its sums: every product of a row runs over K in one order, its terms
lie by token, ascending by expert id, and ``prefill_rows.combine`` adds them in that order.
Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaSparseMoeBlock.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import cdiv, power_of_two
from lean_laguna.kernels.triton.prefill_tiles import ExpertTile, uses_maps
from lean_laguna.kernels.triton.router import route

ROUTE_ROWS = 16
"""Tokens of a program that routes."""
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


@triton.jit
def _place_kernel(
    ranks_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_tiles_ptr,
    BLOCKS: tl.constexpr,
    PIECE: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
    TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
):
    pid = tl.program_id(0)
    e = tl.arange(0, E_BLOCK)
    total = tl.zeros((E_BLOCK,), tl.int32)
    before = tl.zeros((E_BLOCK,), tl.int32)
    for piece in tl.range(0, BLOCKS, PIECE, num_stages=1):
        b = piece + tl.arange(0, PIECE)[:, None]
        counts = tl.load(counts_ptr + b * E + e[None, :], mask=(b < BLOCKS) & (e < E)[None, :], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(b < pid * OWN, counts, 0), 0)
    end = tl.cumsum(total, 0)
    before += end - total
    for own in range(pid * OWN, tl.minimum(pid * OWN + OWN, BLOCKS)):
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
        num_warps=4,
    )
    own = cdiv(blocks, PLACE_PROGRAMS)
    _place_kernel[(cdiv(blocks, own),)](
        sort.ranks,
        sort.counts,
        sort.pairs,
        sort.tiles,
        sort.num_tiles,
        BLOCKS=blocks,
        PIECE=min(32, power_of_two(blocks)),
        E=E,
        E_BLOCK=power_of_two(E),
        A=top_k,
        ROWS=ROUTE_ROWS,
        OWN=own,
        TILE=tile.rows,
        MAX_TILES=sort.tiles.shape[1],
        num_warps=4,
    )


@triton.jit
def _up_tile(
    x_ptr,
    w_ptr,
    act_ptr,
    pairs_ptr,
    expert,
    start,
    end,
    f0,
    A: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MAPS: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0
    DTYPE: tl.constexpr = act_ptr.dtype.element_ty
    i = start + tl.arange(0, ROWS)
    # Rows past the end repeat the last and are not kept.
    token = tl.load(pairs_ptr + tl.minimum(i, end - 1)) // A
    k = tl.arange(0, BLOCK_K)
    f = f0 + tl.arange(0, COLS)
    x_at = x_ptr + token.to(tl.int64)[:, None] * K + k[None, :]
    if not MAPS:
        rows = expert.to(tl.int64) * (2 * F) + tl.minimum(f, F - 1)
        w_at = w_ptr + rows[None, :] * K + k[:, None]
    gate = tl.zeros((ROWS, COLS), tl.float32)
    up = tl.zeros((ROWS, COLS), tl.float32)
    for at_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = at_k + k < K
        x = tl.load(x_at + at_k) if EVEN else tl.load(x_at + at_k, mask=inside[None, :], other=0.0)
        if MAPS:
            w_gate = w_ptr.load([expert * (2 * F) + f0, at_k]).T
            w_up = w_ptr.load([expert * (2 * F) + F + f0, at_k]).T
        elif EVEN:
            w_gate = tl.load(w_at + at_k)
            w_up = tl.load(w_at + F * K + at_k)
        else:
            w_gate = tl.load(w_at + at_k, mask=inside[:, None], other=0.0)
            w_up = tl.load(w_at + F * K + at_k, mask=inside[:, None], other=0.0)
        gate = tl.dot(x, w_gate, gate)
        up = tl.dot(x, w_up, up)
    g = gate.to(DTYPE).to(tl.float32)
    g = (g / (1.0 + tl.exp(-g))).to(DTYPE).to(tl.float32)
    act = (g * up.to(DTYPE).to(tl.float32)).to(DTYPE)
    at = i.to(tl.int64)[:, None] * F + f[None, :]
    tl.store(act_ptr + at, act, mask=(i < end)[:, None] & (f < F)[None, :])


@triton.jit
def _up_kernel(
    x_ptr,
    w_ptr,
    act_ptr,
    pairs_ptr,
    tiles_ptr,
    num_tiles_ptr,
    A: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    HALVES: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MAX_TILES: tl.constexpr,
    MAPS: tl.constexpr,
):
    PARTS: tl.constexpr = (F + COLS - 1) // COLS
    LESS: tl.constexpr = ROWS // 2
    tile = tl.program_id(0) // PARTS
    f0 = tl.program_id(0) % PARTS * COLS
    if tile < tl.load(num_tiles_ptr):
        e = tl.load(tiles_ptr + tile)
        start = tl.load(tiles_ptr + MAX_TILES + tile)
        end = tl.load(tiles_ptr + 2 * MAX_TILES + tile)
        if HALVES and end - start <= LESS:
            _up_tile(
                x_ptr,
                w_ptr,
                act_ptr,
                pairs_ptr,
                e,
                start,
                end,
                f0,
                A,
                F,
                K,
                LESS,
                COLS,
                BLOCK_K,
                STAGES,
                MAPS,
            )
        else:
            _up_tile(
                x_ptr,
                w_ptr,
                act_ptr,
                pairs_ptr,
                e,
                start,
                end,
                f0,
                A,
                F,
                K,
                ROWS,
                COLS,
                BLOCK_K,
                STAGES,
                MAPS,
            )


@triton.jit
def _down_tile(
    act_ptr,
    w_ptr,
    terms_ptr,
    weights_ptr,
    pairs_ptr,
    expert,
    start,
    end,
    n0,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0
    i = start + tl.arange(0, ROWS)
    own = tl.minimum(i, end - 1)
    pair = tl.load(pairs_ptr + own)
    weight = tl.load(weights_ptr + pair)
    k = tl.arange(0, BLOCK_K)
    n = n0 + tl.arange(0, COLS)
    x_at = act_ptr + own.to(tl.int64)[:, None] * K + k[None, :]
    rows = expert.to(tl.int64) * N + tl.minimum(n, N - 1)
    w_at = w_ptr + rows[None, :] * K + k[:, None]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for at_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + at_k)
            w = tl.load(w_at + at_k)
        else:
            x = tl.load(x_at + at_k, mask=(at_k + k < K)[None, :], other=0.0)
            w = tl.load(w_at + at_k, mask=(at_k + k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
    y = (acc * weight[:, None]).to(terms_ptr.dtype.element_ty)
    at = pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(terms_ptr + at, y, mask=(i < end)[:, None] & (n < N)[None, :])


@triton.jit
def _down_kernel(
    act_ptr,
    w_ptr,
    terms_ptr,
    weights_ptr,
    pairs_ptr,
    tiles_ptr,
    num_tiles_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    HALVES: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MAX_TILES: tl.constexpr,
):
    PARTS: tl.constexpr = (N + COLS - 1) // COLS
    LESS: tl.constexpr = ROWS // 2
    tile = tl.program_id(0) // PARTS
    n0 = tl.program_id(0) % PARTS * COLS
    if tile < tl.load(num_tiles_ptr):
        e = tl.load(tiles_ptr + tile)
        start = tl.load(tiles_ptr + MAX_TILES + tile)
        end = tl.load(tiles_ptr + 2 * MAX_TILES + tile)
        if HALVES and end - start <= LESS:
            _down_tile(
                act_ptr, w_ptr, terms_ptr, weights_ptr, pairs_ptr, e, start, end, n0,
                N, K, LESS, COLS, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            _down_tile(
                act_ptr, w_ptr, terms_ptr, weights_ptr, pairs_ptr, e, start, end, n0,
                N, K, ROWS, COLS, BLOCK_K, STAGES,
            )  # fmt: skip


def expert_chunk_up(
    x: Tensor, weight: Tensor, sort: ExpertSort, act: Tensor, num_tiles: int, tile: ExpertTile, *, top_k: int
) -> None:
    """Compute gate, up and SiLU of every pair.

    Args:
        x: [C, K] normalised input of the MoE block.
        weight: [E, 2F, K] gate rows, then up rows.
        sort: From ``sort_by_expert``.
        act: [C * A, F], written in the order of ``sort.pairs``.
        num_tiles: The most tiles there can be.
        tile: As given to ``sort_by_expert``.
        top_k: Experts a token.
    """
    K, F = weight.shape[2], weight.shape[1] // 2
    maps = uses_maps(tile, weight.device)
    operand: object = weight
    if maps:
        from triton.tools.tensor_descriptor import TensorDescriptor

        operand = TensorDescriptor.from_tensor(weight.view(-1, K), [tile.up, tile.block_k])
    _up_kernel[(num_tiles * cdiv(F, tile.up),)](
        x,
        operand,
        act,
        sort.pairs,
        sort.tiles,
        sort.num_tiles,
        A=top_k,
        F=F,
        K=K,
        ROWS=tile.rows,
        HALVES=tile.halves,
        COLS=tile.up,
        BLOCK_K=tile.block_k,
        STAGES=tile.up_stages,
        MAX_TILES=sort.tiles.shape[1],
        MAPS=maps,
        num_warps=tile.up_warps,
    )


def expert_chunk_down(
    act: Tensor, weight: Tensor, sort: ExpertSort, terms: Tensor, num_tiles: int, tile: ExpertTile
) -> None:
    """Compute down of every pair, times its routing weight.

    Args:
        act: [C * A, F] from ``expert_chunk_up``.
        weight: [E, N, F].
        sort: From ``sort_by_expert``.
        terms: [C * A, N], written by token, then ascending by expert id.
        num_tiles: The most tiles there can be.
        tile: As given to ``sort_by_expert``.
    """
    N, F = weight.shape[1:]
    _down_kernel[(num_tiles * cdiv(N, tile.down),)](
        act,
        weight,
        terms,
        sort.weights,
        sort.pairs,
        sort.tiles,
        sort.num_tiles,
        N=N,
        K=F,
        ROWS=tile.rows,
        HALVES=tile.halves,
        COLS=tile.down,
        BLOCK_K=tile.block_k,
        STAGES=tile.down_stages,
        MAX_TILES=sort.tiles.shape[1],
        num_warps=tile.down_warps,
    )
