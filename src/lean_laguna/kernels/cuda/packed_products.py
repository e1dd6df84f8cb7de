"""The CUDA C++ products of a step with packed weights, from Hopper on; ``products`` says what each does."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import has_bulk_copies, multiprocessors, shared_memory
from lean_laguna.kernels.cuda.formats import (
    code_of,
    expert_factors,
    fits,
    is_small,
    pair_factors,
    scale_words,
    tall_log,
    unit_factors,
)
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.formats import Packed
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.weights import SparseWeights

WARPS = 8
THREADS = 32 * WARPS
SUM_STRIDE = 18
"""As in ``packed.cuh``."""
MAX_SHARED = 226 << 10
UNIT_ROOM, LONE_ROOM, SMALL_ROOM = 66 << 10, 50 << 10, 50 << 10
"""Bytes of shared memory for a team's blocks on their way: of 8 bits, of a lone row's FP8, and of 4 bits."""
ONE_ONLY = 115_713
"""Bytes of which a multiprocessor of 228 KiB holds one program and no second: where two land on one,
another has none."""
MOST_BLOCKS = 8
"""Of a team, for which there is room for factors: layers of several widths share code."""
LONE_PLACES = 1
"""Of a team for a lone row's units of gate and up: more on their way hold up how the next kernel starts."""
TEAMS = {1: 2, 8: 2, 16: 1}
ADD_WARPS = 16
ADD_PACE = 4
"""Warps whose weights are on their way at once where a lone row's product adds to the residual."""
DOWN_ROOM = {1: 58 << 10, 8: 64 << 10, 16: 48 << 10}
"""The same for experts of the second product, by columns."""


def takes_packed(device: torch.device) -> bool:
    """Say whether a device has what these kernels need: the copy engine, and a Hopper's shared memory."""
    return has_bulk_copies(device) and shared_memory(device) >= MAX_SHARED


