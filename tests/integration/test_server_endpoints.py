"""The endpoints beside completions and chat: each says the same in its own shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.servers import RunningServer, events_of

HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0}
TOOL = {
    "name": "run",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
}


def chat(server: RunningServer, **body: Any) -> dict[str, Any]:
    return server.ok("/v1/chat/completions", messages=HI, **body)["choices"][0]


def test_the_model_and_the_server_describe_themselves(server: RunningServer) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("nano", 2048)
    assert server.client.get("/v1/models/nano").json() == card
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/version").json()["version"]
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "〈|EOS|〉"
    assert "enable_thinking" in info["chat_template"]


def test_tokenize_and_detokenize_are_each_others_inverse(server: RunningServer) -> None:
    text = "def f(x):\n    return '🦊'  # <assistant>"
    for prefix in ("", "/v1"):
        tokens = server.ok(f"{prefix}/tokenize", prompt=text, return_token_strs=True)
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert server.ok(f"{prefix}/detokenize", tokens=tokens["tokens"])["prompt"] == text
    rendered = server.ok("/tokenize", messages=HI)
    assert rendered["count"] == server.ok("/v1/messages/count_tokens", messages=HI)["input_tokens"]
    usage = server.ok("/v1/chat/completions", messages=HI, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == rendered["count"]


def test_token_in_token_out_gives_what_completions_gives(server: RunningServer) -> None:
    ids = server.ok("/tokenize", prompt="def fib(n):")["tokens"]
    sampling = {"temperature": 0.7, "seed": 5, "max_tokens": 12, "logprobs": 1}
    got = server.ok("/inference/v1/generate", token_ids=ids, sampling_params=sampling)
    same = server.ok("/v1/completions", prompt=ids, **sampling, top_k=0, return_token_ids=True)
    assert got["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]
    content = got["choices"][0]["logprobs"]["content"]
    logprobs = [entry["logprob"] for entry in content]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in got["choices"][0]["token_ids"]]
    assert logprobs == same["choices"][0]["logprobs"]["token_logprobs"]
    events = server.events(
        "/inference/v1/generate",
        token_ids=ids,
        sampling_params=sampling,
        stream_options={"include_usage": True},
    )
    streamed = [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]
    assert streamed == got["choices"][0]["token_ids"]
    assert events[-1]["usage"]["completion_tokens"] == 12


def test_messages_say_what_chat_says(server: RunningServer) -> None:
    right = chat(server, **GREEDY, max_tokens=12)
    whole = server.ok("/v1/messages", messages=HI, max_tokens=12, **GREEDY)
    assert whole["content"] == [{"type": "text", "text": right["message"]["content"]}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert whole["usage"]["output_tokens"] == 12
    events = server.events("/v1/messages", messages=HI, max_tokens=12, **GREEDY)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == right["message"]["content"]
    assert events[-2]["usage"]["output_tokens"] == 12
    stop = right["message"]["content"][4:8]
    stopped = server.ok("/v1/messages", messages=HI, max_tokens=12, stop_sequences=[stop], **GREEDY)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)


def test_responses_say_what_chat_says(server: RunningServer) -> None:
    right = chat(server, **GREEDY, max_tokens=12)["message"]["content"]
    whole = server.ok("/v1/responses", input="hi", max_output_tokens=12, **GREEDY)
    assert whole["output"][0]["content"][0]["text"] == right
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 12
    events = server.events("/v1/responses", input="hi", max_output_tokens=12, **GREEDY)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.incomplete"]
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == right
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


def test_thinking_comes_apart_in_every_api(server: RunningServer) -> None:
    options = {**GREEDY, "chat_template_kwargs": {"enable_thinking": True}}
    right = chat(server, **options, max_tokens=24, thinking_token_budget=6)["message"]
    assert right["reasoning"] == right["reasoning_content"]
    limited = {"thinking": {"type": "enabled", "budget_tokens": 6}}
    blocks = server.ok("/v1/messages", messages=HI, max_tokens=24, **GREEDY, **limited)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (right["reasoning"], right["content"])
    usage = server.ok("/v1/chat/completions", messages=HI, **options, max_tokens=24, thinking_token_budget=6)
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6
    hidden = chat(server, **options, max_tokens=24, thinking_token_budget=6, include_reasoning=False)
    assert hidden["message"] == {"role": "assistant", "content": right["content"]}


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("thinks", [None, False, True], ids=["unsaid", "off", "on"])
def test_no_think_tag_leads_the_text_however_thinking_is_asked_for(
    server: RunningServer, thinks: bool | None, tools: tuple[dict[str, Any], ...]
) -> None:
    kwargs = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
    named = [{"type": "function", "function": tool} for tool in tools]
    body = {"messages": HI, "temperature": 0, "max_tokens": 20, "thinking_token_budget": 5, **kwargs}
    choice = server.ok("/v1/chat/completions", **body, tools=named)["choices"][0]["message"]
    deltas = [
        event["choices"][0]["delta"] for event in server.events("/v1/chat/completions", **body, tools=named)
    ]
    for name in ("content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (choice.get(name) or "")
    assert bool(choice.get("reasoning")) == bool(thinks)
    assert choice["content"]
    how = {"type": "enabled", "budget_tokens": 5} if thinks else {"type": "disabled"}
    blocks = server.ok(
        "/v1/messages",
        messages=HI,
        temperature=0,
        max_tokens=20,
        tools=[{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools],
        **({} if thinks is None else {"thinking": how}),
    )["content"]
    said = {block["type"]: block.get("text") or block.get("thinking") for block in blocks}
    assert said == {
        key: text
        for key, text in (("thinking", choice.get("reasoning")), ("text", choice["content"]))
        if text is not None
    }
    assert not any(text.lstrip().startswith(("<think>", "</think>")) for text in said.values())


def test_a_forced_call_is_streamed_as_it_is_told_whole(server: RunningServer) -> None:
    body: dict[str, Any] = {"messages": HI, "max_tokens": 60, "temperature": 0.8, "seed": 4}
    body |= {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
    body["parallel_tool_calls"] = False
    choice = server.ok("/v1/chat/completions", **body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    chunks = server.events("/v1/chat/completions", **body)
    pieces = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == call["function"]["name"] == "run"
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert arguments == call["function"]["arguments"]
    reason = chunks[-1]["choices"][0]["finish_reason"]
    assert reason == choice["finish_reason"]
    if reason == "tool_calls":
        assert list(json.loads(arguments)) == ["a"]
    else:  # a weak model may fill its whole budget with one string: then it must not look finished
        assert reason == "length"


def test_events_are_told_apart_by_lines(server: RunningServer) -> None:
    response = server.post("/v1/messages", messages=HI, max_tokens=2, stream=True)
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith(("event: ", "data: ")) for line in lines)
    assert len(events_of(response.text)) == len(lines) // 2


def test_the_counters_move_with_what_is_served(server: RunningServer) -> None:
    names = ("generation_tokens_total", "spec_decode_num_drafts_total", "time_to_first_token_seconds_count")
    before = [server.metric(name) for name in names]
    how = {"num_speculative_tokens": 4}
    server.ok("/v1/completions", prompt="def f", max_tokens=20, ignore_eos=True, speculative=how, **GREEDY)
    tokens, drafts, firsts = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert (tokens, firsts) == (20, 1)
    assert 0 < drafts < 20
    server.ok("/v1/completions", prompt="def f", max_tokens=20, speculative=False, **GREEDY)
    assert server.metric("spec_decode_num_drafts_total") == before[1] + drafts
    assert server.metric("num_requests_running") == server.metric("kv_cache_usage_perc") == 0
