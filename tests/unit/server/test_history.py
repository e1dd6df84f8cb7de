"""Past turns keep what the model thought and called, whatever a client calls it."""

import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.models.catalog import ASSETS
from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.server.history import past_messages

ASK = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    "reply",
    [
        {"reasoning": "Hm", "content": "Yes"},
        {"reasoning_content": "Hm", "content": "Yes"},
        {"reasoning": None, "reasoning_content": "Hm", "content": "Yes"},
        {"content": "<think>Hm</think>Yes"},
    ],
)
def test_thinking_reaches_the_template_under_every_name(reply):
    messages = past_messages([ASK, {"role": "assistant", **reply}, ASK])
    assert messages[1] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning": "Hm",
        "reasoning_content": "Hm",
    }
    template = ChatTemplate.from_dir(ASSETS / "laguna-nano")
    assert "<assistant><think>Hm</think>Yes</assistant>" in template.render(messages, enable_thinking=True)


def test_arguments_become_objects_and_nothing_else_changes():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages = past_messages([*given, {"role": "tool", "tool_call_id": "c", "content": "x"}])
    assert messages[0] == ASK
    assert messages[1]["content"] == ""
    assert messages[1]["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"a": 1}}}]
    assert messages[2] == {"role": "tool", "tool_call_id": "c", "content": "x"}
    assert call["function"]["arguments"] == '{"a": 1}'
    assert given[1]["content"] is None


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    reply = past_messages([{"role": "assistant", "tool_calls": [call]}])[0]
    assert reply["tool_calls"][0]["function"]["arguments"] == {}


def test_an_empty_list_of_calls_is_none():
    assert past_messages([{"role": "assistant", "content": "a", "tool_calls": []}]) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    "calls",
    [
        "f",
        3,
        [3],
        [{"function": {}}],
        [{"function": {"name": "f", "arguments": "{"}}],
        [{"function": {"name": "f", "arguments": [1]}}],
    ],
)
def test_what_is_no_call_is_refused_with_its_place(calls):
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls"):
        past_messages([ASK, {"role": "assistant", "tool_calls": calls}])
