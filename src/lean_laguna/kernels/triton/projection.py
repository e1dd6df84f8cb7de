"""Dense projections of a step: normalise and project, project and add to the residual, gate/up with SiLU.

Each streams its weight once for up to 16 rows. Rows keep their bits: see ``primitives.product``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.formats import Weight, format_of, operand, row_bytes, row_elements
from lean_laguna.kernels.triton.launch import Launch, Tile, cdiv, power_of_two
from lean_laguna.kernels.triton.primitives import (
    inverse_rms,
    normalise,
    prefetch_rows,
    product,
    silu_times,
    wait_with_rows,
)


@triton.jit
def _project_kernel(
    x_ptr,
    norm_ptr,
    weight,
    residual_ptr,
    out_ptr,
    tap_ptr,
    num_rows_ptr,
    eps,
    x_stride,
    out_stride,
    tap_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    NORM_EVERY: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    first = 0
    if GROUPS > 1:
        first = pid % GROUPS * COLS
        pid = pid // GROUPS
        x_ptr += first * x_stride
        residual_ptr += first * out_stride
        out_ptr += first * out_stride
        tap_ptr += first * tap_stride
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    prefetch_rows(weight[0], rows * ROW, PREFETCH)
    col = tl.arange(0, COLS)
    live = col < wait_with_rows(num_rows_ptr, PDL, False) - first
    inverse = tl.zeros((COLS,), tl.float32)
    if NORM:
        if NORM_EVERY > 0:
            norm_ptr += pid * BLOCK_N // NORM_EVERY * K
        inverse = inverse_rms(x_ptr, x_stride, live, eps, K, COLS, NORM_BLOCK)
    acc = product(
        weight,
        rows,
        x_ptr,
        x_stride,
        live,
        inverse,
        norm_ptr,
        K,
        BLOCK_N,
        BLOCK_K,
        SPLIT,
        COLS,
        STAGES,
        NORM,
        FORMAT,
    )
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    mask = live[None, :] & (n < N)[:, None]
    y = acc.to(DTYPE)
    if RESIDUAL:
        old = tl.load(residual_ptr + col[None, :] * out_stride + n[:, None], mask=mask, other=0.0)
        y = (old.to(tl.float32) + y.to(tl.float32)).to(DTYPE)
    tl.store(out_ptr + col[None, :] * out_stride + n[:, None], y, mask=mask)
    if TAP:
        tl.store(tap_ptr + col[None, :] * tap_stride + n[:, None], y, mask=mask)


def project(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    num_rows: Tensor,
    tile: Tile,
    launch: Launch,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    tap: Tensor | None = None,
) -> None:
    """Compute x @ weight^T for the live rows, with an RMSNorm before it and a residual after it where given.

    Args:
        x: [MAX_ROWS, K], K contiguous.
        weight: [N, K], packed or plain.
        out: [MAX_ROWS, N], written; may be ``residual`` itself.
        num_rows: [1] int32, live rows.
        tile: By weight shape.
        launch: What the launches of a step share.
        norm: Weight of the RMSNorm of x, [K]; or [., K] one for each ``N // norm.shape[0]`` rows of the
            weight, a multiple of ``tile.block_n``; or None for x as it is.
        eps: Of the RMSNorm.
        residual: [MAX_ROWS, N] added to the rounded product, or None. Strides as ``out``.
        tap: [MAX_ROWS, N], any row stride: a second copy of the result, or None.
    """
    N, K = weight.shape
    norm_every = N // norm.shape[0] if norm is not None and norm.dim() == 2 else 0
    if norm_every % tile.block_n:
        raise ValueError(f"project: {norm_every} rows a norm must be a multiple of block_n {tile.block_n}")
    _project_kernel[(cdiv(N, tile.block_n) * launch.num_groups,)](
        x,
        x if norm is None else norm,
        operand(weight),
        out if residual is None else residual,
        out,
        out if tap is None else tap,
        num_rows,
        eps,
        x.stride(0),
        out.stride(0),
        out.stride(0) if tap is None else tap.stride(0),
        N=N,
        K=K,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT=tile.split,
        COLS=launch.group_cols,
        GROUPS=launch.num_groups,
        STAGES=tile.stages,
        NORM=norm is not None,
        NORM_BLOCK=min(256, power_of_two(K)),
        NORM_EVERY=norm_every,
        RESIDUAL=residual is not None,
        TAP=tap is not None,
        PREFETCH=launch.prefetched(tile, row_bytes(weight)),
        ROW=row_elements(weight),
        FORMAT=format_of(weight),
        PDL=launch.pdl,
        **launch.options(tile.warps),
    )


@triton.jit
def _gate_up_kernel(
    x_ptr,
    norm_ptr,
    weight,
    gate_up,
    scores_ptr,
    normed_ptr,
    act_ptr,
    num_rows_ptr,
    eps,
    x_stride,
    E: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    APART: tl.constexpr,
    GATE_UP_FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    SCORE_BLOCKS: tl.constexpr = (E + BLOCK_N - 1) // BLOCK_N
    PAIR_BLOCKS: tl.constexpr = (F + HALF - 1) // HALF
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK_N)
    f0 = (pid - SCORE_BLOCKS) * HALF
    pair = tl.where(i < HALF, tl.minimum(f0 + i, F - 1), F + tl.minimum(f0 + i - HALF, F - 1)).to(tl.int64)
    rows = tl.minimum(pid * BLOCK_N + i, E - 1).to(tl.int64)
    if not APART:
        rows = tl.where(pid < SCORE_BLOCKS, rows, E + pair)
    if not APART or pid < SCORE_BLOCKS:
        prefetch_rows(weight[0], rows * ROW, PREFETCH)
    col = tl.arange(0, COLS)
    num_rows = wait_with_rows(num_rows_ptr, PDL, False)
    live = col < num_rows
    inverse = inverse_rms(x_ptr, x_stride, live, eps, K, COLS, NORM_BLOCK)
    if not APART or pid < SCORE_BLOCKS:
        acc = product(
            weight,
            rows,
            x_ptr,
            x_stride,
            live,
            inverse,
            norm_ptr,
            K,
            BLOCK_N,
            BLOCK_K,
            SPLIT,
            COLS,
            STAGES,
            True,
            FORMAT,
        )
    else:
        acc = product(
            gate_up,
            pair,
            x_ptr,
            x_stride,
            live,
            inverse,
            norm_ptr,
            K,
            BLOCK_N,
            BLOCK_K,
            SPLIT,
            COLS,
            STAGES,
            True,
            GATE_UP_FORMAT,
        )
    DTYPE: tl.constexpr = act_ptr.dtype.element_ty
    if pid < SCORE_BLOCKS:
        e = pid * BLOCK_N + i
        tl.store(
            scores_ptr + col[None, :] * E + e[:, None],
            acc.to(DTYPE),
            mask=live[None, :] & (e < E)[:, None],
        )
    else:
        f = f0 + tl.arange(0, HALF)
        act = silu_times(acc, DTYPE, HALF, COLS)
        tl.store(act_ptr + col[None, :] * F + f[:, None], act, mask=live[None, :] & (f < F)[:, None])
    if E > 0:
        # One row a program, so that nobody waits: the routed experts read x normalised.
        for row in range(pid, num_rows, SCORE_BLOCKS + PAIR_BLOCKS):
            own = tl.sum(tl.where(col == row, inverse, 0.0), 0)
            for start in tl.static_range(0, K, NORM_BLOCK):
                k = start + tl.arange(0, NORM_BLOCK)
                x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0)
                g = tl.load(norm_ptr + k, mask=k < K, other=0.0)
                tl.store(normed_ptr + row * K + k, normalise(x, own, g), mask=k < K)


def gate_up(
    x: Tensor,
    norm: Tensor,
    weight: Weight,
    act: Tensor,
    num_rows: Tensor,
    eps: float,
    tile: Tile,
    launch: Launch,
    *,
    scores: Tensor | None = None,
    normed: Tensor | None = None,
    shared: Weight | None = None,
) -> None:
    """Normalise, then gate, up and SiLU; with ``scores``, the router's logits beside them.

    Args:
        x: [MAX_ROWS, K] residual stream.
        norm: [K] weight of its RMSNorm.
        weight: [E + 2F, K]: router rows (none for a dense MLP), gate rows, up rows, packed or plain; with
            ``shared`` router rows alone.
        act: [MAX_ROWS, F], written: silu(gate) * up.
        num_rows: [1] int32, live rows.
        eps: Of the RMSNorm.
        tile: By weight shape; ``block_n`` is half gate rows, half up rows.
        launch: What the launches of a step share.
        scores: [MAX_ROWS, E], written: router logits.
        normed: [MAX_ROWS, K], written with ``scores``: x normalised.
        shared: [2F, K] gate rows, then up rows, where they are not in ``weight``.
    """
    K, F = weight.shape[1], act.shape[1]
    E = weight.shape[0] - (2 * F if shared is None else 0)
    apart = weight if shared is None else shared
    blocks = cdiv(E, tile.block_n) + cdiv(F, tile.block_n // 2)
    _gate_up_kernel[(blocks,)](
        x,
        norm,
        operand(weight),
        operand(apart),
        act if scores is None else scores,
        act if normed is None else normed,
        act,
        num_rows,
        eps,
        x.stride(0),
        E=E,
        F=F,
        K=K,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT=tile.split,
        COLS=launch.tile_cols,
        STAGES=tile.stages,
        NORM_BLOCK=min(256, power_of_two(K)),
        PREFETCH=launch.prefetched(tile, row_bytes(weight)),
        ROW=row_elements(weight),
        FORMAT=format_of(weight),
        APART=shared is not None,
        GATE_UP_FORMAT=format_of(apart),
        PDL=launch.pdl,
        **launch.options(tile.warps),
    )
