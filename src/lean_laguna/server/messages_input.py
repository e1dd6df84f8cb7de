"""An Anthropic request as the chat request that means the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lean_laguna.server.errors import ApiError, bad_request
from lean_laguna.server.schemas import MessagesFields, MessagesRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


_NAMES = {
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}


def chat_fields(body: MessagesFields) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a ``ChatRequest``, and under which names errors must speak of them.

    Raises:
        ApiError: 400, naming the field.
    """
    names = dict(_NAMES)
    fields: dict[str, Any] = {"messages": _messages(body, names)}
    kwargs = dict(body.chat_template_kwargs or {})
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
        for where in (f"tools[{i}]" for i in range(len(body.tools))):
            names |= {f"{where}.function": where, f"{where}.function.parameters": f"{where}.input_schema"}
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise bad_request(
                f"thinking.type must be enabled, disabled or adaptive, found {kind!r:.100}", "thinking.type"
            )
        kwargs["enable_thinking"] = kind != "disabled"
        fields["thinking_token_budget"] = body.thinking.get("budget_tokens")
    output_format = (body.output_config or {}).get("format")
    if output_format is not None:
        fields["response_format"] = _response_format(output_format)
    fields["chat_template_kwargs"] = kwargs
    if isinstance(body, MessagesRequest):
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "speculative")
        fields |= {name: value for name in same if (value := getattr(body, name)) is not None}
        fields["stop"] = body.stop_sequences
    return fields, names


def _messages(body: MessagesFields, names: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages, and add to ``names`` where each of them came from."""
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": body.system})
        names |= {"messages[0].content": "system", "messages[0]": "system"}
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        content, role = message.get("content"), message.get("role")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role must be user or assistant, found {role!r:.100}", f"{where}.role")
        names[f"messages[{len(found)}]"] = where
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
            raise bad_request(f"{where}.content must be a text or a list of blocks", f"{where}.content")
        elif role == "assistant":
            found.append(_assistant(content, f"{where}.content"))
        else:
            for message, place in _user(role, content, f"{where}.content"):
                names[f"messages[{len(found)}]"] = place
                found.append(message)
    return found


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        match block.get("type"):
            case "text":
                texts.append(_text(block, "text", place))
            case "thinking":
                thoughts.append(_text(block, "thinking", place))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case other:
                raise _unknown(other, place)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> list[tuple[dict[str, Any], str]]:
    """Return tool results as messages of their own, in place, and texts between them as the user's.

    Beside each stands the block that it came from, or that it began with.
    """
    if not blocks:
        raise bad_request(f"{where} must hold at least one block", where)
    found: list[tuple[dict[str, Any], str]] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        match block.get("type"):
            case "text":
                text = _text(block, "text", place)
                if found and found[-1][0]["role"] == role:
                    found[-1][0]["content"] += "\n" + text
                else:
                    found.append(({"role": role, "content": text}, place))
            case "tool_result":
                content = block.get("content")
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                found.append(({**result, "content": "" if content is None else content}, place))
            case other:
                raise _unknown(other, place)
    return found


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise bad_request(
            f"{where}: only tools with a name and an input_schema are served, found type "
            f"{tool.get('type')!r:.100}",
            where,
        )
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad_request(
            f"tool_choice.type must be auto, any, tool or none, found {kind!r:.100}", "tool_choice.type"
        )
    return {**fields, "tool_choice": _CHOICES[kind]}


def _response_format(output_format: Any) -> dict[str, Any]:
    if not isinstance(output_format, Mapping) or output_format.get("type") != "json_schema":
        raise bad_request("output_config.format must be of type json_schema", "output_config.format")
    schema = output_format.get("schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _text(block: Mapping[str, Any], key: str, where: str) -> str:
    text = block.get(key)
    if not isinstance(text, str):
        raise bad_request(f"{where}.{key} must be a text, found {text!r:.100}", f"{where}.{key}")
    return text


def _unknown(kind: Any, where: str) -> ApiError:
    return bad_request(f"{where}: blocks of type {kind!r:.100} are not served here", where)
