"""The experts of steps of more than 16 rows: a routing of its own, then gate/up and down by expert.

A row's bits are those of ``products.run_experts`` at any other width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import has_bulk_copies, multiprocessors, shared_memory
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.formats import Weight
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch
from lean_laguna.kernels.triton.weights import SparseWeights

WARPS = 8
THREADS = 32 * (WARPS + 1)
ROUTE_WARPS = 4
UP_RING, DOWN_RING = 5, 11
"""Places for 8 rows of gate and up, and for 16 of down, that the copy engine has on their way."""
RUN = 4
"""Units of an expert that a program takes one after another, its rows in registers."""
AHEAD = 4
"""Experts whose activations down asks for ahead."""
GROUP, COLUMNS = 16, 16


def _table_bytes(experts: int, top_k: int) -> int:
    """Return the size of ``struct Table``."""
    ids = 4 + experts + 2 * (experts + 8) + 2 * MAX_ROWS * top_k
    return -(-(-(-ids // 4) * 4 + 4 * MAX_ROWS * top_k) // 16) * 16


def _fixed_bytes(experts: int, top_k: int) -> tuple[int, int]:
    """Return the bytes that gate/up and down take beside their rings."""
    table = _table_bytes(experts, top_k)
    return 2 * WARPS * GROUP * 8 * 4 + table, WARPS * MAX_ROWS * COLUMNS * 4 + table


def _places(device: torch.device, fixed: int, place: int, most: int) -> tuple[int, int]:
    """Return how many places of so many bytes a ring has, and the shared memory they take with the rest."""
    place += 20  # with what says that it is full, that it is free, and what comes after
    count = min(most, (shared_memory(device) - fixed) // place)
    return count, fixed + count * place


def fits(mlp: SparseWeights) -> bool:
    """Say whether ``run`` takes a MoE block, one that ``products.fits_experts`` says yes to."""
    weights = (mlp.gate_up, mlp.down, mlp.shared_down, mlp.shared_gate_up)
    if not all(weight is None or isinstance(weight, Tensor) for weight in weights):
        return False
    device, (experts, _, f), k = mlp.bias.device, mlp.down.shape, mlp.gate_up.shape[2]
    fixed = _fixed_bytes(experts, mlp.top_k)
    return (
        has_bulk_copies(device)
        and mlp.shared_down.shape[1] == f
        # A lane keeps rows of an eighth of K in registers.
        and k <= 2048
        and _places(device, fixed[0], 16 * k, UP_RING)[0] >= 2
        and _places(device, fixed[1], 2 * COLUMNS * f, DOWN_RING)[0] >= 2
    )


def run(
    mlp: SparseWeights,
    hidden: Tensor,
    scores: Tensor,
    normed: Tensor,
    shared_act: Tensor,
    routing: Routing,
    num_rows: Tensor,
    launch: Launch,
    tap: Tensor | None,
) -> None:
    """Route, and add the experts' weighted sum and the shared expert's to the residual stream.

    Args:
        mlp: The block.
        hidden: [MAX_ROWS, D] bf16, changed in place.
        scores: [MAX_ROWS, E] router logits.
        normed: [MAX_ROWS, D] normalised rows.
        shared_act: [MAX_ROWS, FS], written.
        routing: Its ``expert_ids`` are written; ``act`` serves as [MAX_ROWS * A, F] here,
            ``slot_weights`` as [MAX_ROWS, A] and ``num_slots`` as a count of what has been dealt.
        num_rows: [1] int32, live rows.
        launch: What the launches of a step share.
        tap: [MAX_ROWS, D], any row stride: a second copy of the result, or None.
    """
    pairs = MAX_ROWS * mlp.top_k
    assert routing.slot_weights.numel() >= pairs
    assert routing.act.numel() >= pairs * mlp.down.shape[2]
    _route(mlp, scores, routing, num_rows, launch)
    _run_up(mlp, normed, routing, shared_act, num_rows, launch)
    _run_down(mlp, routing, shared_act, hidden, tap, num_rows, launch)


def _sizes(mlp: SparseWeights) -> dict[str, int]:
    """Return what both kernels of the experts are compiled with."""
    return {"E": len(mlp.bias), "A": mlp.top_k, "ROWS": MAX_ROWS}


def _plain(*weights: Weight) -> tuple[Tensor, ...]:
    """Return weights that are not packed; packed ones have been sent elsewhere."""
    plain = tuple(weight for weight in weights if isinstance(weight, Tensor))
    assert len(plain) == len(weights)
    return plain


def _route(mlp: SparseWeights, scores: Tensor, routing: Routing, num_rows: Tensor, launch: Launch) -> None:
    flags = {"SOFTCAP": mlp.softcap > 0, "NORM_TOPK": mlp.norm_topk}
    source = Source.of("wide_route", E=len(mlp.bias), A=mlp.top_k, WARPS=ROUTE_WARPS, **flags)
    outs = (routing.slot_weights, routing.expert_ids, routing.num_slots)
    arguments = (scores, mlp.bias, *outs, num_rows, float(mlp.softcap))
    shared = ROUTE_WARPS * mlp.top_k * 5
    launch_kernel(source, -(-launch.cols // ROUTE_WARPS), 32 * ROUTE_WARPS, shared, arguments, launch)


def _run_up(
    mlp: SparseWeights,
    normed: Tensor,
    routing: Routing,
    shared_act: Tensor,
    num_rows: Tensor,
    launch: Launch,
) -> None:
    (experts, d, f), device = mlp.down.shape, normed.device
    shared_up = mlp.router_gate_up[experts:] if mlp.shared_gate_up is None else mlp.shared_gate_up
    ring, shared = _places(device, _fixed_bytes(experts, mlp.top_k)[0], 16 * d, UP_RING)
    own = {"K": d, "F": f, "WARPS": WARPS, "RING": ring, "RUN": math.gcd(min(RUN, ring), f // 4)}
    chosen = (routing.expert_ids, routing.slot_weights, routing.num_slots)
    arguments = (normed, *chosen, *_plain(mlp.gate_up, shared_up), routing.act, shared_act, num_rows)
    source = Source.of("wide_up", **own, **_sizes(mlp))
    launch_kernel(source, multiprocessors(device), THREADS, shared, arguments, launch)


def _run_down(
    mlp: SparseWeights,
    routing: Routing,
    shared_act: Tensor,
    hidden: Tensor,
    tap: Tensor | None,
    num_rows: Tensor,
    launch: Launch,
) -> None:
    experts, d, f = mlp.down.shape
    fixed = _fixed_bytes(experts, mlp.top_k)[1]
    ring, shared = _places(hidden.device, fixed, 2 * COLUMNS * f, DOWN_RING)
    own = {"K": f, "N": d, "WARPS": WARPS, "RING": ring, "AHEAD": AHEAD}
    numbers = (float(mlp.scaling), 0 if tap is None else tap.stride(0))
    inputs = (routing.act, shared_act, routing.expert_ids, routing.slot_weights)
    arguments = (*inputs, *_plain(mlp.down, mlp.shared_down), hidden, tap, num_rows, *numbers)
    launch_kernel(
        Source.of("wide_down", **own, **_sizes(mlp)), d // COLUMNS, THREADS, shared, arguments, launch
    )
