"""Which drafts stand, and where a run of tokens ends.

The target's sampled token decides at every position; a draft only saves the time to compute the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lean_laguna.core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of one verified block.

    Attributes:
        num_accepted_tokens: Drafts that equal the target's tokens, without a gap from the first on; the
            verifier's verdict, before any cut, as vLLM counts it.
        token_ids: Accepted drafts, then the bonus token: never empty.
    """

    num_accepted_tokens: int
    token_ids: list[int]


def accept(draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int]) -> Acceptance:
    """Accept drafts while each equals the target's token.

    Args:
        draft_token_ids: G drafts; a negative one, for no draft, is never accepted.
        sampled_token_ids: The target's tokens at the G drafted positions and the one after.
    """
    assert len(sampled_token_ids) == len(draft_token_ids) + 1
    num_accepted = 0
    for draft, sampled in zip(draft_token_ids, sampled_token_ids, strict=False):
        if draft < 0 or draft != sampled:
            break
        num_accepted += 1
    return Acceptance(num_accepted, list(sampled_token_ids[: num_accepted + 1]))


@dataclass(frozen=True, slots=True)
class Ending:
    """What can end a completion.

    Attributes:
        max_tokens: Output tokens at most, the context limit included; at least 1.
        min_tokens: Nothing but ``max_tokens`` ends it before more than so many output tokens are out.
        eos_token_ids: End-of-sequence tokens; empty under ``ignore_eos``.
        stop_token_ids: The request's stop tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: Collection[int] = ()
    stop_token_ids: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a run of tokens ends.

    Attributes:
        num_kept: Tokens of the run that are emitted, the ending one included.
        finish_reason: None where nothing ended.
        stop_reason: The stop token or stop text; None for end-of-sequence.
    """

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def cut_block(
    token_ids: Sequence[int],
    num_output_tokens: int,
    ending: Ending,
    stop_text: Callable[[int], str | None] | None = None,
) -> Cut:
    """Find the first event in a run of tokens, looking at each in order, as if they had come one by one.

    Where one token brings several, end-of-sequence goes before a stop token, that before a stop text, and
    that before the length limit, as in vLLM.

    Args:
        token_ids: New tokens.
        num_output_tokens: Output tokens before them.
        ending: What ends the completion.
        stop_text: Takes each kept token that is not itself a stop token, in order; returns the stop text it
            completes, or None.

    Returns:
        The cut.
    """
    for index, token in enumerate(token_ids):
        count = num_output_tokens + index + 1
        may_stop = count > ending.min_tokens
        if may_stop and token in ending.eos_token_ids:
            return Cut(index + 1, "stop")
        if may_stop and token in ending.stop_token_ids:
            return Cut(index + 1, "stop", token)
        text = stop_text(token) if stop_text is not None else None
        if may_stop and text is not None:
            return Cut(index + 1, "stop", text)
        if count >= ending.max_tokens:
            return Cut(index + 1, "length")
    return Cut(len(token_ids))
