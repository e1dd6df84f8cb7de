"""Sampling from the most probable tokens only: top_k, top_p and min_p, on the device.

A row's candidates are its ``MAX_TOP_K`` largest logits. Filters see what the one before left, in vLLM's
order: min_p, top_k, top_p. The token is argmax(logit / T + g) over what is left, with the noise of ``head``:
a function of the row and its absolute position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.head import gumbel
from lean_laguna.kernels.triton.launch import WIDE, Launch, power_of_two
from lean_laguna.kernels.triton.rows import Rows

MAX_TOP_K = 64
"""Largest top_k that the device applies; ties beyond so many candidates are dropped."""


@dataclass(frozen=True)
class Filters:
    """Of each request, [MAX_ROWS].

    Attributes:
        top_k: int32, 1 to ``MAX_TOP_K``; 0 leaves the request's tokens as they are.
        top_p: float32, 1 for none.
        log_min_p: float32 logarithm of min_p, -inf for none.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor


@triton.jit
def _filter_kernel(
    values_ptr,
    ids_ptr,
    token_ptr,
    seeds_ptr,
    temperatures_ptr,
    positions_ptr,
    row_request_ptr,
    row_start_ptr,
    num_rows_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    position_offset,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFT: tl.constexpr,
    WORDS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0)
    request = tl.load(row_request_ptr + row)
    top_k = tl.load(top_k_ptr + request)
    temperature = tl.load(temperatures_ptr + row)
    is_on = (row < tl.load(num_rows_ptr)) & (top_k > 0) & (temperature > 0.0)
    if DRAFT:
        # The first row of a request holds its anchor, which is not for the drafter to choose.
        is_on = is_on & (tl.load(row_start_ptr + request) != row)
    if is_on:
        i = tl.arange(0, BLOCK)
        known = i < N
        value = tl.load(values_ptr + (row - SHIFT) * N + i, mask=known, other=float("-inf"))
        token = tl.load(ids_ptr + (row - SHIFT) * N + i, mask=known, other=0).to(tl.int32)
        scaled = (value - tl.max(value, 0)) / temperature
        kept = known & (scaled >= tl.load(log_min_p_ptr + request))
        kth = tl.max(tl.where(i == tl.minimum(top_k, N) - 1, value, float("-inf")), 0)
        kept = kept & (value >= kth)
        share = tl.where(kept, tl.exp(scaled), 0.0)
        before = tl.cumsum(share, 0) - share
        kept = kept & ((before < tl.load(top_p_ptr + request) * tl.sum(share, 0)) | (i == 0))
        seed = tl.load(seeds_ptr + row) + tl.zeros((BLOCK,), tl.int64)
        position = tl.load(positions_ptr + row) + position_offset + tl.zeros((BLOCK,), tl.int32)
        noisy = tl.where(kept, scaled + gumbel(seed, position, token), float("-inf"))
        best = tl.max(noisy, 0)
        chosen = tl.min(tl.where(kept & (noisy == best), token, 2147483647), 0)
        if WORDS:
            chosen = (0xFFFFFFFF - chosen.to(tl.int64)) | (-1 << 63)
        tl.store(token_ptr + row, chosen)


def choose_filtered(
    logits: Tensor,
    tokens: Tensor,
    filters: Filters,
    seeds: Tensor,
    temperatures: Tensor,
    rows: Rows,
    launch: Launch,
    *,
    position_offset: int,
    is_draft: bool = False,
    words: Tensor | None = None,
    is_shifted: bool = False,
) -> None:
    """Choose anew for the rows whose requests filter; others keep their tokens.

    Args:
        logits: [MAX_ROWS, V] float32, from ``head.sample``.
        tokens: [MAX_ROWS] int32; replaced where a filter is on.
        filters: Of the requests.
        seeds: [MAX_ROWS] int64 of each row's request.
        temperatures: [MAX_ROWS] float32; at 0 nothing is filtered.
        rows: Where the rows stand.
        launch: What the launches of a step share.
        position_offset: As for ``head.sample``.
        is_draft: The first row of each request keeps its token.
        words: [MAX_ROWS] int64 of a walk, or None: then the choice goes there instead, below all real scores.
        is_shifted: A row's logits are those of the row before.
    """
    count = min(MAX_TOP_K, logits.shape[1])
    # So many rows at once in any step: of equal logits the library may put others first where it has more.
    parts = [torch.topk(rows, count, dim=1) for rows in logits[: launch.tile_rows].split(WIDE)]
    values, ids = (torch.cat(found) if len(parts) > 1 else found[0] for found in zip(*parts, strict=True))
    _filter_kernel[(launch.cols,)](
        values,
        ids,
        tokens if words is None else words,
        seeds,
        temperatures,
        rows.positions,
        rows.row_request,
        rows.row_start,
        rows.num_rows,
        filters.top_k,
        filters.top_p,
        filters.log_min_p,
        position_offset,
        N=count,
        BLOCK=power_of_two(count),
        DRAFT=is_draft,
        WORDS=words is not None,
        SHIFT=int(is_shifted),
        num_warps=1,
    )
