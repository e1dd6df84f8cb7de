"""``POST /v1/responses``: OpenAI's newer API over the same chat; nothing is stored.

Source: OpenAI's Responses API: items of the output, events of a stream, statuses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lean_laguna.server.blocks import Block, Blocks, Change
from lean_laguna.server.chat_job import ChatJob, submit_chat
from lean_laguna.server.choice_reader import ChoiceReader
from lean_laguna.server.errors import ApiError
from lean_laguna.server.responses_input import chat_fields
from lean_laguna.server.schemas import ChatRequest, ResponsesRequest
from lean_laguna.server.sending import JSON, EventStream, data, until_gone
from lean_laguna.server.service import Service
from lean_laguna.server.stream import Stream


async def responses(service: Service, request: Request) -> Response:
    """Serve one request."""
    body, headers = await service.body(request, ResponsesRequest)
    fields, names = chat_fields(body)
    chat, job, stream = await submit_chat(service, request, fields, names)
    reply = _ResponseReply(service, body, chat, job, stream)

    def leave() -> None:
        service.engine.abort(stream)

    if body.stream:
        return EventStream(reply.events(), leave, error_event=reply.failed, headers=headers)
    return JSON(await until_gone(request, reply.whole(), leave), headers=headers)


_EVENT_KINDS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


class _ResponseReply:
    """Puts one completion into the endpoint's shape, whole or piece by piece."""

    def __init__(
        self, service: Service, body: ResponsesRequest, chat: ChatRequest, job: ChatJob, stream: Stream
    ):
        self.service, self.body, self.job, self.stream = service, body, job, stream
        self.reader, self.blocks = ChoiceReader(service, job, chat), Blocks()
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.reason: str | None = None
        self._ids: dict[int, str] = {}
        self._num_events = 0

    async def whole(self) -> dict[str, Any]:
        """Return the response body."""
        async for _ in self._changes():
            pass
        return self._response(self._status(), with_usage=True)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        async for change in self._changes():
            for event in self._block_events(change):
                yield event
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status, with_usage=True))

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that failed."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response=response)

    async def _changes(self) -> AsyncIterator[Change]:
        while deltas := await self.stream.next():
            for delta in deltas:
                events, reason = self.reader.read(delta)
                for change in self.blocks.push(events):
                    yield change
                if reason is not None:
                    self.reason = reason
                    for change in self.blocks.finish():
                        yield change

    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    def _response(self, status: str, *, with_usage: bool = False) -> dict[str, Any]:
        body, params = self.body, self.job.prompt.params
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.service.model_name,
            "output": [self._item(block, "completed") for block in self.blocks.all],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if with_usage else None,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_output = len(self.job.prompt.token_ids), self.reader.num_tokens
        num_cached = self.stream.states[0].sequences[0].num_cached_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.reader.num_reasoning_tokens},
            "total_tokens": num_prompt + num_output,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Return an output item; while in progress its parts are still to come."""
        prefix = {"thinking": "rs", "text": "msg", "call": "fc"}[block.kind]
        item_id = self._ids.setdefault(block.index, f"{prefix}_{uuid.uuid4().hex}")
        is_done = status != "in_progress"
        if is_done and not (block.is_complete and self._is_last_whole(block)):
            status = "incomplete"
        if block.kind == "call":
            return {
                "id": item_id,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text if is_done else "",
                "status": status,
            }
        parts = [_part(block, block.text)] if is_done else []
        if block.kind == "thinking":
            return {"id": item_id, "type": "reasoning", "summary": [], "content": parts, "status": status}
        return {"id": item_id, "type": "message", "role": "assistant", "content": parts, "status": status}

    def _is_last_whole(self, block: Block) -> bool:
        """Return whether a block was not cut by the token limit."""
        return self.reason != "length" or block is not self.blocks.all[-1]

    def _block_events(self, change: Change) -> list[bytes]:
        what, block, text = change
        place = {"output_index": block.index, "item_id": self._item(block, "in_progress")["id"]}
        part_place = {**place, "content_index": 0}
        kind = _EVENT_KINDS[block.kind]
        if what == "delta":
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            where = place if block.kind == "call" else part_place
            return [self._event(f"response.{kind}.delta", **where, delta=text, **more)]
        events = []
        if what == "start":
            item = self._item(block, "in_progress")
            events.append(self._event("response.output_item.added", output_index=block.index, item=item))
            if block.kind != "call":
                part = _part(block, "")
                events.append(self._event("response.content_part.added", **part_place, part=part))
            return events
        if block.kind == "call":
            events.append(
                self._event(f"response.{kind}.done", **place, name=block.name, arguments=block.text)
            )
        else:
            more = {"logprobs": []} if block.kind == "text" else {}
            events.append(self._event(f"response.{kind}.done", **part_place, text=block.text, **more))
            part = _part(block, block.text)
            events.append(self._event("response.content_part.done", **part_place, part=part))
        item = self._item(block, "completed")
        events.append(self._event("response.output_item.done", output_index=block.index, item=item))
        return events

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return data({"type": kind, "sequence_number": number, **fields}, kind)


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
