import pytest

from lean_laguna.server.chat_job import offered_tools, template_kwargs, thinking_budget
from lean_laguna.server.errors import ApiError
from lean_laguna.server.schemas import ChatRequest
from lean_laguna.server.settings import ServerConfig

TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Configured:
    """What `template_kwargs` reads of a service."""

    config = ServerConfig(default_chat_template_kwargs={"enable_thinking": True, "other": 1})


def body(**fields):
    return ChatRequest(messages=[], **fields)


def test_the_request_wins_over_its_effort_and_both_over_the_server():
    assert template_kwargs(Configured, body()) == {"enable_thinking": True, "other": 1}
    assert template_kwargs(Configured, body(reasoning_effort="none"))["enable_thinking"] is False
    given = body(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert template_kwargs(Configured, given)["enable_thinking"] is False


def test_the_budget_has_three_names_and_one_value():
    for name in ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"):
        assert thinking_budget(body(**{name: 7})) == 7
    assert thinking_budget(body()) is None
    assert thinking_budget(body(thinking_token_budget=7, thinking_budget_tokens=7)) == 7
    with pytest.raises(ApiError, match="different budgets"):
        thinking_budget(body(thinking_token_budget=7, thinking_budget_tokens=8))


def test_tools_are_shown_unless_the_choice_is_none():
    assert offered_tools(body(tools=TOOLS)) == TOOLS
    assert offered_tools(body(tools=TOOLS, tool_choice="none")) == []
    with pytest.raises(ApiError, match="there are no tools"):
        offered_tools(body(tool_choice="required"))
