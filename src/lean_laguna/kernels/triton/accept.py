"""The end of a speculative step on the device: what is accepted, what goes out, the next rows.

Nothing comes back to the host but the ring and its counts, copied out after each step, so steps can be
launched ahead. Rejected rows need no rollback: their keys lie past the new position and are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import Launch, power_of_two
from lean_laguna.kernels.triton.primitives import wait_for_inputs
from lean_laguna.kernels.triton.rows import Rows


@dataclass(frozen=True)
class Requests:
    """Per-request state of decoding, on the device; all [MAX_ROWS] unless said.

    Attributes:
        remaining: int32 tokens a request may still emit; 0 ends it.
        num_drafts: int32 draft tokens wanted each step; what is left of ``remaining`` caps it.
        seeds: int64.
        temperatures: float32.
        stop_ids: [MAX_ROWS, n] int32 tokens that end each request, -1 for none; the one that ends it is kept.
        ring: [MAX_ROWS, size] int32 emitted tokens; size a power of two.
        emitted: int32 tokens ever emitted, beside the ring.
        accepted: int32 draft tokens ever accepted, before any cut at an ending.
        drafted: int32 draft tokens ever verified.
        thresholds: [n, MAX_ROWS] int64, or None. Accept draft i, whatever it is, where the request's 32-bit
            draw for this step lies below entry i, which do not increase, of the set that another draws; see
            ``spec.synthetic``.
        clock: [1] int64, or None: written with the nanosecond at which this was done; on a GPU only.
    """

    remaining: Tensor
    num_drafts: Tensor
    seeds: Tensor
    temperatures: Tensor
    stop_ids: Tensor
    ring: Tensor
    emitted: Tensor
    accepted: Tensor
    drafted: Tensor
    thresholds: Tensor | None = None
    clock: Tensor | None = None


SYNTHETIC_STREAM = 1
"""Third word of the Philox counter of synthetic draws; sampling noise has 0 there."""


@triton.jit
def synthetic_set(word, NUM_SETS: tl.constexpr):
    """Return which set of rates a 32-bit draw picks."""
    return (((word.to(tl.int64) & 0xFFFFFFFF) * NUM_SETS) >> 32).to(tl.int32)


@triton.jit
def _accept_kernel(
    input_ids_ptr,
    sampled_ptr,
    num_rows_ptr,
    num_requests_ptr,
    row_start_ptr,
    row_count_ptr,
    row_request_ptr,
    positions_ptr,
    row_seeds_ptr,
    row_temperatures_ptr,
    remaining_ptr,
    num_drafts_ptr,
    seeds_ptr,
    temperatures_ptr,
    stops_ptr,
    ring_ptr,
    emitted_ptr,
    accepted_ptr,
    drafted_ptr,
    thresholds_ptr,
    clock_ptr,
    mask_token,
    RING: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    STOP_BLOCK: tl.constexpr,
    NUM_SETS: tl.constexpr,
    STREAM: tl.constexpr,
    TILE: tl.constexpr,
    RATES: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL, False)
    i = tl.arange(0, TILE)
    sampled = tl.load(sampled_ptr + i)
    # Row j's token is draft j + 1's judge.
    judged = tl.load(input_ids_ptr + i + 1, mask=i + 1 < TILE, other=0)
    stop_at = tl.arange(0, STOP_BLOCK)
    position = tl.load(positions_ptr + i)
    new_ids = tl.full((TILE,), 0, tl.int32) + mask_token
    new_positions = tl.zeros((TILE,), tl.int32)
    new_request = tl.zeros((TILE,), tl.int32)
    next_row = 0
    for request in tl.range(0, tl.load(num_requests_ptr), num_stages=1):
        start = tl.load(row_start_ptr + request)
        count = tl.load(row_count_ptr + request)
        left = tl.load(remaining_ptr + request)
        j = i - start
        at = tl.sum(tl.where(i == start, position, 0), 0)
        is_draft = (j >= 0) & (j < count - 1)
        if NUM_SETS > 0:
            seed = tl.load(seeds_ptr + request) + tl.zeros((TILE,), tl.int64)
            zero = tl.zeros((TILE,), tl.int32)
            draw, which, _, _ = tl.philox(seed, zero + at, zero, zero + STREAM, zero)
            which = synthetic_set(which, NUM_SETS)
            threshold = tl.load(thresholds_ptr + which * RATES + j, mask=is_draft, other=0)
            is_wrong = is_draft & ((draw.to(tl.int64) & 0xFFFFFFFF) >= threshold)
        else:
            is_wrong = is_draft & (sampled != judged)
        # The first draft that is not accepted ends the chain.
        num_accepted = tl.min(tl.where(is_wrong, j, count - 1), 0)
        token = tl.where(j < num_accepted, judged, sampled)
        stops = tl.load(stops_ptr + request * NUM_STOPS + stop_at, mask=stop_at < NUM_STOPS, other=-1)
        is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) > 0
        ends = (j >= 0) & (j <= num_accepted) & is_stop
        first_end = tl.min(tl.where(ends, j, TILE), 0)
        num_out = tl.minimum(tl.minimum(num_accepted + 1, first_end + 1), left)
        num_out = tl.where(count > 0, num_out, 0)
        done_before = tl.load(emitted_ptr + request)
        goes_out = (j >= 0) & (j < num_out)
        tl.store(ring_ptr + request * RING + (done_before + j) % RING, token, mask=goes_out)
        left = tl.where(first_end < num_out, 0, left - num_out)
        anchor = tl.sum(tl.where(j == num_out - 1, token, 0), 0)
        at += num_out
        tl.store(remaining_ptr + request, left)
        if count > 0:
            tl.store(accepted_ptr + request, tl.load(accepted_ptr + request) + num_accepted)
            tl.store(drafted_ptr + request, tl.load(drafted_ptr + request) + count - 1)
        tl.store(emitted_ptr + request, done_before + num_out)
        # A request's last token needs no draft after it.
        new_count = tl.where(
            (count > 0) & (left > 0), 1 + tl.minimum(tl.load(num_drafts_ptr + request), left - 1), 0
        )
        new_count = tl.minimum(new_count, TILE - next_row)
        mine = (i >= next_row) & (i < next_row + new_count)
        new_ids = tl.where(i == next_row, tl.where(new_count > 0, anchor, new_ids), new_ids)
        new_positions = tl.where(mine, at + i - next_row, new_positions)
        new_request = tl.where(mine, request, new_request)
        tl.store(row_start_ptr + request, tl.minimum(next_row, TILE - 1))
        tl.store(row_count_ptr + request, new_count)
        next_row += new_count
    tl.store(input_ids_ptr + i, new_ids)
    tl.store(positions_ptr + i, new_positions)
    tl.store(row_request_ptr + i, new_request)
    tl.store(row_seeds_ptr + i, tl.load(seeds_ptr + new_request))
    tl.store(row_temperatures_ptr + i, tl.load(temperatures_ptr + new_request))
    tl.store(num_rows_ptr, next_row)
    if CLOCK:
        tl.store(clock_ptr, tl.extra.cuda.globaltimer())


def accept(
    input_ids: Tensor,
    sampled: Tensor,
    rows: Rows,
    row_seeds: Tensor,
    row_temperatures: Tensor,
    requests: Requests,
    launch: Launch,
    *,
    mask_token: int,
) -> None:
    """Compare drafts with what the target chose, emit, and lay out the next step's rows.

    A draft is accepted while it equals the target's own token (or, for measurements, by a draw at given
    rates); the first event inside the block wins (a stop token, the length limit). A finished request keeps
    its entry with no rows.

    Args:
        input_ids: [MAX_ROWS] int32 anchor and drafts of each request; replaced by new anchors and mask
            tokens.
        sampled: [MAX_ROWS] int32 the target's token of each row.
        rows: Of this step; replaced by the next step's.
        row_seeds: [MAX_ROWS] int64, written for the next step's rows.
        row_temperatures: [MAX_ROWS] float32, likewise.
        requests: State of the requests; changed.
        launch: What the launches of a step share.
        mask_token: What a drafter reads where it is to fill in.
    """
    ring_size = requests.ring.shape[1]
    if ring_size & (ring_size - 1):
        raise ValueError(f"accept: the ring's size must be a power of two, found {ring_size}")
    num_stops, thresholds = requests.stop_ids.shape[1], requests.thresholds
    _accept_kernel[(1,)](
        input_ids,
        sampled,
        rows.num_rows,
        rows.num_requests,
        rows.row_start,
        rows.row_count,
        rows.row_request,
        rows.positions,
        row_seeds,
        row_temperatures,
        requests.remaining,
        requests.num_drafts,
        requests.seeds,
        requests.temperatures,
        requests.stop_ids,
        requests.ring,
        requests.emitted,
        requests.accepted,
        requests.drafted,
        requests.seeds if thresholds is None else thresholds,
        requests.seeds if requests.clock is None else requests.clock,
        mask_token,
        RING=ring_size,
        NUM_STOPS=num_stops,
        STOP_BLOCK=power_of_two(num_stops),
        NUM_SETS=0 if thresholds is None else len(thresholds),
        STREAM=SYNTHETIC_STREAM,
        TILE=launch.tile_rows,
        RATES=0 if thresholds is None else thresholds.shape[1],
        CLOCK=requests.clock is not None and requests.clock.is_cuda,
        PDL=launch.pdl,
        **launch.options(1),
    )
