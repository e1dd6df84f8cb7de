"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API over the same chat.

Source: Anthropic's Messages API: content blocks, events of a stream, stop reasons, shape of errors.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lean_laguna.server.blocks import Block, Blocks, Change
from lean_laguna.server.bodies import convert
from lean_laguna.server.chat_job import ChatJob, rendered_chat, submit_chat
from lean_laguna.server.choice_reader import ChoiceReader
from lean_laguna.server.errors import CONTEXT_LENGTH, ApiError, called
from lean_laguna.server.messages_input import chat_fields
from lean_laguna.server.schemas import ChatRequest, MessagesFields, MessagesRequest
from lean_laguna.server.sending import JSON, EventStream, data, until_gone
from lean_laguna.server.service import Service
from lean_laguna.server.stream import Stream

_ERROR_TYPES = {413: "request_too_large", 503: "overloaded_error"}


async def messages(service: Service, request: Request) -> Response:
    """Serve one request."""
    body, headers = await service.body(request, MessagesRequest)
    fields, names = chat_fields(body)
    chat, job, stream = await submit_chat(service, request, fields, names)
    reply = _MessageReply(service, chat, job, stream)

    def leave() -> None:
        service.engine.abort(stream)

    if body.stream:

        def failed(error: ApiError) -> bytes:
            return data(error_body(error), "error")

        return EventStream(reply.events(), leave, error_event=failed, headers=headers)
    return JSON(await until_gone(request, reply.whole(), leave), headers=headers)


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a prompt without serving it."""
    body, headers = await service.body(request, MessagesFields)
    fields, names = chat_fields(body)
    with called(names):
        rendered, _ = await rendered_chat(service, convert(fields, ChatRequest))
    return JSON({"input_tokens": len(await service.encode(rendered))}, headers=headers)


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's shape, with the words its agents look for."""
    kind = _ERROR_TYPES.get(error.status, error.type if error.status < 500 else "api_error")
    text = f"prompt is too long: {error}" if error.code == CONTEXT_LENGTH else str(error)
    return {"type": "error", "error": {"type": kind, "message": text}}


class _MessageReply:
    """Puts one completion into the endpoint's shape, whole or piece by piece."""

    def __init__(self, service: Service, chat: ChatRequest, job: ChatJob, stream: Stream):
        self.service, self.job, self.stream = service, job, stream
        self.reader, self.blocks = ChoiceReader(service, job, chat), Blocks()
        self.id = f"msg_{uuid.uuid4().hex}"
        self.stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def whole(self) -> dict[str, Any]:
        """Return the response body."""
        async for _ in self._changes():
            pass
        content = [shown for block in self.blocks.all if (shown := _whole_block(block)) is not None]
        return {**self._message(content), **self.stop, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        start = {**self._message([]), **self.stop, "usage": self._usage()}
        yield _event("message_start", message=start)
        async for change in self._changes():
            for event in _block_events(change):
                yield event
        yield _event("message_delta", delta=self.stop, usage=self._usage())
        yield _event("message_stop")

    async def _changes(self) -> AsyncIterator[Change]:
        while deltas := await self.stream.next():
            for delta in deltas:
                events, reason = self.reader.read(delta)
                for change in self.blocks.push(events):
                    yield change
                if reason is not None:
                    for change in self.blocks.finish():
                        yield change
                    self.stop = _stop(reason, delta.stop_reason)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.model_name,
            "content": content,
        }

    def _usage(self) -> dict[str, Any]:
        num_cached = self.stream.states[0].sequences[0].num_cached_tokens
        return {
            "input_tokens": len(self.job.prompt.token_ids) - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.reader.num_tokens,
        }


def _stop(reason: str, stop_reason: int | str | None) -> dict[str, Any]:
    if reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    known = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": known.get(reason, reason), "stop_sequence": None}


def _whole_block(block: Block) -> dict[str, Any] | None:
    """Return a block of a whole reply; None for a call that was cut off, whose input is no object."""
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if not block.is_complete:
        return None
    given: Mapping[str, Any] = msgspec.json.decode(block.text or "{}")
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _block_events(change: Change) -> list[bytes]:
    what, block, text = change
    if what == "start":
        empty: dict[str, dict[str, Any]] = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
            "call": {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}},
        }
        return [_event("content_block_start", index=block.index, content_block=empty[block.kind])]
    if what == "stop":
        return [_event("content_block_stop", index=block.index)]
    kinds = {
        "thinking": ("thinking_delta", "thinking"),
        "text": ("text_delta", "text"),
        "call": ("input_json_delta", "partial_json"),
    }
    kind, key = kinds[block.kind]
    return [_event("content_block_delta", index=block.index, delta={"type": kind, key: text})]


def _event(kind: str, **fields: Any) -> bytes:
    return data({"type": kind, **fields}, kind)
