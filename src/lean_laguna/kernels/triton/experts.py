"""Routed experts, first half: routing, then gate/up with SiLU of every expert that a row chose.

A live expert's weights are read once a step, whatever the number of rows that chose it: all rows are columns
of one product, and only those that chose the expert keep theirs.
Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaSparseMoeBlock.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.formats import Weight, format_of, operand
from lean_laguna.kernels.triton.launch import Launch, Tile, power_of_two
from lean_laguna.kernels.triton.primitives import product, silu_times
from lean_laguna.kernels.triton.router import route


@dataclass(frozen=True)
class Routing:
    """What a step's routing leaves for the second kernel and for whoever asks; overwritten layer by layer.

    S is the most experts that ``WIDE`` rows can choose, which Triton's kernels take at most.

    Attributes:
        act: [S, WIDE, F] silu(gate) * up of each live expert, ascending by id; only rows that chose it
            are set.
        slot_weights: [S, WIDE] float32 routing weight of each row for that expert, 0 where not chosen.
        slot_experts: [S] int32 ids of the live experts, ascending.
        num_slots: [1] int32 live experts.
        expert_ids: [MAX_ROWS, A] int32 chosen experts of each live row, best first.
    """

    act: Tensor
    slot_weights: Tensor
    slot_experts: Tensor
    num_slots: Tensor
    expert_ids: Tensor


@triton.jit
def _expert_gate_up_kernel(
    x_ptr,
    scores_ptr,
    bias_ptr,
    weight,
    act_ptr,
    slot_weights_ptr,
    slot_experts_ptr,
    num_slots_ptr,
    ids_ptr,
    num_rows_ptr,
    softcap,
    MAX: tl.constexpr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    A: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_N // 2
    BLOCKS: tl.constexpr = (F + HALF - 1) // HALF
    DTYPE: tl.constexpr = act_ptr.dtype.element_ty
    pid = tl.program_id(0)
    col = tl.arange(0, COLS)
    live = col < tl.load(num_rows_ptr)
    if PDL:
        tl.extra.cuda.gdc_wait()
    chosen, weights, ids = route(
        scores_ptr, bias_ptr, live, softcap, E, E_BLOCK, A, COLS, SOFTCAP, NORM_TOPK, DTYPE
    )
    e = tl.arange(0, E_BLOCK)
    is_live = tl.max(chosen.to(tl.int32), 0)
    slot = tl.cumsum(is_live, 0) - 1
    num_slots = tl.sum(is_live, 0)
    if pid == 0:
        at = slot[None, :] * MAX + col[:, None]
        tl.store(slot_weights_ptr + at, weights, mask=(is_live > 0)[None, :] & (col < MAX)[:, None])
        tl.store(slot_experts_ptr + slot, e, mask=is_live > 0)
        tl.store(num_slots_ptr, num_slots)
        tl.store(ids_ptr + col[:, None] * A + e[None, :], ids, mask=live[:, None] & (e < A)[None, :])
    if PDL:
        # After the list is written: the next kernel may already prefetch by it.
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK_N)
    for task in tl.range(pid, num_slots * BLOCKS, PROGRAMS, num_stages=1):
        own = task // BLOCKS
        f0 = (task % BLOCKS) * HALF
        mine = (is_live > 0) & (slot == own)
        expert = tl.sum(tl.where(mine, e, 0), 0)
        wants = tl.max((chosen & mine[None, :]).to(tl.int32), 1) > 0
        n = tl.where(i < HALF, tl.minimum(f0 + i, F - 1), F + tl.minimum(f0 + i - HALF, F - 1))
        rows = expert.to(tl.int64) * (2 * F) + n
        inverse = tl.zeros((COLS,), tl.float32)
        acc = product(
            weight,
            rows,
            x_ptr,
            K,
            wants,
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
        f = f0 + tl.arange(0, HALF)
        act = silu_times(acc, DTYPE, HALF, COLS)
        at = (own * MAX + col)[None, :] * F + f[:, None]
        tl.store(act_ptr + at, act, mask=wants[None, :] & (f < F)[:, None])


def expert_gate_up(
    normed: Tensor,
    scores: Tensor,
    bias: Tensor,
    weight: Weight,
    routing: Routing,
    num_rows: Tensor,
    tile: Tile,
    launch: Launch,
    *,
    top_k: int,
    softcap: float = 0.0,
    norm_topk: bool = True,
) -> None:
    """Route the live rows, then gate, up and SiLU of every expert that a row chose.

    Args:
        normed: [MAX_ROWS, K] normalised input of the MoE block.
        scores: [MAX_ROWS, E] router logits, from ``gate_up``.
        bias: [E] float32 correction of the choice.
        weight: [E, 2F, K] gate rows, then up rows, packed or plain.
        routing: Written.
        num_rows: [1] int32, live rows.
        tile: By weight shape; ``block_n`` is half gate rows, half up rows.
        launch: What the launches of a step share.
        top_k: Experts a token.
        softcap: tanh bound of the logits, 0 for none.
        norm_topk: Divide a row's weights by their sum.
    """
    E, F, K = weight.shape[0], weight.shape[1] // 2, weight.shape[2]
    _expert_gate_up_kernel[(launch.programs,)](
        normed,
        scores,
        bias,
        operand(weight),
        routing.act,
        routing.slot_weights,
        routing.slot_experts,
        routing.num_slots,
        routing.expert_ids,
        num_rows,
        softcap,
        MAX=routing.act.shape[1],
        E=E,
        E_BLOCK=power_of_two(E),
        A=top_k,
        F=F,
        K=K,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT=tile.split,
        COLS=launch.tile_cols,
        STAGES=tile.stages,
        SOFTCAP=softcap > 0,
        NORM_TOPK=norm_topk,
        PROGRAMS=launch.programs,
        FORMAT=format_of(weight),
        PDL=launch.pdl,
        **launch.options(tile.warps),
    )
