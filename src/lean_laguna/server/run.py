"""Serves on a bound port until told to stop; the model loads meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from lean_laguna.core import heap
from lean_laguna.engine.llm import LLM
from lean_laguna.server.app import App
from lean_laguna.server.service import Service
from lean_laguna.server.settings import ServerConfig

SWITCH_INTERVAL_S = 0.001
"""How long the engine's thread may keep the interpreter while the event loop wants it: a token waits no
longer. Python's own 5 ms are as much as a step of a small model."""
_LAST_WORDS_S = 5.0
"""After the running requests' time is up: to write their errors and close."""


class Server(uvicorn.Server):
    """A uvicorn server that lets running requests finish within a time, and fails the rest cleanly."""

    def __init__(self, config: uvicorn.Config, app: App):
        super().__init__(config)
        self.app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop gracefully at the first signal, at once at the second; the process then ends as usual."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, give running ones their time, then end what is left."""
        service = self.app.service
        if service is None:
            await super().shutdown(sockets)
            return
        service.is_stopping = True
        service.gate.let_all_in()  # who waits there is refused now: nobody could open it any more
        limit_s = self.app.config.shutdown_timeout_s
        late = asyncio.get_running_loop().call_later(
            limit_s, service.engine.stop, f"the server stopped before the request ended ({limit_s:g} s)"
        )
        await super().shutdown(sockets)
        late.cancel()


def make_server(
    config: ServerConfig,
    load: Callable[[], LLM],
    on_settled: Callable[[Service], None],
    *,
    log_level: str = "warning",
    has_access_log: bool = False,
) -> Server:
    """Return a server that is not yet running.

    Args:
        config: Limits and habits.
        load: Makes the engine; called on a thread, while the port answers "loading".
        on_settled: Called when loading has ended, well or not.
        log_level: Of the log on standard error.
        has_access_log: Log each request.
    """
    app = App(config, load, on_settled)
    settings = uvicorn.Config(
        app.asgi,
        http="h11",
        ws="none",
        lifespan="on",
        log_level=log_level,
        access_log=has_access_log,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s + _LAST_WORDS_S)),
    )
    return Server(settings, app)


def serve(
    config: ServerConfig,
    load: Callable[[], LLM],
    listener: socket.socket,
    on_ready: Callable[[Service], None],
    *,
    log_level: str = "warning",
    has_access_log: bool = False,
) -> None:
    """Serve on a socket from `listener.bind` until a signal says stop; other arguments as for `make_server`.

    Raises:
        BaseException: What made loading fail.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.basicConfig(format="lean-laguna: %(levelname)s: %(message)s")
    failed: list[BaseException] = []

    def settled(service: Service) -> None:
        if service.engine.error is not None:
            failed.append(service.engine.error)
            server.should_exit = True
        else:
            heap.settle()
            on_ready(service)

    server = make_server(config, load, settled, log_level=log_level, has_access_log=has_access_log)
    server.run(sockets=[listener])
    if failed:
        raise failed[0]
    service = server.app.service
    if service is not None and not service.engine.join(_LAST_WORDS_S):
        # Stopped while it loads: the interpreter cannot end a thread inside a library, and would abort.
        sys.stderr.flush()
        os._exit(0)
