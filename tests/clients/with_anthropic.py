"""The ``anthropic`` package against a running server. Usage: with_anthropic.py URL"""

from __future__ import annotations

import sys
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
ASK: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


def say(what: str, found: object) -> None:
    print(f"{what}: {found}", flush=True)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def messages() -> None:
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 32, "messages": ASK, "system": "You are brief."}
    request["extra_body"] = {"seed": 1, "temperature": 0.5}  # this package has no arguments for them
    whole = client.messages.create(**request)
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="You are brief.")
    assert counted.input_tokens == whole.usage.input_tokens
    with client.messages.stream(**request) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens == 32
    say("messages", f"{whole.stop_reason}, {counted.input_tokens} + 32 tokens, stream == whole")


def tools() -> None:
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "messages": ASK, "tools": [WEATHER]}
    request |= {"tool_choice": {"type": "tool", "name": "weather"}, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        final = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "tool_use"
    (use,) = [block for block in whole.content if block.type == "tool_use"]
    (streamed,) = [block for block in final.content if block.type == "tool_use"]
    assert use.input == streamed.input
    assert isinstance(use.input["days"], int)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(
        **{**request, "messages": turns, "tool_choice": {"type": "auto"}, "max_tokens": 8}
    )
    say("tools", f"{use.input}, stream == whole; after its result: {again.stop_reason}")


def thinking() -> None:
    told: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(
        model=MODEL, max_tokens=1100, messages=ASK, thinking=told, extra_body={"seed": 1}
    )
    say("thinking", f"blocks {[block.type for block in whole.content]}, {whole.usage.output_tokens} tokens")


def errors() -> None:
    for kind, change in (
        ("invalid_request_error", {"messages": [{"role": "user", "content": "x " * 9000}]}),
        ("not_found_error", {"model": "nobody"}),
    ):
        found: anthropic.APIStatusError | None = None
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 8, "messages": ASK, **change})
        except anthropic.APIStatusError as error:
            found = error
        assert found is not None, change
        assert found.body["error"]["type"] == kind, found.body
        say("error", f"{type(found).__name__} {found.status_code} {kind}")


say("anthropic", anthropic.__version__)
for part in (messages, tools, thinking, errors):
    part()
say("anthropic", "all as expected")
