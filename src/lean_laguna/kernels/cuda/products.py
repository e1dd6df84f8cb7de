"""The CUDA C++ products of a step: normalise and project, project and add, the two halves of the experts.

Each takes over a Triton kernel of the same meaning on shapes that fit (see ``fits_*``), in BF16, with weights
plain or packed; Triton keeps every other shape and every other card. A shape always takes the same kernel, so
a row keeps its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.kernels.cuda import packed_products, wide_experts
from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import has_bulk_copies, multiprocessors, shared_memory
from lean_laguna.kernels.cuda.formats import fits
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.cuda.packed_products import contest_bytes, routing_bytes
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.formats import Packed, Weight
from lean_laguna.kernels.triton.launch import WIDE, Launch
from lean_laguna.kernels.triton.weights import SparseWeights

WARPS = 8
THREADS = 32 * WARPS
MAX_RING = 16
"""16-byte loads that a lane keeps in flight: 4 KiB of shared memory each."""
BULK_COLUMNS = 8192
"""Columns of 8 rows that the copy engine has on their way to a multiprocessor, 128 KiB, where they fit. It
is one program's, beside which a lone row's next kernel finds room."""
ADD_ROWS = 32
"""Rows that a program of the output projection takes at most; programs side by side take those beyond."""
ADD_AHEAD = 8
"""Blocks of 32 columns of eight rows that a lane of the output projection keeps ahead."""
ADD_RING, LONE_ADD_RING = 24, 16
"""Steps of two such loads; a lone row leaves room for more, most of which arrive during attention."""
DOWN_RING = 16
"""The same of down, where it fits: a lone row leaves room for half of its weights."""
LONE_PROGRAMS = 3
"""Programs whose registers a multiprocessor should hold in steps of one row, of the kernels before and after
too: a kernel that fits beside the one that runs streams its weights meanwhile."""
LONE_ADD_PACE = 4
"""Of such steps no more are asked for at once: what attention asks for meanwhile waits behind them."""
MAX_EXPERTS = 256


def _ring(num_loads: int, most: int) -> int:
    """Return a ring's length: units as a whole if they fit, otherwise an even part of one."""
    if num_loads <= most:
        return num_loads * (most // num_loads)
    return max(n for n in range(1, most + 1) if num_loads % n == 0)


def _unit_bytes(k: int, cols: int) -> int:
    """Return the bytes that products of units take beside their ring: tokens and sums."""
    return cols * (k + 8) * 2 + 2 * WARPS * cols * 8 * 4


def _units(weight: Tensor, cols: int, rest: int, most: int) -> tuple[dict[str, int], int]:
    """Return the constants of products of units, and the bytes of shared memory they take.

    Args:
        weight: [..., K].
        cols: Tokens.
        rest: Bytes that are taken for something else.
        most: Units of a program.
    """
    k = weight.shape[-1]
    rest += _unit_bytes(k, cols)
    room = shared_memory(weight.device) - rest
    constants = {"K": k, "WARPS": WARPS, "COLS": cols}
    if has_bulk_copies(weight.device):
        unit = 8 * k * 2 + 16
        ring = max(1, min(BULK_COLUMNS // k, most, room // unit))
        return constants | {"BULK": 1, "RING": ring, "PROGRAMS": _registers_for(cols, 1)}, rest + ring * unit
    ring = _ring(k // THREADS, max(1, min(MAX_RING, room // (THREADS * 16))))
    programs = _registers_for(cols, _num_lane_programs(cols))
    return constants | {"BULK": 0, "RING": ring, "PROGRAMS": programs}, rest + ring * THREADS * 16


def _registers_for(cols: int, programs: int) -> int:
    """Return for how many programs a multiprocessor's registers should do."""
    return LONE_PROGRAMS if cols == 1 else programs


def _num_lane_programs(cols: int) -> int:
    """Return how many programs a multiprocessor runs where each lane loads for itself."""
    return 2 if cols <= 8 else 1


def _plain(weight: Weight) -> Tensor:
    """Return a weight that is not packed; packed ones have been sent elsewhere."""
    assert isinstance(weight, Tensor)
    return weight


def _num_programs(device: torch.device, cols: int) -> int:
    """Return how many programs of a streaming kernel run at once."""
    return multiprocessors(device) * (1 if has_bulk_copies(device) else _num_lane_programs(cols))


def _num_threads(device: torch.device) -> int:
    """Return a streaming kernel's threads: by the copy engine, a warp more asks for weights."""
    return THREADS + 32 * has_bulk_copies(device)


def _fits_units(weight: Tensor, rest: int = 64, *, whole: bool = False) -> bool:
    """Say whether units of a weight fit the card's shared memory with as many rows as a program takes.

    Args:
        weight: [..., K].
        rest: Bytes that are taken for something else.
        whole: Lanes, too, must have a whole unit on its way, not a part of one.
    """
    k = weight.shape[-1]
    least = 8 * k * 2 + 16 if whole or has_bulk_copies(weight.device) else THREADS * 16
    return rest + _unit_bytes(k, WIDE) + least <= shared_memory(weight.device)


def fits_project(weight: Weight, *, gated: bool = False) -> bool:
    """Say whether ``project`` takes a weight [N, K], or [2N, K] gate and up rows."""
    if isinstance(weight, Packed):
        return packed_products.fits_project(weight, gated=gated)
    n, k = weight.shape
    return k % THREADS == 0 and k <= 4096 and n % 8 == 0 and n >= 16 and fits(weight) and _fits_units(weight)


def project(
    x: Tensor,
    norm: Tensor | None,
    weight: Weight,
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
        norm: [K] weight of the RMSNorm; None, with a packed weight: rows are normalised already.
        weight: [N, K]; with ``gated`` [2N, K], gate rows first.
        out: [MAX_ROWS, N], written.
        num_rows: [1] int32, live rows.
        eps: Of the RMSNorm.
        launch: What the launches of a step share.
        gated: Apply silu(gate) * up.
        normed: [MAX_ROWS, K], written with the normalised rows, or None.
        rows: Use only this many of the weight's rows, 0 for all.
    """
    if isinstance(weight, Packed):
        packed_products.project(x, norm, weight, out, num_rows, eps, launch, gated=gated)
        return
    assert norm is not None
    n, k = rows or weight.shape[0] // (2 if gated else 1), weight.shape[1]
    # More rows are taken by programs side by side: twice as many in one made it slower.
    units, cols = n // (4 if gated else 8), min(launch.cols, WIDE)
    groups = launch.cols // cols
    grid = min(units, max(1, _num_programs(weight.device, cols) // groups))
    constants, shared = _units(weight, cols, k // 2 if cols == 1 else 64, -(-units // grid))
    slots = constants.pop("RING") if constants["BULK"] else 0
    source = Source.of("project", GATED=gated, GROUPS=groups, **constants)
    strides = (x.stride(0), out.stride(0))
    arguments = (x, norm, weight, out, normed, num_rows, eps, *strides, n, slots)
    launch_kernel(source, grid * groups, _num_threads(weight.device), shared, arguments, launch)


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
    cols = min(launch.cols, ADD_ROWS)
    blocks, is_lone, groups = k // THREADS, cols == 1, launch.cols // cols
    rest = WARPS * cols * 16 * 4 + k * 2 * is_lone
    room = (shared_memory(weight.device) - rest) // (2 * THREADS * 16)
    ring = min(LONE_ADD_RING if is_lone else ADD_RING, blocks, room)
    ahead = (c for c in range(ADD_AHEAD // max(1, cols // 8), 0, -1) if blocks % c == 0)
    source = Source.of(
        "project_add",
        K=k,
        N=n,
        WARPS=WARPS,
        RING=ring,
        PACE=min(LONE_ADD_PACE, ring) if is_lone else ring,
        AHEAD=next(ahead),
        COLS=cols,
        GROUPS=groups,
    )
    strides = (x.stride(0), hidden.stride(0), 0 if tap is None else tap.stride(0))
    shared = rest + ring * 2 * THREADS * 16
    arguments = (x, weight, hidden, tap, num_rows, *strides)
    launch_kernel(source, n // 16 * groups, THREADS, shared, arguments, launch)


def _has_packed(mlp: SparseWeights) -> bool:
    weights = (mlp.gate_up, mlp.down, mlp.shared_down, mlp.shared_gate_up)
    return any(isinstance(weight, Packed) for weight in weights)


def fits_experts(mlp: SparseWeights) -> bool:
    """Say whether ``run_experts`` takes a MoE block."""
    experts, n, f = mlp.down.shape
    fs = mlp.shared_down.shape[1]
    if not (
        mlp.gate_up.shape[2] % THREADS == 0
        and experts % 32 == 0
        and experts <= MAX_EXPERTS
        and mlp.top_k <= 32
        and n % THREADS == 0
        and n <= 4096
        and f in (THREADS, 2 * THREADS, 4 * THREADS)
        and fs in (THREADS, 2 * THREADS, 4 * THREADS)
        and fits_project(mlp.router_gate_up)
    ):
        return False
    if _has_packed(mlp):
        return packed_products.fits_experts(mlp)
    tables = routing_bytes(experts, mlp.top_k, WIDE)
    if not _fits_units(_plain(mlp.gate_up), 64 + tables, whole=True):
        return False
    # Of down, all that a lane loads of one expert at least.
    return _down_bytes(mlp, WIDE) + tables + 2 * f * 16 <= shared_memory(mlp.bias.device)


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
    if launch.cols > WIDE:
        wide_experts.run(mlp, hidden, scores, normed, shared_act, routing, num_rows, launch, tap)
        return
    _run_up(mlp, normed, scores, shared_act, routing, num_rows, launch)
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
    normed: Tensor,
    scores: Tensor,
    shared_act: Tensor,
    routing: Routing,
    num_rows: Tensor,
    launch: Launch,
) -> None:
    """Route, and write the activations of the chosen experts and of the shared one."""
    experts, cols, top_k = len(mlp.bias), launch.cols, mlp.top_k
    shared_up = mlp.router_gate_up[experts:] if mlp.shared_gate_up is None else mlp.shared_gate_up
    gate_up, f = _plain(mlp.gate_up), mlp.down.shape[2]
    tables = routing_bytes(experts, top_k, cols) + contest_bytes(experts, top_k, cols)
    constants, shared = _units(gate_up, cols, tables, experts * f // 4)
    source = Source.of("experts_up", **constants | _constants(mlp, launch))
    outs = (routing.act, shared_act, routing.expert_ids)
    arguments = (normed, scores, mlp.bias, gate_up, _plain(shared_up), *outs, num_rows, float(mlp.softcap))
    device = normed.device
    launch_kernel(source, _num_programs(device, cols), _num_threads(device), shared, arguments, launch)


def _down_bytes(mlp: SparseWeights, cols: int) -> int:
    """Return the bytes that down takes beside its ring and the routing: activations and sums."""
    staged = mlp.top_k * (mlp.down.shape[2] + 8) + mlp.shared_down.shape[1] + 8
    return cols * staged * 2 + WARPS * cols * 32 * 4


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
    cols, top_k = launch.cols, mlp.top_k
    rest = _down_bytes(mlp, cols) + routing_bytes(experts, top_k, cols) + contest_bytes(experts, top_k, cols)
    room = (shared_memory(hidden.device) - rest) // (THREADS * 16)
    ring = _ring(2 * f // THREADS, min(DOWN_RING, room))
    programs = 1 if cols > 8 else 2 if cols > 1 else LONE_PROGRAMS
    own = {"N": d, "RING": ring, "PROGRAMS": programs}
    source = Source.of("experts_down", **own, **_constants(mlp, launch))
    shared = rest + ring * THREADS * 16
    activations = (routing.act, shared_act, scores, mlp.bias)
    numbers = (float(mlp.scaling), float(mlp.softcap), 0 if tap is None else tap.stride(0))
    weights = (_plain(mlp.down), _plain(mlp.shared_down))
    arguments = (*activations, *weights, hidden, tap, num_rows, *numbers)
    launch_kernel(source, d // 16, THREADS, shared, arguments, launch)
