import pytest

from lean_laguna.server.bodies import convert
from lean_laguna.server.errors import ApiError, field_in
from lean_laguna.server.messages_input import chat_fields
from lean_laguna.server.schemas import ChatRequest, MessagesRequest


def fields_of(**body):
    fields, _ = chat_fields(convert({"messages": [], "max_tokens": 5, **body}, MessagesRequest))
    convert(fields, ChatRequest)  # it is a chat request
    return fields


def test_an_agents_turn_becomes_a_chat():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I will "},
                {"type": "text", "text": "look."},
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.py"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "be good"}]
    found = fields_of(messages=messages, system=system)["messages"]
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "user"]
    assert found[2]["content"] == "I will look."
    assert found[2]["reasoning"] == "hm"
    assert found[2]["tool_calls"][0]["function"] == {"name": "ls", "arguments": {"path": "."}}
    assert found[3]["tool_call_id"] == "t1"
    assert found[4]["content"] == "and?"


def test_options_keep_their_meaning_under_their_other_names():
    fields = fields_of(
        messages=[{"role": "user", "content": "x"}],
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        temperature=0.0,
    )
    assert (fields["stop"], fields["max_tokens"], fields["temperature"]) == (["END"], 5, 0.0)
    assert fields["chat_template_kwargs"]["enable_thinking"] is True
    assert fields["thinking_token_budget"] == 1024
    assert fields["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert fields["tool_choice"]["function"]["name"] == "f"
    assert fields["parallel_tool_calls"] is False
    assert fields_of(tool_choice={"type": "any"})["tool_choice"] == "required"
    assert fields_of(thinking={"type": "disabled"})["chat_template_kwargs"]["enable_thinking"] is False


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0]"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"tool_choice": {"type": {}}}, "tool_choice.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"thinking": {"type": "lots"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_is_not_served_is_named(body, param):
    with pytest.raises(ApiError) as caught:
        fields_of(**body)
    assert caught.value.param == param


def test_errors_learn_where_a_message_came_from():
    result = {"type": "tool_result", "tool_use_id": "c", "content": "4"}
    content = [{"type": "text", "text": "a"}, result, {"type": "text", "text": "b"}]
    messages = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": 5, "system": "be good"}
    fields, names = chat_fields(convert(body, MessagesRequest))
    assert [field_in(names, f"messages[{i}].content") for i in range(len(fields["messages"]))] == [
        "system",
        "messages[0].content",
        "messages[1].content[0].content",
        "messages[1].content[1].content",
        "messages[1].content[2].content",
    ]
    assert field_in(names, "response_format.json_schema.schema") == "output_config.format.schema"
    body["tools"] = [{"name": "f", "input_schema": {}}]
    _, names = chat_fields(convert(body, MessagesRequest))
    assert field_in(names, "tools[0].function.parameters") == "tools[0].input_schema"
    assert field_in(names, "tools[0].function.name") == "tools[0].name"


def test_a_message_without_blocks_is_not_dropped_in_silence():
    with pytest.raises(ApiError, match=r"messages\[0\].content must hold at least one block"):
        fields_of(messages=[{"role": "user", "content": []}])
