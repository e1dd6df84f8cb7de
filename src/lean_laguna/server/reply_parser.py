"""From the text of a reply to its thinking, its answer and its tool calls, while it streams.

The parser sees text alone, so it does not matter how many tokens a step brought, or where a delta was cut.
It needs the tags in the text: requests must run with ``skip_special_tokens`` off, since some checkpoints list
them as special tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from lean_laguna.core.types import FinishReason
from lean_laguna.models.chat_template import starts_in_thinking
from lean_laguna.server.argument_types import ToolSchemas
from lean_laguna.server.reply_events import ContentDelta, Event, ReasoningDelta
from lean_laguna.server.reply_reasoning import ReasoningSplitter, has_line_layout
from lean_laguna.server.reply_tool_calls import ToolCallParser


def new_call_id() -> str:
    """Return the id of a tool call."""
    return f"call_{uuid.uuid4().hex}"


class ReplyParser:
    """Parses one completion; ``push`` its text in any pieces, then ``finish``.

    Attributes:
        has_unfinished_call: Whether the reply ended, or has so far come, inside a tool call.
    """

    def __init__(
        self,
        tools: Iterable[Mapping[str, Any]] = (),
        starts_in_thinking: bool = False,
        *,
        line_layout: bool = False,
        new_call_id: Callable[[], str] = new_call_id,
    ):
        """Start a reply.

        Args:
            tools: The tools that may be called; without any, tool call tags are text.
            starts_in_thinking: Whether the prompt left the thinking open, by
                ``ChatTemplate.starts_in_thinking``.
            line_layout: Whether the template puts tags on lines of their own (`has_line_layout`).
            new_call_id: Makes the ids of calls.
        """
        schemas = ToolSchemas(tools)
        self._reasoning = ReasoningSplitter(starts_in_thinking, line_layout=line_layout)
        self._calls = ToolCallParser(schemas, new_call_id) if len(schemas) else None

    @classmethod
    def for_prompt(cls, rendered: str, tools: Iterable[Mapping[str, Any]] = ()) -> ReplyParser:
        """Make the parser of a reply to a rendered prompt, reading layout and open thinking off it."""
        return cls(tools, starts_in_thinking(rendered), line_layout=has_line_layout(rendered))

    @property
    def is_thinking(self) -> bool:
        """True while the text so far ends inside the thinking."""
        return self._reasoning.is_thinking

    @property
    def has_unfinished_call(self) -> bool:
        """True while a call has begun and not ended."""
        return self._calls is not None and self._calls.num_ended < self._calls.num_started

    def push(self, text_delta: str) -> list[Event]:
        """Take text and return everything that became certain with it."""
        return self._events(self._reasoning.push(text_delta))

    def finish(self, finish_reason: FinishReason | None) -> list[Event]:
        """Take the end of the reply.

        Args:
            finish_reason: Why the engine stopped; only "stop" means that the model was done.

        Returns:
            What was held back. A call that was cut off gets no end.
        """
        events = self._events(self._reasoning.finish())
        if self._calls is not None:
            events += self._calls.finish(is_cut=finish_reason != "stop")
        return events

    def finish_reason(self, reason: FinishReason | None) -> FinishReason | Literal["tool_calls"] | None:
        """Return what a client is told: "tool_calls" only where the model stopped with all calls complete."""
        if reason == "stop" and self._calls is not None:
            return "tool_calls" if self._calls.num_ended and not self.has_unfinished_call else reason
        return reason

    def _events(self, pieces: Iterable[tuple[bool, str]]) -> list[Event]:
        events: list[Event] = []
        for is_thinking, text in pieces:
            if is_thinking:
                events.append(ReasoningDelta(text))
            elif self._calls is None:
                events.append(ContentDelta(text))
            else:
                events += self._calls.push(text)
        return events
