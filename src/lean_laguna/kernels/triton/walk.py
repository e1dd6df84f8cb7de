"""A DSpark drafter's walk on the device: each draft from the block's logits and a bias by the token before.

One launch a draft, for all requests at once: columns are rows of the step, those whose turn it is are live.
A row's best token so far is one 64-bit word, its score above its id, so programs need no second pass. Drafts
are drawn as ``head`` draws: the noise of seed, position and token.

With a confidence head, each launch also says how likely its draft is to be accepted, in a program of its own
beside the others: that follows from the block and the token before. So the next launch knows whether more
drafts of a request can pay, and does nothing where they cannot.

Source: DSpark (arXiv 2607.05147), the vanilla Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.accept import SYNTHETIC_STREAM, synthetic_set
from lean_laguna.kernels.triton.formats import format_of, operand
from lean_laguna.kernels.triton.head import gumbel
from lean_laguna.kernels.triton.launch import MAX_ROWS, WIDE, Launch, cdiv, is_interpreting, power_of_two
from lean_laguna.kernels.triton.primitives import load_weight_tile, wait_for_inputs, wait_with_rows
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import SparkWeights

LEAST = -(1 << 63)
"""Word of a row that nothing has been found for."""


@dataclass(frozen=True)
class Walk:
    """Buffers of the walk.

    Attributes:
        logits: [most, V'] float32 of the block; the bias is added in place where somebody filters them.
        words: [MAX_ROWS] int64 best token of each row: score in the upper half, complement of its id below.
    """

    logits: Tensor
    words: Tensor

    @classmethod
    def allocate(cls, vocab_size: int, device: torch.device | str, most_rows: int = WIDE) -> Walk:
        """Return buffers for a drafter of so many words, and logits of so many rows."""
        return cls(
            torch.zeros(most_rows, vocab_size, device=device),
            torch.zeros(MAX_ROWS, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class Chances:
    """How likely drafts are to be accepted, and when that is too little to draft on.

    Attributes:
        own: [MAX_ROWS] float32 the part of each row's confidence logit that the block decides.
        reached: [MAX_ROWS] float32 chance that each row's draft and all before it are accepted.
        given: [MAX_ROWS] float32 chance that it is if all before it are; -1 where none was made.
        least: [1] float32 what the chance to get to the next draft and past it must be, as far as this one
            tells, for it to be made; at most 1, 0 for all.
        thresholds: [n, MAX_ROWS] int64 of synthetic acceptance, or None: then chances are its rates.
        request_seeds: [MAX_ROWS] int64, with ``thresholds``.
    """

    own: Tensor
    reached: Tensor
    given: Tensor
    least: Tensor
    thresholds: Tensor | None = None
    request_seeds: Tensor | None = None


@triton.jit
def to_word(value, token):
    """Pack a float32 score and an id so that a larger word is a higher score, or the same and a lower id."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def to_token(word):
    """Return the id in a word, int32."""
    return (0xFFFFFFFF - (word & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def token_before(ids_ptr, words_ptr, map_ptr, row, index, MAP: tl.constexpr):
    """Return the token before each row's: the request's anchor, or the draft of the row before."""
    anchor = tl.load(ids_ptr + row - 1, mask=index == 1, other=0)
    draft = to_token(tl.load(words_ptr + row - 1, mask=index > 1, other=0xFFFFFFFF))
    if MAP:
        draft += tl.load(map_ptr + draft, mask=index > 1, other=0).to(tl.int32)
    return tl.where(index == 1, anchor, draft)


@triton.jit
def _synthetic_chance(
    thresholds_ptr,
    request_seeds_ptr,
    request,
    anchor,
    index,
    live,
    RATES: tl.constexpr,
    NUM_SETS: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Return the chance of each row's draft by the rates that its block draws."""
    zero = tl.zeros(anchor.shape, tl.int32)
    _, word, _, _ = tl.philox(tl.load(request_seeds_ptr + request), anchor, zero, zero + STREAM, zero)
    at = synthetic_set(word, NUM_SETS) * RATES + index - 1
    reached = tl.load(thresholds_ptr + at, mask=live, other=0).to(tl.float32)
    before = tl.load(thresholds_ptr + at - 1, mask=live & (index > 1), other=1 << 32).to(tl.float32)
    return tl.where(before > 0.0, reached / tl.where(before > 0.0, before, 1.0), 0.0)


@triton.jit
def _start_kernel(
    words_ptr,
    hidden_ptr,
    confidence_ptr,
    confidence_bias_ptr,
    own_ptr,
    given_ptr,
    num_rows_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    num_rows = wait_with_rows(num_rows_ptr, PDL, True)
    tl.store(words_ptr + row, LOWEST)
    if CONFIDENCE:
        tl.store(given_ptr + row, -1.0)
        d = tl.arange(0, BLOCK_D)
        mask = d < tl.where(row < num_rows, D, 0)
        slot = tl.maximum(row - SHIFT, 0)  # the first row has no draft
        h = tl.load(hidden_ptr + slot * D + d, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(confidence_ptr + d, mask=mask, other=0.0).to(tl.float32)
        tl.store(own_ptr + row, tl.sum(h * weight, 0) + tl.load(confidence_bias_ptr).to(tl.float32))


@triton.jit(do_not_specialize=["step"])
def _walk_kernel(
    logits_ptr,
    before_ptr,
    bias,
    words_ptr,
    ids_ptr,
    map_ptr,
    seeds_ptr,
    temperatures_ptr,
    positions_ptr,
    row_start_ptr,
    row_request_ptr,
    num_rows_ptr,
    own_ptr,
    after_ptr,
    scales_ptr,
    offsets_ptr,
    given_ptr,
    reached_ptr,
    least_ptr,
    thresholds_ptr,
    request_seeds_ptr,
    step,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COLS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    MAP: tl.constexpr,
    STORE: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    RATES: tl.constexpr,
    NUM_SETS: tl.constexpr,
    STREAM: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0) // GROUPS * BLOCK_N
    n = block + tl.arange(0, BLOCK_N)
    inside = n < N
    col = tl.program_id(0) % GROUPS * COLS + tl.arange(0, COLS)
    # Where rows stand is known before the kernel before this one is through; what it found is not.
    request = tl.load(row_request_ptr + col)
    index = col - tl.load(row_start_ptr + request)
    index = tl.where((col < tl.load(num_rows_ptr)) & (index == step), index, 0)
    wait_for_inputs(PDL, True)
    last = tl.full((COLS,), 1.0, tl.float32)
    reached = last
    if CONFIDENCE:
        last = tl.load(given_ptr + col - 1, mask=index > 1, other=1.0)
        reached = tl.load(reached_ptr + col - 1, mask=index > 1, other=1.0)
        # The next draft goes on as likely as the last did; one that was not made, of chance -1, ends it.
        index = tl.where((last >= 0.0) & (reached * last >= tl.load(least_ptr)), index, 0)
    live = index > 0
    if CONFIDENCE & (block >= N):
        if tl.max(index, 0) > 0:
            if NUM_SETS > 0:
                anchor = tl.load(positions_ptr + col) - index
                chance = _synthetic_chance(
                    thresholds_ptr, request_seeds_ptr, request, anchor, index, live, RATES, NUM_SETS, STREAM
                )
            else:
                token = token_before(ids_ptr, words_ptr, map_ptr, col, index, MAP)
                guess = tl.load(own_ptr + col, mask=live, other=0.0)
                guess += tl.load(after_ptr + token, mask=live, other=0.0)
                temperature = tl.load(temperatures_ptr + col, mask=live, other=0.0)
                at = (temperature > 0.0).to(tl.int32) * RATES + index - 1
                guess = guess * tl.load(scales_ptr + at, mask=live, other=1.0)
                guess += tl.load(offsets_ptr + at, mask=live, other=0.0)
                chance = 1.0 / (1.0 + tl.exp(-guess))
            tl.store(given_ptr + col, chance, mask=live)
            tl.store(reached_ptr + col, reached * chance, mask=live)
    elif tl.max(index, 0) > 0:
        before = token_before(ids_ptr, words_ptr, map_ptr, col, index, MAP).to(tl.int64)
        acc = tl.zeros((BLOCK_N, COLS), tl.float32)
        rows = tl.minimum(n, N - 1).to(tl.int64)
        DTYPE: tl.constexpr = before_ptr.dtype.element_ty
        for start in tl.static_range(0, R, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            w = load_weight_tile(bias, rows, start, R, BLOCK_N, BLOCK_R, 1, R % BLOCK_R == 0, FORMAT, DTYPE)
            x = tl.load(
                before_ptr + before[None, :] * R + r[:, None],
                mask=live[None, :] & (r < R)[:, None],
                other=0.0,
            )
            acc = tl.dot(w, x, acc)
        at = (col - SHIFT)[None, :].to(tl.int64) * N + n[:, None]
        mask = live[None, :] & inside[:, None]
        value = tl.load(logits_ptr + at, mask=mask, other=0.0) + acc
        if STORE:
            tl.store(logits_ptr + at, value, mask=mask)
        temperature = tl.load(temperatures_ptr + col, mask=live, other=0.0)
        if tl.max(temperature, 0) > 0.0:
            seed = tl.load(seeds_ptr + col, mask=live, other=0)
            position = tl.load(positions_ptr + col, mask=live, other=0)
            hot = (temperature > 0.0)[None, :]
            noise = gumbel(seed[None, :], position[None, :], n[:, None] + tl.zeros((BLOCK_N, COLS), tl.int32))
            value = tl.where(hot, value / tl.where(hot, temperature[None, :], 1.0) + noise, value)
        value = tl.where(inside[:, None], value, float("-inf"))
        best = tl.max(value, 0)
        first = tl.min(tl.where(value == best[None, :], n[:, None], N), 0)
        tl.atomic_max(words_ptr + col, to_word(best, first), mask=live, sem="relaxed")


@triton.jit
def _finish_kernel(
    words_ptr,
    ids_ptr,
    map_ptr,
    row_start_ptr,
    row_request_ptr,
    num_rows_ptr,
    COLS: tl.constexpr,
    LOWEST: tl.constexpr,
    MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * COLS + tl.arange(0, COLS)
    num_rows = wait_with_rows(num_rows_ptr, PDL, True)
    index = row - tl.load(row_start_ptr + tl.load(row_request_ptr + row))
    word = tl.load(words_ptr + row)
    is_made = (row < num_rows) & (index > 0) & (word > LOWEST)
    token = to_token(word)
    if MAP:
        token += tl.load(map_ptr + token, mask=is_made, other=0).to(tl.int32)
    tl.store(ids_ptr + row, token, mask=is_made)


def start_walk(
    weights: SparkWeights,
    walk: Walk,
    rows: Rows,
    launch: Launch,
    *,
    hidden: Tensor | None = None,
    chances: Chances | None = None,
) -> None:
    """Forget what an earlier walk found, and note what the block alone says of its drafts' chances.

    Args:
        weights: Of the heads.
        walk: To be walked.
        rows: Where the rows stand.
        launch: What the launches of a step share.
        hidden: [MAX_ROWS, D] of the block, after the final norm; with ``chances``.
        chances: Where the drafts' chances will go; None for a drafter that says none.
    """
    confidence, bias, none = weights.confidence, weights.confidence_bias, walk.words
    D = 1 if hidden is None else hidden.shape[1]
    _start_kernel[(launch.cols,)](
        walk.words,
        none if hidden is None else hidden,
        none if confidence is None else confidence,
        none if bias is None else bias,
        none if chances is None else chances.own,
        none if chances is None else chances.given,
        rows.num_rows,
        D=D,
        BLOCK_D=power_of_two(D),
        LOWEST=LEAST,
        SHIFT=int(weights.is_shifted),
        CONFIDENCE=chances is not None,
        PDL=launch.pdl,
        **launch.options(4),
    )


def walk_on(
    step: int,
    weights: SparkWeights,
    walk: Walk,
    input_ids: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    rows: Rows,
    launch: Launch,
    *,
    chances: Chances | None = None,
    token_map: Tensor | None = None,
    keeps_logits: bool = False,
) -> None:
    """Find draft number ``step`` of every request that wants so many, into ``walk.words``.

    Args:
        step: From 1; the drafts before it are found.
        weights: Of the heads.
        walk: Logits of the block, and what was found.
        input_ids: [MAX_ROWS] int32, of which each request's anchor is read.
        seeds: [MAX_ROWS] int64 of each row's request.
        temperatures: [MAX_ROWS] float32, 0 for argmax.
        rows: Where the rows stand: a request's anchor, then its drafts.
        launch: What the launches of a step share.
        chances: Where the drafts' chances go, and when to stop; None for a drafter that says none.
        token_map: [V'] what to add to a reduced vocabulary's id to get the target's, or None.
        keeps_logits: Leave the logits with the bias added.
    """
    N, R = weights.bias.shape
    block_n = 512 if is_interpreting() else 64
    after, thresholds, none = weights.after, None, walk.words
    if chances is not None:
        assert after is not None
        thresholds = chances.thresholds
    _walk_kernel[((cdiv(N, block_n) + (chances is not None)) * launch.num_groups,)](
        walk.logits,
        weights.before,
        operand(weights.bias),
        walk.words,
        input_ids,
        input_ids if token_map is None else token_map,
        seeds,
        temperatures,
        rows.positions,
        rows.row_start,
        rows.row_request,
        rows.num_rows,
        none if chances is None else chances.own,
        none if after is None else after,
        weights.scales,
        weights.offsets,
        none if chances is None else chances.given,
        none if chances is None else chances.reached,
        none if chances is None else chances.least,
        none if thresholds is None else thresholds,
        none if chances is None or chances.request_seeds is None else chances.request_seeds,
        step,
        N=N,
        R=R,
        BLOCK_N=block_n,
        BLOCK_R=max(16, min(128, power_of_two(R))),
        COLS=launch.group_cols,
        GROUPS=launch.num_groups,
        SHIFT=int(weights.is_shifted),
        MAP=token_map is not None,
        STORE=keeps_logits,
        CONFIDENCE=chances is not None,
        RATES=(weights.scales if thresholds is None else thresholds).shape[1],
        NUM_SETS=0 if thresholds is None else len(thresholds),
        STREAM=SYNTHETIC_STREAM,
        FORMAT=format_of(weights.bias),
        PDL=launch.pdl,
        **launch.options(4),
    )


def finish_walk(
    walk: Walk, input_ids: Tensor, rows: Rows, launch: Launch, *, token_map: Tensor | None = None
) -> None:
    """Write the drafts that were made into ``input_ids``.

    Args:
        walk: What was found.
        input_ids: [MAX_ROWS] int32; each request's anchor stays.
        rows: Where the rows stand.
        launch: What the launches of a step share.
        token_map: As for ``walk_on``.
    """
    _finish_kernel[(launch.num_groups,)](
        walk.words,
        input_ids,
        input_ids if token_map is None else token_map,
        rows.row_start,
        rows.row_request,
        rows.num_rows,
        COLS=launch.group_cols,
        LOWEST=LEAST,
        MAP=token_map is not None,
        PDL=launch.pdl,
        **launch.options(1),
    )
