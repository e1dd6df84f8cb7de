import itertools

from lean_laguna.server.blocks import Blocks
from lean_laguna.server.reply_events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

EVENTS = [
    ReasoningDelta("hm"),
    ReasoningDelta("!"),
    ContentDelta("so"),
    ToolCallStart(0, "c0", "f"),
    ToolCallArguments(0, '{"a":'),
    ToolCallArguments(0, " 1}"),
    ToolCallEnd(0),
    ToolCallStart(1, "c1", "g"),
    ToolCallEnd(1),
    ContentDelta("done"),
]


def run(groups):
    blocks = Blocks()
    changes = [change for group in groups for change in blocks.push(group)] + blocks.finish()
    return blocks.all, [(what, block.index, text) for what, block, text in changes]


def test_a_reply_is_sorted_into_blocks_in_order():
    found, changes = run([EVENTS])
    assert [(b.kind, b.text, b.name) for b in found] == [
        ("thinking", "hm!", ""),
        ("text", "so", ""),
        ("call", '{"a": 1}', "f"),
        ("call", "", "g"),
        ("text", "done", ""),
    ]
    assert all(block.is_complete for block in found)
    for index in range(5):  # each block starts once, stops once, and stops before the next one starts
        own = [what for what, number, _ in changes if number == index]
        assert (own[0], own[-1]) == ("start", "stop")
        assert own[1:-1] == ["delta"] * (len(own) - 2)
    assert [number for _, number, _ in changes] == sorted(number for _, number, _ in changes)


def test_how_events_are_grouped_changes_nothing():
    whole = run([EVENTS])
    for cut in range(len(EVENTS) + 1):
        assert run([EVENTS[:cut], EVENTS[cut:]]) == whole
    assert run([[event] for event in EVENTS]) == whole


def test_a_call_that_is_cut_off_is_not_complete():
    for length in range(4, 7):
        (*_, call), _ = run([EVENTS[:length]])
        assert (call.kind, call.is_complete) == ("call", False)
    assert all(block.is_complete for block in run([EVENTS[:3]])[0])
    assert list(itertools.chain(*run([[]]))) == []
