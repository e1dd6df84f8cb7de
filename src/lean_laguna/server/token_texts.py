"""The text that each token of a completion adds, for views that show tokens one by one."""

from __future__ import annotations

from lean_laguna.models.tokenizer import IncrementalDetokenizer, Tokenizer
from lean_laguna.server.stream import Delta


class TokenTexts:
    """Texts of one completion's tokens.

    All together they are the completion's text and, where a stop text cut it, what was cut.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)

    def of(self, delta: Delta) -> list[str]:
        """Return one text per token; a character of several tokens belongs to its last one."""
        texts = [self._detokenizer.push((token,)) for token in delta.token_ids]
        if delta.finish_reason is not None and texts:
            texts[-1] += self._detokenizer.flush()
        return texts
