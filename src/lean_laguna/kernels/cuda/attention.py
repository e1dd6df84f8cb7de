"""Attention of decode and verify rows in CUDA C++: one kernel, from raw q, k and v to gated heads."""

from __future__ import annotations

from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import multiprocessors
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch, cdiv
from lean_laguna.kernels.triton.rows import Rows

WARPS = 8
HEAD_DIM = 128


def split_keys(shape: AttentionShape) -> int:
    """Return how many keys a program takes: fewer in a window, where there are few."""
    return 128 if shape.window else 256


def num_splits(shape: AttentionShape, max_model_len: int) -> int:
    """Return how many partial sums a row can leave."""
    keys = split_keys(shape)
    return cdiv(shape.window + MAX_ROWS, keys) + 1 if shape.window else cdiv(max_model_len, keys)


def fits_attention(shape: AttentionShape) -> bool:
    """Say whether ``attend`` takes a shape."""
    return (
        shape.head_dim == HEAD_DIM
        and shape.rotary_dim in (32, 64, 128)
        and shape.num_heads % shape.num_kv_heads == 0
    )


def attend(
    qkv: Tensor,
    out: Tensor,
    norms: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    block_table: Tensor,
    rows: Rows,
    workspace: tuple[Tensor, Tensor],
    arrived: Tensor,
    shape: AttentionShape,
    launch: Launch,
    *,
    eps: float,
) -> None:
    """Append the live rows' keys and values to the cache, then attend, as Triton's ``attend`` does.

    Args:
        qkv: [MAX_ROWS, shape.width] bf16, packed.
        out: [MAX_ROWS, H * P], written.
        norms: [P] weights of the query and key norms.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each.
        cache: Keys and values of this layer, [num_blocks, kv_block_size, J, P]; the rows' slots are written.
        block_table: [MAX_ROWS, .] int32.
        rows: The rows of this step.
        workspace: Partial sums, float32 [MAX_ROWS * H * num_splits * P] and [MAX_ROWS * H * num_splits * 2]
            at least.
        arrived: [MAX_ROWS * H] int32 zeros, left as zeros.
        shape: Of this layer.
        launch: What the launches of a step share.
        eps: Of the query and key norms.
    """
    keys, p = split_keys(shape), shape.head_dim
    source = Source.of(
        "attention",
        H=shape.num_heads,
        J=shape.num_kv_heads,
        P=p,
        ROTARY=shape.rotary_dim,
        WINDOW=shape.window,
        CAUSAL=shape.causal,
        QK_NORM=shape.has_qk_norm,
        GATE=shape.has_gate,
        SPLIT=keys,
        KV_BLOCK=cache[0].shape[1],
        MAX_SPLITS=num_splits(shape, rotary[0].shape[0]),
    )
    shared = (2 * keys + 16) * (p + 8) * 2 + 16 * (keys + 8) * 2 + 2 * WARPS * 16 * 4 + 3 * 16 * 4 + 16
    programs = multiprocessors(qkv.device) * (2 if shape.window else 1)
    # As many as there are KV heads, or so many times that: a program's splits are then all of one head.
    programs -= programs % shape.num_kv_heads if programs > shape.num_kv_heads else 0
    arguments = (
        qkv,
        out,
        *norms,
        *rotary,
        *cache,
        block_table,
        rows.positions,
        rows.row_start,
        rows.row_count,
    )
    scale = p**-0.5 * 1.4426950408889634
    launch_kernel(
        source,
        programs,
        32 * WARPS,
        shared,
        (*arguments, rows.num_requests, *workspace, arrived, float(eps), scale, block_table.stride(0)),
        launch,
    )
