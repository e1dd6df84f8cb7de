"""A DSpark drafter's walk on the device: each draft from the block's logits and a bias by the token before.

One launch a draft, for all requests at once: columns are rows of the step, those whose turn it is are live.
A row's best token so far is one 64-bit word, its score above its id, so programs need no second pass. Drafts
are drawn as ``head`` draws: the noise of seed, position and token.

Source: DSpark (arXiv 2607.05147), the vanilla Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.formats import format_of, operand
from lean_laguna.kernels.triton.head import gumbel
from lean_laguna.kernels.triton.launch import MAX_ROWS, WIDE, Launch, cdiv, is_interpreting, power_of_two
from lean_laguna.kernels.triton.primitives import load_weight_tile, wait_with_rows
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
        guesses: [MAX_ROWS] float32 confidence logit of each row's draft.
    """

    logits: Tensor
    words: Tensor
    guesses: Tensor

    @classmethod
    def allocate(cls, vocab_size: int, device: torch.device | str, most_rows: int = WIDE) -> Walk:
        """Return buffers for a drafter of so many words, and logits of so many rows."""
        return cls(
            torch.zeros(most_rows, vocab_size, device=device),
            torch.zeros(MAX_ROWS, dtype=torch.int64, device=device),
            torch.zeros(MAX_ROWS, device=device),
        )


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
def token_before(ids_ptr, words_ptr, map_ptr, row, index, live, MAP: tl.constexpr):
    """Return the token before each row's: the request's anchor, or the draft of the row before."""
    anchor = tl.load(ids_ptr + row - 1, mask=live & (index == 1), other=0)
    draft = to_token(tl.load(words_ptr + row - 1, mask=live & (index > 1), other=0xFFFFFFFF))
    if MAP:
        draft += tl.load(map_ptr + draft, mask=live & (index > 1), other=0).to(tl.int32)
    return tl.where(index == 1, anchor, draft)


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
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) // GROUPS * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    col = tl.program_id(0) % GROUPS * COLS + tl.arange(0, COLS)
    num_rows = wait_with_rows(num_rows_ptr, PDL, True)
    index = col - tl.load(row_start_ptr + tl.load(row_request_ptr + col))
    live = (col < num_rows) & (index == step)
    if tl.max(live.to(tl.int32), 0) > 0:
        before = token_before(ids_ptr, words_ptr, map_ptr, col, index, live, MAP).to(tl.int64)
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
    hidden_ptr,
    before_ptr,
    confidence_ptr,
    confidence_bias_ptr,
    guesses_ptr,
    words_ptr,
    ids_ptr,
    map_ptr,
    row_start_ptr,
    row_request_ptr,
    num_rows_ptr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHIFT: tl.constexpr,
    MAP: tl.constexpr,
    CONFIDENCE: tl.constexpr,
    WITH_MARKOV: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    num_rows = wait_with_rows(num_rows_ptr, PDL, True)
    index = row - tl.load(row_start_ptr + tl.load(row_request_ptr + row))
    if (row < num_rows) & (index > 0):
        token = to_token(tl.load(words_ptr + row))
        if MAP:
            token += tl.load(map_ptr + token).to(tl.int32)
        tl.store(ids_ptr + row, token)
        if CONFIDENCE:
            d = tl.arange(0, BLOCK_D)
            h = tl.load(hidden_ptr + (row - SHIFT) * D + d, mask=d < D, other=0.0).to(tl.float32)
            weight = tl.load(confidence_ptr + d, mask=d < D, other=0.0).to(tl.float32)
            guess = tl.sum(h * weight, 0) + tl.load(confidence_bias_ptr).to(tl.float32)
            if WITH_MARKOV:
                r = tl.arange(0, BLOCK_R)
                before = token_before(ids_ptr, words_ptr, map_ptr, row, index, True, MAP).to(tl.int64)
                e = tl.load(before_ptr + before * R + r, mask=r < R, other=0.0).to(tl.float32)
                weight = tl.load(confidence_ptr + D + r, mask=r < R, other=0.0).to(tl.float32)
                guess += tl.sum(e * weight, 0)
            tl.store(guesses_ptr + row, guess)


def start_walk(walk: Walk) -> None:
    """Forget what an earlier walk found."""
    walk.words.fill_(LEAST)


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
        token_map: [V'] what to add to a reduced vocabulary's id to get the target's, or None.
        keeps_logits: Leave the logits with the bias added.
    """
    N, R = weights.bias.shape
    block_n = 512 if is_interpreting() else 64
    _walk_kernel[(cdiv(N, block_n) * launch.num_groups,)](
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
        FORMAT=format_of(weights.bias),
        PDL=launch.pdl,
        **launch.options(4),
    )


def finish_walk(
    weights: SparkWeights,
    walk: Walk,
    hidden: Tensor,
    input_ids: Tensor,
    rows: Rows,
    launch: Launch,
    *,
    token_map: Tensor | None = None,
) -> None:
    """Write the drafts into ``input_ids``, and how sure the drafter is of each into ``walk.guesses``.

    Args:
        weights: Of the heads.
        walk: What was found.
        hidden: [MAX_ROWS, D] of the block, after the final norm.
        input_ids: [MAX_ROWS] int32; all but each request's anchor are written.
        rows: Where the rows stand.
        launch: What the launches of a step share.
        token_map: As for ``walk_on``.
    """
    D, R = hidden.shape[1], weights.bias.shape[1]
    confidence = weights.confidence
    _finish_kernel[(launch.cols,)](
        hidden,
        weights.before,
        hidden if confidence is None else confidence,
        hidden if weights.confidence_bias is None else weights.confidence_bias,
        walk.guesses,
        walk.words,
        input_ids,
        input_ids if token_map is None else token_map,
        rows.row_start,
        rows.row_request,
        rows.num_rows,
        D=D,
        R=R,
        BLOCK_D=power_of_two(D),
        BLOCK_R=power_of_two(R),
        SHIFT=int(weights.is_shifted),
        MAP=token_map is not None,
        CONFIDENCE=confidence is not None,
        WITH_MARKOV=confidence is not None and len(confidence) > D,
        PDL=launch.pdl,
        **launch.options(4),
    )
