"""Attention of a drafter's block: keys from the paged context cache and from the block itself, plain PyTorch.

The block's keys never enter the cache. Unlike the target's attention this one need not be invariant to batching:
a drafter's bits decide which tokens are proposed, never which are emitted.
Source: z-lab dflash 0.1.0 model.py _attention_mask (window per query, both sides where not causal); vLLM 0.33
laguna_dflash.py.
"""

from __future__ import annotations

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

    C is the longest kept context and R the longest block among the B requests.

    Attributes:
        context_slots: [B * C] int64, flat cache slots; short contexts repeat slot 0, unseen.
        mask: [B, 1, R, C + R] float32, 0 where seen and -inf where not; every row sees at least itself.
        padded_rows: [B * R] int64 packed row of each padded row, or None where all blocks have R rows in order.
        packed_rows: [T] int64 padded row of each packed row, or None likewise.
        num_requests: B.
    """

    context_slots: Tensor
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
    """Lay out context slots and visibility of every request's block.

    Args:
        spans: One per request, covering the packed rows.
        group: KV group whose block tables hold the context.
        kv_block_size: Tokens per KV page.
        window: A row at position q sees keys k with q - window < k (and k < q + window), or None for all.
        causal: A row sees only itself and earlier rows of its block.
        device: Where the tensors go.

    Returns:
        The plan. Context positions in the null block count as not kept and are not seen.
    """
    num_rows = max(span.num_rows for span in spans)
    firsts = [0 if window is None else max(0, span.first_position - window + 1) for span in spans]
    width = max(span.first_position - first for span, first in zip(spans, firsts, strict=True))
    slots = np.zeros((len(spans), width), dtype=np.int64)
    seen = np.zeros((len(spans), num_rows, width + num_rows), dtype=bool)
    rows = np.arange(num_rows)
    for b, (span, first) in enumerate(zip(spans, firsts, strict=True)):
        positions = np.arange(first, span.first_position)
        blocks = np.asarray(span.block_tables[group], dtype=np.int64)[positions // kv_block_size]
        slots[b, : positions.size] = blocks * kv_block_size + positions % kv_block_size
        kept = (blocks != 0)[None, :]
        if window is not None:
            kept = kept & (positions[None, :] > span.first_position + rows[:, None] - window)
        seen[b, :, : positions.size] = kept
        seen[b, :, width:] = _block_visibility(num_rows, span.num_rows, window, causal)
    mask = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    padded_rows, packed_rows = _row_maps(spans, num_rows)
    return BlockPlan(
        torch.from_numpy(slots.reshape(-1)).to(device),
        mask.unsqueeze(1).to(device),
        None if padded_rows is None else padded_rows.to(device),
        None if packed_rows is None else packed_rows.to(device),
        len(spans),
    )


def _block_visibility(num_rows: int, num_real: int, window: int | None, causal: bool) -> np.ndarray:
    """Return [num_rows, num_rows]: which block rows each row sees; padding sees itself, so that it stays finite."""
    offset = np.arange(num_rows)[None, :] - np.arange(num_rows)[:, None]
    seen = (offset <= 0) if causal else np.ones_like(offset, dtype=bool)
    if window is not None:
        seen = seen & (np.abs(offset) < window)
    seen[:, num_real:] = False
    return seen | (offset == 0)


def _row_maps(spans: Sequence[Span], num_rows: int) -> tuple[Tensor | None, Tensor | None]:
    if all(span.num_rows == num_rows and span.start == b * num_rows for b, span in enumerate(spans)):
        return None, None
    padded = np.concatenate(
        [span.start + np.minimum(np.arange(num_rows), span.num_rows - 1) for span in spans]
    )
    packed = np.empty(sum(span.num_rows for span in spans), dtype=np.int64)
    for b, span in enumerate(spans):
        packed[span.start : span.start + span.num_rows] = b * num_rows + np.arange(span.num_rows)
    return torch.from_numpy(padded), torch.from_numpy(packed)


def block_attention(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: BlockPlan, scale: float) -> Tensor:
    """Attend from every block row to its request's context and block.

    Args:
        q: [T, H, P] rotated queries, packed.
        k: [T, J, P] rotated keys of the block rows.
        v: [T, J, P] values of the block rows.
        kv: [num_blocks, kv_block_size, 2, J, P], the layer's context keys and values; only read.
        plan: From ``plan_block_attention`` for these rows.
        scale: Factor on the scores.

    Returns:
        [T, H, P] in q's dtype.
    """
    rows = torch.stack((k, v), dim=1)
    if plan.padded_rows is not None:
        q, rows = q.index_select(0, plan.padded_rows), rows.index_select(0, plan.padded_rows)
    pair = rows.shape[1:]
    context = kv.view(-1, *pair).index_select(0, plan.context_slots).to(rows.dtype)
    seen = torch.cat(
        (context.view(plan.num_requests, -1, *pair), rows.view(plan.num_requests, -1, *pair)), dim=1
    ).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(
        q.reshape(plan.num_requests, -1, *q.shape[1:]).transpose(1, 2),
        seen[0],
        seen[1],
        attn_mask=plan.mask.to(q.dtype),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    out = out.transpose(1, 2).reshape(q.shape)
    return out if plan.packed_rows is None else out.index_select(0, plan.packed_rows)
