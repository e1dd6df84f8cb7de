"""``POST /v1/chat/completions``: messages in; thinking, text and tool calls out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lean_laguna.server.chat_job import ChatJob, prepare_chat
from lean_laguna.server.choice_reader import ChoiceReader
from lean_laguna.server.logprobs import chat_logprobs, prompt_logprobs
from lean_laguna.server.reply_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ToolCallArguments,
    ToolCallStart,
)
from lean_laguna.server.schemas import ChatRequest
from lean_laguna.server.sending import DONE, JSON, EventStream, data, until_gone
from lean_laguna.server.service import Service
from lean_laguna.server.stream import Delta, Stream
from lean_laguna.server.usage import speculation_metrics, usage


async def chat_completions(service: Service, request: Request) -> Response:
    """Serve one request."""
    body, headers = await service.body(request, ChatRequest)
    job = await prepare_chat(service, body)
    stream = await service.submit(request, [job.prompt], job.names)
    reply = _ChatReply(service, body, job, stream)

    def leave() -> None:
        service.engine.abort(stream)

    if body.stream:
        return EventStream(reply.events(), leave, headers=headers)
    return JSON(await until_gone(request, reply.whole(), leave), headers=headers)


class _ChatReply:
    """Puts the engine's output into the endpoint's shape, whole or piece by piece."""

    def __init__(self, service: Service, body: ChatRequest, job: ChatJob, stream: Stream):
        self.service, self.body, self.job, self.stream = service, body, job, stream
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.readers = [ChoiceReader(service, job, body) for _ in range(stream.num_seqs)]

    async def whole(self) -> dict[str, Any]:
        """Return the response body."""
        events: list[list[Event]] = [[] for _ in self.readers]
        choices = [self._empty_choice(i) for i in range(len(self.readers))]
        while deltas := await self.stream.next():
            for delta in deltas:
                choice = choices[delta.choice]
                new, reason = self.readers[delta.choice].read(delta)
                events[delta.choice] += new
                if reason is not None:
                    choice["finish_reason"], choice["stop_reason"] = reason, delta.stop_reason
                if self.body.logprobs:
                    choice["logprobs"]["content"] += self._logprobs(delta)["content"]
                if self.body.return_token_ids:
                    choice["token_ids"] += delta.token_ids
        for choice, said in zip(choices, events, strict=True):
            choice["message"] = message_of(Reply.from_events(said))
        frame = self._frame("chat.completion", choices)
        frame["usage"] = self._usage()
        if self.body.prompt_logprobs is not None:
            frame["prompt_logprobs"] = prompt_logprobs(self.stream.states[0].prompt_logprobs)
        if self.body.return_token_ids:
            frame["prompt_token_ids"] = list(self.job.prompt.token_ids)
        if metrics := self._metrics():
            frame["metrics"] = metrics
        return frame

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        options = self.body.stream_options
        wants_usage = bool(options and options.include_usage)
        is_continuous = bool(options and options.continuous_usage_stats)

        def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
            frame = self._frame("chat.completion.chunk", choices)
            if is_continuous:
                frame["usage"] = self._usage()
            elif wants_usage:
                frame["usage"] = None
            return frame

        started: set[int] = set()
        while deltas := await self.stream.next():
            for delta in deltas:
                if delta.choice not in started:
                    started.add(delta.choice)
                    yield data(self._first(chunk([_stream_choice(delta.choice, _OPENING, None)])))
                choice = self._choice(delta)
                if choice["delta"] or choice["finish_reason"] or self._is_wanted() or is_continuous:
                    yield data(chunk([choice]))
        if wants_usage:
            last = self._frame("chat.completion.chunk", [])
            last["usage"] = self._usage()
            if metrics := self._metrics():
                last["metrics"] = metrics
            yield data(last)
        yield DONE

    def _first(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Add what a stream says once, with a completion's first chunk."""
        if self.body.prompt_logprobs is not None:
            frame["prompt_logprobs"] = prompt_logprobs(self.stream.states[0].prompt_logprobs)
        if self.body.return_token_ids:
            frame["prompt_token_ids"] = list(self.job.prompt.token_ids)
        return frame

    def _is_wanted(self) -> bool:
        """Return whether tokens without text are still news."""
        return bool(self.body.logprobs or self.body.return_token_ids)

    def _choice(self, delta: Delta) -> dict[str, Any]:
        events, reason = self.readers[delta.choice].read(delta)
        choice = _stream_choice(delta.choice, delta_of(events), reason)
        if reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.body.logprobs:
            choice["logprobs"] = self._logprobs(delta)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(
            self.service.tokenizer,
            delta.token_ids,
            delta.logprobs or [],
            self.body.top_logprobs or 0,
            bool(self.body.return_tokens_as_token_ids),
        )

    def _empty_choice(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "message": {}, "logprobs": None, "finish_reason": None}
        choice["stop_reason"] = None
        if self.body.logprobs:
            choice["logprobs"] = {"content": []}
        if self.body.return_token_ids:
            choice["token_ids"] = []
        return choice

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        return usage(
            len(self.job.prompt.token_ids),
            sum(reader.num_tokens for reader in self.readers),
            self.stream.states[0].sequences[0].num_cached_tokens,
            sum(reader.num_reasoning_tokens for reader in self.readers),
        )

    def _metrics(self) -> dict[str, Any] | None:
        return speculation_metrics(
            list(self.stream.outputs.values()), self.service.config.spec_decode_metrics
        )


_OPENING = {"role": "assistant", "content": ""}


def message_of(reply: Reply) -> dict[str, Any]:
    """Return the message of a whole reply; thinking under both names in use."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.content is None and not reply.tool_calls and reply.reasoning is None:
        message["content"] = ""
    if reply.reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def delta_of(events: Iterable[Event]) -> dict[str, Any]:
    """Return the ``delta`` of a chunk that carries these events."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
            case ContentDelta(text):
                delta["content"] = delta.get("content", "") + text
            case ToolCallStart(index, call_id, name):
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ToolCallArguments(index, json_delta):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += json_delta
            case _:
                pass
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _stream_choice(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
