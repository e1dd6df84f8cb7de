"""A description of the API at ``/openapi.json``, made from the request models that the server checks with."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from lean_laguna.server import schemas

_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/completions": schemas.CompletionRequest,
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/responses": schemas.ResponsesRequest,
    "/v1/messages": schemas.MessagesRequest,
    "/v1/messages/count_tokens": schemas.MessagesFields,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
    "/inference/v1/generate": schemas.GenerateRequest,
    "/pause": schemas.PauseRequest,
    "/update_weights": schemas.UpdateWeightsRequest,
}
_REF = "#/components/schemas/{name}"


def description(routes: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        routes: Method and path to endpoint, as served.
    """
    _, components = msgspec.json.schema_components(list(_BODIES.values()), ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), endpoint in routes.items():
        plain = path.replace(":path}", "}")
        paths.setdefault(plain, {})[method.lower()] = _operation(method, plain, endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lean-laguna", "version": importlib.metadata.version("lean-laguna")},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _operation(method: str, path: str, endpoint: Any) -> dict[str, Any]:
    summary, _, more = inspect.cleandoc(endpoint.__doc__ or "").partition("\n")
    refused = {"description": "Refused", "content": {"application/json": {"schema": {"$ref": _ref("Error")}}}}
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": summary,
        "responses": {"200": {"description": "Done"}, "4XX": refused, "503": refused},
    }
    if more:
        operation["description"] = " ".join(more.split())
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    body = _BODIES.get(path.removeprefix("/v1") if path.endswith("tokenize") else path)
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _ref(body.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _ref(name: str) -> str:
    return _REF.format(name=name)


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
