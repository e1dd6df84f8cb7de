"""Thinking, token by token: whether it is open, how long it is, and a budget that closes it.

The budget is soft, then hard. In its last eighth the thinking is closed after the first token that ends a
line, so that a thought is not cut in its middle; at its end it is closed wherever it is. Closing means that
the closing tag's own token is the only one that can come. Thinking that is reopened before the answer has
begun goes on counting; once it has, an opening tag is text, as it is for the reply parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lean_laguna.models.chat_template import ASSISTANT_START, THINK_END, THINK_START
from lean_laguna.models.tokenizer import Tokenizer

SOFT_SHARE = 8
"""The last 1 / this of a budget is soft."""
MOST_ROWS = 1024
"""No block has so many rows: a budget further away than this cannot matter to the next one."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tokens that thinking is made of.

    Attributes:
        start_id: ``<think>``.
        end_id: ``</think>``.
        turn_id: ``<assistant>``, which no open thinking survives; None where it is no token.
        blank_ids: Tokens of white space alone.
        line_end_ids: Tokens whose text ends a line, blanks after it aside.
    """

    start_id: int
    end_id: int
    turn_id: int | None = None
    blank_ids: frozenset[int] = frozenset()
    line_end_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ThinkTags | None:
        """Return a tokenizer's tags, or None where they are no tokens: such a model does not think."""
        start, end = tokenizer.token_to_id(THINK_START), tokenizer.token_to_id(THINK_END)
        if start is None or end is None:
            return None
        texts = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        return cls(
            start,
            end,
            tokenizer.token_to_id(ASSISTANT_START),
            frozenset(i for i, text in enumerate(texts) if text and not text.strip()),
            frozenset(i for i, text in enumerate(texts) if text.rstrip(b" \t").endswith(b"\n")),
        )

    def is_open_after(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether a prompt leaves the thinking open."""
        for token in reversed(prompt_token_ids):
            if token == self.start_id:
                return True
            if token in (self.end_id, self.turn_id):
                return False
        return False


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where a completion's thinking stands; immutable.

    Attributes:
        is_open: Whether the next token is part of it.
        num_tokens: Its tokens so far, opening tags that it brought along included.
        ends_line: Whether its last token ended a line.
        has_answer: Whether the answer has begun, after which nothing opens it again.
    """

    is_open: bool
    num_tokens: int = 0
    ends_line: bool = False
    has_answer: bool = False

    def after(self, token: int, tags: ThinkTags) -> Thinking:
        """Return where it stands after one more token."""
        if self.has_answer:
            return self
        if self.is_open:
            if token == tags.end_id:
                return Thinking(False, self.num_tokens)
            return Thinking(True, self.num_tokens + 1, token in tags.line_end_ids)
        if token == tags.start_id:
            return Thinking(True, self.num_tokens)
        if token == tags.end_id or token in tags.blank_ids:
            return self
        return Thinking(False, self.num_tokens, has_answer=True)


class ThinkingBudget:
    """Closes the thinking of one completion; a `Constraint`."""

    def __init__(self, budget: int, tags: ThinkTags, prompt_token_ids: Sequence[int]):
        """Start a completion.

        Args:
            budget: Most tokens of thinking, at least 0.
            tags: The tokenizer's.
            prompt_token_ids: Tells whether the thinking is open.
        """
        self._hard = budget
        self._soft = budget - budget // SOFT_SHARE
        self._tags = tags
        self._thinking = Thinking(tags.is_open_after(prompt_token_ids))

    @property
    def is_active(self) -> bool:
        """True where the next block may reach the budget."""
        return not self._thinking.has_answer and self._thinking.num_tokens + MOST_ROWS >= self._soft

    @property
    def failure(self) -> None:
        """Never: the tag that closes the thinking can always come."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens."""
        for token in token_ids:
            self._thinking = self._thinking.after(token, self._tags)

    def restrict(self, scores: NDArray[np.float64], draft_token_ids: Sequence[int], first_row: int) -> None:
        """Leave only the closing tag where the thinking must end; see `Constraint.restrict`."""
        thinking = self._thinking
        for index in range(first_row + len(scores)):
            if index and (draft := draft_token_ids[index - 1]) >= 0:
                thinking = thinking.after(draft, self._tags)
            if index >= first_row and self._must_close(thinking):
                row = scores[index - first_row]
                row[:] = -np.inf
                row[self._tags.end_id] = 0

    def forced_tokens(self, limit: int) -> list[int]:
        """Return the closing tag where it must come now."""
        return [self._tags.end_id] if limit and self._must_close(self._thinking) else []

    def _must_close(self, thinking: Thinking) -> bool:
        reached = thinking.num_tokens >= (self._soft if thinking.ends_line else self._hard)
        return thinking.is_open and reached
