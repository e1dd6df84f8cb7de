"""The head of a step: logits, exact sampling and argmax in one stream over the vocabulary.

A row's token is argmax(logit / T + g), g Gumbel noise from Philox4x32-10 keyed by the request's seed and
counted by token and position; at T = 0 it is argmax(logit). Equal values go to the lower id. So a token
depends on its row and its absolute position only. Source: ../spec/performance.md, section 3.5.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.formats import Packed, Weight, format_of, operand, row_bytes, row_elements
from lean_laguna.kernels.triton.launch import Launch, Tile, cdiv, power_of_two
from lean_laguna.kernels.triton.primitives import prefetch_rows, product, wait_with_rows

GIVEN_BLOCK = 512
"""Of the vocabulary, of a program that chooses among what another kernel has multiplied."""


@triton.jit
def gumbel(seed, position, token):
    """Return float32 Gumbel noise of each element; seed int64, position and token int32, broadcastable.

    With x one of Philox's 32-bit words, v = (x + 0.5) / 2^32 and the noise is -log(-log1p(-v)), computed so
    that both tails keep float32's relative precision.
    """
    zero = tl.zeros_like(token)
    a, b, c, d = tl.philox(seed, token // 4, position + zero, zero, zero)
    lane = token % 4
    x = tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))
    SCALE: tl.constexpr = 2.3283064365386963e-10
    v = (x.to(tl.float32) + 0.5) * SCALE
    # 1 - v from the complement's bits, exact where v is near 1; log1p(-v) by Kahan's correction where v is
    # small.
    rest = ((0xFFFFFFFF - x).to(tl.float32) + 0.5) * SCALE
    off = 1.0 - v
    is_tiny = off == 1.0
    small = tl.where(is_tiny, v, -tl.log(off) * (v / tl.where(is_tiny, 1.0, 1.0 - off)))
    return -tl.log(tl.where(v < 0.5, small, -tl.log(rest)))


@triton.jit
def _head_kernel(
    x_ptr,
    weight,
    logits_ptr,
    best_value_ptr,
    best_id_ptr,
    seeds_ptr,
    temperatures_ptr,
    positions_ptr,
    num_rows_ptr,
    position_offset,
    MAX: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    LOGITS: tl.constexpr,
    CHOOSE: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    col = tl.arange(0, COLS)
    if GROUPS > 1:
        first = pid % GROUPS * COLS
        pid = pid // GROUPS
        x_ptr += first * K
        col += first
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    prefetch_rows(weight[0], rows * ROW, PREFETCH)
    live = col < wait_with_rows(num_rows_ptr, PDL, False)
    inverse = tl.zeros((COLS,), tl.float32)
    acc = product(
        weight,
        rows,
        x_ptr,
        K,
        live,
        inverse,
        x_ptr,
        K,
        BLOCK_N,
        BLOCK_K,
        SPLIT,
        COLS,
        STAGES,
        False,
        FORMAT,
    )
    _leave(
        acc.to(x_ptr.dtype.element_ty).to(tl.float32),
        n,
        col,
        live,
        logits_ptr,
        best_value_ptr + pid * MAX,
        best_id_ptr + pid * MAX,
        seeds_ptr,
        temperatures_ptr,
        positions_ptr,
        position_offset,
        N,
        BLOCK_N,
        COLS,
        LOGITS,
        CHOOSE,
    )


@triton.jit
def _given_kernel(
    given_ptr,
    logits_ptr,
    best_value_ptr,
    best_id_ptr,
    seeds_ptr,
    temperatures_ptr,
    positions_ptr,
    num_rows_ptr,
    position_offset,
    MAX: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLS: tl.constexpr,
    LOGITS: tl.constexpr,
    CHOOSE: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    col = tl.arange(0, COLS)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    live = col < wait_with_rows(num_rows_ptr, PDL, True)
    at = col[None, :].to(tl.int64) * N + n[:, None]
    _leave(
        tl.load(given_ptr + at, mask=live[None, :] & (n < N)[:, None], other=0.0).to(tl.float32),
        n,
        col,
        live,
        logits_ptr,
        best_value_ptr + pid * MAX,
        best_id_ptr + pid * MAX,
        seeds_ptr,
        temperatures_ptr,
        positions_ptr,
        position_offset,
        N,
        BLOCK_N,
        COLS,
        LOGITS,
        CHOOSE,
    )


@triton.jit
def _leave(
    value,
    n,
    col,
    live,
    logits_ptr,
    best_value_ptr,
    best_id_ptr,
    seeds_ptr,
    temperatures_ptr,
    positions_ptr,
    position_offset,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLS: tl.constexpr,
    LOGITS: tl.constexpr,
    CHOOSE: tl.constexpr,
):
    """Write a block's logits [BLOCK_N, COLS], and of each column the best with its noise."""
    if LOGITS:
        at = col[None, :].to(tl.int64) * N + n[:, None]
        tl.store(logits_ptr + at, value, mask=live[None, :] & (n < N)[:, None])
    if CHOOSE:
        temperature = tl.load(temperatures_ptr + col, mask=live, other=0.0)
        if tl.max(temperature, 0) > 0.0:
            seed = tl.load(seeds_ptr + col, mask=live, other=0)
            position = tl.load(positions_ptr + col, mask=live, other=0) + position_offset
            hot = (temperature > 0.0)[None, :]
            noise = gumbel(seed[None, :], position[None, :], n[:, None] + tl.zeros((BLOCK_N, COLS), tl.int32))
            value = tl.where(hot, value / tl.where(hot, temperature[None, :], 1.0) + noise, value)
        value = tl.where((n < N)[:, None], value, float("-inf"))
        best = tl.max(value, 0)
        token = tl.min(tl.where(value == best[None, :], n[:, None], N), 0)
        tl.store(best_value_ptr + col, best, mask=live)
        tl.store(best_id_ptr + col, token, mask=live)


