import pytest

from lean_laguna.server.bodies import convert
from lean_laguna.server.errors import ApiError, field_in
from lean_laguna.server.responses_input import chat_fields
from lean_laguna.server.schemas import ChatRequest, ResponsesRequest


def fields_of(**body):
    fields, _ = chat_fields(convert({"input": "hi", **body}, ResponsesRequest))
    convert(fields, ChatRequest)
    return fields


def test_items_of_one_turn_become_one_message():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "message", "role": "developer", "content": "now"},
    ]
    found = fields_of(input=items, instructions="be good")["messages"]
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "developer"]
    assert (found[2]["content"], found[2]["reasoning"]) == ("look", "hm")
    assert found[2]["tool_calls"][0]["id"] == found[3]["tool_call_id"] == "c1"


def test_options_keep_their_meaning_under_their_other_names():
    schema = {"type": "object"}
    fields = fields_of(
        max_output_tokens=7,
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": None}],
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "high"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
    )
    assert fields["max_tokens"] == 7
    assert fields["tools"] == [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert fields["reasoning_effort"] == "high"
    assert fields["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"type": "file_search_call"}]}, "input[0]"),
        ({"input": [{"role": "assistant", "content": [{"text": 3}]}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": "json"}}, "text.format"),
    ],
)
def test_what_is_not_served_is_named(body, param):
    with pytest.raises(ApiError) as caught:
        fields_of(**body)
    assert caught.value.param == param


def test_errors_learn_where_a_message_came_from():
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a.py"},
    ]
    body = {"input": items, "instructions": "be good"}
    _, names = chat_fields(convert(body, ResponsesRequest))
    places = ["instructions", "input[0].content", "input[1].content", "input[3].output"]
    assert [field_in(names, f"messages[{i}].content") for i in range(4)] == places
    _, names = chat_fields(convert({"input": "hi"}, ResponsesRequest))
    assert field_in(names, "messages[0].content") == field_in(names, "messages") == "input"
