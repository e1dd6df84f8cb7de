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

from lean_laguna.core.engine_sizes import NARROW
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.formats import Weight, format_of, operand, row_bytes, row_elements
from lean_laguna.kernels.triton.launch import Launch, Tile, cdiv, power_of_two, shared_memory
from lean_laguna.kernels.triton.primitives import load_weight_tile, prefetch_rows, wait_with_rows

_SMALL_THINGS = 1024
"""Bytes of shared memory of a program beside weights and activations, at most."""


@triton.jit
def _expert_down_kernel(
    act_ptr,
    slot_weights_ptr,
    slot_experts_ptr,
    num_slots_ptr,
    bank,
    shared_act_ptr,
    shared,
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
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
    TAP: tl.constexpr,
    PREFETCH_SLOTS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PREFETCH_SHARED: tl.constexpr,
    ROW: tl.constexpr,
    SHARED_ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = h_ptr.dtype.element_ty
    pid = tl.program_id(0)
    if GROUPS > 1:
        group = pid % GROUPS
        pid = pid // GROUPS
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PREFETCH_SLOTS > 0:
        prefetch_rows(shared[0], rows * SHARED_ROW, PREFETCH_SHARED)
        # The list may still be the layer before's: a wrong guess costs bandwidth, never a bit.
        for j in range(tl.minimum(tl.load(num_slots_ptr, volatile=True), PREFETCH_SLOTS)):
            guess = tl.load(slot_experts_ptr + j, volatile=True)
            guess = tl.minimum(tl.maximum(guess, 0), E - 1).to(tl.int64)
            prefetch_rows(bank[0], (guess * N + rows) * ROW, PREFETCH)
    part = tl.arange(0, SPLIT)
    if SHARED:
        # Weights need no waiting, and by the loop's end they have come.
        shared_at = part[:, None] * SHARED_K + tl.arange(0, SHARED_K)[None, :]
        shared_w = load_weight_tile(
            shared,
            rows,
            0,
            FS,
            BLOCK_N,
            SHARED_K,
            SPLIT,
            FS == SHARED_K * SPLIT,
            SHARED_FORMAT,
            DTYPE,
        )
    col = tl.arange(0, COLS)
    if GROUPS > 1:
        col += group * COLS
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
    inside = at < F
    sums = tl.zeros((SPLIT, BLOCK_N, COLS), tl.float32)
    for j in tl.range(0, num_slots, num_stages=STAGES):
        expert = tl.load(slot_experts_ptr + j).to(tl.int64)
        weight = tl.load(slot_weights_ptr + j * MAX + col)
        chose = weight != 0.0
        w = load_weight_tile(
            bank, expert * N + rows, 0, F, BLOCK_N, BLOCK_K, SPLIT, F == BLOCK_K * SPLIT, FORMAT, DTYPE
        )
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
        own = tl.sum(tl.dot(shared_w, shared_x), 0)
        y = (y.to(tl.float32) + own.to(DTYPE).to(tl.float32)).to(DTYPE)
    y = (old.to(tl.float32) + y.to(tl.float32)).to(DTYPE)
    tl.store(h_ptr + col[None, :] * N + n[:, None], y, mask=mask)
    if TAP:
        tl.store(tap_ptr + col[None, :] * tap_stride + n[:, None], y, mask=mask)


def _columns(weight: Weight, shared: Weight, tile: Tile, launch: Launch) -> int:
    """Return the columns of a program: half of all where whole rows of both do not fit shared memory."""
    lengths = (max(16, power_of_two(cdiv(w.shape[-1], tile.split))) * tile.split for w in (weight, shared))
    needed = sum(lengths) * weight.dtype.itemsize * (tile.block_n + launch.tile_cols) + _SMALL_THINGS
    is_too_much = launch.tile_cols > NARROW and needed > shared_memory(weight.device)
    return launch.tile_cols // 2 if is_too_much else launch.tile_cols


def expert_down(
    routing: Routing,
    weight: Weight,
    hidden: Tensor,
    num_rows: Tensor,
    tile: Tile,
    launch: Launch,
    *,
    scaling: float,
    shared_act: Tensor | None,
    shared_weight: Weight | None,
    tap: Tensor | None = None,
) -> None:
    """Add scaling * sum of weight * down(act), and the shared expert's down, to the residual stream.

    Args:
        routing: From ``expert_gate_up``.
        weight: [E, N, F], packed or plain.
        hidden: [MAX_ROWS, N] residual stream, changed in place.
        num_rows: [1] int32, live rows.
        tile: By weight shape; ``split`` at least 2. A whole row F is taken at once, in ``split`` parts.
        launch: What the launches of a step share.
        scaling: Factor of the routed sum.
        shared_act: [MAX_ROWS, FS] silu(gate) * up of the shared expert, or None without one.
        shared_weight: [N, FS], likewise.
        tap: [MAX_ROWS, N], any row stride: a second copy of the result, or None.
    """
    E, N, F = weight.shape
    if tile.split < 2:
        raise ValueError(f"expert_down: tile.split must be at least 2, found {tile.split}")
    shared = weight if shared_weight is None else shared_weight
    cols = _columns(weight, shared, tile, launch)
    groups = launch.tile_cols // cols
    width = F if shared_weight is None else shared_weight.shape[1]
    prefetch, whole = launch.prefetched(tile, row_bytes(weight)), tile.with_prefetch(1.0)
    _expert_down_kernel[(cdiv(N, tile.block_n) * groups,)](
        routing.act,
        routing.slot_weights,
        routing.slot_experts,
        routing.num_slots,
        operand(weight),
        routing.act if shared_act is None else shared_act,
        operand(shared),
        hidden,
        hidden if tap is None else tap,
        num_rows,
        scaling,
        N if tap is None else tap.stride(0),
        MAX=routing.act.shape[1],
        E=E,
        F=F,
        FS=width,
        N=N,
        BLOCK_N=tile.block_n,
        BLOCK_K=max(16, power_of_two(cdiv(F, tile.split))),
        SPLIT=tile.split,
        SHARED_K=max(16, power_of_two(cdiv(width, tile.split))),
        COLS=cols,
        GROUPS=groups,
        STAGES=tile.stages,
        SHARED=shared_weight is not None,
        TAP=tap is not None,
        PREFETCH_SLOTS=8 if prefetch else 0,
        PREFETCH=prefetch and launch.prefetched(whole, row_bytes(weight)),
        PREFETCH_SHARED=launch.prefetched(whole, row_bytes(shared)),
        ROW=row_elements(weight),
        SHARED_ROW=row_elements(shared),
        FORMAT=format_of(weight),
        SHARED_FORMAT=format_of(shared),
        PDL=launch.pdl,
        **launch.options(tile.warps),
    )
