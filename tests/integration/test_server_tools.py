"""Forced calls, schemas and thinking budgets over HTTP, from a real model that would rather write Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.servers import RunningServer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"enum": ["a + b", "a - b"]}, "times": {"type": "integer", "maximum": 99}},
    "required": ["code", "times"],
}
TOOLS = [
    {"type": "function", "function": {"name": "run", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
RUN = {"type": "function", "function": {"name": "run"}}
FORCED: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 80}


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinking"])
def test_a_named_function_is_called_with_what_its_schema_allows(server: RunningServer, thinks: bool) -> None:
    kwargs = {"enable_thinking": thinks}
    body = {**FORCED, "tool_choice": RUN, "chat_template_kwargs": kwargs, "thinking_token_budget": 6}
    answer = server.ok(CHAT, **body)
    (choice,) = answer["choices"]
    ((name, arguments),) = called(choice)
    assert name == "run"
    assert arguments["code"] in ("a + b", "a - b")
    assert arguments["times"] <= 99
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (0 < thought <= 6) if thinks else thought == 0


def test_a_required_call_may_be_any_and_streams_as_it_is_whole(server: RunningServer) -> None:
    body = {**FORCED, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = server.ok(CHAT, **body)["choices"]
    ((name, arguments),) = called(choice)
    pieces = [
        call["function"]
        for event in server.events(CHAT, **body)
        for streamed in event["choices"]
        for call in streamed["delta"].get("tool_calls") or []
    ]
    assert [piece["name"] for piece in pieces if piece.get("name")] == [name]
    assert json.loads("".join(piece.get("arguments") or "" for piece in pieces)) == arguments


def test_a_forced_call_that_is_cut_is_not_reported_as_finished(server: RunningServer) -> None:
    cut = {**FORCED, "tool_choice": RUN, "max_tokens": 7}
    (choice,) = server.ok(CHAT, **cut)["choices"]
    assert choice["finish_reason"] == "length"
    reasons = [piece["choices"][0]["finish_reason"] for piece in server.events(CHAT, **cut)]
    assert [reason for reason in reasons if reason] == ["length"]
    tools = [{"name": "run", "input_schema": PARAMETERS}]
    body = {"messages": MESSAGES, "max_tokens": 7, "tools": tools, "tool_choice": {"type": "any"}}
    whole = server.ok("/v1/messages", **body)
    assert whole["stop_reason"] == "max_tokens"
    assert not any(block["type"] == "tool_use" for block in whole["content"])
    assert server.events("/v1/messages", **body)[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": RUN, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"structured_outputs": {"json": {"type": "strange"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"thinking_token_budget": -3}, "thinking_token_budget"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    server: RunningServer, changes: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = server.post(CHAT, **{**FORCED, **changes, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_a_grammar_that_cannot_be_followed_to_its_end_is_an_error_and_no_finished_reply(
    server: RunningServer,
) -> None:
    """The parser gives up on more than 2,000 alternatives at one place, and finds out when it gets there."""
    rules = [f'r{i}: "a" w "{i}"' for i in range(2100)]
    grammar = "\n".join(
        ['start: "x" w w w all', "all: " + " | ".join(f"r{i}" for i in range(2100)), 'w: "b" | "c"', *rules]
    )
    body = {"prompt": "x = ", "temperature": 0, "max_tokens": 30, "guided_grammar": grammar}
    texts, failed = [], server.metric("request_success_total", finished_reason="error")
    for how in (False, {"num_speculative_tokens": 6}):
        refused = server.post("/v1/completions", **body, speculative=how)
        assert refused.status_code == 400, refused.text
        *pieces, last = server.events("/v1/completions", **body, speculative=how)
        assert last["error"] == refused.json()["error"]
        assert last["error"]["param"] == "guided_grammar"
        assert "cannot be followed any further" in last["error"]["message"]
        assert not any(piece["choices"][0]["finish_reason"] for piece in pieces)
        texts.append("".join(piece["choices"][0]["text"] for piece in pieces))
    assert texts[0] == texts[1]
    assert texts[0].startswith("x")
    assert server.metric("request_success_total", finished_reason="error") == failed + 4
    assert server.metric("num_requests_running") == server.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    ("path", "tool", "param"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": "f"}}, "tools[1].function.name"),
        ("/v1/responses", {"type": "function", "name": "f"}, "tools[1].name"),
        ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}}, "tools[1].name"),
        ("/tokenize", {"type": "function", "function": {"name": "f"}}, "tools[1].function.name"),
    ],
)
def test_two_tools_of_one_name_are_refused(
    server: RunningServer, path: str, tool: dict[str, Any], param: str
) -> None:
    said = "input" if path == "/v1/responses" else "messages"
    body: dict[str, Any] = {said: [{"role": "user", "content": "x"}], "tools": [tool, tool]}
    if path == "/v1/messages":
        body["max_tokens"] = 1
    refused = server.post(path, **body)
    assert refused.status_code == 400
    assert param in refused.json()["error"]["message"]
    assert refused.json()["error"].get("param", param) == param
