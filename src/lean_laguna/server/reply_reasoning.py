"""Where the thinking ends and the answer begins, read off the text as it comes.

Rules, the same however the text is cut:

- A reply whose prompt opened the thinking starts inside it; an opening tag that the model repeats is dropped.
- The first closing tag ends the thinking. While nothing but whitespace has followed, further closing tags are
  dropped (models repeat them) and an opening tag starts thinking again.
- Once the answer has begun, tags are text: an answer may be about them. Tool calls inside the thinking are
  thoughts, whether or not tools are on offer.
- In the layout of the early templates, which puts tags on lines of their own, the one line break beside each
  tag belongs to the tag.

Source: vLLM ``reasoning/poolside_v1_reasoning_parser.py`` (first closing tag, nothing stripped).
"""

from __future__ import annotations

from collections.abc import Sequence

from lean_laguna.models.chat_template import ASSISTANT_START, THINK_END, THINK_START
from lean_laguna.models.tokenizer import IncrementalDetokenizer, Tokenizer


def has_line_layout(rendered: str) -> bool:
    """Return whether a prompt ends as the early templates do, with the think tag on a line of its own."""
    return rendered.endswith((f"{ASSISTANT_START}\n{THINK_START}", f"{ASSISTANT_START}\n{THINK_END}"))


def held_back(text: str, tags: Sequence[str]) -> int:
    """Return the length of the longest tail of ``text`` that begins one of ``tags`` without completing it."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


class ReasoningSplitter:
    """Splits a reply's text into thinking and the rest.

    Attributes:
        is_thinking: Whether the text so far ends inside the thinking.
    """

    def __init__(self, starts_in_thinking: bool, *, line_layout: bool = False):
        """Start a reply.

        Args:
            starts_in_thinking: Whether the prompt left the thinking open.
            line_layout: Whether tags stand on lines of their own (`has_line_layout`).
        """
        self.is_thinking = starts_in_thinking
        self._line_layout = line_layout
        self._at_start = True  # of the thinking or of the answer: nothing but whitespace and tags so far
        self._blank: list[str] = []  # whitespace at that start
        self._buffer = ""

    @property
    def is_settled(self) -> bool:
        """True once the answer has begun: nothing can start the thinking again."""
        return not self.is_thinking and not self._at_start

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Take text.

        Returns:
            Pieces that became certain, none empty: whether it is thinking, and the text.
        """
        self._buffer += text
        pieces: list[tuple[bool, str]] = []
        while self._buffer:
            if self._at_start:
                goes_on = self._begin()
            else:
                goes_on = self._think(pieces) if self.is_thinking else self._answer(pieces)
            if not goes_on:
                break
        return pieces

    def finish(self) -> list[tuple[bool, str]]:
        """Return what was held back: at the end, half a tag is text."""
        text = "".join([*self._blank, self._buffer])
        self._blank, self._buffer = [], ""
        if self._at_start:
            text = self._without_line_break(text)
        return [(self.is_thinking, text)] if text else []

    def _begin(self) -> bool:
        """Drop tags at the start; return False where more text is needed to know."""
        body = self._buffer.lstrip()
        self._blank.append(self._buffer[: len(self._buffer) - len(body)])
        self._buffer = body
        if any(len(body) < len(tag) and tag.startswith(body) for tag in (THINK_START, THINK_END)):
            return False
        blank, self._blank = "".join(self._blank), []
        if body.startswith(THINK_START):
            self.is_thinking, self._buffer = True, body[len(THINK_START) :]
        elif body.startswith(THINK_END) and not self.is_thinking:
            self._buffer = body[len(THINK_END) :]
        else:
            self._at_start = False
            self._buffer = self._without_line_break(blank + body)
        return True

    def _think(self, pieces: list[tuple[bool, str]]) -> bool:
        thought, tag, rest = self._buffer.partition(THINK_END)
        if tag:
            if self._line_layout:
                thought = thought.removesuffix("\n")
            self.is_thinking, self._at_start, self._buffer = False, True, rest
        else:
            held = held_back(thought, (THINK_END,))
            if self._line_layout and thought[: len(thought) - held].endswith("\n"):
                held += 1
            thought, self._buffer = thought[: len(thought) - held], thought[len(thought) - held :]
        if thought:
            pieces.append((True, thought))
        return bool(tag)

    def _answer(self, pieces: list[tuple[bool, str]]) -> bool:
        pieces.append((False, self._buffer))
        self._buffer = ""
        return False

    def _without_line_break(self, text: str) -> str:
        return text.removeprefix("\n") if self._line_layout else text


class ReasoningCounter:
    """Counts the tokens of a reply's thinking, by the same split as its text.

    Attributes:
        num_tokens: Tokens after which the thinking was still open: closing tags are not among them.
    """

    def __init__(self, tokenizer: Tokenizer, starts_in_thinking: bool):
        self.num_tokens = 0
        self._splitter = ReasoningSplitter(starts_in_thinking)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)

    def push(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens, in order."""
        for token in token_ids:
            if self._splitter.is_settled:
                return
            self._splitter.push(self._detokenizer.push((token,)))
            self.num_tokens += self._splitter.is_thinking
