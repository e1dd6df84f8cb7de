"""Attention of decode and verify rows in CUDA C++: one kernel, from raw q, k and v to gated heads."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import multiprocessors
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import MAX_ROWS, WIDE, Launch, cdiv
from lean_laguna.kernels.triton.rows import Rows

WARPS = 8
HEAD_DIM = 128
SPLIT = 128
"""Keys a program takes at a time."""
PARTS = 8
"""In which a row's keys are added up."""
PROGRAMS = 2
"""Of a multiprocessor, in steps of 2 to 16 rows."""
CROWD = 1.5
"""Of a multiprocessor, that may share the tasks of such a step; beyond, fewer share each."""
WIDE_CLUSTERS = (2, 1)
"""Programs of a cluster in wider steps, in full layers and in those with windows."""
TILE = 16
"""Queries of a matrix instruction."""
KEYS = 16
"""Of a split, that a warp takes."""


def has_clusters(device: torch.device) -> bool:
    """Say whether programs can share a head's keys as here: on Hopper and Blackwell's large cards."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def cluster_programs(shape: AttentionShape, cols: int) -> tuple[int, int]:
    """Return how many programs share the parts of a KV head's keys, at most and at least.

    Of many rows there are many tasks: fewer programs each, so that all have room at once. Where the two
    differ the kernel counts the tasks (`CROWD`). The bits do not follow it.
    """
    if cols > WIDE:
        return (WIDE_CLUSTERS[bool(shape.window)],) * 2
    if cols <= 8:
        return PARTS, 4 if cols == 8 and shape.window else PARTS
    return (2, 2) if shape.window else (4, 4)


def num_queries(shape: AttentionShape, cols: int) -> int:
    """Return how many queries a cluster takes at a time."""
    return TILE // 2 if cols == 1 and shape.num_heads // shape.num_kv_heads <= TILE // 2 else TILE


def _shared_bytes(shape: AttentionShape, cols: int) -> int:
    """Return the bytes of shared memory of a program."""
    queries = num_queries(shape, cols)
    own_dims = shape.head_dim // cluster_programs(shape, cols)[1]
    # Keys and values of a split, queries, keys and values of a request's rows; peaks and totals of warps and
    # parts, sums of parts in the program's own dimensions; where rows stand, the task, an arrival.
    vectors = 2 * SPLIT + queries + 2 * min(cols, WIDE)
    sums = queries * (8 * (WARPS + PARTS) + 4 * PARTS * own_dims)
    # In wide steps the warps' sums do not take the place of keys and values.
    room = WARPS * TILE * (shape.head_dim + 8) * 4 if cols > WIDE else 0
    return vectors * (shape.head_dim + 8) * 2 + sums + room + 12 * MAX_ROWS + 48


def fits_pages(kv_block: int) -> bool:
    """Say whether ``attend`` takes pages of so many keys: a warp's are whole pages, or all in one."""
    return kv_block % KEYS == 0 or KEYS % kv_block == 0


def fits_attention(shape: AttentionShape) -> bool:
    """Say whether ``attend`` takes a shape."""
    return (
        shape.head_dim == HEAD_DIM
        # Elements are loaded by twos, and rows of q, k, v and gates lie one after another.
        and shape.width % 2 == 0
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
        shape: Of this layer.
        launch: What the launches of a step share.
        eps: Of the query and key norms.
    """
    p, heads, cols = shape.head_dim, shape.num_kv_heads, launch.cols
    (cluster, least), queries = cluster_programs(shape, cols), num_queries(shape, cols)
    source = Source.of(
        "wide_attention" if cols > WIDE else "attention",
        H=shape.num_heads,
        J=heads,
        P=p,
        ROTARY=shape.rotary_dim,
        WINDOW=shape.window,
        CAUSAL=shape.causal,
        QK_NORM=shape.has_qk_norm,
        GATE=shape.has_gate,
        KV_BLOCK=cache[0].shape[1],
        KEY_PARTS=PARTS,
        CLUSTER=cluster,
        LEAST=least,
        CROWD=int(CROWD * multiprocessors(qkv.device)),
        COLS=cols,
        MOST=MAX_ROWS,
    )
    num_clusters = heads * cdiv(shape.num_heads // heads, queries)
    if cols > 1:
        num_clusters = min(
            cols * num_clusters,
            max(1, (1 if cols > WIDE else PROGRAMS) * multiprocessors(qkv.device) // cluster),
        )
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
        num_clusters * cluster,
        32 * WARPS,
        _shared_bytes(shape, cols),
        (*arguments, rows.num_requests, float(eps), scale, block_table.stride(0)),
        launch,
    )
