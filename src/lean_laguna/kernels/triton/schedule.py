"""How many drafts of a step are worth verifying, decided on the device: expected tokens against their time.

Drafts of all requests are ranked by their chance of survival. The number of rows is kept whose expected
tokens exceed by most the tokens that its time is worth, and the rows are laid out anew. A draft never
survives better than the one before it, so what is kept of a request is a prefix. The target decides every
token, whatever is sent.

Source: DSpark (arXiv 2607.05147), section 3.2; vLLM 0.33 adaptive_verification.py. See
``spec.draft_schedule``, which is the same for one length a step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.primitives import wait_for_inputs
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.walk import Chances


@triton.jit
def _schedule_kernel(
    given_ptr,
    reached_ptr,
    prices_ptr,
    cut_ptr,
    skipped_ptr,
    input_ids_ptr,
    row_seeds_ptr,
    row_temperatures_ptr,
    positions_ptr,
    row_start_ptr,
    row_count_ptr,
    row_request_ptr,
    num_rows_ptr,
    num_requests_ptr,
    TILE: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL, False)
    i = tl.arange(0, TILE)
    num_rows = tl.load(num_rows_ptr)
    live = i < num_rows
    request = tl.load(row_request_ptr + i)
    start = tl.load(row_start_ptr + request)
    index = i - start
    is_made = tl.load(given_ptr + i) >= 0.0
    is_draft = live & (index > 0) & is_made
    token, position = tl.load(input_ids_ptr + i), tl.load(positions_ptr + i)
    seed, temperature = tl.load(row_seeds_ptr + i), tl.load(row_temperatures_ptr + i)
    # Rows of one request up to each row: [row, row before].
    up_to = (request[:, None] == request[None, :]) & (i[None, :] <= i[:, None]) & is_draft[None, :]
    reached = tl.load(reached_ptr + i, mask=is_draft, other=0.0)
    # Rounding must not let a draft pass the one before it.
    survival = tl.min(tl.where(up_to, reached[None, :], 2.0), 1)
    ahead = (survival[None, :] > survival[:, None]) | (
        (survival[None, :] == survival[:, None]) & (i[None, :] < i[:, None])
    )
    rank = tl.sum((ahead & is_draft[None, :]).to(tl.int32), 1)
    num_anchors = tl.sum((live & (index == 0)).to(tl.int32), 0)
    num_drafts = tl.sum(is_draft.to(tl.int32), 0)
    within = is_draft[None, :] & (rank[None, :] < i[:, None])
    expected = num_anchors + tl.sum(tl.where(within, survival[None, :], 0.0), 1)
    can_send = (i <= num_drafts) & (num_anchors + i <= TILE)
    value = expected - tl.load(prices_ptr + num_anchors + i, mask=can_send, other=0.0)
    value = tl.where(can_send, value, float("-inf"))
    num_sent = tl.min(tl.where(value == tl.max(value, 0), i, TILE), 0)
    num_sent = tl.where(tl.load(prices_ptr + LAST) > 0.0, num_sent, num_drafts)
    keep = (live & (index == 0)) | (is_draft & (rank < num_sent))
    to = tl.sum((keep[None, :] & (i[None, :] < i[:, None])).to(tl.int32), 1)
    num_kept = tl.sum(keep.to(tl.int32), 0)
    # By request: kept rows, and those before them.
    mine = request[None, :] == i[:, None]
    count = tl.sum((mine & keep[None, :]).to(tl.int32), 1)
    first = tl.sum(((request[None, :] < i[:, None]) & keep[None, :]).to(tl.int32), 1)
    is_request = i < tl.load(num_requests_ptr)
    cut = tl.sum((mine & (is_draft & (keep == 0))[None, :]).to(tl.int32), 1)
    skipped = tl.sum((mine & (live & (index > 0) & (is_made == 0))[None, :]).to(tl.int32), 1)
    # Rows move in place: nobody may write before all warps have read.
    tl.debug_barrier()
    tl.store(cut_ptr + i, tl.load(cut_ptr + i) + cut, mask=is_request)
    tl.store(skipped_ptr + i, tl.load(skipped_ptr + i) + skipped, mask=is_request)
    tl.store(row_start_ptr + i, tl.minimum(first, TILE - 1), mask=is_request)
    tl.store(row_count_ptr + i, count, mask=is_request)
    tl.store(input_ids_ptr + to, token, mask=keep)
    tl.store(positions_ptr + to, position, mask=keep)
    tl.store(row_request_ptr + to, request, mask=keep)
    tl.store(row_seeds_ptr + to, seed, mask=keep)
    tl.store(row_temperatures_ptr + to, temperature, mask=keep)
    tl.store(num_rows_ptr, num_kept)


def schedule(
    chances: Chances,
    prices: Tensor,
    cut: Tensor,
    skipped: Tensor,
    input_ids: Tensor,
    row_seeds: Tensor,
    row_temperatures: Tensor,
    rows: Rows,
    launch: Launch,
) -> None:
    """Keep the drafts that are worth verifying, and lay their rows out.

    Args:
        chances: Of each row's draft.
        prices: [MAX_ROWS + 1] float32 tokens that the time of a step with so many rows is worth; zeros keep
            all drafts that were made.
        cut: [MAX_ROWS] int32 drafts of each request ever made and not sent; added to.
        skipped: [MAX_ROWS] int32 drafts of each request ever laid out and not made; added to.
        input_ids: [MAX_ROWS] int32 anchors and drafts; moved.
        row_seeds: [MAX_ROWS] int64; moved.
        row_temperatures: [MAX_ROWS] float32; moved.
        rows: Where the rows stand; replaced.
        launch: What the launches of a step share.
    """
    tile = launch.tile_rows
    _schedule_kernel[(1,)](
        chances.given,
        chances.reached,
        prices,
        cut,
        skipped,
        input_ids,
        row_seeds,
        row_temperatures,
        rows.positions,
        rows.row_start,
        rows.row_count,
        rows.row_request,
        rows.num_rows,
        rows.num_requests,
        TILE=tile,
        LAST=len(prices) - 1,
        PDL=launch.pdl,
        # Tables of rows by rows in registers: 32 of them a lane.
        **launch.options(max(1, tile * tile // 1024)),
    )
