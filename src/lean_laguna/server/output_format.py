"""What a request says its output must be, in any of the spellings in use.

Source: OpenAI's ``response_format``; vLLM's ``structured_outputs`` and its older ``guided_*`` fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.server.errors import bad_request, called
from lean_laguna.server.schemas import GenerationFields

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_SCHEMA = "response_format.json_schema.schema"


def structured_outputs(body: GenerationFields) -> StructuredOutputs | None:
    """Return what the output must be, or None where the request leaves it free.

    Raises:
        ApiError: 400, the request says it twice, or in a shape that is none.
        RequestError: The same.
    """
    found: dict[str, StructuredOutputs] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = StructuredOutputs.from_dict(body.structured_outputs)
    if body.response_format is not None and (given := _response_format(body.response_format)) is not None:
        found["response_format"] = given
    for field, kind in _GUIDED.items():
        if (value := getattr(body, field)) is not None:
            with called(_spelled(field, kind)):
                found[field] = StructuredOutputs.from_dict({kind: value})
    if len(found) > 1:
        raise bad_request(
            f"{' and '.join(found)} each say what the output must be; give one", next(iter(found))
        )
    return next(iter(found.values()), None)


def output_names(body: GenerationFields) -> dict[str, str]:
    """Return what errors must call the fields of ``StructuredOutputs``: as this request spells them."""
    if body.response_format is not None and body.response_format.get("type") != "text":
        is_schema = body.response_format.get("type") == "json_schema"
        field = _SCHEMA if is_schema else "response_format"
        return _spelled(field, "json")
    for field, kind in _GUIDED.items():
        if getattr(body, field) is not None:
            return _spelled(field, kind)
    return {}


def _spelled(field: str, kind: str) -> dict[str, str]:
    return {"structured_outputs": field, f"structured_outputs.{kind}": field}


def _response_format(given: Mapping[str, Any]) -> StructuredOutputs | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise bad_request(
            f"response_format.type must be text, json_object or json_schema, found {kind!r:.100}",
            "response_format.type",
        )
    described = given.get("json_schema")
    schema: Any = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise bad_request(f"{_SCHEMA} must be a JSON schema", _SCHEMA)
    with called(_spelled(_SCHEMA, "json")):
        return StructuredOutputs.from_dict({"json": schema})
