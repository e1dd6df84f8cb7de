"""The ``openai`` package, 2.x or 3.x, against a running server. Usage: with_openai.py URL"""

from __future__ import annotations

import json
import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
ASK = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer"},
            },
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def say(what: str, found: object) -> None:
    print(f"{what}: {found}", flush=True)


def completions() -> None:
    whole = client.completions.create(
        model=MODEL, prompt="def fib(n):", max_tokens=24, temperature=0, logprobs=2, echo=True
    )
    assert whole.choices[0].text.startswith("def fib(n):")
    assert whole.usage.completion_tokens == 24
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.total_tokens
    options = {"include_usage": True}
    parts = list(
        client.completions.create(
            model=MODEL,
            prompt="def fib(n):",
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options=options,
        )
    )
    text = "".join(part.choices[0].text for part in parts if part.choices)
    assert "def fib(n):" + text == whole.choices[0].text
    say(
        "completions",
        f"{len(parts)} chunks, usage {parts[-1].usage.completion_tokens} tokens, stream == whole",
    )


def chat() -> None:
    for n in (1, 2):
        whole = client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=32,
            temperature=0.7,
            seed=1,
            n=n,
            logprobs=True,
            top_logprobs=2,
        )
        assert len(whole.choices) == n
        assert len(whole.choices[0].logprobs.content) > 0
    request = {"model": MODEL, "messages": ASK, "max_tokens": 32, "temperature": 0.7, "seed": 1}
    with client.chat.completions.stream(**request) as stream:
        events = list(stream)
    said = "".join(event.delta for event in events if event.type == "content.delta")
    assert said == whole.choices[0].message.content
    bare = client.chat.completions.create(**request, extra_body={"speculative": False})
    assert bare.choices[0].message.content == said
    reason = stream.current_completion_snapshot.choices[0].finish_reason
    say("chat", f"{len(events)} events, finish {reason}, stream == whole, drafter on == off")


def tools() -> None:
    request = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "max_tokens": 200, "temperature": 0}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        whole = client.chat.completions.create(**request, tool_choice=choice)
        if whole.choices[0].finish_reason == "length":
            say("tools", f"{choice}: cut by the limit, and said so")
            continue
        call = whole.choices[0].message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather"
        assert isinstance(arguments["days"], int), arguments
    parts = list(client.chat.completions.create(**request, tool_choice=named, stream=True))
    deltas = [c for part in parts for choice in part.choices for c in choice.delta.tool_calls or ()]
    streamed = "".join(delta.function.arguments or "" for delta in deltas)
    if whole.choices[0].finish_reason != "length":
        assert json.loads(streamed) == arguments
    answer = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    client.chat.completions.create(**{**request, "messages": answer, "max_tokens": 8})
    say(
        "tools",
        f"named and required; arguments {streamed[:60]!r}, finish {parts[-1].choices[0].finish_reason}",
    )


def structured() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    texts = []
    for speculative in (True, False):
        whole = client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=120,
            temperature=0,
            response_format=schema,
            extra_body={"speculative": speculative},
        )
        texts.append(whole.choices[0].message.content)
    assert texts[0] == texts[1]
    if whole.choices[0].finish_reason == "stop":
        assert set(json.loads(texts[0])) == {"name", "age"}
    say("structured", f"{texts[0]!r:.70}, finish {whole.choices[0].finish_reason}, drafter on == off")


def responses() -> None:
    whole = client.responses.create(
        model=MODEL, input="Add two numbers.", max_output_tokens=24, temperature=0
    )
    kinds = [
        event.type
        for event in client.responses.create(
            model=MODEL, input="Add two numbers.", max_output_tokens=24, temperature=0, stream=True
        )
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    with client.responses.stream(
        model=MODEL, input="Add two numbers.", max_output_tokens=24, temperature=0
    ) as s:
        streamed = "".join(event.delta for event in s if event.type == "response.output_text.delta")
    assert streamed == whole.output_text
    say("responses", f"{whole.status}, {whole.usage.output_tokens} tokens, ends {kinds[-1]}, stream == whole")


def errors() -> None:
    for code, change in (
        ("context_length_exceeded", {"messages": [{"role": "user", "content": "x " * 9000}]}),
        ("model_not_found", {"model": "nobody"}),
        (None, {"temperature": -1}),
    ):
        found: openai.APIStatusError | None = None
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": ASK, **change})
        except openai.APIStatusError as error:
            found = error
        assert found is not None, change
        assert found.code == code, (found.code, code)
        say("error", f"{type(found).__name__} {found.status_code} {found.code}")


say("openai", openai.__version__)
for part in (completions, chat, tools, structured, responses, errors):
    part()
say("openai", "all as expected")
