"""A Responses request as the chat request that means the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lean_laguna.server.errors import bad_request
from lean_laguna.server.schemas import ResponsesRequest

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}


def chat_fields(body: ResponsesRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a ``ChatRequest``, and under which names errors must speak of them.

    Raises:
        ApiError: 400, naming the field.
    """
    found: list[dict[str, Any]] = []
    names = dict(_NAMES)
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
        names |= {"messages[0].content": "instructions", "messages[0]": "instructions"}
    if isinstance(body.input, str):
        names |= {f"messages[{len(found)}].content": "input", f"messages[{len(found)}]": "input"}
        found.append({"role": "user", "content": body.input})
    else:
        _add_messages(body.input, found, names)
    fields: dict[str, Any] = {"messages": found, "max_tokens": body.max_output_tokens}
    same = ("temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls", "speculative")
    given = {name: getattr(body, name) for name in (*same, "chat_template_kwargs")}
    fields |= {name: value for name, value in given.items() if value is not None}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
        names |= {f"tools[{i}].function": f"tools[{i}]" for i in range(len(body.tools))}
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if (body.reasoning or {}).get("effort") is not None:
        fields["reasoning_effort"] = (body.reasoning or {})["effort"]
    if (body.text or {}).get("format") is not None:
        fields["response_format"] = _response_format((body.text or {})["format"])
    return fields, names


def _add_messages(
    items: Sequence[Mapping[str, Any]], found: list[dict[str, Any]], names: dict[str, str]
) -> None:
    """Add messages to ``found``, and to ``names`` the item that each of them came from or began with.

    Thinking, text and calls that follow each other are one turn of the assistant.
    """
    for i, item in enumerate(items):
        where = f"input[{i}]"
        place = f"messages[{len(found)}]"  # where the item begins a message
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            found.append({"role": item.get("role"), "content": item.get("content")})
            names[place] = where
        elif kind == "function_call_output":
            output = item.get("output")
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            names |= {place: where, f"{place}.content": f"{where}.output"}
        elif kind in ("message", "reasoning", "function_call"):
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
                names[place] = where
            _add_to_turn(found[-1], kind, item, where)
        else:
            raise bad_request(f"{where}: items of type {kind!r:.100} are not served here", where)


def _add_to_turn(turn: dict[str, Any], kind: str, item: Mapping[str, Any], where: str) -> None:
    if kind == "message":
        turn["content"] += _joined(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        said = item.get("content") or item.get("summary") or []
        turn["reasoning"] = turn.get("reasoning", "") + _joined(said, f"{where}.content")
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _joined(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of parts", where)
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise bad_request(f"{where}: every part must hold a text", where)
    return "".join(texts)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(
            f"{where}: only tools of type function are served here, found {tool.get('type')!r:.100}", where
        )
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _response_format(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise bad_request("text.format must be an object", "text.format")
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}
