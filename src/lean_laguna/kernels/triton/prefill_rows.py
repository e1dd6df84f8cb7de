"""What prefill does row by row between products: embedding, norms, residual, SiLU, the sum over experts.

One program a row; the chunk's number of tokens is read on the device, and rows from it on are left as they
are. Source: Hugging Face transformers 5.24, modeling_laguna.py; rounded where the decode kernels round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import cdiv, power_of_two
from lean_laguna.kernels.triton.primitives import normalise


@triton.jit
def _store_normed(h, d, out_ptr, weight_ptr, eps, D: tl.constexpr):
    wide = h.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
    tl.store(out_ptr + d, normalise(h, inverse, weight), mask=d < D)


@triton.jit
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows_ptr, eps, M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    d = tl.arange(0, BLOCK)
    h = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0)
    _store_normed(h, d, out_ptr + row * D, weight_ptr + row % M * D, eps, D)


def norm_rows(x: Tensor, weights: Tensor, out: Tensor, num_rows: Tensor, eps: float) -> None:
    """Normalise rows.

    Args:
        x: [R, D].
        weights: [M, D]; row i takes weight i modulo M.
        out: [R, D], written; may be ``x``.
        num_rows: [1] int32, how many.
        eps: Of the norm.
    """
    M, D = weights.shape
    _norm_kernel[(x.shape[0],)](x, weights, out, num_rows, eps, M=M, D=D, BLOCK=power_of_two(D), num_warps=8)


@triton.jit
def _embed_norm_kernel(
    ids_ptr,
    table_ptr,
    weight_ptr,
    hidden_ptr,
    normed_ptr,
    num_tokens_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_tokens_ptr):
        return
    d = tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    h = tl.load(table_ptr + token * D + d, mask=d < D, other=0.0)
    tl.store(hidden_ptr + row * D + d, h, mask=d < D)
    _store_normed(h, d, normed_ptr + row * D, weight_ptr, eps, D)


@triton.jit
def _add_norm_kernel(
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    normed_ptr,
    tap_ptr,
    num_tokens_ptr,
    eps,
    tap_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TAP: tl.constexpr,
):
    DTYPE: tl.constexpr = hidden_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_tokens_ptr):
        return
    d = tl.arange(0, BLOCK)
    old = tl.load(hidden_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    h = (old + delta).to(DTYPE)
    tl.store(hidden_ptr + row * D + d, h, mask=d < D)
    if TAP:
        tl.store(tap_ptr + row * tap_stride + d, h, mask=d < D)
    _store_normed(h, d, normed_ptr + row * D, weight_ptr, eps, D)


@triton.jit(do_not_specialize=["left"])
def _combine_kernel(
    hidden_ptr,
    terms_ptr,
    shared_ptr,
    tap_ptr,
    num_tokens_ptr,
    left,
    scaling,
    tap_stride,
    A: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TAP: tl.constexpr,
):
    DTYPE: tl.constexpr = hidden_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_tokens_ptr):
        return
    i = tl.arange(0, BLOCK)
    own = i < WIDTH
    d = left + i
    total = tl.zeros((BLOCK,), tl.float32)
    for a in tl.static_range(A):
        total += tl.load(terms_ptr + (row * A + a) * WIDTH + i, mask=own, other=0.0).to(tl.float32)
    y = (total.to(DTYPE).to(tl.float32) * scaling).to(DTYPE)
    shared = tl.load(shared_ptr + row * D + d, mask=own, other=0.0).to(tl.float32)
    y = (y.to(tl.float32) + shared).to(DTYPE)
    old = tl.load(hidden_ptr + row * D + d, mask=own, other=0.0).to(tl.float32)
    h = (old + y.to(tl.float32)).to(DTYPE)
    tl.store(hidden_ptr + row * D + d, h, mask=own)
    if TAP:
        tl.store(tap_ptr + row * tap_stride + d, h, mask=own)


@triton.jit
def _silu_kernel(both_ptr, act_ptr, num_tokens_ptr, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    DTYPE: tl.constexpr = act_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_tokens_ptr):
        return
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both_ptr + row * stride + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * stride + F + f, mask=f < F, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(DTYPE)
    tl.store(act_ptr + row * F + f, (gate.to(tl.float32) * up).to(DTYPE), mask=f < F)


def embed_norm(
    input_ids: Tensor,
    table: Tensor,
    norm: Tensor,
    hidden: Tensor,
    normed: Tensor,
    num_tokens: Tensor,
    eps: float,
) -> None:
    """Copy each token's embedding [D] of ``table`` [V, D] to ``hidden`` [T, D] and its RMSNorm to ``normed``.

    Args:
        input_ids: [T] int32.
        table: [V, D].
        norm: [D] weight of the first layer's input norm.
        hidden: [T, D], written.
        normed: [T, D], written.
        num_tokens: [1] int32, rows that count.
        eps: Of the norm.
    """
    D = table.shape[1]
    _embed_norm_kernel[(hidden.shape[0],)](
        input_ids, table, norm, hidden, normed, num_tokens, eps, D=D, BLOCK=power_of_two(D), num_warps=8
    )


def add_norm(
    hidden: Tensor,
    delta: Tensor,
    norm: Tensor,
    normed: Tensor,
    num_tokens: Tensor,
    eps: float,
    *,
    tap: Tensor | None = None,
) -> None:
    """Add ``delta`` to the residual stream and normalise it for the next block.

    Args:
        hidden: [T, D], changed in place.
        delta: [T, D].
        norm: [D] weight of the next block's RMSNorm.
        normed: [T, D], written.
        num_tokens: [1] int32, rows that count.
        eps: Of the norm.
        tap: [T, D], any row stride: a second copy of the residual stream, or None.
    """
    D = hidden.shape[1]
    _add_norm_kernel[(hidden.shape[0],)](
        hidden,
        delta,
        norm,
        normed,
        hidden if tap is None else tap,
        num_tokens,
        eps,
        D if tap is None else tap.stride(0),
        D=D,
        BLOCK=power_of_two(D),
        TAP=tap is not None,
        num_warps=8,
    )


def combine(
    hidden: Tensor,
    terms: Tensor,
    shared: Tensor,
    num_tokens: Tensor,
    first_column: int = 0,
    *,
    scaling: float,
    tap: Tensor | None = None,
) -> None:
    """Add scaling * sum of a token's terms, and the shared expert, to some columns of the residual stream.

    Args:
        hidden: [T, D], changed in place.
        terms: [T, A, W] weighted outputs of a token's experts, ascending by id; summed in this order in
            float32.
        shared: [T, D] output of the shared expert.
        num_tokens: [1] int32, rows that count.
        first_column: Of the W among the D.
        scaling: Factor of the routed sum.
        tap: [T, D], any row stride: a second copy of the residual stream, or None.
    """
    D, width = hidden.shape[1], terms.shape[2]
    _combine_kernel[(hidden.shape[0],)](
        hidden,
        terms,
        shared,
        hidden if tap is None else tap,
        num_tokens,
        first_column,
        scaling,
        D if tap is None else tap.stride(0),
        A=terms.shape[1],
        D=D,
        WIDTH=width,
        BLOCK=power_of_two(width),
        TAP=tap is not None,
        num_warps=8 if width > 1024 else 4,
    )


def silu_and_mul(both: Tensor, act: Tensor, num_tokens: Tensor) -> None:
    """Write silu(gate) * up.

    Args:
        both: [T, 2F] gate columns, then up columns; any row stride.
        act: [T, F], written.
        num_tokens: [1] int32, rows that count.
    """
    F = act.shape[1]
    block = min(1024, power_of_two(F))
    _silu_kernel[(act.shape[0], cdiv(F, block))](
        both, act, num_tokens, both.stride(0), F=F, BLOCK=block, num_warps=max(1, block // 256)
    )
