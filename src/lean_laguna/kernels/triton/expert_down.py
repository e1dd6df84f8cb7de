"""Routed experts, second half: down, the routed sum, the shared expert's down and the residual in one store.

Output-centric: a program owns output columns and walks the live experts in ascending id, so there is no
scatter, no combine kernel and no atomic, and a row's sum has one order whichever experts are live for other
rows. Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaSparseMoeBlock; terms are summed in
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch, Tile, cdiv, power_of_two
from lean_laguna.kernels.triton.primitives import prefetch_rows, wait_with_rows


@triton.jit
def _expert_down_kernel(
    act_ptr,
    slot_weights_ptr,
    slot_experts_ptr,
    num_slots_ptr,
    w_ptr,
    shared_act_ptr,
    shared_w_ptr,
    h_ptr,
    tap_ptr,
    num_rows_ptr,
    scaling,
    tap_stride,
    MAX: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    FS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARED_K: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
    TAP: tl.constexpr,
    PREFETCH_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PREFETCH_SLOTS > 0:
        prefetch_rows(shared_w_ptr, rows * FS, FS * 2 // 512 * 512)
        # The list may still be the layer before's: a wrong guess costs bandwidth, never a bit.
        for j in range(tl.minimum(tl.load(num_slots_ptr, volatile=True), PREFETCH_SLOTS)):
            guess = tl.load(slot_experts_ptr + j, volatile=True)
            guess = tl.minimum(tl.maximum(guess, 0), E - 1).to(tl.int64)
            prefetch_rows(w_ptr, guess * N * F + rows * F, F * 2 // 512 * 512)
    part = tl.arange(0, SPLIT)
    if SHARED:
        # Weights need no waiting, and by the loop's end they have come.
        shared_at = part[:, None] * SHARED_K + tl.arange(0, SHARED_K)[None, :]
        shared_w = tl.load(
            shared_w_ptr + rows[None, :, None] * FS + shared_at[:, None, :],
            mask=(shared_at < FS)[:, None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
    col = tl.arange(0, COLS)
    live = col < wait_with_rows(num_rows_ptr, PDL, False)
    mask = live[None, :] & (n < N)[:, None]
    old = tl.load(h_ptr + col[None, :] * N + n[:, None], mask=mask, other=0.0)
    num_slots = tl.load(num_slots_ptr)
    if SHARED:
        shared_x = tl.load(
            shared_act_ptr + col[None, None, :] * FS + shared_at[:, :, None],
            mask=(shared_at < FS)[:, :, None] & live[None, None, :],
            other=0.0,
        )
    at = part[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w_at = w_ptr + rows[None, :, None] * F + at[:, None, :]
    inside = at < F
    sums = tl.zeros((SPLIT, BLOCK_N, COLS), tl.float32)
    for j in tl.range(0, num_slots, num_stages=STAGES):
        expert = tl.load(slot_experts_ptr + j).to(tl.int64)
        weight = tl.load(slot_weights_ptr + j * MAX + col)
        chose = weight != 0.0
        w = tl.load(w_at + expert * N * F, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(
            act_ptr + (j * MAX + col)[None, None, :] * F + at[:, :, None],
            mask=inside[:, :, None] & chose[None, None, :],
            other=0.0,
        )
        y = tl.dot(w, x)
        sums = tl.where(chose[None, None, :], sums + y * weight[None, None, :], sums)
    routed = tl.sum(sums, 0).to(DTYPE).to(tl.float32)
    y = (routed * scaling).to(DTYPE)
    if SHARED:
        shared = tl.sum(tl.dot(shared_w, shared_x), 0)
        y = (y.to(tl.float32) + shared.to(DTYPE).to(tl.float32)).to(DTYPE)
    y = (old.to(tl.float32) + y.to(tl.float32)).to(DTYPE)
    tl.store(h_ptr + col[None, :] * N + n[:, None], y, mask=mask)
    if TAP:
        tl.store(tap_ptr + col[None, :] * tap_stride + n[:, None], y, mask=mask)


def expert_down(
    routing: Routing,
    weight: Tensor,
    hidden: Tensor,
    num_rows: Tensor,
    tile: Tile,
    launch: Launch,
    *,
    scaling: float,
    shared_act: Tensor | None,
    shared_weight: Tensor | None,
    tap: Tensor | None = None,
) -> None:
    """Add scaling * sum of weight * down(act), and the shared expert's down, to the residual stream.

    Args:
        routing: From ``expert_gate_up``.
        weight: [E, N, F].
        hidden: [MAX_ROWS, N] residual stream, changed in place.
        num_rows: [1] int32, live rows.
        tile: By weight shape; ``split`` at least 2. A whole row F is taken at once, in ``split`` parts.
        launch: What the launches of a step share.
        scaling: Factor of the routed sum.
        shared_act: [MAX_ROWS, FS] silu(gate) * up of the shared expert, or None without one.
        shared_weight: [N, FS].
        tap: [MAX_ROWS, N], any row stride: a second copy of the result, or None.
    """
    E, N, F = weight.shape
    if tile.split < 2:
        raise ValueError(f"expert_down: tile.split must be at least 2, found {tile.split}")
    shared = shared_weight is not None
    width = F if shared_weight is None else shared_weight.shape[1]
    prefetched = launch.prefetched(tile, F * weight.element_size()) > 0 and weight.element_size() == 2
    _expert_down_kernel[(cdiv(N, tile.block_n),)](
        routing.act,
        routing.slot_weights,
        routing.slot_experts,
        routing.num_slots,
        weight,
        routing.act if shared_act is None else shared_act,
        weight if shared_weight is None else shared_weight,
        hidden,
        hidden if tap is None else tap,
        num_rows,
        scaling,
        N if tap is None else tap.stride(0),
        MAX=MAX_ROWS,
        E=E,
        F=F,
        FS=width,
        N=N,
        BLOCK_N=tile.block_n,
        BLOCK_K=max(16, power_of_two(cdiv(F, tile.split))),
        SPLIT=tile.split,
        SHARED_K=max(16, power_of_two(cdiv(width, tile.split))),
        COLS=launch.cols,
        STAGES=tile.stages,
        SHARED=shared,
        TAP=tap is not None,
        PREFETCH_SLOTS=8 if prefetched else 0,
        PDL=launch.pdl,
        **launch.options(tile.warps),
    )
