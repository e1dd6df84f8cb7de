"""Streamed text with the tokens of accepted drafts in colour."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from lean_laguna.core.types import CompletionOutput, SamplingParams, SpeculationStats
from lean_laguna.models.tokenizer import IncrementalDetokenizer, Tokenizer

DRAFT_STYLE = "green"
# What a model writes must not steer the terminal: control characters are shown as their symbols.
_SYMBOLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_SYMBOLS |= {0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}


def harmless(text: str) -> str:
    """Return text with control characters other than line break and tab made visible."""
    return text.translate(_SYMBOLS)


def acceptance_text(stats: SpeculationStats) -> str | None:
    """Return what a step with drafts brought, and how many of the steps had any; None where none had."""
    length = stats.mean_acceptance_length
    if length is None:
        return None
    if not stats.num_steps:  # another's server may not count them
        return f"{length:.2f} tokens a step with drafts"
    if stats.num_steps <= stats.num_drafts:
        return f"{length:.2f} tokens a step"
    return f"{length:.2f} tokens a step with drafts ({stats.num_drafts} of {stats.num_steps} steps)"


class DraftColours:
    """Turns the growing output of one completion into pieces of text, each with or without the draft style.

    The pieces always add up to the completion's own text: where a stop text cut it, or where the end of it
    may still become one, nothing more is shown.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._num_tokens = 0
        self._pending: list[tuple[str, bool]] = []
        self._num_chars = 0

    def new_pieces(self, completion: CompletionOutput) -> list[tuple[str, bool]]:
        """Return (text, came from a draft) for what the completion says beyond the last call."""
        for index in range(self._num_tokens, len(completion.token_ids)):
            text = self._detokenizer.push(completion.token_ids[index : index + 1])
            is_draft = index < len(completion.is_draft_token) and completion.is_draft_token[index]
            self._pending.append((text, is_draft))
        self._num_tokens = len(completion.token_ids)
        room = len(completion.text) - self._num_chars
        pieces: list[tuple[str, bool]] = []
        while self._pending and room > 0:
            text, is_draft = self._pending.pop(0)
            pieces.append((text[:room], is_draft))
            if len(text) > room:
                self._pending.insert(0, (text[room:], is_draft))
            room -= len(text)
        self._num_chars += sum(len(text) for text, _ in pieces)
        return pieces


class StreamPrinter:
    """Prints one completion as it grows."""

    def __init__(self, console: Console, tokenizer: Tokenizer, params: SamplingParams, *, show_drafts: bool):
        self._console = console
        self._colours = DraftColours(tokenizer, params) if show_drafts and console.is_terminal else None
        self._num_chars = 0

    def show(self, completion: CompletionOutput) -> None:
        """Print what is new."""
        if self._colours is None:
            new = completion.text[self._num_chars :]
            self._console.file.write(harmless(new) if self._console.is_terminal else new)
            self._num_chars = len(completion.text)
        else:
            line = Text()
            for text, is_draft in self._colours.new_pieces(completion):
                line.append(harmless(text), style=DRAFT_STYLE if is_draft else "")
            self._console.print(line, end="", soft_wrap=True, highlight=False)
        self._console.file.flush()
