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

from lean_laguna.kernels.triton.accept import SYNTHETIC_STREAM, synthetic_set
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.primitives import wait_for_inputs
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import SparkWeights


@triton.jit
def _schedule_kernel(
    guesses_ptr,
    scales_ptr,
    offsets_ptr,
    prices_ptr,
    chances_ptr,
    cut_ptr,
    thresholds_ptr,
    request_seeds_ptr,
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
    RATES: tl.constexpr,
    NUM_SETS: tl.constexpr,
    STREAM: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL, False)
    i = tl.arange(0, TILE)
    num_rows = tl.load(num_rows_ptr)
    live = i < num_rows
    request = tl.load(row_request_ptr + i)
    start = tl.load(row_start_ptr + request)
    index = i - start
    is_draft = live & (index > 0)
    token, position = tl.load(input_ids_ptr + i), tl.load(positions_ptr + i)
    seed, temperature = tl.load(row_seeds_ptr + i), tl.load(row_temperatures_ptr + i)
    # Rows of one request up to each row: [row, row before].
    up_to = (request[:, None] == request[None, :]) & (i[None, :] <= i[:, None]) & is_draft[None, :]
    if NUM_SETS > 0:
        zero = tl.zeros((TILE,), tl.int32)
        anchor = position - index
        key = tl.load(request_seeds_ptr + request)
        _, word, _, _ = tl.philox(key, anchor, zero, zero + STREAM, zero)
        at = synthetic_set(word, NUM_SETS) * RATES + index - 1
        reached = tl.load(thresholds_ptr + at, mask=is_draft, other=0).to(tl.float32) * 2.3283064365386963e-10
        before = tl.load(thresholds_ptr + at - 1, mask=is_draft & (index > 1), other=1 << 32)
        before = before.to(tl.float32) * 2.3283064365386963e-10
        chance = tl.where(before > 0.0, reached / tl.where(before > 0.0, before, 1.0), 0.0)
    else:
        at = (temperature > 0.0).to(tl.int32) * RATES + index - 1
        guess = tl.load(guesses_ptr + i, mask=is_draft, other=0.0)
        guess = guess * tl.load(scales_ptr + at, mask=is_draft, other=1.0)
        guess += tl.load(offsets_ptr + at, mask=is_draft, other=0.0)
        chance = 1.0 / (1.0 + tl.exp(-guess))
        log_chance = tl.where(is_draft, tl.log(tl.maximum(chance, 1e-30)), 0.0)
        reached = tl.exp(tl.sum(tl.where(up_to, log_chance[None, :], 0.0), 1))
    tl.store(chances_ptr + i, tl.where(is_draft, chance, 0.0))
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
    keep = live & ((index == 0) | (rank < num_sent))
    to = tl.sum((keep[None, :] & (i[None, :] < i[:, None])).to(tl.int32), 1)
    num_kept = tl.sum(keep.to(tl.int32), 0)
    # By request: kept rows, and those before them.
    mine = request[None, :] == i[:, None]
    count = tl.sum((mine & keep[None, :]).to(tl.int32), 1)
    first = tl.sum(((request[None, :] < i[:, None]) & keep[None, :]).to(tl.int32), 1)
    is_request = i < tl.load(num_requests_ptr)
    cut = tl.sum((mine & (live & (keep == 0))[None, :]).to(tl.int32), 1)
    # Rows move in place: nobody may write before all warps have read.
    tl.debug_barrier()
    tl.store(cut_ptr + i, tl.load(cut_ptr + i) + cut, mask=is_request)
    tl.store(row_start_ptr + i, tl.minimum(first, TILE - 1), mask=is_request)
    tl.store(row_count_ptr + i, count, mask=is_request)
    tl.store(input_ids_ptr + to, token, mask=keep)
    tl.store(positions_ptr + to, position, mask=keep)
    tl.store(row_request_ptr + to, request, mask=keep)
    tl.store(row_seeds_ptr + to, seed, mask=keep)
    tl.store(row_temperatures_ptr + to, temperature, mask=keep)
    tl.store(num_rows_ptr, num_kept)


def schedule(
    guesses: Tensor,
    weights: SparkWeights,
    prices: Tensor,
    chances: Tensor,
    cut: Tensor,
    input_ids: Tensor,
    row_seeds: Tensor,
    row_temperatures: Tensor,
    rows: Rows,
    launch: Launch,
    *,
    thresholds: Tensor | None = None,
    request_seeds: Tensor | None = None,
) -> None:
    """Keep the drafts that are worth verifying, and lay their rows out.

    Args:
        guesses: [MAX_ROWS] float32 confidence logit of each row's draft.
        weights: With the calibration.
        prices: [MAX_ROWS + 1] float32 tokens that the time of a step with so many rows is worth; zeros keep
            all drafts.
        chances: [MAX_ROWS] float32, written: of each row as it was laid out, the chance that its draft is
            accepted if those before it are.
        cut: [MAX_ROWS] int32 drafts ever cut of each request; added to.
        input_ids: [MAX_ROWS] int32 anchors and drafts; moved.
        row_seeds: [MAX_ROWS] int64; moved.
        row_temperatures: [MAX_ROWS] float32; moved.
        rows: Where the rows stand; replaced.
        launch: What the launches of a step share.
        thresholds: [n, MAX_ROWS] int64 of synthetic acceptance, or None: then chances are its rates.
        request_seeds: [MAX_ROWS] int64, with ``thresholds``.
    """
    tile = launch.tile_rows
    _schedule_kernel[(1,)](
        guesses,
        weights.scales,
        weights.offsets,
        prices,
        chances,
        cut,
        cut if thresholds is None else thresholds,
        row_seeds if request_seeds is None else request_seeds,
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
        RATES=(weights.scales if thresholds is None else thresholds).shape[1],
        NUM_SETS=0 if thresholds is None else len(thresholds),
        STREAM=SYNTHETIC_STREAM,
        PDL=launch.pdl,
        # Tables of rows by rows in registers: 32 of them a lane.
        **launch.options(max(1, tile * tile // 1024)),
    )