def _widths(weight: Packed, tall: int, *, pairs: bool = False) -> tuple[int, int]:
    """Return the bytes of 8 rows' codes and of their words of scales; ``pairs`` as for ``fits``."""
    columns = weight.shape[-1]
    if weight.kind == "fp8" and not pairs:
        return columns * 8, -(-columns // 128) * 16
    share = 16 if weight.kind == "fp8" and tall else {"fp4": 1, "int4": 4}.get(weight.kind, 2)
    return columns * (4 if is_small(weight) else 8), columns // share


def _sums(cols: int) -> int:
    """Return the bytes of all warps' sums, twice."""
    return 2 * WARPS * cols * SUM_STRIDE * 4


def _places(
    weight: Packed, block_bytes: int, most: int, fixed: int, cols: int, *, is_long: bool = False
) -> int:
    """Return how many blocks of 8 rows of a team are on their way at once.

    Args:
        weight: Whose blocks.
        block_bytes: Bytes of one.
        most: Blocks that a team has at most.
        fixed: Bytes that a program takes beside.
        cols: Columns.
        is_long: A head's blocks, which are many: attention does not come next.
    """
    is_lone = weight.kind == "fp8" and cols == 1 and not is_long
    room = SMALL_ROOM if is_small(weight) else LONE_ROOM if is_lone else UNIT_ROOM
    room = min(room, (MAX_SHARED - fixed) // TEAMS[cols])
    return max(2, min(most, room // (block_bytes + 8)))


def fits_project(weight: Packed, *, gated: bool) -> bool:
    """Say whether ``project`` takes a weight [N, K], or [2N, K] gate and up rows."""
    n, k = weight.shape
    return n % 16 == 0 and k <= 4096 and fits(weight) and takes_packed(weight.device)


def project(
    x: Tensor,
    norm: Tensor | None,
    weight: Packed,
    out: Tensor,
    num_rows: Tensor,
    eps: float,
    launch: Launch,
    *,
    gated: bool,
) -> None:
    """Compute rmsnorm(x) @ weight^T of the live rows, or silu(gate) * up of it; x as it is without a norm."""
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    tall, cols = tall_log(weight), launch.cols
    block = sum(_widths(weight, tall))
    units = n // (8 if gated else 16)
    teams = TEAMS[cols]
    grid = min(-(-units // teams), multiprocessors(x.device))
    most = -(-units // (grid * teams)) * 2 if gated else -(-n // 8 // (grid * teams))
    fixed = teams * _sums(cols) + cols * (k + 8) * 2 + (k // 2 if cols == 1 else 0)
    blocks = max(MOST_BLOCKS, most + 1)
    fixed += teams * blocks * 4
    is_long = not gated and most > MOST_BLOCKS
    places = _places(weight, block, most, fixed, cols, is_long=is_long)
    one_by_one = weight.kind == "fp8" and cols == 1 and not gated and most <= MOST_BLOCKS
    keeps = one_by_one or (cols == 1 and not gated and most <= min(places, MOST_BLOCKS))
    sum_places = MOST_BLOCKS // 2 + 1 if keeps else 2
    fixed += teams * (sum_places - 2) * _sums(cols) // 2
    source = Source.of(
        "packed_project",
        FORMAT=code_of(weight),
        TALL=tall,
        K=k,
        WARPS=WARPS,
        PLACES=places,
        BLOCKS=blocks,
        KEEPS=keeps,
        SUM_PLACES=sum_places,
        COLS=cols,
        GATED=gated,
        NORM=norm is not None,
        TEAMS=teams,
        PROGRAMS=1,
    )
    shared = fixed + teams * places * (block + (16 if one_by_one else 8))
    factors = pair_factors(weight) if gated else unit_factors(weight)
    weights = (weight.codes, scale_words(weight, tall), factors)
    arguments = (x, norm, *weights, out, num_rows, n, eps, x.stride(0), out.stride(0))
    launch_kernel(source, grid, teams * THREADS, max(shared, ONE_ONLY), arguments, launch)


def _add_warps(weight: Packed) -> int:
    """Return the warps that share a row."""
    return 16 if weight.shape[1] % 1024 == 0 and ADD_WARPS == 16 else WARPS


def _add_shared(weight: Packed, tall: int, cols: int) -> int:
    """Return the bytes of shared memory: all of a program's weights, sums and a lone row."""
    warps = _add_warps(weight)
    k, (codes, words) = weight.shape[1], _widths(weight, tall, pairs=True)
    if weight.kind == "fp8" and tall:
        words = k // 16 * (1 if k // warps % 256 == 0 else warps)
    else:
        words *= 2
    return 2 * codes + words + warps * (cols * SUM_STRIDE * 4 + 8) + (k * 2 if cols == 1 else 0)


def fits_project_add(weight: Packed) -> bool:
    """Say whether ``project_add`` takes a weight [N, K]."""
    n, k = weight.shape
    return (
        k % 512 == 0
        and n % 16 == 0
        and fits(weight, pairs=True)
        and takes_packed(weight.device)
        and all(_add_shared(weight, tall_log(weight), cols) <= MAX_SHARED for cols in (1, 16))
    )


def project_add(
    x: Tensor, weight: Packed, hidden: Tensor, num_rows: Tensor, launch: Launch, tap: Tensor | None
) -> None:
    """Add x @ weight^T, rounded, to the residual stream of the live rows."""
    n, k = weight.shape
    tall, cols, warps = tall_log(weight), launch.cols, _add_warps(weight)
    source = Source.of(
        "packed_add",
        FORMAT=code_of(weight),
        TALL=tall,
        K=k,
        N=n,
        WARPS=warps,
        COLS=cols,
        PACE=ADD_PACE if cols == 1 else warps,
        PROGRAMS=1 if cols > 1 else 2 if warps == 16 else 3,
    )
    strides = (x.stride(0), hidden.stride(0), 0 if tap is None else tap.stride(0))
    words = scale_words(weight, tall, pairs=True)
    arguments = (x, weight.codes, words, unit_factors(weight), hidden, tap, num_rows, *strides)
    launch_kernel(
        source, n // 16, 32 * warps, max(ONE_ONLY, _add_shared(weight, tall, cols)), arguments, launch
    )


def _packed(mlp: SparseWeights) -> tuple[Packed, Packed, Packed, Packed]:
    """Return the weights of the experts and of the shared one, up and down."""
    shared = mlp.shared_gate_up
    assert isinstance(mlp.gate_up, Packed)
    assert isinstance(mlp.down, Packed)
    assert isinstance(shared, Packed)
    assert isinstance(mlp.shared_down, Packed)
    return mlp.gate_up, mlp.down, shared, mlp.shared_down


def fits_experts(mlp: SparseWeights) -> bool:
    """Say whether ``run_experts`` takes a MoE block that has a packed weight, as far as that goes."""
    weights = (mlp.gate_up, mlp.down, mlp.shared_gate_up, mlp.shared_down)
    if not all(isinstance(weight, Packed) for weight in weights) or len(set(map(code_of, weights))) > 1:
        return False
    up, down, shared, last = _packed(mlp)
    return (
        fits(up)
        and fits(shared)
        and fits(down, pairs=True)
        and fits(last, pairs=True)
        and takes_packed(up.device)
        and up.shape[-1] <= 4096
        and down.shape[-1] % 512 == 0
        and last.shape[-1] % 512 == 0
        and all(_down_plan(mlp, cols)[2] <= MAX_SHARED for cols in (1, 8, 16))
    )


def routing_bytes(num_experts: int, top_k: int, cols: int) -> int:
    """Return an upper bound of ``struct Routing``'s size."""
    slots = min(num_experts, cols * top_k)
    return 96 + slots * (1 + cols + 4 * cols) + cols * top_k * 5 + 64


def contest_bytes(num_experts: int, top_k: int, cols: int) -> int:
    """Return an upper bound of ``struct Contest``'s size, which only a lone row needs."""
    return num_experts * 8 + num_experts // 32 * min(top_k, 32) * 5 + 32 if cols == 1 else 0


def _down_plan(mlp: SparseWeights, cols: int) -> tuple[bool, int, int]:
    """Return how ``packed_down`` runs: ALONE, places for experts on their way, bytes of shared memory."""
    _, down, _, last = _packed(mlp)
    tall, (experts, _, f), fs, top_k = tall_log(down, last), down.shape, last.shape[-1], mlp.top_k
    is_tall = down.kind == "fp8" and tall > 0
    own, shared_own = (
        2 * codes + (1 if is_tall else 2) * words
        for codes, words in (_widths(down, tall, pairs=True), _widths(last, tall, pairs=True))
    )
    sizes, slots = (experts, top_k, cols), min(experts, top_k * cols)
    fixed = shared_own + cols * (top_k * (f + 8) + fs + 8) * 2 + routing_bytes(*sizes) + 8 + 4 * slots
    alone_sums = max(contest_bytes(*sizes), (top_k + 2) * WARPS * 64)
    is_alone = cols == 1 and fixed + alone_sums + top_k * (own + 8) <= MAX_SHARED
    fixed += alone_sums if is_alone else max(contest_bytes(*sizes), _sums(cols))
    room = min(DOWN_ROOM[cols] - shared_own, MAX_SHARED - fixed)
    places = top_k if is_alone else max(1, min(slots, room // (own + 8)))
    return is_alone, places, fixed + places * (own + 8)


def _experts_up(
    mlp: SparseWeights,
    constants: dict[str, int],
    buffers: tuple[Tensor, ...],
    routing: Routing,
    sizes: tuple[int, int, int],
    launch: Launch,
) -> None:
    """Route, and compute silu(gate) * up of the shared expert and of every chosen one.

    Args:
        mlp: Weights.
        constants: Of routing and shapes.
        buffers: Normalised rows, scores, the shared expert's result and live rows.
        routing: As for ``products.run_experts``.
        sizes: Experts, those of a token, columns.
        launch: What the launches of a step share.
    """
    normed, scores, shared_act, num_rows = buffers
    up, _, shared_up, _ = _packed(mlp)
    tall, cols, k = tall_log(up, shared_up), launch.cols, up.shape[-1]
    block = sum(_widths(up, tall))
    units = (up.shape[1] * mlp.top_k * cols + shared_up.shape[0]) // 16
    teams, grid = TEAMS[cols], multiprocessors(normed.device)
    most = -(-units // (grid * teams))
    kept = most if cols == 1 and most <= MOST_BLOCKS // 2 else 0
    fixed = (
        teams * _sums(cols) // 2 * (kept or 2)
        + cols * (k + 8) * 2
        + routing_bytes(*sizes)
        + contest_bytes(*sizes)
    )
    fixed += teams * 8 * min(up.shape[0], mlp.top_k * cols)
    places = LONE_PLACES if cols == 1 else _places(up, block, most * 2, fixed, cols) // 2
    source = Source.of(
        "packed_up",
        K=k,
        PLACES=places,
        UNITS=kept,
        TALL=tall,
        FORMAT=code_of(up),
        TEAMS=teams,
        PROGRAMS=1,
        **constants,
    )
    weights = (up.codes, scale_words(up, tall), shared_up.codes, scale_words(shared_up, tall))
    outs = (expert_factors(mlp), routing.act, shared_act, routing.expert_ids, num_rows, float(mlp.softcap))
    shared = fixed + teams * places * (2 * block + 24)
    arguments = (normed, scores, mlp.bias, *weights, *outs)
    launch_kernel(source, grid, teams * THREADS, max(shared, ONE_ONLY), arguments, launch)


def _experts_down(
    mlp: SparseWeights,
    constants: dict[str, int],
    buffers: tuple[Tensor, ...],
    routing: Routing,
    tap: Tensor | None,
    launch: Launch,
) -> None:
    """Compute the experts' down products, their weighted sum and the residual's new value.

    Args:
        mlp: Weights.
        constants: Of routing and shapes.
        buffers: The shared expert's activations, scores, residual stream and live rows.
        routing: As for ``products.run_experts``.
        tap: As there.
        launch: What the launches of a step share.
    """
    shared_act, scores, hidden, num_rows = buffers
    _, down, _, last = _packed(mlp)
    tall, cols = tall_log(down, last), launch.cols
    is_alone, places, shared = _down_plan(mlp, cols)
    source = Source.of(
        "packed_down",
        N=hidden.shape[1],
        PLACES=places,
        ALONE=is_alone,
        TALL=tall,
        FORMAT=code_of(down),
        PROGRAMS=(2 if is_alone else 3) if cols == 1 else 1,
        **constants,
    )
    routed = (down.codes, scale_words(down, tall, pairs=True))
    weights = (*routed, last.codes, scale_words(last, tall, pairs=True), expert_factors(mlp))
    factors = (float(mlp.scaling), float(mlp.softcap))
    rest = (hidden, tap, num_rows, *factors, 0 if tap is None else tap.stride(0))
    arguments = (routing.act, shared_act, scores, mlp.bias, *weights, *rest)
    threads = THREADS * (2 if is_alone else 1)
    launch_kernel(source, hidden.shape[1] // 16, threads, shared, arguments, launch)


def run_experts(
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
    """Run a mixture of experts whose router has written ``scores`` and ``normed``."""
    experts, _, f = mlp.down.shape
    constants = {
        "E": experts,
        "A": mlp.top_k,
        "F": f,
        "FS": mlp.shared_down.shape[1],
        "WARPS": WARPS,
        "COLS": launch.cols,
        "SOFTCAP": mlp.softcap > 0,
        "NORM_TOPK": mlp.norm_topk,
    }
    sizes = experts, mlp.top_k, launch.cols
    up_buffers = (normed, scores, shared_act, num_rows)
    _experts_up(mlp, constants, up_buffers, routing, sizes, launch)
    down_buffers = (shared_act, scores, hidden, num_rows)
    _experts_down(mlp, constants, down_buffers, routing, tap, launch)
