"""The clients of ``verifiers`` against a running server. Usage: with_verifiers.py URL MODEL_FOLDER"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from typing import Any

import httpx
from verifiers.v1.clients import EvalClient, EvalClientConfig, TrainClient, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

URL, FOLDER = sys.argv[1:3]
ASK: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 24, "seed": 3}


def say(what: str, found: object) -> None:
    print(f"{what}: {found}", flush=True)


def rescored(prompt: list[int], completion: list[int]) -> list[float]:
    """Return the log-probabilities of a completion, read as part of a prompt and without drafting."""
    sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    body = {"token_ids": prompt + completion, "sampling_params": sampling, "speculative": False}
    answer = httpx.post(f"{URL}/inference/v1/generate", json=body, timeout=60).json()
    entries = answer["prompt_logprobs"][len(prompt) :]
    return [entry[str(token)]["logprob"] for entry, token in zip(entries, completion, strict=True)]


async def train() -> None:
    client = TrainClient(TrainClientConfig(base_url=f"{URL}/v1", renderer_model_name=FOLDER))
    replies = []
    # The second says what a turn that continues an earlier one says beside its tokens.
    for more in ({}, {"routed_experts_prompt_start": 0}):
        sampling = SamplingConfig(**SAMPLING, **more)
        reply = await client.get_response(
            ChatDialect(), {"model": "nano", "messages": ASK}, sampling, session_id="s"
        )
        replies.append(reply)
    tokens = replies[0].tokens
    assert tokens.completion_ids == replies[1].tokens.completion_ids
    assert len(tokens.completion_ids) == len(tokens.completion_logprobs) > 0
    again = rescored(list(tokens.prompt_ids), list(tokens.completion_ids))
    worst = max(abs(a - b) for a, b in zip(again, tokens.completion_logprobs, strict=True))
    assert worst < 1e-4, worst
    await client.close()
    say("train", f"{len(tokens.completion_ids)} tokens, log-probabilities rescored within {worst:.1e}")


async def evaluate() -> None:
    client = EvalClient(EvalClientConfig(base_url=f"{URL}/v1"))
    body = {"model": "nano", "messages": ASK, **SAMPLING}
    reply = await client.get_response(ChatDialect(), body, SamplingConfig(), session_id="s")
    assert reply.usage.completion_tokens > 0
    say("eval", f"{reply.finish_reason}, {reply.usage.completion_tokens} tokens")


say("verifiers", importlib.metadata.version("verifiers"))
asyncio.run(train())
asyncio.run(evaluate())
say("verifiers", "all as expected")
