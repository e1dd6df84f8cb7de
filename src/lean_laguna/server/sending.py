"""Responses that end when their client does: JSON that is awaited, and server-sent events.

Both watch for the client's leaving while they work, and tell the engine at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lean_laguna.server.errors import ApiError, as_api_error

T = TypeVar("T")
log = logging.getLogger("lean_laguna.server")
encode = msgspec.json.Encoder().encode


class ClientGoneError(Exception):
    """Nobody reads the response any more."""


class JSON(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of a value."""
        return encode(content)


def error_response(error: ApiError, body: dict[str, Any]) -> JSON:
    """Return the response that says what went wrong, in the given shape."""
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSON(body, status_code=error.status, headers=headers)


def data(value: Any, event: str | None = None) -> bytes:
    """Return one server-sent event that carries a JSON value."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def until_gone(request: Request, work: Coroutine[Any, Any, T], on_gone: Callable[[], None]) -> T:
    """Await ``work``; where it does not come to its end, call ``on_gone``: nobody reads the rest.

    Args:
        request: Tells when the client leaves; the work is cancelled then.
        work: Makes the response.
        on_gone: Drops what the work was reading.

    Raises:
        ClientGoneError: It left.
    """
    watch = asyncio.ensure_future(_gone(request.receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    except BaseException:  # a fault of ours on the way is no reason to go on computing either
        on_gone()
        raise
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


class EventStream(Response):
    """Server-sent events; a failure on the way is an event too, in the shape of an error body."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_gone: Callable[[], None],
        *,
        error_event: Callable[[ApiError], bytes] = lambda error: data(error.body()) + DONE,
        headers: dict[str, str] | None = None,
    ):
        self.events, self.on_gone, self.error_event = events, on_gone, error_event
        self.background = None
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self.raw_headers.append((b"content-type", b"text/event-stream; charset=utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client is gone."""
        watch = asyncio.ensure_future(_gone(receive))
        task = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait({watch, task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
            self.on_gone()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await send(start)
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:  # how a server says that the client has gone
            return
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                log.error("a stream failed", exc_info=error)
            await send({"type": "http.response.body", "body": self.error_event(told), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
