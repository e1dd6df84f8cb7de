"""What the grammar of calls says beside the table of `test_reply_parser`."""

import time

from lean_laguna.server.argument_types import ToolSchemas
from lean_laguna.server.reply_tool_calls import ToolCallParser


def new_parser():
    tools = ToolSchemas([{"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}])
    return ToolCallParser(tools, lambda: "id")


def test_calls_are_counted():
    parser = new_parser()
    parser.push("<tool_call>f</tool_call><tool_call>f<arg_key>s")
    assert (parser.num_started, parser.num_ended) == (2, 1)


def test_a_name_that_does_not_end_becomes_text():
    parser = new_parser()
    text = "<tool_call>" + "x" * 300
    assert "".join(event.text for event in parser.push(text)) == text


def test_runaway_parts_cost_little_character_by_character():
    parser = new_parser()
    start = time.process_time()
    for part in ("<tool_call>f", " " * 200, "<arg_key>", "k" * 10_000, "</arg_key><arg_value>"):
        for character in part:
            parser.push(character)
    for _ in range(3):
        for character in "v" * 5_000 + "</arg_value>" + " " * 5_000 + "</tool_call>"[:-1] + " ":
            parser.push(character)
    assert time.process_time() - start < 5
    assert (parser.num_started, parser.num_ended) == (1, 0)
