"""What a reply is made of while it streams: pieces of thinking, of answer, and of tool calls.

The same events serve streamed and whole replies: a whole reply is its events, put together by `Reply`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's thinking; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins.

    Attributes:
        index: Its place among the reply's calls, from 0.
        id: Unique name of the call, for the tool's answer to refer to.
        name: The function, as the model wrote it; not checked against the tools on offer.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; all pieces of a call that ends form one JSON object."""

    index: int
    json_delta: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A tool call is complete; a call that was cut off never gets one."""

    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass
class ToolCall:
    """One call of a whole reply.

    Attributes:
        id: As in `ToolCallStart`.
        name: The function.
        arguments: JSON text; of a call that is not complete, its beginning.
        is_complete: False where the reply ended inside the call.
    """

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class Reply:
    """A whole reply.

    Attributes:
        reasoning: The thinking, or None where there was none.
        content: The answer, or None where there was none.
        tool_calls: In the order in which they began.
    """

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Reply:
        """Put a reply together."""
        reply = cls()
        reasoning: list[str] = []
        content: list[str] = []
        arguments: list[list[str]] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ContentDelta(text):
                    content.append(text)
                case ToolCallStart(_, call_id, name):
                    reply.tool_calls.append(ToolCall(call_id, name))
                    arguments.append([])
                case ToolCallArguments(index, json_delta):
                    arguments[index].append(json_delta)
                case ToolCallEnd(index):
                    reply.tool_calls[index].is_complete = True
        for call, pieces in zip(reply.tool_calls, arguments, strict=True):
            call.arguments = "".join(pieces)
        reply.reasoning = "".join(reasoning) or None
        reply.content = "".join(content) or None
        return reply


def merged(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring pieces of the same kind, so that how a text was cut no longer shows."""
    out: list[Event] = []
    for event in events:
        match out[-1] if out else None, event:
            case ReasoningDelta(before), ReasoningDelta(text):
                out[-1] = ReasoningDelta(before + text)
            case ContentDelta(before), ContentDelta(text):
                out[-1] = ContentDelta(before + text)
            case ToolCallArguments(i, before), ToolCallArguments(j, text) if i == j:
                out[-1] = ToolCallArguments(i, before + text)
            case _:
                out.append(event)
    return out
