"""A drafter's context: keys and values of target features, for all drafter layers at once.

Source: vLLM 0.33 laguna_dflash.py (input_layernorm on the context, key norm and rotation at the absolute
position).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.formats import as_plain
from lean_laguna.kernels.triton.heads import append_rows
from lean_laguna.kernels.triton.launch import WIDE, Launch, cdiv
from lean_laguna.kernels.triton.prefill_rows import norm_rows
from lean_laguna.kernels.triton.primitives import wait_with_rows
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import DrafterWeights


@triton.jit
def _append_context_kernel(
    kv_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    positions_ptr,
    row_start_ptr,
    row_count_ptr,
    num_requests_ptr,
    eps,
    table_stride,
    layer_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    layer = tl.program_id(0)
    head = tl.program_id(1)
    num_requests = wait_with_rows(num_requests_ptr, PDL, True)
    for request in tl.range(0, num_requests, num_stages=1):
        start = tl.load(row_start_ptr + request)
        count = tl.load(row_count_ptr + request)
        first = tl.load(positions_ptr + start)
        append_rows(
            kv_ptr + layer * (2 * J * P),
            k_norm_ptr + layer * P,
            cos_ptr,
            sin_ptr,
            k_cache_ptr + layer.to(tl.int64) * layer_stride,
            v_cache_ptr + layer.to(tl.int64) * layer_stride,
            table_ptr + request * table_stride,
            start,
            count,
            first,
            0,
            first + count,
            head,
            eps,
            1.0,
            1.0,
            ROWS,
            WIDTH,
            0,
            J,
            P,
            ROTARY,
            QK_NORM,
            KV_BLOCK,
        )


def append_context(
    kv: Tensor,
    k_norms: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    block_table: Tensor,
    rows: Rows,
    shape: AttentionShape,
    launch: Launch,
    *,
    eps: float,
) -> None:
    """Normalise and rotate the live rows' context keys of every layer; write keys and values to the cache.

    Args:
        kv: [MAX_ROWS, L * 2 * J * P] keys and values of each layer as projected.
        k_norms: [L, P] weights of the key norms.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each.
        cache: Keys and values, [L, num_blocks, kv_block_size, J, P]; the rows' slots are written.
        block_table: [MAX_ROWS, .] int32 of the drafter's KV group.
        rows: The verified rows, at the positions whose features these are.
        shape: Of the drafter's layers.
        launch: What the launches of a step share.
        eps: Of the key norms.
    """
    num_layers, _, kv_block_size, J, P = cache[0].shape
    _append_context_kernel[(num_layers, J)](
        kv,
        k_norms,
        *rotary,
        *cache,
        block_table,
        rows.positions,
        rows.row_start,
        rows.row_count,
        rows.num_requests,
        eps,
        block_table.stride(0),
        cache[0].stride(0),
        ROWS=WIDE,
        WIDTH=kv.stride(0),
        J=J,
        P=P,
        ROTARY=shape.rotary_dim,
        QK_NORM=shape.has_qk_norm,
        KV_BLOCK=kv_block_size,
        PDL=launch.pdl,
        **launch.options(4),
    )


@triton.jit
def _append_chunk_kernel(
    kv_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    first_ptr,
    num_tokens_ptr,
    eps,
    layer_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    QK_NORM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    start = tl.program_id(0) * ROWS
    first = tl.load(first_ptr)
    num_tokens = tl.load(num_tokens_ptr)
    layer = tl.program_id(1)
    append_rows(
        kv_ptr + layer * (2 * J * P),
        k_norm_ptr + layer * P,
        cos_ptr,
        sin_ptr,
        k_cache_ptr + layer.to(tl.int64) * layer_stride,
        v_cache_ptr + layer.to(tl.int64) * layer_stride,
        table_ptr,
        start,
        tl.minimum(num_tokens - start, ROWS),
        first + start,
        0,
        first + num_tokens,
        tl.program_id(2),
        eps,
        1.0,
        1.0,
        ROWS,
        WIDTH,
        0,
        J,
        P,
        ROTARY,
        QK_NORM,
        KV_BLOCK,
    )


def context_width(weights: DrafterWeights) -> int:
    """Return the values of keys and values that one context row has, in all layers of a drafter."""
    return weights.context_kv.shape[0]


def fold_tap(
    weights: DrafterWeights,
    index: int,
    hidden: Tensor,
    sums: Tensor,
    num_tokens: Tensor,
    buffers: tuple[Tensor, Tensor],
) -> None:
    """Add one tapped layer's share of a chunk's context, before its norm.

    Args:
        weights: Of the drafter.
        index: Of the tapped layer among the tapped ones.
        hidden: [C, D] the target's residual stream, of which the first ``num_tokens`` rows count.
        sums: [C, D] float32, added to; zero before the first tapped layer.
        num_tokens: [1] int32.
        buffers: [C, D] and [B, D], B rows at a time; contents mean nothing before and after.
    """
    normed, product = buffers
    D, rows = hidden.shape[1], product.shape[0]
    if weights.aux_norms is not None:
        norm_rows(hidden, weights.aux_norms[index : index + 1], normed, num_tokens, weights.eps)
        hidden = normed
    part = as_plain(weights.fc)[:, index * D : (index + 1) * D].t()
    for at in range(0, len(hidden), rows):
        x = hidden[at : at + rows]
        sums[at : at + rows] += torch.mm(x, part, out=product[: len(x)])


def append_chunk_context(
    weights: DrafterWeights,
    cache: tuple[Tensor, Tensor],
    sums: Tensor,
    table: Tensor,
    first: Tensor,
    num_tokens: Tensor,
    buffers: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the context of a prefilled chunk: the same as ``append_context``, for many rows of one sequence.

    Rows are rounded elsewhere and summed by the library, so bits may differ; they decide on drafts, no more.

    Args:
        weights: Of the drafter.
        cache: Keys and values, [L, num_blocks, kv_block_size, J, P] each; the tokens' slots are written.
        sums: [C, D] float32 from ``fold_tap``, of which the first ``num_tokens`` rows count.
        table: [.] int32 block table of the sequence in the drafter's group.
        first: [1] int32, position of the first token.
        num_tokens: [1] int32.
        buffers: [C, D], [C, D] and [C, ``context_width``]; contents mean nothing before and after.
    """
    context, normed, kv = buffers
    n, eps = num_tokens, weights.eps
    context.copy_(sums)
    norm_rows(context, weights.hidden_norm[None], context, n, eps)
    layer, (num_layers, _, kv_block_size, J, P) = weights.layers[0], cache[0].shape
    plain = as_plain(weights.context_kv)
    if weights.context_norms is None:
        torch.mm(context, plain.t(), out=kv)
    else:
        for own, part, out in zip(
            weights.context_norms, plain.chunk(num_layers), kv.chunk(num_layers, 1), strict=True
        ):
            norm_rows(context, own[None], normed, n, eps)
            torch.mm(normed, part.t(), out=out)
    _append_chunk_kernel[(cdiv(len(sums), WIDE), num_layers, J)](
        kv,
        weights.k_norms,
        *layer.rotary,
        *cache,
        table,
        first,
        num_tokens,
        weights.eps,
        cache[0].stride(0),
        ROWS=WIDE,
        WIDTH=kv.stride(0),
        J=J,
        P=P,
        ROTARY=layer.attention.shape.rotary_dim,
        QK_NORM=layer.attention.shape.has_qk_norm,
        KV_BLOCK=kv_block_size,
        num_warps=4,
    )
