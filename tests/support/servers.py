"""A server over a real socket, in a thread of the test's process, and readers for what it streams."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import torch

from lean_laguna.engine.llm import LLM
from lean_laguna.server.listener import bind
from lean_laguna.server.run import Server, make_server
from lean_laguna.server.service import Service
from lean_laguna.server.settings import ServerConfig
from support.engines import dflash, make_engine


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Look every 10 ms until it is so."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come about in time"
        time.sleep(0.01)


class RunningServer:
    """A server that is up.

    Attributes:
        server: uvicorn's server, with the application on it.
        client: Calls it.
        url: Where it listens.
    """

    def __init__(self, server: Server, port: int):
        self.server, self.port = server, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    @property
    def service(self) -> Service:
        assert self.server.app.service is not None
        return self.server.app.service

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the JSON of a stream's events; a stream of OpenAI's ends with [DONE]."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series that carry the labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON of server-sent events, without the closing [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def nano(**options: Any) -> Callable[[], LLM]:
    """Return what loads the packaged pair, on one thread."""

    def load() -> LLM:
        torch.set_num_threads(1)
        return LLM("nano", speculative_config={"model": "nano-dflash"}, seed=0, **options)

    return load


def tiny(**options: Any) -> Callable[[], LLM]:
    """Return what wraps an engine over the tiny random pair; it has no chat template."""

    def load() -> LLM:
        torch.set_num_threads(1)
        return LLM.from_engine(make_engine(dflash(), **options))

    return load


@contextlib.contextmanager
def running(
    load: Callable[[], LLM], *, send_buffer: int | None = None, **config: Any
) -> Iterator[RunningServer]:
    """Run a server on a free port until the block ends; a small send buffer lets slow readers be felt."""
    settled = threading.Event()
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = make_server(ServerConfig(**{"shutdown_timeout_s": 1, **config}), load, lambda _: settled.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    up = RunningServer(server, listener.getsockname()[1])
    try:
        assert settled.wait(60)
        assert up.service.engine.error is None
        yield up
    finally:
        up.client.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
