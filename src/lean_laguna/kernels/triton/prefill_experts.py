"""Routed experts of a chunk: two grouped products over rows sorted by expert (``prefill_sort``).

Programs past the live tiles leave. Every product of a row runs over K in one order, its terms lie by token,
ascending by expert id, and ``prefill_rows.combine`` adds them in that order.
Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaSparseMoeBlock.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.formats import Packed, Weight, format_of, load_packed_tile, operand
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.prefill_sort import ExpertSort
from lean_laguna.kernels.triton.prefill_tiles import ExpertTile, uses_maps
from lean_laguna.kernels.triton.prefill_words import decode_tile, row_factors, takes_words, words_of


@triton.jit
def _load_columns(
    weight,
    rows,
    at_k,
    K: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load rows [COLS] of a bank (int64, counted through it) as [BLOCK_K, COLS] from column ``at_k`` on."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    if FORMAT[0] != "plain":
        tile = load_packed_tile(weight, rows, at_k, K, COLS, BLOCK_K, 1, EVEN, FORMAT, DTYPE)
        return tl.trans(tl.reshape(tile, (COLS, BLOCK_K)))
    else:
        k = tl.arange(0, BLOCK_K)
        w_at = weight[0] + (rows[None, :] * K + k[:, None])
        if EVEN:
            return tl.load(w_at + at_k)
        else:
            return tl.load(w_at + at_k, mask=(at_k + k < K)[:, None], other=0.0)


@triton.jit
def _up_tile(
    x_ptr,
    weight,
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
    WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0
    DTYPE: tl.constexpr = act_ptr.dtype.element_ty
    i = start + tl.arange(0, ROWS)
    # Rows past the end repeat the last and are not kept.
    token = tl.load(pairs_ptr + tl.minimum(i, end - 1)) // A
    k = tl.arange(0, BLOCK_K)
    f = f0 + tl.arange(0, COLS)
    x_at = x_ptr + token.to(tl.int64)[:, None] * K + k[None, :]
    first = expert.to(tl.int64) * (2 * F) + f0
    rows = expert.to(tl.int64) * (2 * F) + tl.minimum(f, F - 1)
    if WORDS:
        own_gate = row_factors(weight, first, COLS, FORMAT)
        own_up = row_factors(weight, first + F, COLS, FORMAT)
    gate = tl.zeros((ROWS, COLS), tl.float32)
    up = tl.zeros((ROWS, COLS), tl.float32)
    for at_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (at_k + k < K)[None, :]
        x = tl.load(x_at + at_k) if EVEN else tl.load(x_at + at_k, mask=inside, other=0.0)
        if MAPS:
            w_gate = weight.load([expert * (2 * F) + f0, at_k]).T
            w_up = weight.load([expert * (2 * F) + F + f0, at_k]).T
        elif WORDS:
            w_gate = tl.trans(decode_tile(weight, first, own_gate, at_k, K, COLS, BLOCK_K, FORMAT, DTYPE))
            w_up = tl.trans(decode_tile(weight, first + F, own_up, at_k, K, COLS, BLOCK_K, FORMAT, DTYPE))
        else:
            w_gate = _load_columns(weight, rows, at_k, K, COLS, BLOCK_K, FORMAT, DTYPE)
            w_up = _load_columns(weight, rows + F, at_k, K, COLS, BLOCK_K, FORMAT, DTYPE)
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
    weight,
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
    WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
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
                weight,
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
                WORDS,
                FORMAT,
            )
        else:
            _up_tile(
                x_ptr,
                weight,
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
                WORDS,
                FORMAT,
            )


@triton.jit
def _down_tile(
    act_ptr,
    bank,
    terms_ptr,
    weights_ptr,
    pairs_ptr,
    expert,
    start,
    end,
    n0,
    left,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    MAPS: tl.constexpr,
    WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    EVEN: tl.constexpr = K % BLOCK_K == 0
    i = start + tl.arange(0, ROWS)
    own = tl.minimum(i, end - 1)
    pair = tl.load(pairs_ptr + own)
    weight = tl.load(weights_ptr + pair)
    k = tl.arange(0, BLOCK_K)
    n = n0 + tl.arange(0, COLS)
    x_at = act_ptr + own.to(tl.int64)[:, None] * K + k[None, :]
    first = expert.to(tl.int64) * N + left + n0
    rows = expert.to(tl.int64) * N + tl.minimum(left + n, N - 1)
    if WORDS:
        factors = row_factors(bank, first, COLS, FORMAT)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for at_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (at_k + k < K)[None, :]
        x = tl.load(x_at + at_k) if EVEN else tl.load(x_at + at_k, mask=inside, other=0.0)
        if MAPS:
            w = bank.load([expert * N + left + n0, at_k]).T
        elif WORDS:
            w = tl.trans(
                decode_tile(bank, first, factors, at_k, K, COLS, BLOCK_K, FORMAT, act_ptr.dtype.element_ty)
            )
        else:
            w = _load_columns(bank, rows, at_k, K, COLS, BLOCK_K, FORMAT, act_ptr.dtype.element_ty)
        acc = tl.dot(x, w, acc)
    y = (acc * weight[:, None]).to(terms_ptr.dtype.element_ty)
    at = pair.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(terms_ptr + at, y, mask=(i < end)[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["left"])
def _down_kernel(
    act_ptr,
    bank,
    terms_ptr,
    weights_ptr,
    pairs_ptr,
    tiles_ptr,
    num_tiles_ptr,
    left,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    HALVES: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MAX_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    MAPS: tl.constexpr,
    WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    PARTS: tl.constexpr = (WIDTH + COLS - 1) // COLS
    LESS: tl.constexpr = ROWS // 2
    tile = tl.program_id(0) // PARTS
    n0 = tl.program_id(0) % PARTS * COLS
    if tile < tl.load(num_tiles_ptr):
        e = tl.load(tiles_ptr + tile)
        start = tl.load(tiles_ptr + MAX_TILES + tile)
        end = tl.load(tiles_ptr + 2 * MAX_TILES + tile)
        if HALVES and end - start <= LESS:
            _down_tile(
                act_ptr, bank, terms_ptr, weights_ptr, pairs_ptr, e, start, end, n0,
                left, N, K, LESS, COLS, BLOCK_K, STAGES, WIDTH, MAPS, WORDS, FORMAT,
            )  # fmt: skip
        else:
            _down_tile(
                act_ptr, bank, terms_ptr, weights_ptr, pairs_ptr, e, start, end, n0,
                left, N, K, ROWS, COLS, BLOCK_K, STAGES, WIDTH, MAPS, WORDS, FORMAT,
            )  # fmt: skip


def expert_chunk_up(
    x: Tensor, weight: Weight, sort: ExpertSort, act: Tensor, num_tiles: int, tile: ExpertTile, *, top_k: int
) -> None:
    """Compute gate, up and SiLU of every pair.

    Args:
        x: [C, K] normalised input of the MoE block.
        weight: [E, 2F, K] gate rows, then up rows, packed or plain.
        sort: From ``sort_by_expert``.
        act: [C * A, F], written in the order of ``sort.pairs``.
        num_tiles: The most tiles there can be.
        tile: As given to ``sort_by_expert``.
        top_k: Experts a token.
    """
    K, F = weight.shape[2], weight.shape[1] // 2
    maps = isinstance(weight, Tensor) and uses_maps(tile, weight.device)
    words = takes_words(weight, tile.up, tile.block_k) and F % tile.up == 0
    source: object = words_of(weight) if isinstance(weight, Packed) and words else operand(weight)
    if isinstance(weight, Tensor) and maps:
        from triton.tools.tensor_descriptor import TensorDescriptor

        source = TensorDescriptor.from_tensor(weight.view(-1, K), [tile.up, tile.block_k])
    _up_kernel[(num_tiles * cdiv(F, tile.up),)](
        x,
        source,
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
        WORDS=words,
        FORMAT=format_of(weight),
        num_warps=tile.up_warps,
        **tile.options,
    )


def expert_chunk_down(
    act: Tensor,
    weight: Weight,
    sort: ExpertSort,
    terms: Tensor,
    num_tiles: int,
    tile: ExpertTile,
    first_column: int = 0,
) -> None:
    """Compute down of every pair, times its routing weight.

    Args:
        act: [C * A, F] from ``expert_chunk_up``.
        weight: [E, N, F], likewise.
        sort: From ``sort_by_expert``.
        terms: [C * A, W], written by token, then ascending by expert id: W columns of the N.
        num_tiles: The most tiles there can be.
        tile: As given to ``sort_by_expert``.
        first_column: Of the W.
    """
    (N, F), width = weight.shape[1:], terms.shape[1]
    maps = isinstance(weight, Tensor) and uses_maps(tile, weight.device)
    words = takes_words(weight, tile.down, tile.block_k) and width % tile.down == 0
    source: object = words_of(weight) if isinstance(weight, Packed) and words else operand(weight)
    if isinstance(weight, Tensor) and maps:
        from triton.tools.tensor_descriptor import TensorDescriptor

        source = TensorDescriptor.from_tensor(weight.view(-1, F), [tile.down, tile.block_k])
    _down_kernel[(num_tiles * cdiv(width, tile.down),)](
        act,
        source,
        terms,
        sort.weights,
        sort.pairs,
        sort.tiles,
        sort.num_tiles,
        first_column,
        N=N,
        K=F,
        ROWS=tile.rows,
        HALVES=tile.halves,
        COLS=tile.down,
        BLOCK_K=tile.block_k,
        STAGES=tile.down_stages,
        MAX_TILES=sort.tiles.shape[1],
        WIDTH=width,
        MAPS=maps,
        WORDS=words,
        FORMAT=format_of(weight),
        num_warps=tile.down_warps,
        **tile.options,
    )
