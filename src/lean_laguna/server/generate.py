"""``POST /inference/v1/generate``: token ids in, token ids out, for callers that tokenize by themselves.

Source: vLLM 0.30, entrypoints/serve/disagg/protocol.py.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lean_laguna.server.logprobs import chat_logprobs, prompt_logprobs
from lean_laguna.server.sampling import draft_length, sampling_params
from lean_laguna.server.schemas import GenerateRequest
from lean_laguna.server.sending import DONE, JSON, EventStream, data, until_gone
from lean_laguna.server.service import Service
from lean_laguna.server.stream import Delta, Prompt, Stream
from lean_laguna.server.usage import speculation_metrics, usage


async def generate(service: Service, request: Request) -> Response:
    """Serve one request."""
    body, headers = await service.body(request, GenerateRequest)
    ids, sampling = tuple(body.token_ids), body.sampling_params
    asked = 16 if sampling.max_tokens is None else sampling.max_tokens
    params = sampling_params(
        sampling,
        {},  # a caller that brings tokens brings its sampling too: no defaults of the checkpoint
        structured_outputs=sampling.structured_outputs,
        max_tokens=service.max_tokens(asked, len(ids), "token_ids"),
        logprobs=sampling.logprobs,
    )
    stream = await service.submit(
        request, [Prompt(ids, params, None, draft_length(body.speculative))], {"prompt": "token_ids"}
    )
    reply = _TokenReply(service, body, stream)

    def leave() -> None:
        service.engine.abort(stream)

    if body.stream:
        return EventStream(reply.events(), leave, headers=headers)
    return JSON(await until_gone(request, reply.whole(), leave), headers=headers)


class _TokenReply:
    """Puts the engine's output into the endpoint's shape, whole or piece by piece."""

    def __init__(self, service: Service, body: GenerateRequest, stream: Stream):
        self.service, self.body, self.stream = service, body, stream
        self.id = body.request_id or uuid.uuid4().hex
        self.num_tokens = [0] * stream.num_seqs

    async def whole(self) -> dict[str, Any]:
        """Return the response body."""
        merged: dict[int, dict[str, Any]] = {}
        while deltas := await self.stream.next():
            for delta in deltas:
                piece = self._choice(delta)
                choice = merged.setdefault(delta.choice, piece)
                if choice is piece:
                    continue
                choice["token_ids"] += piece["token_ids"]
                choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
                if piece["logprobs"] is not None:
                    choice["logprobs"]["content"] += piece["logprobs"]["content"]
        return {
            "request_id": self.id,
            "choices": [merged[i] for i in sorted(merged)],
            "prompt_logprobs": prompt_logprobs(self.stream.states[0].prompt_logprobs),
            "kv_transfer_params": None,
            "usage": self._usage(),
            "metrics": self._metrics(),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        options = self.body.stream_options
        is_continuous = bool(options and options.continuous_usage_stats)
        while deltas := await self.stream.next():
            for delta in deltas:
                chunk: dict[str, Any] = {"request_id": self.id, "choices": [self._choice(delta)]}
                if is_continuous:
                    chunk["usage"] = self._usage()
                yield data(chunk)
        if options and options.include_usage:
            last: dict[str, Any] = {
                "request_id": self.id,
                "choices": [],
                "usage": self._usage(),
                "metrics": self._metrics(),
            }
            yield data(last)
        yield DONE

    def _choice(self, delta: Delta) -> dict[str, Any]:
        self.num_tokens[delta.choice] = delta.num_tokens
        num_top = self.body.sampling_params.logprobs
        return {
            "index": delta.choice,
            "token_ids": delta.token_ids,
            "logprobs": None
            if num_top is None
            # Tokens are named by id, as trainers read them: texts are not unique.
            else chat_logprobs(self.service.tokenizer, delta.token_ids, delta.logprobs or [], num_top, True),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _usage(self) -> dict[str, Any]:
        num_cached = self.stream.states[0].sequences[0].num_cached_tokens
        return usage(len(self.body.token_ids), sum(self.num_tokens), num_cached, None)

    def _metrics(self) -> dict[str, Any] | None:
        return speculation_metrics(
            list(self.stream.outputs.values()), self.service.config.spec_decode_metrics
        )
