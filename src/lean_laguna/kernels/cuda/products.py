"""The CUDA C++ products of a step: normalise and project, project and add, the two halves of the experts.

Each takes over a Triton kernel of the same meaning on shapes that fit (see ``fits_*``), in BF16 only; Triton
keeps every other shape and every other card. A shape always takes the same kernel, so a row keeps its bits.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import multiprocessors
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.formats import Weight, plain
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.weights import SparseWeights

WARPS = 8
THREADS = 32 * WARPS
MAX_RING = 16
"""16-byte loads that a lane keeps in flight: 4 KiB of shared memory each."""
ADD_RING = 12
DOWN_RING = 8
PROGRAMS = 2
"""Of a streaming kernel on each multiprocessor, whose shared memory holds two: as one ends, the next kernel's
first takes its place."""
MAX_EXPERTS = 256
TABLE_BYTES = 1 << 15
"""Enough for the routing tables of 16 rows."""


def _ring(num_loads: int, most: int = 0) -> int:
    """Return a ring's length: units as a whole if they fit, otherwise an even part of one."""
    most = most or MAX_RING
    if num_loads <= most:
        return num_loads * (most // num_loads)
    return max(n for n in range(1, most + 1) if num_loads % n == 0)


def fits_project(weight: Weight, *, gated: bool = False) -> TypeGuard[Tensor]:
    """Say whether ``project`` takes a weight [N, K], or [2N, K] gate and up rows."""
    n, k = weight.shape
    return isinstance(weight, Tensor) and k % THREADS == 0 and k <= 4096 and n % 8 == 0 and n >= 16


def project(
    x: Tensor,
    norm: Tensor,
    weight: Tensor,
    out: Tensor,
    num_rows: Tensor,
    eps: float,
    launch: Launch,
    *,
    gated: bool = False,
    normed: Tensor | None = None,
    rows: int = 0,
) -> None:
    """Compute rmsnorm(x) @ weight^T of the live rows, or silu(gate) * up of it.

    Args:
        x: [MAX_ROWS, K] bf16.
        norm: [K] weight of the RMSNorm.
        weight: [N, K]; with ``gated`` [2N, K], gate rows first.
        out: [MAX_ROWS, N], written.
        num_rows: [1] int32, live rows.
        eps: Of the RMSNorm.
        launch: What the launches of a step share.
        gated: Apply silu(gate) * up.
        normed: [MAX_ROWS, K], written with the normalised rows, or None.
        rows: Use only this many of the weight's rows, 0 for all.
    """
    n, k = rows or weight.shape[0] // (2 if gated else 1), weight.shape[1]
    units = n // (4 if gated else 8)
    ring = _ring(k // THREADS)
    source = Source.of(
        "project",
        K=k,
        N=n,
        WARPS=WARPS,
        RING=ring,
        COLS=launch.cols,
        GATED=gated,
        NORMED=normed is not None,
        PROGRAMS=2,
    )
    shared = ring * THREADS * 16 + launch.cols * (k + 8) * 2 + k * 2 + 2 * WARPS * launch.cols * 8 * 4
    grid = min(units, PROGRAMS * multiprocessors(x.device))
    arguments = (x, norm, weight, out, normed, num_rows, eps, x.stride(0), out.stride(0))
    launch_kernel(source, grid, THREADS, shared, arguments, launch)


def fits_project_add(weight: Weight) -> TypeGuard[Tensor]:
    """Say whether ``project_add`` takes a weight [N, K]."""
    return isinstance(weight, Tensor) and weight.shape[1] % THREADS == 0 and weight.shape[0] % 16 == 0


def project_add(
    x: Tensor, weight: Tensor, hidden: Tensor, num_rows: Tensor, launch: Launch, tap: Tensor | None = None
) -> None:
    """Add x @ weight^T, rounded, to the residual stream of the live rows.

    Args:
        x: [MAX_ROWS, K] bf16.
        weight: [N, K].
        hidden: [MAX_ROWS, N], changed in place.
        num_rows: [1] int32, live rows.
        launch: What the launches of a step share.
        tap: [MAX_ROWS, N], any row stride: a second copy of the result, or None.
    """
    n, k = weight.shape
    blocks = k // THREADS
    ring = min(ADD_RING, blocks)
    source = Source.of(
        "project_add",
        K=k,
        N=n,
        WARPS=WARPS,
        RING=ring,
        AHEAD=min(4 if launch.cols <= 8 else 2, blocks),
        COLS=launch.cols,
    )
    strides = (x.stride(0), hidden.stride(0), 0 if tap is None else tap.stride(0))
    arguments = (x, weight, hidden, tap, num_rows, *strides)
    shared = 2 * ring * THREADS * 16 + WARPS * launch.cols * 16 * 4
    launch_kernel(source, n // 16, THREADS, shared, arguments, launch)


def fits_experts(mlp: SparseWeights) -> bool:
    """Say whether ``run_experts`` takes a MoE block."""
    experts, n, f = mlp.down.shape
    fs = mlp.shared_down.shape[1]
    return (
        all(isinstance(weight, Tensor) for weight in (mlp.gate_up, mlp.down, mlp.shared_down))
        and mlp.shared_gate_up is None
        and experts % 32 == 0
        and experts <= MAX_EXPERTS
        and n % THREADS == 0
        and n <= 4096
        and f in (THREADS, 2 * THREADS, 4 * THREADS)
        and fs in (THREADS, 2 * THREADS, 4 * THREADS)
        and fits_project(mlp.router_gate_up)
    )


def _routing_bytes(num_experts: int, top_k: int, cols: int) -> int:
    """Return an upper bound of ``struct Routing``'s size."""
    slots = min(num_experts, cols * top_k)
    return 96 + slots * (1 + cols + 4 * cols) + cols * top_k * 5 + 64


def run_experts(
    mlp: SparseWeights,
    hidden: Tensor,
    scores: Tensor,
    normed: Tensor,
    shared_act: Tensor,
    routing: Routing,
    tables: Tensor,
    num_rows: Tensor,
    eps: float,
    launch: Launch,
    tap: Tensor | None = None,
) -> None:
    """Run a mixture of experts with its router and shared expert on the residual stream, in place.

    Args:
        mlp: Weights.
        hidden: [MAX_ROWS, D] bf16.
        scores: [MAX_ROWS, E], written.
        normed: [MAX_ROWS, D], written.
        shared_act: [MAX_ROWS, FS], written.
        routing: Its ``expert_ids`` are written; ``act`` serves as [MAX_ROWS, A, F] here.
        tables: [TABLE_BYTES] uint8, written: routing as the second kernel takes it.
        num_rows: [1] int32, live rows.
        eps: Of the RMSNorm.
        launch: What the launches of a step share.
        tap: [MAX_ROWS, D], any row stride: a second copy of the result, or None.
    """
    bank_up, bank_down, shared_down = (plain(weight) for weight in (mlp.gate_up, mlp.down, mlp.shared_down))
    experts, d, f = mlp.down.shape
    fs, cols = mlp.shared_down.shape[1], launch.cols
    project(hidden, mlp.norm, mlp.router_gate_up, scores, num_rows, eps, launch, normed=normed, rows=experts)
    shared_rows = mlp.router_gate_up[experts:]
    constants = {
        "E": experts,
        "A": mlp.top_k,
        "F": f,
        "FS": fs,
        "WARPS": WARPS,
        "COLS": cols,
        "SOFTCAP": mlp.softcap > 0,
        "NORM_TOPK": mlp.norm_topk,
    }
    table_bytes = _routing_bytes(experts, mlp.top_k, cols)
    ring = _ring(d // THREADS)
    up = Source.of("experts_up", K=d, RING=ring, **constants)
    up_arguments = (normed, scores, mlp.bias, bank_up, shared_rows, routing.act, shared_act)
    launch_kernel(
        up,
        PROGRAMS * multiprocessors(hidden.device),
        THREADS,
        ring * THREADS * 16 + cols * (d + 8) * 2 + 2 * WARPS * cols * 8 * 4 + table_bytes,
        (*up_arguments, routing.expert_ids, tables, num_rows, float(mlp.softcap)),
        launch,
    )
    ring = _ring(2 * f // THREADS, DOWN_RING)
    down = Source.of("experts_down", N=d, RING=ring, **constants)
    staged = cols * mlp.top_k * (f + 8) * 2 + cols * (fs + 8) * 2
    down_arguments = (routing.act, shared_act, tables, bank_down, shared_down, hidden, tap)
    launch_kernel(
        down,
        d // 16,
        THREADS,
        ring * THREADS * 16 + staged + WARPS * cols * 32 * 4 + table_bytes,
        (*down_arguments, num_rows, float(mlp.scaling), 0 if tap is None else tap.stride(0)),
        launch,
    )
