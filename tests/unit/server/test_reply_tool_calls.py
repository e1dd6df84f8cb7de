"""What the grammar of calls says beside the table of `test_reply_parser`."""

import pytest

from lean_laguna.server.argument_types import ToolSchemas
from lean_laguna.server.reply_reasoning import ReasoningSplitter
from lean_laguna.server.reply_tool_calls import ToolCallParser


def new_parser():
    tools = ToolSchemas(
        [{"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}]
    )
    return ToolCallParser(tools, lambda: "id")


def test_calls_are_counted():
    parser = new_parser()
    parser.push("<tool_call>f</tool_call><tool_call>f<arg_key>s")
    assert (parser.num_started, parser.num_ended) == (2, 1)


def test_a_name_that_does_not_end_becomes_text():
    parser = new_parser()
    text = "<tool_call>" + "x" * 300
    assert "".join(event.text for event in parser.push(text)) == text


RUNAWAYS = {
    "key": ("<tool_call>f<arg_key>", "k<"),
    "before the opening tag": ("<tool_call>f<arg_key>s</arg_key>", " \n"),
    "string": ("<tool_call>f<arg_key>s</arg_key><arg_value>", "v<"),
    "other value": ("<tool_call>f<arg_key>n</arg_key><arg_value>", "v<"),
    "after a closing tag": ("<tool_call>f<arg_key>s</arg_key><arg_value>v</arg_value>", " \n"),
    "before the name": ("<tool_call>", " \n"),
    "blank answer": ("", " \n"),
    "thinking not begun": (None, " \n"),
}


@pytest.mark.parametrize(("start", "repeated"), RUNAWAYS.values(), ids=RUNAWAYS)
def test_a_part_that_never_ends_costs_no_more_per_character(start, repeated):
    """By what the parser looks at again: a character that stays in the buffer is looked at with each push."""
    parser = new_parser() if start is not None else ReasoningSplitter(starts_in_thinking=False)
    parser.push(start or "")
    longest = 0
    for character in repeated * 2_000:
        parser.push(character)
        longest = max(longest, len(parser._buffer))
    assert longest <= len("</arg_value>")
