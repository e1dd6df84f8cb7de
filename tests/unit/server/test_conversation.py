import time

import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.server.conversation import Conversation, read_messages, read_tools
from lean_laguna.server.errors import ApiError

FORGETFUL = ChatTemplate(
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_parts_become_text_and_roles_become_those_of_templates():
    given = [
        {"role": "developer", "content": "rules"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"],
        },
        {"role": "tool", "content": "done", "tool_call_id": "1", "name": None},
    ]
    assert read_messages(given) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "answer", "reasoning": "thought"},
        {"content": "answer", "reasoning_content": "thought"},
        {"content": "answer", "reasoning": "thought", "reasoning_content": "thought"},
        {"content": "<think>thought</think>answer"},
        {"content": [{"type": "thinking", "thinking": "thought"}, {"type": "text", "text": "answer"}]},
    ],
)
def test_past_thinking_is_kept_wherever_the_client_puts_it(turn):
    (message,) = read_messages([{"role": "assistant", **turn}])
    assert message["content"] == "answer"
    assert message["reasoning"] == message["reasoning_content"] == "thought"


def test_arguments_of_past_calls_become_objects():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_what_a_template_leaves_out_is_an_error_and_not_a_shorter_prompt():
    messages = read_messages([{"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}])
    with pytest.raises(ApiError, match=r"messages\[1\].*role 'system'"):
        Conversation(messages, [], {}).render(FORGETFUL)
    assert Conversation(messages[:1], [], {}).render(FORGETFUL) == "hi"


def test_a_long_conversation_costs_in_proportion_to_its_length():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}")

    def seconds(count):
        messages = read_messages([{"role": "user", "content": f"message {i} of many"} for i in range(count)])
        started = time.process_time()
        Conversation(messages, [], {}).render(template)
        return time.process_time() - started

    assert min(seconds(20_000) for _ in range(3)) < 40 * min(seconds(2000) for _ in range(3))


def test_messages_out_of_their_order_are_found():
    late = ChatTemplate("{% for m in messages | reverse %}{{ m.content }}{% endfor %}")
    messages = read_messages([{"role": "user", "content": text} for text in ("a", "b", "ab", "b")])
    assert Conversation(messages, [], {}).render(late) == "babba"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "reasoning": 3}, "messages[0].reasoning"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
    ],
)
def test_a_wrong_message_is_named(message, param):
    with pytest.raises((ApiError, RequestError)) as caught:
        read_messages([message])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search"}, "tools[0].type"),
        ({"function": {"name": ""}}, "tools[0].function.name"),
        ({"function": {"name": "a\nb"}}, "tools[0].function.name"),
        ({"function": {"name": "a<b"}}, "tools[0].function.name"),
        ({"function": {"name": " a"}}, "tools[0].function.name"),
        ({"function": {"name": "a" * 257}}, "tools[0].function.name"),
        ({"function": {"name": "f", "parameters": "x"}}, "tools[0].function.parameters"),
    ],
)
def test_a_wrong_tool_is_named(tool, param):
    with pytest.raises(ApiError) as caught:
        read_tools([tool])
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["f", "get weather", "mcp.server/tool-1:x", "é", "a" * 256])
def test_any_name_that_the_model_can_write_between_tags_is_taken(name):
    assert read_tools([{"function": {"name": name}}])[0]["function"]["name"] == name


def test_two_tools_of_one_name_are_refused_by_name():
    tools = [{"function": {"name": name}} for name in ("read", "write", "read")]
    with pytest.raises(
        ApiError, match=r"tools\[2\].function.name .* tools\[0\] has 'read' already"
    ) as caught:
        read_tools(tools)
    assert (caught.value.status, caught.value.param) == (400, "tools[2].function.name")
    assert len(read_tools(tools[:2])) == 2
