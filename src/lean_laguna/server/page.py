"""``GET /``: a page where a person watches tokens arrive, with and without the drafter, offline."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from lean_laguna.server.service import Service

# The page talks to its own server and to nobody else, whatever a model writes into it.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(service: Service, request: Request) -> Response:
    """``GET /``: the live view."""
    file = resources.files("lean_laguna").joinpath("assets", "page", "index.html")
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
    return HTMLResponse(file.read_text("utf-8"), headers=headers)
