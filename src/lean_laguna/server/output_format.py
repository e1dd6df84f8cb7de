"""What a request says its output must be, in any of the spellings in use.

Source: OpenAI's ``response_format``; vLLM's ``structured_outputs`` and its older ``guided_*`` fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.server.errors import bad_request
from lean_laguna.server.schemas import GenerationFields

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


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
            found[field] = StructuredOutputs.from_dict({kind: value})
    if len(found) > 1:
        raise bad_request(
            f"{' and '.join(found)} each say what the output must be; give one", next(iter(found))
        )
    return next(iter(found.values()), None)


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
        raise bad_request(
            "response_format.json_schema.schema must be a JSON schema", "response_format.json_schema.schema"
        )
    return StructuredOutputs.from_dict({"json": schema})