@triton.jit
def _best_kernel(
    best_value_ptr,
    best_id_ptr,
    token_ptr,
    row_start_ptr,
    row_request_ptr,
    map_ptr,
    num_rows_ptr,
    V: tl.constexpr,
    MAX: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFT: tl.constexpr,
    MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if row < wait_with_rows(num_rows_ptr, PDL, True):
        value = tl.load(best_value_ptr + i * MAX + row, mask=i < PARTS, other=float("-inf"))
        token = tl.load(best_id_ptr + i * MAX + row, mask=i < PARTS, other=V)
        token = tl.min(tl.where(value == tl.max(value, 0), token, V), 0)
        if MAP:
            token = token + tl.load(map_ptr + tl.minimum(token, V - 1)).to(tl.int32)
        keep = False
        if DRAFT:
            # The first row of a request holds its anchor, which is not for the drafter to choose.
            keep = tl.load(row_start_ptr + tl.load(row_request_ptr + row)) == row
        tl.store(token_ptr + row, token, mask=not keep)


def _constants(weight: Weight, tile: Tile, launch: Launch, most_rows: int) -> dict[str, Any]:
    """Return what a launch of ``_head_kernel`` must know beforehand, and its options."""
    V, D = weight.shape
    tile = tile.by_warp() if isinstance(weight, Packed) else tile
    return {
        "MAX": most_rows,
        "N": V,
        "K": D,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SPLIT": tile.split,
        "COLS": launch.group_cols,
        "GROUPS": launch.num_groups,
        "STAGES": tile.stages,
        "PREFETCH": launch.prefetched(tile, row_bytes(weight)),
        "ROW": row_elements(weight),
        "FORMAT": format_of(weight),
        "PDL": launch.pdl,
        **launch.options(tile.warps),
    }


def sample(
    x: Tensor,
    weight: Weight,
    tokens: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    positions: Tensor,
    num_rows: Tensor,
    workspace: tuple[Tensor, Tensor],
    tile: Tile,
    launch: Launch,
    *,
    position_offset: int,
    logits: Tensor | None = None,
    draft_rows: tuple[Tensor, Tensor] | None = None,
    token_map: Tensor | None = None,
    given: Tensor | None = None,
) -> None:
    """Choose one token for each live row.

    Args:
        x: [MAX_ROWS, D] after the final norm.
        weight: [V, D] of the head, packed or plain.
        tokens: [MAX_ROWS] int32, written.
        seeds: [MAX_ROWS] int64 seed of each row's request.
        temperatures: [MAX_ROWS] float32, 0 for argmax.
        positions: [MAX_ROWS] int32 position of each row.
        num_rows: [1] int32, live rows.
        workspace: float32 and int32, [ceil(V / tile.block_n), MAX_ROWS] each at least.
        tile: By weight shape.
        launch: What the launches of a step share.
        position_offset: From a row's position to that of the token it predicts: 1 for the target, 0 for a
            drafter.
        logits: [MAX_ROWS, V] float32, written, or None.
        draft_rows: ``row_start`` and ``row_request`` of a drafter's rows, whose first row of each request
            keeps its token; None for the target.
        token_map: [V] what to add to a reduced vocabulary's id to get the target's, or None.
        given: [MAX_ROWS, V] of x's dtype: the product of both, where another kernel has made it.
    """
    V = weight.shape[0]
    parts = cdiv(V, tile.block_n if given is None else _given_block(tile))
    chosen = (*workspace, seeds, temperatures, positions, num_rows, position_offset)
    _launch(x, weight, given, logits, chosen, tile, launch, workspace[0].shape[1])
    row_start, row_request = (tokens, tokens) if draft_rows is None else draft_rows
    _best_kernel[(launch.cols,)](
        *workspace,
        tokens,
        row_start,
        row_request,
        tokens if token_map is None else token_map,
        num_rows,
        V=V,
        MAX=workspace[0].shape[1],
        PARTS=parts,
        BLOCK=power_of_two(parts),
        DRAFT=draft_rows is not None,
        MAP=token_map is not None,
        PDL=launch.pdl,
        **launch.options(4),
    )


def write_logits(
    x: Tensor,
    weight: Weight,
    logits: Tensor,
    num_rows: Tensor,
    tile: Tile,
    launch: Launch,
    *,
    given: Tensor | None = None,
) -> None:
    """Compute the logits of each live row and choose nothing; bits as ``sample`` writes them.

    Args:
        x: [MAX_ROWS, D] after the final norm.
        weight: [V, D] of the head, packed or plain.
        logits: [MAX_ROWS, V] float32, written.
        num_rows: [1] int32, live rows.
        tile: By weight shape.
        launch: What the launches of a step share.
        given: As for ``sample``.
    """
    _launch(x, weight, given, logits, (*[num_rows] * 6, 0), tile, launch, 0)


def _given_block(tile: Tile) -> int:
    """Return how much of the vocabulary a program takes of a product that is there already."""
    return max(GIVEN_BLOCK, tile.block_n)


def _launch(
    x: Tensor,
    weight: Weight,
    given: Tensor | None,
    logits: Tensor | None,
    chosen: tuple[Any, ...],
    tile: Tile,
    launch: Launch,
    most_rows: int,
) -> None:
    """Write logits, if any are wanted, and the best of each part, if there is room for any rows."""
    writes = {"LOGITS": logits is not None, "CHOOSE": most_rows > 0}
    to = chosen[0] if logits is None else logits
    if given is None:
        constants = _constants(weight, tile, launch, most_rows) | writes
        grid = cdiv(weight.shape[0], tile.block_n) * launch.num_groups
        _head_kernel[(grid,)](x, operand(weight), to, *chosen, **constants)
        return
    block, V = _given_block(tile), weight.shape[0]
    _given_kernel[(cdiv(V, block),)](
        given,
        to,
        *chosen,
        MAX=most_rows,
        N=V,
        BLOCK_N=block,
        COLS=launch.tile_cols,
        PDL=launch.pdl,
        **writes,
        **launch.options(tile.warps),
    )
