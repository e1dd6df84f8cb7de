"""Events put together."""

from lean_laguna.server.reply_events import (
    ContentDelta,
    ReasoningDelta,
    Reply,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    merged,
)

EVENTS = [
    ReasoningDelta("a"),
    ReasoningDelta("b"),
    ContentDelta("c"),
    ContentDelta("d"),
    ToolCallStart(0, "x", "now"),
    ToolCallArguments(0, "{"),
    ToolCallArguments(0, "}"),
    ToolCallEnd(0),
    ToolCallStart(1, "y", "now"),
    ToolCallArguments(1, '{"a'),
]


def test_a_reply_holds_everything_and_says_what_is_not_complete():
    assert Reply.from_events(EVENTS) == Reply(
        "ab", "cd", [ToolCall("x", "now", "{}", True), ToolCall("y", "now", '{"a', False)]
    )
    assert Reply.from_events([]) == Reply(None, None, [])


def test_only_neighbours_of_a_kind_are_merged():
    assert merged(EVENTS) == [
        ReasoningDelta("ab"),
        ContentDelta("cd"),
        ToolCallStart(0, "x", "now"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
        ToolCallStart(1, "y", "now"),
        ToolCallArguments(1, '{"a'),
    ]
