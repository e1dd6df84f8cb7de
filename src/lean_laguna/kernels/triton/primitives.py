"""What every kernel of a step is made of: waiting, prefetching, row norms, streamed products.

The products are "swap-AB": weight rows are the M operand of the matrix unit and tokens its columns, always
``COLS`` of them, so a row of tokens keeps its bits whatever its slot and its neighbours. The K dimension is
cut by ``BLOCK_K`` and ``SPLIT``, which follow the weight's shape and never the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lean_laguna.kernels.triton.formats import load_packed_tile


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, EARLY: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start its prologue.

    Everything a kernel reads other than weights, and everything it writes, comes after this call.

    Args:
        PDL: Launched with programmatic dependent launch (sm_90 and later); otherwise nothing happens.
        EARLY: Let the next kernel start before this one's inputs are there: for kernels too small to fill the
            memory system, so that the next kernel's weight prefetch covers them.
    """
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_with_rows(num_rows_ptr, PDL: tl.constexpr, EARLY: tl.constexpr):
    """Do what ``wait_for_inputs`` does, and return the number of live rows, read before the wait.

    The row tables change in one place only, the end of a step, and the step's first kernel (``norm.embed``)
    lets nobody start before that is over; so every kernel after it may read them in its prologue.
    """
    num_rows = tl.load(num_rows_ptr)
    wait_for_inputs(PDL, EARLY)
    return num_rows


