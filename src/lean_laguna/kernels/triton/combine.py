"""Add up attention's splits, each row its own in their order, and apply the per-head gate."""

from __future__ import annotations

import triton
import triton.language as tl

from lean_laguna.kernels.triton.primitives import wait_with_rows


@triton.jit
def split_of(position, CHUNK: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Return the split that holds a key position; NEAR is 0 where all splits are one chunk."""
    chunk = position // CHUNK
    if NEAR > 0:
        chunk = tl.where(chunk < NEAR, chunk, NEAR + (chunk - NEAR) // FAR)
    return chunk


@triton.jit
def combine_kernel(
    qkv_ptr,
    out_ptr,
    positions_ptr,
    row_request_ptr,
    row_start_ptr,
    row_count_ptr,
    num_rows_ptr,
    part_ptr,
    stat_ptr,
    WIDTH: tl.constexpr,
    GATE_AT: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    GATE: tl.constexpr,
    CHUNK: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    SPLITS: tl.constexpr,
    TAKE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine (row, head) by (row, head); see ``attention.attend``."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    num_rows = wait_with_rows(num_rows_ptr, PDL, True)
    d = tl.arange(0, P)
    i = tl.arange(0, TAKE)
    for task in tl.range(tl.program_id(0), num_rows * H, PROGRAMS, num_stages=1):
        row = task // H
        head = task % H
        position = tl.load(positions_ptr + row)
        gate = 0.0
        if GATE:
            gate = tl.load(qkv_ptr + row * WIDTH + GATE_AT + head).to(tl.float32)
        last = position
        if not CAUSAL:
            request = tl.load(row_request_ptr + row)
            start = tl.load(row_start_ptr + request)
            last = tl.load(positions_ptr + start) + tl.load(row_count_ptr + request) - 1
            if WINDOW > 0:
                last = tl.minimum(last, position + WINDOW - 1)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(position - WINDOW + 1, 0) // CHUNK
        count = split_of(last, CHUNK, NEAR, FAR) - low + 1
        peak = float("-inf")
        total = 0.0
        acc = tl.zeros((P,), tl.float32)
        for begin in tl.range(0, count, TAKE, num_stages=1):
            take = begin + i < count
            at = task * SPLITS + (low + begin + i) % SPLITS
            peaks = tl.load(stat_ptr + at * 2, mask=take, other=float("-inf"))
            totals = tl.load(stat_ptr + at * 2 + 1, mask=take, other=0.0)
            part = tl.load(part_ptr + at[:, None] * P + d[None, :], mask=take[:, None], other=0.0)
            new_peak = tl.maximum(peak, tl.max(peaks, 0))
            share = tl.exp2(peaks - new_peak)
            fade = tl.exp2(peak - new_peak)
            total = total * fade + tl.sum(totals * share, 0)
            acc = acc * fade + tl.sum(part * share[:, None], 0)
            peak = new_peak
        y = (acc / total).to(DTYPE)
        if GATE:
            # softplus as torch has it: linear above 20; log1p by Kahan's correction.
            grown = tl.exp(tl.minimum(gate, 20.0))
            sum1 = 1.0 + grown
            log1p = tl.where(
                sum1 == 1.0, grown, tl.log(sum1) * (grown / tl.where(sum1 == 1.0, 1.0, sum1 - 1.0))
            )
            opened = tl.where(gate > 20.0, gate, log1p).to(DTYPE)
            y = (y.to(tl.float32) * opened.to(tl.float32)).to(DTYPE)
        tl.store(out_ptr + row * (H * P) + head * P + d, y)
