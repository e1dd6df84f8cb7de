"""A reply as a sequence of blocks: thinking, text, calls; what the block-wise APIs stream.

Source: the block structure shared by Anthropic's Messages and OpenAI's Responses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lean_laguna.server.reply_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Kind = Literal["thinking", "text", "call"]
What = Literal["start", "delta", "stop"]


@dataclass
class Block:
    """One block, grown so far.

    Attributes:
        kind: What it holds.
        index: Its place in the reply.
        text: Thinking, text, or the JSON text of a call's arguments.
        call_id: Of a call.
        name: Of a call: the function.
        is_complete: False for a call that the reply's end cut off.
    """

    kind: Kind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    is_complete: bool = False


Change = tuple[What, Block, str]
"""What happened to a block, the block after it, and the new text of a delta."""


class Blocks:
    """Sorts the events of one completion into blocks.

    Attributes:
        all: In the order in which they began.
    """

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, events: Iterable[Event]) -> list[Change]:
        """Take events and return what changed."""
        changes: list[Change] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._grow("thinking", text, changes)
                case ContentDelta(text):
                    self._grow("text", text, changes)
                case ToolCallStart(_, call_id, name):
                    self._begin(Block("call", len(self.all), "", call_id, name), changes)
                case ToolCallArguments(_, json_delta):
                    self._grow("call", json_delta, changes)
                case ToolCallEnd():
                    self._close(changes)
        return changes

    def finish(self) -> list[Change]:
        """Take the end of the reply; a call still open stays incomplete."""
        changes: list[Change] = []
        is_cut = self._open is not None and self._open.kind == "call"
        last = self._open
        self._close(changes)
        if is_cut and last is not None:
            last.is_complete = False
        return changes

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Block(kind, len(self.all)), changes)
        assert self._open is not None
        self._open.text += text
        changes.append(("delta", self._open, text))

    def _begin(self, block: Block, changes: list[Change]) -> None:
        self._close(changes)
        self._open = block
        self.all.append(block)
        changes.append(("start", block, ""))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            self._open.is_complete = True
            changes.append(("stop", self._open, ""))
            self._open = None
