"""Every sampling option over HTTP: with a drafter as from an engine that has none, streamed as whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lean_laguna.engine.llm import LLM
from support.servers import RunningServer, running


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    """A server without any drafter: what is right."""

    def load() -> LLM:
        torch.set_num_threads(1)
        return LLM("nano", seed=0)

    with running(load) as up:
        assert up.service.engine.llm.engine.proposer is None
        yield up


@pytest.fixture(scope="module")
def right_for(plain: RunningServer) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Return what is right for a body; each is asked for once."""
    known: dict[str, dict[str, Any]] = {}

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        key = path + json.dumps(body, sort_keys=True)
        if key not in known:
            known[key] = without_names(plain.ok(path, **body))
        return copy.deepcopy(known[key])

    return answer


ON: Any = {"num_speculative_tokens": 5}
PROMPT = "def fib(n):\n"
SAMPLED = {"temperature": 0.9, "seed": 11}
COMMON: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": SAMPLED,
    "negative seed": {"temperature": 0.9, "seed": -7},
    "top_p": {**SAMPLED, "top_p": 0.5},
    "top_k": {**SAMPLED, "top_k": 2},
    "min_p": {**SAMPLED, "min_p": 0.2},
    "repetition_penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "presence_penalty": {**SAMPLED, "presence_penalty": 2.0},
    "frequency_penalty": {**SAMPLED, "frequency_penalty": 2.0},
    "logit_bias": {"temperature": 0, "logit_bias": {"349": 6.0, "326": -100}},
    "allowed_token_ids": {**SAMPLED, "allowed_token_ids": list(range(300, 900))},
    "truncate_prompt_tokens": {"temperature": 0, "truncate_prompt_tokens": 3},
    "truncate_prompt_tokens -1": {"temperature": 0, "truncate_prompt_tokens": -1},
    "min_tokens": {"temperature": 0, "logit_bias": {"2": 30.0}, "min_tokens": 5},
    "eos": {"temperature": 0, "logit_bias": {"24": 16.0}},
    "ignore_eos": {"temperature": 0, "logit_bias": {"24": 16.0}, "ignore_eos": True},
    "stop": {"temperature": 0, "stop": ["turn", "ef ", "iber of"]},
    "stop kept": {"temperature": 0, "stop": ["\n    ", "ber of t"], "include_stop_str_in_output": True},
    "stop_token_ids": {**SAMPLED, "stop_token_ids": list(range(700, 1300))},
    "bad_words": {"temperature": 0, "bad_words": ["return", '"""', "python"]},
    "skip_special_tokens": {"temperature": 0, "logit_bias": {"12": 26.0}, "skip_special_tokens": False},
    "n": {**SAMPLED, "n": 3},
    "prompt_logprobs": {"temperature": 0, "prompt_logprobs": 2},
    "token ids": {**SAMPLED, "return_token_ids": True},
    "max_tokens 1": {"temperature": 0, "max_tokens": 1},
    "defaults": {"seed": 3},
    "regex": {**SAMPLED, "structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{2,5})+"}},
    "choice": {**SAMPLED, "guided_choice": ["yes, it is", "no"]},
}
COMPLETION = {
    "logprobs": {**SAMPLED, "logprobs": 3},
    "logprobs 0": {"temperature": 0, "logprobs": 0},
    "logprobs as ids": {"temperature": 0, "logprobs": 2, "return_tokens_as_token_ids": True},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
    "echo alone": {"temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 0},
    "many prompts": {**SAMPLED, "prompt": ["def a", [349, 326], "x = 1"], "n": 2, "echo": True},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
CHAT = {
    "top_logprobs": {**SAMPLED, "logprobs": True, "top_logprobs": 3},
    "thinking": {**SAMPLED, "chat_template_kwargs": {"enable_thinking": True}},
    "budget": {"temperature": 0, "reasoning_effort": "low", "thinking_token_budget": 4},
    "tools": {**SAMPLED, "tools": TOOLS, "tool_choice": "auto"},
    "json_schema": {
        **SAMPLED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
}
CASES = [("/v1/completions", name, case) for name, case in (COMMON | COMPLETION).items()]
CASES += [("/v1/chat/completions", name, case) for name, case in (COMMON | CHAT).items()]


def body_of(path: str, case: dict[str, Any]) -> dict[str, Any]:
    prompt = (
        {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    said = {"return_token_ids": True, "logprobs": 1 if path == "/v1/completions" else True}
    return {"max_tokens": 16, **said, **prompt, **case}


def without_names(value: dict[str, Any]) -> dict[str, Any]:
    """Drop what differs between any two requests: names, times, counts of drafts and of cached tokens."""
    value = copy.deepcopy(value)
    for key in ("id", "created", "metrics", "object"):
        value.pop(key, None)
    value["usage"].pop("prompt_tokens_details")
    return value


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream's chunks together into the shape of a whole response."""
    *pieces, last = chunks
    assert last["choices"] == []
    whole: dict[str, Any] = {"model": last["model"], "usage": last["usage"], "choices": {}}
    for chunk in pieces:
        assert chunk["usage"] is None
        whole |= {key: chunk[key] for key in ("prompt_logprobs", "prompt_token_ids") if key in chunk}
        for choice in chunk["choices"]:
            said = choice.pop("delta", None)
            if said is not None:
                choice["message"] = said
            _add(whole["choices"].setdefault(choice["index"], {}), choice)
    whole["choices"] = [choice for _, choice in sorted(whole["choices"].items())]
    return whole


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    for key, value in piece.items():
        if key in ("index", "role") or choice.get(key) is None:
            choice[key] = value
        elif key in ("finish_reason", "stop_reason"):
            assert choice["finish_reason"] is None, "a finish reason came twice"
            choice[key] = value
        elif isinstance(value, dict):
            _add(choice[key], value)
        elif value is not None:
            choice[key] = choice[key] + value


@pytest.mark.parametrize(("path", "name", "case"), CASES, ids=[f"{p.split('/')[2]} {n}" for p, n, _ in CASES])
def test_an_option_gives_the_same_with_a_drafter_and_from_an_engine_without_one_streamed_or_whole(
    server: RunningServer,
    plain: RunningServer,
    right_for: Callable[[str, dict[str, Any]], dict[str, Any]],
    path: str,
    name: str,
    case: dict[str, Any],
) -> None:
    """Texts, ids, log-probabilities, finish and stop reasons and usage, to the last bit."""
    body = body_of(path, case)
    right = right_for(path, body)
    assert all(choice["token_ids"] for choice in right["choices"]) or case.get("max_tokens") == 0
    assert without_names(server.ok(path, **body, speculative=ON)) == right
    usage = {"include_usage": True}
    bare = plain.events(path, **body, stream_options=usage)
    drafted = server.events(path, **body, speculative=ON, stream_options=usage)
    for stream in (bare, drafted):
        assert without_names(joined(stream)) == streams_of(right)


def streams_of(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a whole response as the pieces of its stream add up: nothing said is '', not null."""
    whole = copy.deepcopy(whole)
    for choice in whole["choices"]:
        if "message" in choice and choice["message"]["content"] is None:
            choice["message"]["content"] = ""
    return whole


OPTION_OF = {
    "negative seed": "seed",
    "eos": "logit_bias",
    "stop kept": "include_stop_str_in_output",
    "max_tokens 1": "max_tokens",
    "regex": "structured_outputs",
    "choice": "guided_choice",
    "thinking": "chat_template_kwargs",
    "budget": "thinking_token_budget",
    "json_schema": "response_format",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_one_of_these_options_changes_something(
    right_for: Callable[[str, dict[str, Any]], dict[str, Any]], path: str
) -> None:
    """So that no case above holds because its option does nothing here."""
    cases = {name: case for where, name, case in CASES if where == path and name in COMMON | CHAT}
    idle: list[str] = []
    silent = {"greedy", "defaults", "token ids", "tools"}  # change nothing, or not for certain
    silent |= {"truncate_prompt_tokens -1"}  # nothing of short prompts
    for name in cases.keys() - silent:
        option = OPTION_OF.get(name, name)
        assert option in cases[name]
        without = {key: value for key, value in cases[name].items() if key != option}
        if option == "seed":
            without["seed"] = 12345
        answers = [right_for(path, body_of(path, case)) for case in (cases[name], without)]
        idle += [name] if answers[0] == answers[1] else []
    assert idle == []


def test_the_options_leave_none_of_sampling_params_out() -> None:
    from dataclasses import fields

    from lean_laguna.core.types import SamplingParams

    asked = {key for _, _, case in CASES for key in case}
    spelled = {"thinking_token_budget", "structured_outputs", "max_tokens"}
    assert {field.name for field in fields(SamplingParams)} - asked - spelled == set()


def test_drafts_are_really_made_and_counted(server: RunningServer) -> None:
    body = body_of("/v1/completions", {"temperature": 0, "max_tokens": 30})
    on = server.ok("/v1/completions", **body, speculative=ON)["metrics"]["speculative_decoding"]
    assert on["num_draft_tokens"] >= on["num_accepted_draft_tokens"] > 0
    assert sum(on["acceptance_histogram"]) == on["num_spec_steps"]
    counted = sum(i * count for i, count in enumerate(on["acceptance_histogram"]))
    assert counted == on["num_accepted_draft_tokens"]
    assert on["mean_acceptance_length"] == 1 + counted / on["num_spec_steps"]
    assert "metrics" not in server.ok("/v1/completions", **body, speculative=False)
    streamed = server.events(
        "/v1/completions", **body, speculative=ON, stream_options={"include_usage": True}
    )
    assert streamed[-1]["metrics"]["speculative_decoding"] == on
    assert not any("metrics" in chunk for chunk in streamed[:-1])


def test_a_request_does_not_depend_on_its_neighbours(server: RunningServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bodies = [body_of("/v1/completions", {**SAMPLED, "seed": seed, "logprobs": 1}) for seed in range(6)]
    alone = [without_names(server.ok("/v1/completions", **body)) for body in bodies]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda body: without_names(server.ok("/v1/completions", **body)), bodies))
    assert together == alone
