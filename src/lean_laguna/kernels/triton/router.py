"""Top-k routing from router logits, inside whichever kernel needs it.

Every program of the routed experts' first kernel routes for itself: a few hundred bytes of logits and less
than a microsecond, against the round trip through memory that a separate routing step would cost between two
streams. Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaTopKRouter (sigmoid, bias for the
choice only, weights divided by their sum and rounded to the model's dtype). Ties go to the lower expert id.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_bits(x):
    """Map float32 to int32 so that order is kept; NaN sorts by its bits, -0 below +0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def route(
    scores_ptr,
    bias_ptr,
    live,
    softcap,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    A: tl.constexpr,
    COLS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Choose A experts for each live row.

    Args:
        scores_ptr: [COLS, E] router logits in the model's dtype: two bytes each, so that one warp holds a row
            of 256.
        bias_ptr: [E] float32 correction, for the choice only.
        live: [COLS] which rows count; the others choose nothing.
        softcap: tanh bound of the logits; unused unless SOFTCAP.
        E: Experts.
        E_BLOCK: Power of two, at least E.
        A: Experts a token.
        COLS: Token rows.
        SOFTCAP: Bound the logits.
        NORM_TOPK: Divide the weights by their sum.
        DTYPE: Weights are rounded to it.

    Returns:
        (chosen [COLS, E_BLOCK] bool, weights [COLS, E_BLOCK] float32, 0 where not chosen, ids [COLS, E_BLOCK]
        int32: columns 0 to A - 1 hold the choice in descending order).
    """
    e = tl.arange(0, E_BLOCK)[None, :]
    col = tl.arange(0, COLS)[:, None]
    known = live[:, None] & (e < E)
    logits = tl.load(scores_ptr + col * E + e, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + tl.arange(0, E_BLOCK), mask=tl.arange(0, E_BLOCK) < E, other=0.0)
    if SOFTCAP:
        double = tl.exp(2.0 * logits / softcap)
        logits = softcap * (1.0 - 2.0 / (double + 1.0))
    sigmoid = 1.0 / (1.0 + tl.exp(-logits))
    LOWEST: tl.constexpr = -2147483648
    key = tl.where(known, ordered_bits(sigmoid + bias[None, :]), LOWEST)
    chosen = tl.zeros((COLS, E_BLOCK), tl.int32)
    ids = tl.zeros((COLS, E_BLOCK), tl.int32)
    for a in tl.static_range(A):
        best = tl.max(key, 1)[:, None]
        first = tl.min(tl.where((key == best) & known, e, E_BLOCK), 1)[:, None]
        hit = e == first
        chosen = tl.where(hit, 1, chosen)
        key = tl.where(hit, LOWEST, key)
        ids = tl.where(e == a, first, ids)
    taken = chosen > 0
    weights = tl.where(taken, sigmoid, 0.0)
    if NORM_TOPK:
        weights = weights / tl.where(live, tl.sum(weights, 1), 1.0)[:, None]
    weights = tl.where(taken, weights.to(DTYPE).to(tl.float32), 0.0)
    return taken, weights, ids
