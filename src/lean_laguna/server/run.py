"""Serves on a bound port until told to stop; the model loads meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from lean_laguna.engine.llm import LLM
from lean_laguna.server.app import App
from lean_laguna.server.service import Service
from lean_laguna.server.settings import ServerConfig

_LAST_WORDS_S = 5.0
"""After the running requests' time is up: to write their errors and close."""


class Server(uvicorn.Server):
    """A uvicorn server that lets running requests finish within a time, and fails the rest cleanly."""

    def __init__(self, config: uvicorn.Config, app: App):
        super().__init__(config)
        self.app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, give running ones their time, then end what is left."""
        service = self.app.service
        if service is None:
            await super().shutdown(sockets)
            return
        service.is_stopping = True
        limit_s = self.app.config.shutdown_timeout_s
        late = asyncio.get_running_loop().call_later(
            limit_s, service.engine.stop, f"the server stopped before the request ended ({limit_s:g} s)"
        )
        await super().shutdown(sockets)
        late.cancel()


def serve(
    config: ServerConfig,
    load: Callable[[], LLM],
    listener: socket.socket,
    on_loaded: Callable[[Service], None],
    *,
    log_level: str = "warning",
    has_access_log: bool = False,
) -> None:
    """Serve on a bound socket until a signal says stop.

    Args:
        config: Limits and habits.
        load: Makes the engine; called on a thread, while the port answers "loading".
        listener: From `listener.bind`.
        on_loaded: Called once requests can be served.
        log_level: Of the log on standard error.
        has_access_log: Log each request.

    Raises:
        BaseException: What made loading fail.
    """
    logging.basicConfig(format="lean-laguna: %(levelname)s: %(message)s")
    failed: list[BaseException] = []

    def settled(service: Service) -> None:
        if service.engine.error is not None:
            failed.append(service.engine.error)
            server.should_exit = True
        else:
            on_loaded(service)

    app = App(config, load, settled)
    server = Server(
        uvicorn.Config(
            app.asgi,
            http="h11",
            ws="none",
            lifespan="on",
            log_level=log_level,
            access_log=has_access_log,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s + _LAST_WORDS_S)),
        ),
        app,
    )
    server.run(sockets=[listener])
    if failed:
        raise failed[0]
