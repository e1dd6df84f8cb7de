"""Past turns of a conversation, in the one shape that chat templates read.

Clients send a reply back as they got it: thinking under either of two names or still inside the text, and
arguments of calls as JSON text. Templates want the thinking under the name they chose, and arguments as
objects. Nothing a client sent is dropped: a template that leaves thinking out does so itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lean_laguna.core.errors import RequestError
from lean_laguna.models.chat_template import THINK_END, THINK_START

REASONING_NAMES = ("reasoning", "reasoning_content")


def past_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates read them; those given are not changed.

    Args:
        messages: Each with a ``role``; content already text.

    Raises:
        RequestError: A tool call of a past turn is not one; names the message.
    """
    return [
        _past_reply(message, index) if message.get("role") == "assistant" else dict(message)
        for index, message in enumerate(messages)
    ]


def _past_reply(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    reply = dict(message)
    reasoning = next((text for name in REASONING_NAMES if (text := reply.get(name))), None)
    content = reply.get("content")
    if reasoning is None and isinstance(content, str):
        reasoning, content = _inline_thinking(content)
    for name in REASONING_NAMES:
        reply.pop(name, None)
        if reasoning is not None:
            reply[name] = reasoning
    reply["content"] = "" if content is None else content
    if reply.get("tool_calls"):
        reply["tool_calls"] = _past_calls(reply["tool_calls"], f"messages[{index}].tool_calls")
    else:
        reply.pop("tool_calls", None)
    return reply


def _inline_thinking(content: str) -> tuple[str | None, str]:
    """Split a text that starts with thinking between its tags."""
    body = content.lstrip()
    if body.startswith(THINK_START) and THINK_END in body:
        thinking, _, answer = body.removeprefix(THINK_START).partition(THINK_END)
        return thinking or None, answer
    return None, content


def _past_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where} must be a list of calls, found {calls!r:.200}", param=where)
    return [_past_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _past_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{where} must be an object with 'function': {{'name', 'arguments'}}, found {call!r:.200}",
            param=where,
        )
    given = function.get("arguments")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"{where}.function.arguments must be a JSON object, found {given!r:.200}",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": dict(arguments)}}
