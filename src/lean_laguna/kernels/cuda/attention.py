"""Attention of decode and verify rows in CUDA C++: one kernel, from raw q, k and v to gated heads."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import multiprocessors
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import Launch, cdiv
from lean_laguna.kernels.triton.rows import Rows

WARPS = 8
HEAD_DIM = 128
SPLIT = 128
"""Keys a program takes at a time."""
TILE = 16
"""Queries of a matrix instruction."""
MAX_TILES = 2


def has_clusters(device: torch.device) -> bool:
    """Say whether programs can share a head's keys as here: on Hopper and Blackwell's large cards."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def cluster_programs(shape: AttentionShape) -> int:
    """Return how many programs share the keys of a KV head: more where they may be many."""
    return 8 if shape.window else 16


def inbox_parts(shape: AttentionShape) -> int:
    """Return how many parts of a lone row's queries a program is handed at most; 0 where there is no room."""
    if not shape.window:
        return 0
    group = shape.num_heads // shape.num_kv_heads
    most = min(cluster_programs(shape), (shape.window + SPLIT - 2) // SPLIT + 1)
    return max(programs * cdiv(group, programs) for programs in range(1, most + 1))


def num_tiles(shape: AttentionShape, cols: int) -> int:
    """Return how many tiles of queries a program takes."""
    return min(cdiv(cols * shape.num_heads // shape.num_kv_heads, TILE), MAX_TILES)


def fits_attention(shape: AttentionShape) -> bool:
    """Say whether ``attend`` takes a shape."""
    return (
        shape.head_dim == HEAD_DIM
        and shape.rotary_dim in (32, 64, 128)
        and shape.num_heads % shape.num_kv_heads == 0
        and shape.num_heads // shape.num_kv_heads <= MAX_TILES * TILE
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
    p, heads = shape.head_dim, shape.num_kv_heads
    cluster, tiles = cluster_programs(shape), num_tiles(shape, launch.cols)
    is_lone, group = launch.cols == 1, shape.num_heads // heads
    inbox = inbox_parts(shape) if is_lone else 0
    source = Source.of(
        "attention",
        H=shape.num_heads,
        J=heads,
        P=p,
        ROTARY=shape.rotary_dim,
        WINDOW=shape.window,
        CAUSAL=shape.causal,
        QK_NORM=shape.has_qk_norm,
        GATE=shape.has_gate,
        SPLIT=SPLIT,
        KV_BLOCK=cache[0].shape[1],
        CLUSTER=cluster,
        TILES=tiles,
        LONE=is_lone,
        INBOX=inbox,
    )
    queries = tiles * (TILE // 2 if is_lone and group <= TILE // 2 else TILE)
    shared = (2 * SPLIT + queries) * (p + 8) * 2 + queries * (SPLIT + 8 + 2 * WARPS) * 2 + 3 * 16 * 4
    shared += 2 * 4 * max(1, SPLIT // cache[0].shape[1]) + inbox * (p + 6) * 4
    # A lone row has a cluster for each KV head, and leaves room for what comes next.
    spread = 1 if is_lone else max(1, 2 * multiprocessors(qkv.device) // (cluster * heads))
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
        spread * heads * cluster,
        32 * WARPS,
        shared,
        (*arguments, rows.num_requests, float(eps), scale, block_table.stride(0)),
        launch,
    )
