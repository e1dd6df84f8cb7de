"""Drafter metrics, defined once. G is the number of draft tokens, L(a) how many are accepted at anchor a.

``tau_chain`` walks as greedy decoding does and equals the served mean acceptance length; ``eal`` averages
over all anchors alike and overstates it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def accepted_lengths(correct: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return L, the length of the correct prefix of each block, [N] int64.

    Args:
        correct: [N, G] bool, the slot's proposal equals the token.
        mask: [N, G] bool, the slot has a token to be compared with; None means all.
    """
    right = correct if mask is None else correct & mask
    return torch.cumprod(right.long(), dim=1).sum(1)


def run_lengths(match: Tensor, longest: int) -> Tensor:
    """Return how many True values in a row begin at each place, ``longest`` at most.

    Args:
        match: [B, S] bool.
        longest: Ceiling of the count.

    Returns:
        [B, S] int64.
    """
    windows = F.pad(match, (0, longest - 1)).unfold(1, longest, 1)  # [B, S, longest]
    return torch.cumprod(windows.long(), dim=-1).sum(-1)


def position_accuracy(correct: Tensor, mask: Tensor) -> list[float]:
    """Return the share of correct proposals [N, G] per slot, whatever came before."""
    return ((correct & mask).sum(0) / mask.sum(0).clamp_min(1)).tolist()


def conditional_accuracy(correct: Tensor, mask: Tensor) -> list[float]:
    """Return the share of correct proposals [N, G] per slot where the block's earlier slots were correct."""
    reached = (
        torch.cumprod(torch.cat([torch.ones_like(correct[:, :1]), correct[:, :-1]], 1).long(), 1).bool()
        & mask
    )
    return ((correct & reached).sum(0) / reached.sum(0).clamp_min(1)).tolist()


def expected_acceptance_length(accepted: Tensor) -> float:
    """Return ``eal``: mean of L + 1 over all anchors; ``accepted`` holds each L, [N]."""
    return float((accepted + 1).double().mean())


def chain_counts(
    accepted: Sequence[int], first_anchor: int, end: int, *, is_stopped: bool = False
) -> tuple[int, int]:
    """Walk one sequence as greedy decoding does.

    The first cycle's anchor is the token that the prefill emitted; each cycle emits the accepted drafts and
    one token of the target, and the last of these is the next anchor. Drafts that would pass ``end`` are not
    made.

    Args:
        accepted: L at each position of the sequence (unused before ``first_anchor``).
        first_anchor: Position of the first generated token.
        end: One past the last generated token.
        is_stopped: The last token ended the text by itself. Serving cannot know of it before: drafts past it
            are made, and counted, so that ``accepted`` must count them, too.

    Returns:
        Cycles (target steps that verified a draft) and accepted drafts.
    """
    cycles = drafts = 0
    anchor = first_anchor
    while anchor < end - 1 if is_stopped else anchor < end - 2:
        take = int(accepted[anchor]) if is_stopped else min(int(accepted[anchor]), end - anchor - 2)
        cycles += 1
        drafts += take
        anchor += take + 1
    return cycles, drafts


def tau_chain(accepted: Tensor, first_anchor: int, end: int) -> float:
    """Return the mean acceptance length, 1 + accepted drafts / cycles, over sequences walked one by one.

    Args:
        accepted: [B, S] L at each position.
        first_anchor: Position of the first generated token, the same in every sequence.
        end: One past the last generated token.
    """
    totals = [chain_counts(row, first_anchor, end) for row in accepted.tolist()]
    cycles = sum(c for c, _ in totals)
    return 1.0 + sum(d for _, d in totals) / max(1, cycles)


def distinct_ngram_share(tokens: Tensor, n: int = 8) -> float:
    """Return distinct n-grams over n-grams, averaged over sequences [B, S]: near 0 for loops, at most 1."""
    shares = []
    for row in tokens.tolist():
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        shares.append(len(set(grams)) / max(1, len(grams)))
    return sum(shares) / max(1, len(shares))
