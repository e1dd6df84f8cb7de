"""The ASGI application: routes, keys, and errors in one shape."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lean_laguna.engine.llm import LLM
from lean_laguna.server import admin, texts
from lean_laguna.server.chat import chat_completions
from lean_laguna.server.completions import completions
from lean_laguna.server.engine_thread import EngineThread
from lean_laguna.server.errors import ApiError, as_api_error
from lean_laguna.server.generate import generate
from lean_laguna.server.messages_api import count_tokens, error_body, messages
from lean_laguna.server.metrics import Metrics
from lean_laguna.server.openapi import description
from lean_laguna.server.page import page
from lean_laguna.server.responses_api import responses
from lean_laguna.server.sending import JSON, ClientGoneError, error_response
from lean_laguna.server.service import Service
from lean_laguna.server.settings import ServerConfig

Endpoint = Callable[[Service, Request], Awaitable[Response]]
log = logging.getLogger("lean_laguna.server")

OPEN_PATHS = ("/", "/health", "/ping", "/version", "/metrics", "/openapi.json")
"""Served without a key: they say nothing of anybody's text."""
ROUTES: Mapping[tuple[str, str], Endpoint] = {
    ("GET", "/"): page,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/responses"): responses,
    ("POST", "/v1/messages"): messages,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/inference/v1/generate"): generate,
    ("GET", "/v1/models"): texts.models,
    ("GET", "/v1/models/{name:path}"): texts.models,
    ("POST", "/tokenize"): texts.tokenize,
    ("POST", "/v1/tokenize"): texts.tokenize,
    ("POST", "/detokenize"): texts.detokenize,
    ("POST", "/v1/detokenize"): texts.detokenize,
    ("GET", "/tokenizer_info"): texts.tokenizer_info,
    ("GET", "/v1/tokenizer_info"): texts.tokenizer_info,
    ("GET", "/health"): texts.health,
    ("GET", "/ping"): texts.ping,
    ("GET", "/version"): texts.version,
    ("GET", "/metrics"): texts.metrics,
    ("POST", "/reset_prefix_cache"): admin.reset_prefix_cache,
}
ADMIN_ROUTES: Mapping[tuple[str, str], Endpoint] = {
    ("POST", "/pause"): admin.pause,
    ("POST", "/resume"): admin.resume,
    ("GET", "/is_paused"): admin.is_paused,
    ("POST", "/update_weights"): admin.update_weights,
}


class App:
    """The application and, from its start on, its service.

    Attributes:
        asgi: What a web server runs.
        service: Set while the application runs.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Callable[[], LLM],
        on_loaded: Callable[[Service], None] | None = None,
    ):
        """Describe an application; nothing is loaded until it starts.

        Args:
            config: Limits and habits.
            load: Makes the engine; called on a thread of its own.
            on_loaded: Called on the event loop when loading has ended, well or not.
        """
        self.config, self._load, self._on_loaded = config, load, on_loaded
        self.service: Service | None = None
        self.asgi: ASGIApp = Starlette(
            routes=[Route(path, self._endpoint(call), methods=[how]) for (how, path), call in self._routes()],
            middleware=self._middleware(),
            exception_handlers={Exception: _on_error, HTTPException: _on_http_error, ApiError: _on_error},
            lifespan=self._lifespan,
        )

    def _routes(self) -> list[tuple[tuple[str, str], Endpoint]]:
        routes = {**ROUTES, **(ADMIN_ROUTES if self.config.enable_admin else {})}
        described = JSON(description(routes))

        async def openapi(service: Service, request: Request) -> Response:
            return described

        return [*routes.items(), (("GET", "/openapi.json"), openapi)]

    def _middleware(self) -> list[Middleware]:
        config, layers = self.config, []
        if config.allowed_origins:
            layers.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(config.allowed_origins),
                    allow_methods=["*"],
                    allow_headers=["*"],
                )
            )
        if config.api_keys:
            layers.append(Middleware(_KeyCheck, keys=config.api_keys))
        return layers

    def _endpoint(self, call: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        @functools.wraps(call)
        async def endpoint(request: Request) -> Response:
            assert self.service is not None
            try:
                return await call(self.service, request)
            except (ClientGoneError, ClientDisconnect):  # the second while its body was read
                return Response(status_code=499)
            except Exception as error:
                told = as_api_error(error)
                if told.status == 500:
                    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
                return _error(request.url.path, told)

        return endpoint

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        metrics = Metrics(self.config.served_model_names[0])

        def loaded() -> None:
            assert self.service is not None
            if engine.phase == "ready":
                metrics.loaded(engine.llm)
            if self._on_loaded is not None:
                self._on_loaded(self.service)

        engine = EngineThread(self._load, metrics, loaded)
        self.service = Service(self.config, engine, metrics)
        yield
        engine.stop("the server is stopping")


class _KeyCheck:
    """Refuses requests without a key."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]):
        self.app, self.keys = app, tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_let_in(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401, "a valid API key is needed: 'Authorization: Bearer KEY'", code="invalid_api_key"
        )
        await _error(scope["path"], error)(scope, receive, send)

    def _is_let_in(self, scope: Scope) -> bool:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        bearer = headers.get(b"authorization", b"")
        given = bearer[7:] if bearer[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        return any(hmac.compare_digest(given, key) for key in self.keys)


def _error(path: str, error: ApiError) -> Response:
    """Return an error in the shape of the API that a path belongs to."""
    return error_response(error, error_body(error) if path.startswith("/v1/messages") else error.body())


async def _on_error(request: Request, error: Exception) -> Response:
    return _error(request.url.path, as_api_error(error))


async def _on_http_error(request: Request, error: Any) -> Response:
    known = {
        404: f"no such path: {request.url.path:.200}",
        405: f"{request.method} is not served at this path",
    }
    message = known.get(error.status_code, str(error.detail))
    response = _error(request.url.path, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response
