"""A rule about the next token that needs more than counts of the past: a grammar, a thinking budget.

Like every sampling option it is a function of (request, tokens before the row), so a verified row gets what
plain decoding would give it, and speculation changes nothing. A constraint keeps what it needs of the
committed tokens, and looks at drafts only while it restricts rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Restricts the tokens of one completion; owned by its `SamplingRequest`, which commits every token."""

    @property
    def is_active(self) -> bool:
        """True where a row of the next block may be restricted."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the committed output ended before it was what it must be; None where it did not."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens, every one of them, in order."""
        ...

    def restrict(self, scores: NDArray[np.float64], draft_token_ids: Sequence[int], first_row: int) -> None:
        """Set the scores of tokens that must not come to -inf, in place; leaves each row some token.

        Args:
            scores: [R, V]; row r is for the token after the committed ones and the first ``first_row + r``
                drafts.
            draft_token_ids: At least ``first_row + R - 1`` drafts; rows after a draft that is negative, or
                that the constraint forbids, may stay as they are, since nothing stands there.
            first_row: Index of the first row within its block.
        """
        ...

    def forced_tokens(self, limit: int) -> list[int]:
        """Return tokens, at most ``limit``, that probably must come next: drafts that cost no drafter."""
        ...
