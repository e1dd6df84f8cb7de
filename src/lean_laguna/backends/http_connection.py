"""The connection to one server: requests, streams, and what can be read about it; errors in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import httpx

from lean_laguna.backends.http_wire import (
    error_message,
    events_of,
    normal_url,
    said_by_server,
    speculation_counts,
)
from lean_laguna.core.errors import BackendError, ConfigError, RequestError
from lean_laguna.core.types import SpeculationStats

CONNECT_TIMEOUT_S = 10.0
# Between two pieces of a stream: a long prompt on a slow machine says nothing for minutes.
READ_TIMEOUT_S = 600.0
T = TypeVar("T")


class HttpConnection:
    """Keeps connections to a server open, on an event loop of its own.

    Attributes:
        base_url: Up to and without ``/v1``.
    """

    def __init__(self, base_url: str, api_key: str | None = None):
        self.base_url = normal_url(base_url)
        self._runner = asyncio.Runner()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=timeout)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something asynchronous."""
        return self._runner.run(work)

    def close(self) -> None:
        """Close the connections and the loop."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Post a body and yield the events of the stream that comes back.

        Raises:
            RequestError: The server refuses the request.
            ConfigError: It refuses the key.
            BackendError: It cannot be reached, fails, or breaks the stream off.
        """
        num_events = 0
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise said_by_server(self.base_url, response)
                async for event in events_of(response, self.base_url):
                    num_events += 1
                    yield event
        except httpx.HTTPError as error:
            raise BackendError(error_message(self.base_url, error, num_events)) from None

    async def get(self, path: str) -> httpx.Response:
        """Return what a path answers.

        Raises:
            ConfigError: The key is refused.
            BackendError: The server cannot be reached, or answers with an error.
        """
        try:
            response = await self._client.get(path)
        except httpx.HTTPError as error:
            raise BackendError(error_message(self.base_url, error)) from None
        if response.status_code != 200:
            raise said_by_server(self.base_url, response)
        return response

    async def get_json(self, path: str) -> Any:
        """Return the JSON that a path answers.

        Raises:
            ConfigError: The key is refused.
            BackendError: As `get`, or the answer is something else.
        """
        response = await self.get(path)
        try:
            return response.json()
        except ValueError:
            raise BackendError(f"{self.base_url}{path}: not JSON: {response.text!r:.80}") from None

    async def version(self) -> str | None:
        """Return the engine's version; None where the server does not say."""
        try:
            answer = await self.get_json("/version")
        except (BackendError, ConfigError, RequestError):
            return None
        return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None

    async def counts(self, model: str) -> SpeculationStats | None:
        """Return the server's speculation counters so far; None where it has none."""
        try:
            response = await self.get("/metrics")
        except (BackendError, ConfigError, RequestError):
            return None
        return speculation_counts(response.text, model)
