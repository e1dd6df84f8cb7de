"""Attention of decode and verify rows over the paged cache: norm, rotation and KV append on the way in.

The context is cut at absolute positions into splits, whatever the number of rows or requests: 64 keys a split
near the start, eight times that further on. One program takes (request, KV head, split) for all of the
request's rows; it writes the rows' own keys that fall into its split to the cache before it reads the split.
A second kernel adds each row's splits in their order and applies the per-head gate. A row skips what lies
outside its own window or after its own position, so its bits do not depend on the rows beside it.
Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaAttention (where it rounds; the rotation
too).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.core.engine_sizes import FAR_SPLIT_CHUNKS, NEAR_SPLITS, SPLIT_KEYS
from lean_laguna.kernels.triton.combine import combine_kernel, split_of
from lean_laguna.kernels.triton.heads import append_rows, normed_rotated
from lean_laguna.kernels.triton.launch import WIDE, Launch, cdiv, power_of_two
from lean_laguna.kernels.triton.layer_cache import LayerCache, from_cache
from lean_laguna.kernels.triton.primitives import prefetch_rows, wait_with_rows
from lean_laguna.kernels.triton.rows import Rows

CHUNK = SPLIT_KEYS
"""Keys taken at a time, and keys of a near split."""
FAR_CHUNKS = FAR_SPLIT_CHUNKS
"""Chunks of a split beyond the first NEAR_SPLITS, so that long contexts leave few partial sums."""


@dataclass(frozen=True)
class AttentionShape:
    """What does not change from layer to layer of one kind.

    Attributes:
        num_heads: Query heads H.
        num_kv_heads: KV heads J.
        head_dim: P, a power of two.
        rotary_dim: Dimensions that are rotated, from the first.
        window: A row at position p sees keys k with p - window < k; 0 for all.
        causal: Rows see only keys up to their own position; otherwise all of their request's rows.
        has_qk_norm: RMSNorm over each query and key head.
        has_gate: Multiply each head by softplus of its gate.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    window: int = 0
    causal: bool = True
    has_qk_norm: bool = True
    has_gate: bool = True

    @property
    def width(self) -> int:
        """Columns of a packed q, k, v, gate row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.num_heads * self.has_gate

    def num_splits(self, max_model_len: int) -> int:
        """Return how many partial sums a row can leave."""
        if self.window:
            return power_of_two(cdiv(self.window + WIDE, CHUNK) + 1)
        return min(cdiv(max_model_len, CHUNK), NEAR_SPLITS) + cdiv(
            max(0, max_model_len - CHUNK * NEAR_SPLITS), CHUNK * FAR_CHUNKS
        )


@triton.jit
def _attend_kernel(
    qkv_ptr,
    q_norm_ptr,
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
    part_ptr,
    stat_ptr,
    eps,
    scale,
    k_scale,
    v_scale,
    table_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    QK_NORM: tl.constexpr,
    CHUNK: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    SPLITS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    G: tl.constexpr = H // J
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    pid = tl.program_id(0)
    d = tl.arange(0, P)
    key_in_chunk = tl.arange(0, CHUNK)
    if PREFETCH:
        # The first request's first task of this program: most of its keys are old, whatever the wait is for.
        first = tl.load(positions_ptr + tl.load(row_start_ptr))
        low = 0
        if WINDOW > 0:
            low = tl.maximum(first - WINDOW + 1, 0) // CHUNK
        key = (low + pid // J) * CHUNK + key_in_chunk
        block = tl.load(table_ptr + key // KV_BLOCK, mask=key < first, other=0).to(tl.int64)
        slot = ((block * KV_BLOCK + key % KV_BLOCK) * J + pid % J) * P
        if low + pid // J <= (first - 1) // CHUNK:
            prefetch_rows(k_cache_ptr, slot, P * 2, 2)
            prefetch_rows(v_cache_ptr, slot, P * 2, 2)
    num_requests = wait_with_rows(num_requests_ptr, PDL, False)
    before = 0
    for request in tl.range(0, num_requests, num_stages=1):
        start = tl.load(row_start_ptr + request)
        count = tl.load(row_count_ptr + request)
        first = tl.load(positions_ptr + start)
        last = first + count - 1
        own_table = table_ptr + request * table_stride
        low = 0
        if WINDOW > 0:
            low = tl.maximum(first - WINDOW + 1, 0) // CHUNK
        num_tasks = tl.where(count > 0, (split_of(last, CHUNK, NEAR, FAR) - low + 1) * J, 0)
        # Tasks of all requests in one row, dealt out in turn.
        begin = (pid + PROGRAMS - before % PROGRAMS) % PROGRAMS
        before += num_tasks
        for task in tl.range(begin, num_tasks, PROGRAMS, num_stages=1):
            head = task % J
            split = low + task // J
            from_key = split * CHUNK
            num_chunks = 1
            if NEAR > 0 and split >= NEAR:
                from_key = (NEAR + (split - NEAR) * FAR) * CHUNK
                num_chunks = tl.minimum(FAR, (last - from_key) // CHUNK + 1)
            to_key = from_key + num_chunks * CHUNK
            if last >= from_key and first < to_key:
                append_rows(
                    qkv_ptr,
                    k_norm_ptr,
                    cos_ptr,
                    sin_ptr,
                    k_cache_ptr,
                    v_cache_ptr,
                    own_table,
                    start,
                    count,
                    first,
                    from_key,
                    to_key,
                    head,
                    eps,
                    k_scale,
                    v_scale,
                    ROWS,
                    WIDTH,
                    H * P,
                    J,
                    P,
                    ROTARY,
                    QK_NORM,
                    KV_BLOCK,
                )
                tl.debug_barrier()
            for group in tl.range(0, (count * G + COLS - 1) // COLS, num_stages=1):
                c = group * COLS + tl.arange(0, COLS)
                live = c < count * G
                row = start + c // G
                position = first + c // G
                q_head = head * G + c % G
                q = normed_rotated(
                    qkv_ptr,
                    row * WIDTH + q_head * P,
                    live,
                    q_norm_ptr,
                    cos_ptr,
                    sin_ptr,
                    position,
                    eps,
                    P,
                    ROTARY,
                    QK_NORM,
                )
                to_see = position if CAUSAL else tl.zeros_like(position) + last
                peak = tl.full((COLS,), float("-inf"), tl.float32)
                total = tl.zeros((COLS,), tl.float32)
                acc = tl.zeros((COLS, P), tl.float32)
                for chunk in tl.range(0, num_chunks, num_stages=1):
                    key = from_key + chunk * CHUNK + key_in_chunk
                    kept = key <= last
                    if WINDOW > 0:
                        # What no row sees any more may be gone from the cache.
                        kept = kept & (first - key < WINDOW)
                    block = tl.load(own_table + key // KV_BLOCK, mask=kept, other=0).to(tl.int64)
                    slot = ((block * KV_BLOCK + key % KV_BLOCK) * J + head) * P
                    k = tl.load(k_cache_ptr + slot[:, None] + d[None, :], mask=kept[:, None], other=0.0)
                    v = tl.load(v_cache_ptr + slot[:, None] + d[None, :], mask=kept[:, None], other=0.0)
                    k, v = from_cache(k, k_scale, DTYPE), from_cache(v, v_scale, DTYPE)
                    scores = tl.dot(q, tl.trans(k)) * scale
                    seen = key[None, :] <= to_see[:, None]
                    if WINDOW > 0:
                        seen = seen & (position[:, None] - key[None, :] < WINDOW)
                        if not CAUSAL:
                            seen = seen & (key[None, :] - position[:, None] < WINDOW)
                    scores = tl.where(seen, scores, float("-inf"))
                    new_peak = tl.maximum(peak, tl.max(scores, 1))
                    touched = tl.max(seen.to(tl.int32), 1) > 0
                    safe = tl.where(touched, new_peak, 0.0)
                    p = tl.exp2(scores - safe[:, None])
                    fade = tl.exp2(peak - safe)
                    # A chunk that a row does not see leaves its sums untouched, to the sign of a zero.
                    total = tl.where(touched, total * fade + tl.sum(p, 1), total)
                    acc = tl.where(touched[:, None], acc * fade[:, None] + tl.dot(p.to(DTYPE), v), acc)
                    peak = tl.where(touched, new_peak, peak)
                at = (row * H + q_head) * SPLITS + split % SPLITS
                mine = live & (peak > float("-inf"))
                tl.store(part_ptr + at[:, None] * P + d[None, :], acc, mask=mine[:, None])
                tl.store(stat_ptr + at * 2, peak, mask=mine)
                tl.store(stat_ptr + at * 2 + 1, total, mask=mine)


def attend(
    qkv: Tensor,
    out: Tensor,
    norms: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    cache: LayerCache | tuple[Tensor, Tensor],
    block_table: Tensor,
    rows: Rows,
    workspace: tuple[Tensor, Tensor],
    shape: AttentionShape,
    launch: Launch,
    *,
    eps: float,
) -> None:
    """Append the live rows' keys and values to the cache, then attend.

    Args:
        qkv: [MAX_ROWS, shape.width] q, k, v and gate as projected, packed in this order.
        out: [MAX_ROWS, H * P], written.
        norms: [P] weights of the query and key norms; anything where the shape has none.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each, in the model's dtype.
        cache: Keys and values of this layer, [num_blocks, kv_block_size, J, P]; the rows' slots are written.
        block_table: [MAX_ROWS, .] int32 physical block of each logical block of each request.
        rows: The rows of this step.
        workspace: Partial sums, float32 [WIDE * H * num_splits * P] and [WIDE * H * num_splits * 2]
            at least.
        shape: Of this layer.
        launch: What the launches of a step share.
        eps: Of the query and key norms.
    """
    cache = LayerCache(*cache)
    kv_block_size, programs = cache.keys.shape[1], launch.attention_programs
    splits = shape.num_splits(rotary[0].shape[0])
    near, far = (0, 1) if shape.window else (NEAR_SPLITS, FAR_CHUNKS)
    _attend_kernel[(programs,)](
        qkv,
        *norms,
        *rotary,
        cache.keys,
        cache.values,
        block_table,
        rows.positions,
        rows.row_start,
        rows.row_count,
        rows.num_requests,
        *workspace,
        eps,
        shape.head_dim**-0.5 * 1.4426950408889634,
        cache.k_scale,
        cache.v_scale,
        block_table.stride(0),
        ROWS=WIDE,
        WIDTH=qkv.stride(0),
        H=shape.num_heads,
        J=shape.num_kv_heads,
        P=shape.head_dim,
        ROTARY=shape.rotary_dim,
        WINDOW=shape.window,
        CAUSAL=shape.causal,
        QK_NORM=shape.has_qk_norm,
        CHUNK=CHUNK,
        NEAR=near,
        FAR=far,
        SPLITS=splits,
        KV_BLOCK=kv_block_size,
        COLS=16,
        PROGRAMS=programs,
        PREFETCH=launch.can_prefetch and shape.head_dim * cache.keys.element_size() == 256,
        PDL=launch.pdl,
        **launch.options(4),
    )
    _combine(qkv, out, rows, workspace, shape, launch, (near, far, splits))


def _combine(
    qkv: Tensor,
    out: Tensor,
    rows: Rows,
    workspace: tuple[Tensor, Tensor],
    shape: AttentionShape,
    launch: Launch,
    split: tuple[int, int, int],
) -> None:
    """Add up the partial sums of each row in chunk order, and apply the gate."""
    programs, (near, far, splits) = launch.attention_programs, split
    combine_kernel[(programs,)](
        qkv,
        out,
        rows.positions,
        rows.row_request,
        rows.row_start,
        rows.row_count,
        rows.num_rows,
        *workspace,
        WIDTH=qkv.stride(0),
        GATE_AT=(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
        H=shape.num_heads,
        P=shape.head_dim,
        WINDOW=shape.window,
        CAUSAL=shape.causal,
        GATE=shape.has_gate,
        CHUNK=CHUNK,
        NEAR=near,
        FAR=far,
        SPLITS=splits,
        TAKE=16,
        PROGRAMS=programs,
        PDL=launch.pdl,
        **launch.options(4),
    )
