"""Attention of a drafter's block: keys from the paged context cache and from the block itself, plain PyTorch.

The block's keys never enter the cache. Unlike the target's attention this one need not be invariant to
batching: a drafter's bits decide which tokens are proposed, never which are emitted.
Source: z-lab dflash 0.1.0 model.py _attention_mask (window per query, both sides where not causal); vLLM 0.33
laguna_dflash.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.kernels.attention import Span


@dataclass(frozen=True)
class BlockPlan:
    """Which keys each block row sees; made once per drafting step and shared by the layers that agree on it.

    Of B requests C is the longest kept context and R the longest block; a request's keys are C context slots,
    then R block rows.

    Attributes:
        slots: Flat cache slot of every key, [B * (C + R)] int64; of the null block, which is zero, for block
            rows and padding.
        block_keys: Key that each packed row is, [T] int64.
        mask: 0 where seen and -inf where not, [B or 1, 1, R, C + R] float32; every row sees at least itself.
        padded_rows: Packed row of each block row, [B * R] int64, or None where all blocks have R rows.
        packed_rows: Block row of each packed row, [T] int64, or None likewise.
        num_requests: B.
    """

    slots: Tensor
    block_keys: Tensor
    mask: Tensor
    padded_rows: Tensor | None
    packed_rows: Tensor | None
    num_requests: int


def plan_block_attention(
    spans: Sequence[Span],
    group: int,
    kv_block_size: int,
    *,
    window: int | None,
    causal: bool,
    device: torch.device | str = "cpu",
) -> BlockPlan:
    """Lay out the keys and the visibility of every request's block.

    Args:
        spans: One per request, covering the packed rows in order; ``first_position`` is the anchor's and all
            context lies before it.
        group: KV group whose block tables hold the context.
        kv_block_size: Tokens per KV page.
        window: A row at position q sees keys k with q - window < k (and k < q + window), or None for all.
        causal: A row sees only itself and earlier rows of its block.
        device: Where the tensors go.

    Returns:
        The plan. Context positions in the null block are not kept and not seen.
    """
    anchors = np.array([span.first_position for span in spans])[:, None]
    lengths = np.array([span.num_rows for span in spans])[:, None]
    num_rows, num_requests = int(lengths.max()), len(spans)
    width = int(anchors.max()) if window is None else min(int(anchors.max()), window - 1)
    tables = np.zeros((num_requests, max(len(span.block_tables[group]) for span in spans)), dtype=np.int64)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.block_tables[group])] = span.block_tables[group]
    # Contexts end at a common column, so that the window's mask is the same for every request and step.
    positions = anchors - width + np.arange(width)
    blocks = tables[np.arange(num_requests)[:, None], np.maximum(positions, 0) // kv_block_size] * (
        positions >= 0
    )
    slots = np.zeros((num_requests, width + num_rows), dtype=np.int64)
    slots[:, :width] = blocks * kv_block_size + positions % kv_block_size
    rows = np.arange(num_rows)
    is_row = rows < lengths
    is_uniform = bool(is_row.all())
    block_keys = (np.arange(num_requests)[:, None] * (width + num_rows) + width + rows)[is_row]
    mask = block_mask(num_rows, width, window, causal)
    if not (is_uniform and blocks.all()):
        hidden = np.zeros((num_requests, 1, num_rows, width + num_rows), dtype=bool)
        hidden[..., :width] = (blocks == 0)[:, None, None]
        hidden[..., width:] = ~is_row[:, None, None] & ~np.eye(num_rows, dtype=bool)
        mask = mask.masked_fill(torch.from_numpy(hidden), float("-inf"))
    padded = np.array([span.start for span in spans])[:, None] + np.minimum(rows, lengths - 1)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.reshape(-1)).to(device)

    return BlockPlan(
        slots=tensor(slots),
        block_keys=tensor(block_keys),
        mask=mask.to(device),
        padded_rows=None if is_uniform else tensor(padded),
        packed_rows=None if is_uniform else tensor(np.flatnonzero(is_row)),
        num_requests=num_requests,
    )


@functools.lru_cache(maxsize=64)
def block_mask(num_rows: int, width: int, window: int | None, causal: bool) -> Tensor:
    """Return [1, 1, R, C + R]: 0 where a row sees a key of a full context or block, -inf where not."""
    offset = torch.arange(-width, num_rows) - torch.arange(num_rows)[:, None]
    seen = offset <= 0 if causal else torch.ones_like(offset, dtype=torch.bool)
    if window is not None:
        seen &= offset.abs() < window
    return torch.zeros(1, 1, *seen.shape).masked_fill_(~seen, float("-inf"))


def block_attention(q: Tensor, own: Tensor, kv: Tensor, plan: BlockPlan, scale: float) -> Tensor:
    """Attend from every block row to its request's context and block.

    Args:
        q: [T, H, P] rotated queries, packed; rows beyond the plan's are padding.
        own: [T, 2, J, P] rotated keys and values of the block rows.
        kv: [num_blocks, kv_block_size, 2, J, P], the layer's context keys and values; only read.
        plan: From ``plan_block_attention`` for these rows.
        scale: Factor on the scores.

    Returns:
        [T, H, P] in q's dtype, a tensor of its own; padding rows are zero.
    """
    num_rows, num_requests = plan.block_keys.shape[0], plan.num_requests
    keys = kv.view(-1, *kv.shape[2:]).index_select(0, plan.slots).to(q.dtype)
    keys.index_copy_(0, plan.block_keys, own[:num_rows])
    by_request = keys.view(num_requests, -1, *keys.shape[1:]).permute(2, 0, 3, 1, 4)
    rows = q[:num_rows] if plan.padded_rows is None else q.index_select(0, plan.padded_rows)
    out = F.scaled_dot_product_attention(
        rows.view(num_requests, -1, *q.shape[1:]).transpose(1, 2),
        by_request[0],
        by_request[1],
        attn_mask=plan.mask.to(q.dtype),
        scale=scale,
        enable_gqa=q.shape[1] != own.shape[2],
    )
    out = out.transpose(1, 2).flatten(0, 1)
    if plan.packed_rows is not None:
        out = out.index_select(0, plan.packed_rows)
    return F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - num_rows)) if q.shape[0] > num_rows else out.contiguous()