@triton.jit
def prefetch_rows(w_ptr, rows, BYTES: tl.constexpr, PIECES: tl.constexpr = 4):
    """Ask for the first ``BYTES`` bytes of rows at element offsets ``rows`` into L2 (sm_90 and later).

    Only a hint: results never depend on it. ``BYTES`` is a multiple of 128 * ``PIECES``, 0 for nothing.
    """
    if BYTES > 0:
        offset = tl.arange(0, PIECES) * (BYTES // PIECES)
        address = (w_ptr + rows).to(tl.int64)[:, None] + offset.to(tl.int64)[None, :]
        size = tl.full(address.shape, BYTES // PIECES, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [address, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def inverse_rms(x_ptr, stride, live, eps, K: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """Return [COLS] float32: 1 / sqrt(mean(x^2) + eps) of each live row of x [., K]."""
    col = tl.arange(0, COLS)
    k = tl.arange(0, BLOCK)
    total = tl.zeros((COLS, BLOCK), tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        mask = live[:, None] & (start + k < K)[None, :]
        x = tl.load(x_ptr + col[:, None] * stride + (start + k)[None, :], mask=mask, other=0.0).to(tl.float32)
        total += x * x
    return tl.rsqrt(tl.sum(total, 1) / K + eps)


@triton.jit
def normalise(x, inverse, weight):
    """Scale x by the row's inverse RMS and by the norm's weight, rounding after each as Hugging Face does."""
    scaled = (x.to(tl.float32) * inverse).to(x.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def load_weight_tile(
    weight,
    rows,
    start,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load a tile of a weight, decoded where it is packed.

    Args:
        weight: ``formats.operand`` of it.
        rows: [BLOCK_N] int64 rows, counted through a bank; the caller keeps them inside.
        start: First column, a multiple of BLOCK_K.
        K: Columns of the weight; those from K on are zeros.
        BLOCK_N: Rows.
        BLOCK_K: Columns of each part.
        SPLIT: Parts, side by side.
        EVEN: No column reaches past K.
        FORMAT: ``formats.format_of`` the weight.
        DTYPE: The model's.

    Returns:
        [SPLIT, BLOCK_N, BLOCK_K], or [BLOCK_N, BLOCK_K] where SPLIT is 1.
    """
    if FORMAT[0] != "plain":
        tile = load_packed_tile(weight, rows, start, K, BLOCK_N, BLOCK_K, SPLIT, EVEN, FORMAT, DTYPE)
        if SPLIT == 1:
            return tl.reshape(tile, (BLOCK_N, BLOCK_K))
        else:
            return tile
    elif SPLIT == 1:
        k = tl.arange(0, BLOCK_K)
        w_at = weight[0] + (rows * K)[:, None] + k[None, :]
        if EVEN:
            return tl.load(w_at + start, eviction_policy="evict_first")
        else:
            inside = (start + k < K)[None, :]
            return tl.load(w_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        at = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        w_at = weight[0] + (rows * K)[None, :, None] + at[:, None, :]
        if EVEN:
            return tl.load(w_at + start, eviction_policy="evict_first")
        else:
            inside = (start + at < K)[:, None, :]
            return tl.load(w_at + start, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(
    weight,
    rows,
    x_ptr,
    x_stride,
    live,
    inverse,
    norm_ptr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Stream weight rows once against all columns of tokens.

    With ``SPLIT`` > 1 each warp takes its own part of K, and the parts are added in a fixed order at the end:
    a few rows a program still keep all its warps busy.

    Args:
        weight: ``formats.operand`` of it.
        rows: [BLOCK_N] int64 rows, counted through a bank; the caller keeps them inside.
        x_ptr: Tokens [COLS, K] with row stride ``x_stride``; columns not ``live`` count as zero.
        x_stride: Elements from one token's row to the next.
        live: [COLS] which token rows to read.
        inverse: [COLS] float32 from ``inverse_rms``; unused unless NORM.
        norm_ptr: [K] norm weight; unused unless NORM.
        K: Length of a row.
        BLOCK_N: Weight rows.
        BLOCK_K: Part of a row that one warp group multiplies at a time.
        SPLIT: Parts of K taken side by side; the number of warps, or 1.
        COLS: Token columns, 8 or 16.
        STAGES: Depth of the software pipeline.
        NORM: Normalise x on the way.
        FORMAT: ``formats.format_of`` the weight.

    Returns:
        [BLOCK_N, COLS] float32.
    """
    col = tl.arange(0, COLS)
    k = tl.arange(0, BLOCK_K)
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT) == 0
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if SPLIT == 1:
        x_at = x_ptr + col[None, :] * x_stride + k[:, None]
        acc = tl.zeros((BLOCK_N, COLS), tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            w = load_weight_tile(weight, rows, start, K, BLOCK_N, BLOCK_K, 1, EVEN, FORMAT, DTYPE)
            if EVEN:
                x = tl.load(x_at + start, mask=live[None, :], other=0.0)
            else:
                inside = start + k < K
                x = tl.load(x_at + start, mask=live[None, :] & inside[:, None], other=0.0)
            if NORM:
                g = tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0)
                x = normalise(x, inverse[None, :], g[:, None])
            acc = tl.dot(w, x, acc)
        return acc
    else:
        part = tl.arange(0, SPLIT)
        at = part[:, None] * BLOCK_K + k[None, :]
        x_at = x_ptr + col[None, None, :] * x_stride + at[:, :, None]
        acc = tl.zeros((SPLIT, BLOCK_N, COLS), tl.float32)
        for start in tl.range(0, K, BLOCK_K * SPLIT, num_stages=STAGES):
            w = load_weight_tile(weight, rows, start, K, BLOCK_N, BLOCK_K, SPLIT, EVEN, FORMAT, DTYPE)
            if EVEN:
                x = tl.load(x_at + start, mask=live[None, None, :], other=0.0)
            else:
                inside = start + at < K
                x = tl.load(x_at + start, mask=live[None, None, :] & inside[:, :, None], other=0.0)
            if NORM:
                g = tl.load(norm_ptr + start + at, mask=start + at < K, other=0.0)
                x = normalise(x, inverse[None, None, :], g[:, :, None])
            acc = tl.dot(w, x, acc)
        return tl.sum(acc, 0)


@triton.jit
def silu_times(gate_up, DTYPE: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr):
    """Return [HALF, COLS] silu(gate) * up of a product whose first HALF rows are gate, the others up.

    Rounds gate, up, silu(gate) and the result to DTYPE, where Hugging Face does.
    """
    pair = tl.permute(tl.reshape(gate_up.to(DTYPE), (2, HALF, COLS)), (1, 2, 0))
    gate, up = tl.split(pair)
    gate = gate.to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(DTYPE)
    return (gate.to(tl.float32) * up.to(tl.float32)).to(DTYPE)
