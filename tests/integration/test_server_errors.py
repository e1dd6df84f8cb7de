"""Errors as OpenAI shapes them: 400 with the field's name for what is wrong, and never a 5xx for it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from support.servers import RunningServer, nano, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
STRANGE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
STRANGE_FIELD = "response_format.json_schema.schema"
WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "temprature": 0}, "temprature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": 1e308 * 10}, None),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": 1.5}, "top_k"),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, "min_p"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 5000}, "n"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 20}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**65}, "seed"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": -2}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"9999999": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5, 9999999]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [-1]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 9999999}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop[0]"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    (COMPLETIONS, {"prompt": "x", "speculative": {"num_speculative_tokens": 99}}, "num_speculative_tokens"),
    (COMPLETIONS, {"prompt": "x", "speculative": {"num_speculative_tokens": -1}}, None),
    (COMPLETIONS, {"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    (
        COMPLETIONS,
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "allowed_token_ids": [0]},
        "allowed_token_ids",
    ),
    (COMPLETIONS, {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [*HI, {"role": "system", "content": "late"}]}, "messages[1]"),
    (
        CHAT,
        {
            "messages": [
                *HI,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        "messages[1].tool_calls[0].function.arguments",
    ),
    (CHAT, {"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 10**6}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "reasoning_budget_tokens": -3}, "reasoning_budget_tokens"),
    (CHAT, {"messages": HI, "response_format": STRANGE}, STRANGE_FIELD),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    (COMPLETIONS, {"prompt": "x", "response_format": STRANGE}, STRANGE_FIELD),
    (COMPLETIONS, {"prompt": "x", "guided_json": {"type": "strange"}}, "guided_json"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HI, "tool_choice": "always"}, "tool_choice"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"messages": HI, "thinking_token_budget": -3}, "thinking_token_budget"),
    (
        CHAT,
        {"messages": HI, "thinking_token_budget": 3, "thinking_budget_tokens": 4},
        "thinking_token_budget",
    ),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"input": [{"type": "image"}]}, None),
    (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": 5}]},
        "tools[0].parameters",
    ),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ("/v1/responses", {"input": [{"role": "user"}], "instructions": "x"}, "input[0].content"),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {**STRANGE["json_schema"], "type": "json_schema"}}},
        "text.format.schema",
    ),
    ("/tokenize", {"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"top_q": 1}}, "sampling_params.top_q"),
]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_wrong_is_named(server: RunningServer, is_streamed: bool) -> None:
    for path, body, param in WRONG:
        if is_streamed and ("tokenize" in path):
            continue
        content = json.dumps(body | ({"stream": True} if is_streamed else {}))
        response = server.client.post(path, content=content)
        assert response.status_code == 400, (path, body, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        if param is not None:
            assert error["param"] == param, (path, body, error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "x", "logit_bias": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_object_are_refused(server: RunningServer, content: bytes) -> None:
    response = server.client.post(COMPLETIONS, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_one_token_over_the_limit_names_both_numbers(server: RunningServer, is_streamed: bool) -> None:
    limit = server.ok("/tokenize", prompt="x")["max_model_len"]
    for path, body in (
        (COMPLETIONS, {"prompt": [300] * limit, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [300] * (limit + 1)}),
        (COMPLETIONS, {"prompt": [300] * (limit - 4), "max_tokens": 5}),
        ("/inference/v1/generate", {"token_ids": [300] * limit, "sampling_params": {"max_tokens": 1}}),
    ):
        error = server.post(path, **body, stream=is_streamed)
        assert error.status_code == 400
        told = error.json()["error"]
        assert told["type"] == "invalid_request_error"
        assert told["code"] == "context_length_exceeded"
        assert f"maximum context length is {limit} tokens" in told["message"]
        num_tokens = len(body.get("prompt") or body["token_ids"])
        assert f"({num_tokens} in the " in told["message"]
    fits = server.post(COMPLETIONS, prompt=[300] * (limit - 1), max_tokens=1, stream=is_streamed)
    assert fits.status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_one_token_over_the_limit_is_told_by_every_chat_api(server: RunningServer, is_streamed: bool) -> None:
    def words(num: int) -> tuple[list[dict[str, str]], int]:
        messages = [{"role": "user", "content": "word " * num}]
        return messages, server.ok("/tokenize", messages=messages)["count"]

    limit = server.ok("/tokenize", prompt="x")["max_model_len"]
    few, more = words(100)[1], words(200)[1]
    long, count = words(100 + (limit - 20 - few) * 100 // (more - few))  # little is left for the reply
    assert 0 < limit - count < 40
    for path, body, name in (
        (CHAT, {"messages": long}, "max_tokens"),
        (CHAT, {"messages": long}, "max_completion_tokens"),
        ("/v1/responses", {"input": long[0]["content"]}, "max_output_tokens"),
        ("/v1/messages", {"messages": long}, "max_tokens"),
    ):
        over = server.post(path, **body, **{name: limit - count + 1}, stream=is_streamed)
        assert over.status_code == 400
        error = over.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        assert f"maximum context length is {limit} tokens" in error["message"]
        assert f"{limit + 1} tokens ({count} in the messages, {limit - count + 1} in" in error["message"]
        stop = {} if path == "/v1/responses" else {"stop_sequences" if "messages" in path else "stop": [" "]}
        assert server.post(path, **body, **{name: limit - count}, **stop).status_code == 200


def test_a_chat_that_is_too_long_says_so_in_each_api(server: RunningServer) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    chat = server.post(CHAT, messages=long)
    assert chat.json()["error"]["code"] == "context_length_exceeded"
    assert chat.json()["error"]["param"] == "messages"
    anthropic = server.post("/v1/messages", messages=long, max_tokens=1)
    assert anthropic.status_code == 400
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["message"].startswith("prompt is too long: ")
    assert (
        server.post("/v1/responses", input="word " * 3000).json()["error"]["code"]
        == "context_length_exceeded"
    )


def test_a_prompt_that_no_counting_could_make_fit_costs_nothing(server: RunningServer) -> None:
    text, many = "word " * 2_000_000, ["word " * 3000] * 2000
    started = time.process_time()
    for path, body, field in (
        (COMPLETIONS, {"prompt": text}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
        (COMPLETIONS, {"prompt": many}, "n"),
    ):
        told = server.post(path, **body, max_tokens=7)
        assert told.status_code == 400
        assert told.json()["error"]["param"] == field
        if field != "n":
            assert re.search(
                r"requested \d+ tokens or more \(\d+ or more in", told.json()["error"]["message"]
            )
    assert time.process_time() - started < 10  # encoding them takes minutes


def test_the_end_of_a_prompt_is_kept_where_asked(server: RunningServer) -> None:
    text = "import os\n\ndef fib(n):\n"
    ids = server.ok("/tokenize", prompt=text)["tokens"]
    asked = {"temperature": 0, "max_tokens": 6}
    for kept in (3, len(ids) - 1):
        cut = [server.ok(COMPLETIONS, prompt=p, **asked, truncate_prompt_tokens=kept) for p in (text, ids)]
        short = server.ok(COMPLETIONS, prompt=ids[-kept:], **asked)
        for answer in cut:
            assert (answer["choices"], answer["usage"]["prompt_tokens"]) == (short["choices"], kept)
    echo = server.ok(COMPLETIONS, prompt=text, **asked, truncate_prompt_tokens=3, echo=True)
    assert echo["choices"][0]["text"].startswith(server.ok("/detokenize", tokens=ids[-3:])["prompt"])
    limit = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    long = (ids * limit)[: limit + 5]
    most = server.ok(COMPLETIONS, prompt=long, temperature=0, max_tokens=4, truncate_prompt_tokens=-1)
    assert most["usage"]["prompt_tokens"] == limit - 4
    assert server.post(COMPLETIONS, prompt=long, max_tokens=4).status_code == 400


def test_nothing_but_allowed_tokens_is_chosen(server: RunningServer) -> None:
    allowed = list(range(300, 320))
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI})):
        body = {**prompt, "max_tokens": 8, "temperature": 1.0, "seed": 1, "return_token_ids": True}
        said = server.ok(path, **body, allowed_token_ids=allowed)["choices"][0]["token_ids"]
        assert len(said) == 8
        assert set(said) <= set(allowed)


def test_options_that_ask_for_nothing_are_taken(server: RunningServer) -> None:
    neutral = {"min_p": 0, "logit_bias": {}, "best_of": 1, "suffix": None, "use_beam_search": False}
    neutral |= {"user": "u", "metadata": {"a": "b"}, "store": False, "top_k": -1, "stop": None, "seed": None}
    plain = server.ok(COMPLETIONS, prompt="x", temperature=0, max_tokens=4)
    same = server.ok(COMPLETIONS, prompt="x", temperature=0, max_tokens=4, **neutral)
    assert same["choices"] == plain["choices"]


def test_options_in_the_query_count_and_wrong_ones_are_refused(server: RunningServer) -> None:
    body = {"prompt": "def f", "seed": 4, "temperature": 1.5, "max_tokens": 12}
    by_body = server.ok(COMPLETIONS, **body, top_k=1)["choices"]
    assert server.ok(f"{COMPLETIONS}?top_k=1", **body)["choices"] == by_body
    assert server.ok(COMPLETIONS, **body, top_k=0)["choices"] != by_body
    refused = server.post(f"{COMPLETIONS}?top_kk=1", **body)
    assert refused.status_code == 400
    assert "did you mean 'top_k'" in refused.json()["error"]["message"]
    assert server.post("/v1/messages/count_tokens?beta=true", messages=HI).status_code == 200


def test_other_models_paths_and_methods_are_refused_in_the_same_shape(server: RunningServer) -> None:
    for path in (COMPLETIONS, CHAT, "/v1/responses", "/tokenize"):
        fields = {"prompt": "x"} if path in (COMPLETIONS, "/tokenize") else {"messages": HI}
        fields = {"input": "x"} if path == "/v1/responses" else fields
        error = server.post(path, model="gpt-9", **fields)
        assert error.status_code == 404
        assert error.json()["error"]["code"] == "model_not_found"
    assert server.client.get("/v1/models/gpt-9").status_code == 404
    assert server.client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert server.client.get(COMPLETIONS).status_code == 405
    assert server.post("/update_weights", checkpoint="nano").status_code == 404


def test_keys_limits_origins_and_unknown_fields_are_as_configured() -> None:
    config: dict[str, Any] = {
        "api_keys": ("right", "also"),
        "max_request_bytes": 1000,
        "unknown_fields": "ignore",
    }
    with running(nano(), **config, allowed_origins=("https://page.example",)) as up:
        assert up.post(COMPLETIONS, prompt="x").status_code == 401
        assert up.post("/v1/messages", messages=HI, max_tokens=1).json()["type"] == "error"
        for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "righ"}):
            assert up.client.get("/v1/models", headers=headers).status_code == 401
        for headers in ({"authorization": "Bearer right"}, {"x-api-key": "also"}):
            assert up.client.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/version", "/metrics", "/openapi.json"):
            assert up.client.get(path).status_code == 200
        up.client.headers["authorization"] = "Bearer right"
        assert up.post(COMPLETIONS, prompt="x" * 2000).status_code == 413
        ignored = up.post(COMPLETIONS, prompt="x", max_tokens=1, temprature=1)
        assert ignored.status_code == 200
        assert ignored.headers["x-lean-laguna-ignored"] == "temprature"
        asked = up.client.options(
            COMPLETIONS, headers={"origin": "https://page.example", "access-control-request-method": "POST"}
        )
        assert asked.headers["access-control-allow-origin"] == "https://page.example"


def test_no_page_may_call_unless_told(server: RunningServer) -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.client.options(COMPLETIONS, headers=headers).headers
