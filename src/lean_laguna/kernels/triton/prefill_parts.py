"""Attention of a short chunk far into a sequence: programs share the keys before it, and parts are added.

Parts start at multiples that follow from the chunk's first position alone, and are added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile

MERGE_ROWS = 16
"""Rows of a program that adds up parts."""


@triton.jit
def softplus(gate, DTYPE: tl.constexpr):
    """Return softplus as torch has it, rounded: linear above 20; log1p by Kahan's correction."""
    grown = tl.exp(tl.minimum(gate, 20.0))
    sum1 = 1.0 + grown
    rest = tl.where(sum1 == 1.0, 1.0, sum1 - 1.0)
    log1p = tl.where(sum1 == 1.0, grown, tl.log(sum1) * (grown / rest))
    return tl.where(gate > 20.0, gate, log1p).to(DTYPE).to(tl.float32)


@triton.jit
def part_span(first, KEYS: tl.constexpr, PARTS: tl.constexpr):
    """Return how many of the keys before a chunk a part takes, and how many parts there are."""
    span = tl.maximum(tl.cdiv(first, PARTS * KEYS) * KEYS, 16 * KEYS)
    return span, tl.maximum(tl.cdiv(first, span), 1)


@triton.jit
def _merge_kernel(
    qkv_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    first_ptr,
    num_tokens_ptr,
    C,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    GATE: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up the parts of each row and head, in order."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    num_tokens = tl.load(num_tokens_ptr)
    _, num_parts = part_span(tl.load(first_ptr), KEYS, PARTS)
    if (num_parts == 1) | (tl.program_id(0) * ROWS >= num_tokens):
        return
    live = row < num_tokens
    d = tl.arange(0, P)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, P), tl.float32)
    for part in range(num_parts):
        own = part * (C * H) + row * H + head
        their_peak = tl.load(sums_ptr + own * 2, mask=live, other=0.0)
        new_peak = tl.maximum(peak, their_peak)
        fade, share = tl.exp2(peak - new_peak), tl.exp2(their_peak - new_peak)
        total = total * fade + tl.load(sums_ptr + own * 2 + 1, mask=live, other=1.0) * share
        theirs = tl.load(parts_ptr + own[:, None] * P + d[None, :], mask=live[:, None], other=0.0)
        acc = acc * fade[:, None] + theirs * share[:, None]
        peak = new_peak
    y = (acc / total[:, None]).to(DTYPE)
    if GATE:
        gate_at = qkv_ptr + row.to(tl.int64) * WIDTH + (H + 2 * J) * P + head
        gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) * softplus(gate, DTYPE)[:, None]).to(DTYPE)
    out_at = row.to(tl.int64) * (H * P) + head * P
    tl.store(out_ptr + out_at[:, None] + d[None, :], y, mask=live[:, None])


def merge_parts(
    qkv: Tensor,
    out: Tensor,
    acc: Tensor,
    sums: Tensor,
    shape: AttentionShape,
    first: Tensor,
    num_tokens: Tensor,
    tile: AttentionTile,
    num_parts: int,
) -> None:
    """Add up the parts of each row and head, and apply the gate; nothing where there is one part.

    Args:
        qkv: [C, shape.width] of which gates are read.
        out: [C, H * P], written for the chunk's tokens.
        acc: [N * C * H * P] float32 weighted values of each part.
        sums: [N * C * H * 2] float32 largest score, in powers of two, and sum of exponentials likewise.
        shape: Of this layer.
        first: [1] int32, position of the chunk's first token.
        num_tokens: [1] int32, tokens of the chunk.
        tile: Of the attention that left the parts.
        num_parts: N.
    """
    rows, H = qkv.shape[0], shape.num_heads
    _merge_kernel[(cdiv(rows, MERGE_ROWS), H)](
        qkv,
        out,
        acc,
        sums,
        first,
        num_tokens,
        rows,
        WIDTH=shape.width,
        H=H,
        J=shape.num_kv_heads,
        P=shape.head_dim,
        GATE=shape.has_gate,
        KEYS=tile.keys,
        PARTS=num_parts,
        ROWS=MERGE_ROWS,
        num_warps=4,
    )
