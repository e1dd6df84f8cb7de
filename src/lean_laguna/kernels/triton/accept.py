"""The end of a speculative step on the device: what is accepted, what goes out, the next rows.

Nothing comes back to the host but tokens through a ring, so steps can be launched ahead. Rejected rows need
no rollback: their keys lie past the new position and are overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch, power_of_two
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
        eos_ids: [n] int32 tokens that end a request; it keeps the one that ended it.
        ring: [MAX_ROWS, size] int32 emitted tokens, host memory that the device sees; size a power of two.
        emitted: [MAX_ROWS] int32 tokens ever emitted, beside the ring.
        accepted: [MAX_ROWS] int32 draft tokens ever accepted.
        drafted: [MAX_ROWS] int32 draft tokens ever verified.
    """

    remaining: Tensor
    num_drafts: Tensor
    seeds: Tensor
    temperatures: Tensor
    eos_ids: Tensor
    ring: Tensor
    emitted: Tensor
    accepted: Tensor
    drafted: Tensor


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
    eos_ptr,
    ring_ptr,
    emitted_ptr,
    accepted_ptr,
    drafted_ptr,
    mask_token,
    RING: tl.constexpr,
    NUM_EOS: tl.constexpr,
    EOS_BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL, False)
    i = tl.arange(0, MAX)
    ids = tl.load(input_ids_ptr + i)
    sampled = tl.load(sampled_ptr + i)
    eos_at = tl.arange(0, EOS_BLOCK)
    eos = tl.load(eos_ptr + eos_at, mask=eos_at < NUM_EOS, other=-1)
    is_eos = tl.max((sampled[:, None] == eos[None, :]).to(tl.int32), 1) > 0
    position = tl.load(positions_ptr + i)
    new_ids = tl.full((MAX,), 0, tl.int32) + mask_token
    new_positions = tl.zeros((MAX,), tl.int32)
    new_request = tl.zeros((MAX,), tl.int32)
    next_row = 0
    for request in tl.range(0, tl.load(num_requests_ptr), num_stages=1):
        start = tl.load(row_start_ptr + request)
        count = tl.load(row_count_ptr + request)
        left = tl.load(remaining_ptr + request)
        j = i - start
        # Row j's token is draft j + 1's judge. The first draft that differs ends the chain.
        judged = tl.sum(tl.where((i[None, :] == i[:, None] + 1), ids[None, :], 0), 1)
        wrong = (j >= 0) & (j < count - 1) & (sampled != judged)
        num_accepted = tl.min(tl.where(wrong, j, count - 1), 0)
        ends = (j >= 0) & (j <= num_accepted) & is_eos
        first_end = tl.min(tl.where(ends, j, MAX), 0)
        num_out = tl.minimum(tl.minimum(num_accepted + 1, first_end + 1), left)
        num_out = tl.where(count > 0, num_out, 0)
        done_before = tl.load(emitted_ptr + request)
        goes_out = (j >= 0) & (j < num_out)
        tl.store(ring_ptr + request * RING + (done_before + j) % RING, sampled, mask=goes_out)
        left = tl.where(first_end < num_out, 0, left - num_out)
        anchor = tl.sum(tl.where(j == num_out - 1, sampled, 0), 0)
        at = tl.sum(tl.where(i == start, position, 0), 0) + num_out
        tl.store(remaining_ptr + request, left)
        if count > 0:
            tl.store(
                accepted_ptr + request, tl.load(accepted_ptr + request) + tl.minimum(num_accepted, num_out)
            )
            tl.store(drafted_ptr + request, tl.load(drafted_ptr + request) + count - 1)
        # The host reads the count after the tokens.
        tl.debug_barrier()
        tl.atomic_xchg(emitted_ptr + request, done_before + num_out, sem="release", scope="sys")
        # A request's last token needs no draft after it.
        new_count = tl.where(
            (count > 0) & (left > 0), 1 + tl.minimum(tl.load(num_drafts_ptr + request), left - 1), 0
        )
        new_count = tl.minimum(new_count, MAX - next_row)
        mine = (i >= next_row) & (i < next_row + new_count)
        new_ids = tl.where(i == next_row, tl.where(new_count > 0, anchor, new_ids), new_ids)
        new_positions = tl.where(mine, at + i - next_row, new_positions)
        new_request = tl.where(mine, request, new_request)
        tl.store(row_start_ptr + request, tl.minimum(next_row, MAX - 1))
        tl.store(row_count_ptr + request, new_count)
        next_row += new_count
    tl.store(input_ids_ptr + i, new_ids)
    tl.store(positions_ptr + i, new_positions)
    tl.store(row_request_ptr + i, new_request)
    tl.store(row_seeds_ptr + i, tl.load(seeds_ptr + new_request))
    tl.store(row_temperatures_ptr + i, tl.load(temperatures_ptr + new_request))
    tl.store(num_rows_ptr, next_row)


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

    A draft is accepted while it equals the target's own token; the first event inside the block wins (a stop
    token, the length limit). A finished request keeps its entry with no rows.

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
    num_eos = requests.eos_ids.shape[0]
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
        requests.eos_ids,
        requests.ring,
        requests.emitted,
        requests.accepted,
        requests.drafted,
        mask_token,
        RING=ring_size,
        NUM_EOS=num_eos,
        EOS_BLOCK=power_of_two(max(1, num_eos)),
        MAX=MAX_ROWS,
        PDL=launch.pdl,
        **launch.options(1),
    )
