"""The CUDA C++ products of a step: normalise and project, project and add, the two halves of the experts.

Each takes over a Triton kernel of the same meaning on shapes that fit (see ``fits_*``), in BF16, with weights
plain or packed; Triton keeps every other shape and every other card. A shape always takes the same kernel, so
a row keeps its bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lean_laguna.kernels.cuda import packed_products
from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import has_bulk_copies, multiprocessors
from lean_laguna.kernels.cuda.formats import fits
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.cuda.packed_products import contest_bytes, routing_bytes
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.formats import Packed, Weight
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.weights import SparseWeights

WARPS = 8
THREADS = 32 * WARPS
MAX_RING = 16
"""16-byte loads that a lane keeps in flight: 4 KiB of shared memory each."""


@dataclass(frozen=True)
class Plan:
    """How a product whose units of 8 rows come by the copy engine runs.

    Attributes:
        programs: A multiprocessor.
        columns: Of 8 rows each, on their way to a program: 16 bytes of shared memory a column.
        early: Of these, how many do not lie where tokens are before registers hold them; 0 for all.
        is_bulk: False for loads by lanes instead, of 16 bytes each.
    """

    programs: int
    columns: int
    early: int = 0
    is_bulk: bool = True


PROJECT_PLANS = {1: Plan(2, 6144), 8: Plan(2, 4096), 16: Plan(1, 0, is_bulk=False)}
UP_PLANS = {1: Plan(2, 6144), 8: Plan(2, 4096), 16: Plan(1, 0, is_bulk=False)}
"""By columns of tokens."""
ADD_AHEAD = 8
"""Blocks of 32 columns of eight rows that a lane of the output projection keeps ahead."""
ADD_RING, LONE_ADD_RING = 24, 16
"""Steps of two such loads; a lone row leaves room for more, most of which arrive during attention."""
DOWN_RING = 8
LONE_DOWN_RING = 16
"""The same of down for a lone row, whose activations take little room: half of its weights."""
PROGRAMS = 2
"""Of a streaming kernel on each multiprocessor, whose shared memory holds two: as one ends, the next kernel's
first takes its place."""
LONE_PROGRAMS = 4
"""Programs whose registers a multiprocessor should hold in steps of one row, of the kernels before and after
too: a kernel that fits beside the one that runs streams its weights meanwhile."""
LEAST_OF_TWO = 76_801
"""Bytes of which a multiprocessor of 228 KiB holds two and no third: there is then room beside them
everywhere, which a cluster of programs needs."""
MAX_EXPERTS = 256


def _ring(num_loads: int, most: int = 0) -> int:
    """Return a ring's length: units as a whole if they fit, otherwise an even part of one."""
    most = most or MAX_RING
    if num_loads <= most:
        return num_loads * (most // num_loads)
    return max(n for n in range(1, most + 1) if num_loads % n == 0)


def _is_bulk(weight: Weight) -> bool:
    """Say whether rows come by the copy engine."""
    return isinstance(weight, Tensor) and has_bulk_copies(weight.device)


def _units(weight: Weight, cols: int, plan: Plan) -> tuple[dict[str, int], int]:
    """Return the constants of a ring of a weight's units, and the bytes it takes with tokens and sums."""
    k = weight.shape[-1]
    if _is_bulk(weight) and plan.is_bulk:
        ring = max(1, plan.columns // k)
        early = max(1, plan.early // k) if plan.early else ring
        room = max(early * 8 * k + cols * (k + 8), ring * 8 * k) * 2 + ring * 8
        constants = {"BULK": 1, "RING": ring, "EARLY": early}
    else:
        ring = _ring(k // THREADS)
        room = ring * THREADS * 16 + cols * (k + 8) * 2
        constants = {"BULK": 0, "RING": ring}
    return constants | {"K": k, "WARPS": WARPS, "COLS": cols}, room + 2 * WARPS * cols * 8 * 4


def _plain(weight: Weight) -> Tensor:
    """Return a weight that is not packed; packed ones have been sent elsewhere."""
    assert isinstance(weight, Tensor)
    return weight


def _num_programs(x: Tensor, plan: Plan) -> int:
    """Return how many programs of a streaming kernel run at once."""
    return multiprocessors(x.device) * plan.programs


def fits_project(weight: Weight, *, gated: bool = False) -> bool:
    """Say whether ``project`` takes a weight [N, K], or [2N, K] gate and up rows."""
    if isinstance(weight, Packed):
        return packed_products.fits_project(weight, gated=gated)
    n, k = weight.shape
    return k % THREADS == 0 and k <= 4096 and n % 8 == 0 and n >= 16 and fits(weight)


def project(
    x: Tensor,
    norm: Tensor,
    weight: Weight,
    out: Tensor,
    num_rows: Tensor,
    eps: float,
    launch: Launch,
    *,
    gated: bool = False,
    normed: Tensor | None = None,
    rows: int = 0,
    least_shared: int = 0,
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
        least_shared: Bytes of shared memory that a program takes at least; see ``LEAST_OF_TWO``.
    """
    if isinstance(weight, Packed):
        packed_products.project(
            x, norm, weight, out, num_rows, eps, launch, gated=gated, least_shared=least_shared
        )
        return
    n, k = rows or weight.shape[0] // (2 if gated else 1), weight.shape[1]
    units, plan = n // (4 if gated else 8), PROJECT_PLANS[launch.cols]
    grid = min(units, _num_programs(x, plan))
    constants, room = _units(weight, launch.cols, plan)
    source = Source.of(
        "project",
        N=n,
        GATED=gated,
        NORMED=normed is not None,
        PROGRAMS=LONE_PROGRAMS if launch.cols == 1 else plan.programs,
        **constants,
    )
    shared = room + (k // 2 if launch.cols == 1 else 64)
    arguments = (
        x,
        norm,
        _plain(weight),
        out,
        normed,
        num_rows,
        eps,
        x.stride(0),
        out.stride(0),
    )
    launch_kernel(source, grid, THREADS, max(shared, least_shared), arguments, launch)


def fits_project_add(weight: Weight) -> bool:
    """Say whether ``project_add`` takes a weight [N, K]."""
    if isinstance(weight, Packed):
        return packed_products.fits_project_add(weight)
    return weight.shape[1] % THREADS == 0 and weight.shape[0] % 16 == 0 and fits(weight)


def project_add(
    x: Tensor, weight: Weight, hidden: Tensor, num_rows: Tensor, launch: Launch, tap: Tensor | None = None
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
    if isinstance(weight, Packed):
        packed_products.project_add(x, weight, hidden, num_rows, launch, tap)
        return
    n, k = weight.shape
    blocks, is_lone = k // THREADS, launch.cols == 1
    ring = min(LONE_ADD_RING if is_lone else ADD_RING, blocks)
    ahead = (c for c in range(ADD_AHEAD // (1 if launch.cols <= 8 else 2), 0, -1) if blocks % c == 0)
    source = Source.of(
        "project_add",
        K=k,
        N=n,
        WARPS=WARPS,
        RING=ring,
        AHEAD=next(ahead),
        COLS=launch.cols,
    )
    strides = (x.stride(0), hidden.stride(0), 0 if tap is None else tap.stride(0))
    shared = ring * 2 * THREADS * 16 + WARPS * launch.cols * 16 * 4 + k * 2 * is_lone
    launch_kernel(source, n // 16, THREADS, shared, (x, weight, hidden, tap, num_rows, *strides), launch)


def _has_packed(mlp: SparseWeights) -> bool:
    weights = (mlp.gate_up, mlp.down, mlp.shared_down, mlp.shared_gate_up)
    return any(isinstance(weight, Packed) for weight in weights)


def fits_experts(mlp: SparseWeights) -> bool:
    """Say whether ``run_experts`` takes a MoE block."""
    experts, n, f = mlp.down.shape
    fs = mlp.shared_down.shape[1]
    if _has_packed(mlp) and not packed_products.fits_experts(mlp):
        return False
    return (
        mlp.gate_up.shape[2] % THREADS == 0
        and experts % 32 == 0
        and experts <= MAX_EXPERTS
        and mlp.top_k <= 32
        and n % THREADS == 0
        and n <= 4096
        and f in (THREADS, 2 * THREADS, 4 * THREADS)
        and fs in (THREADS, 2 * THREADS, 4 * THREADS)
        and fits_project(mlp.router_gate_up)
    )


def run_experts(
    mlp: SparseWeights,
    hidden: Tensor,
    scores: Tensor,
    normed: Tensor,
    shared_act: Tensor,
    routing: Routing,
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
        num_rows: [1] int32, live rows.
        eps: Of the RMSNorm.
        launch: What the launches of a step share.
        tap: [MAX_ROWS, D], any row stride: a second copy of the result, or None.
    """
    experts = mlp.bias.shape[0]
    project(hidden, mlp.norm, mlp.router_gate_up, scores, num_rows, eps, launch, normed=normed, rows=experts)
    if _has_packed(mlp):
        packed_products.run_experts(mlp, hidden, scores, normed, shared_act, routing, num_rows, launch, tap)
        return
    _run_up(mlp, scores, normed, shared_act, routing, num_rows, launch)
    _run_down(mlp, hidden, scores, shared_act, routing, num_rows, launch, tap)


def _constants(mlp: SparseWeights, launch: Launch) -> dict[str, int]:
    """Return what the two kernels of the experts share."""
    experts, _, f = mlp.down.shape
    return {
        "E": experts,
        "A": mlp.top_k,
        "F": f,
        "FS": mlp.shared_down.shape[1],
        "WARPS": WARPS,
        "COLS": launch.cols,
        "SOFTCAP": mlp.softcap > 0,
        "NORM_TOPK": mlp.norm_topk,
    }


def _run_up(
    mlp: SparseWeights,
    scores: Tensor,
    normed: Tensor,
    shared_act: Tensor,
    routing: Routing,
    num_rows: Tensor,
    launch: Launch,
) -> None:
    """Route, and write the activations of the chosen experts and of the shared one."""
    experts = len(mlp.bias)
    cols, top_k = launch.cols, mlp.top_k
    shared_up = mlp.router_gate_up[experts:] if mlp.shared_gate_up is None else mlp.shared_gate_up
    plan = UP_PLANS[cols]
    constants, room = _units(mlp.gate_up, cols, plan)
    programs = LONE_PROGRAMS if cols == 1 else plan.programs
    source = Source.of("experts_up", PROGRAMS=programs, **constants | _constants(mlp, launch))
    shared = room + routing_bytes(experts, top_k, cols) + contest_bytes(experts, top_k, cols)
    weights = (_plain(mlp.gate_up), _plain(shared_up))
    outs = (routing.act, shared_act, routing.expert_ids, num_rows, float(mlp.softcap))
    arguments = (normed, scores, mlp.bias, *weights, *outs)
    launch_kernel(source, _num_programs(normed, plan), THREADS, shared, arguments, launch)


def _run_down(
    mlp: SparseWeights,
    hidden: Tensor,
    scores: Tensor,
    shared_act: Tensor,
    routing: Routing,
    num_rows: Tensor,
    launch: Launch,
    tap: Tensor | None,
) -> None:
    """Route again, and add the experts' weighted sum and the shared expert's to the residual stream."""
    experts, d, f = mlp.down.shape
    fs, cols, top_k = mlp.shared_down.shape[1], launch.cols, mlp.top_k
    ring = _ring(2 * f // THREADS, LONE_DOWN_RING if cols == 1 else DOWN_RING)
    programs = 1 if cols > 8 else 2 if cols > 1 else LONE_PROGRAMS - 1
    source = Source.of("experts_down", N=d, RING=ring, PROGRAMS=programs, **_constants(mlp, launch))
    staged = cols * top_k * (f + 8) * 2 + cols * (fs + 8) * 2
    shared = ring * THREADS * 16 + staged + WARPS * cols * 32 * 4
    shared += routing_bytes(experts, top_k, cols) + contest_bytes(experts, top_k, cols)
    activations = (routing.act, shared_act, scores, mlp.bias)
    numbers = (float(mlp.scaling), float(mlp.softcap), 0 if tap is None else tap.stride(0))
    arguments = (*activations, _plain(mlp.down), _plain(mlp.shared_down), hidden, tap, num_rows, *numbers)
    launch_kernel(source, d // 16, THREADS, shared, arguments, launch)
