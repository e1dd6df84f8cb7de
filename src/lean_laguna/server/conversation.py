"""From a client's messages to the prompt: content parts joined, arguments parsed, both spellings of thinking.

Nothing that a client says is dropped on the way: what the template leaves out is an error, not a shorter
prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.server.errors import bad_request
from lean_laguna.server.history import REASONING_NAMES, past_messages
from lean_laguna.server.reply_tool_calls import LONGEST_NAME

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "self")
# What can be read back from where the model writes it.
_NAME = re.compile(rf"(?=\S)[^<\x00-\x1f\x7f]{{1,{LONGEST_NAME}}}(?<=\S)")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_THINKING_PARTS = ("thinking", "reasoning", "reasoning_text")


def check_template_kwargs(given: Mapping[str, Any]) -> None:
    """Refuse template arguments that have fields of their own, or could not be passed on.

    Raises:
        ApiError: 400, naming the argument.
    """
    for key in RESERVED_KWARGS:
        if key in given:
            raise bad_request(f"chat_template_kwargs must not set '{key}'", f"chat_template_kwargs.{key}")


@dataclass(frozen=True)
class Conversation:
    """What a prompt is rendered from.

    Attributes:
        messages: In the shape that templates read.
        tools: The functions on offer.
        template_kwargs: The template's switches.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]

    def render(self, template: ChatTemplate, *, add_generation_prompt: bool = True) -> str:
        """Return the prompt.

        Raises:
            RequestError: The template refuses the conversation.
            ApiError: 400, it leaves out what a message says.
        """
        rendered = template.render(
            self.messages, self.tools or None, add_generation_prompt, **self.template_kwargs
        )
        end = 0  # of what was found last: messages stand in their order, and long conversations have many
        for number, message in enumerate(self.messages):
            said = (message.get("content") or "").strip()
            if not said or message["role"] == "assistant":
                continue
            found = rendered.find(said, end)
            if found >= 0:
                end = found + len(said)
            elif said not in rendered:
                raise bad_request(
                    f"messages[{number}]: this model's chat template leaves out the content of a "
                    f"message with role '{message['role']}' in this place",
                    f"messages[{number}]",
                )
        return rendered


def read_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the shape that templates read.

    Args:
        given: In OpenAI's shape; keys that are not known go to the template as they are.

    Raises:
        ApiError: 400, naming the message and the key.
        RequestError: The same.
    """
    if not given:
        raise bad_request("messages must hold at least one message", "messages")
    return past_messages([_message(message, f"messages[{i}]") for i, message in enumerate(given)])


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the functions on offer, checked.

    Raises:
        ApiError: 400, naming the tool and the key.
    """
    tools = []
    place_of: dict[str, int] = {}
    for i, tool in enumerate(given or ()):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise bad_request(
                f"{where}.type must be 'function', found {tool['type']!r:.100}", f"{where}.type"
            )
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise bad_request(f"{where}.function must be an object", f"{where}.function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_request(f"{where}.function.name must be a non-empty text", f"{where}.function.name")
        if not _NAME.fullmatch(function["name"]):
            raise bad_request(
                f"{where}.function.name must be up to {LONGEST_NAME} characters on one line, without '<' and "
                f"spaces at its ends, as the model writes it between tags; found {function['name']!r:.100}",
                f"{where}.function.name",
            )
        first = place_of.setdefault(function["name"], i)
        if first != i:
            raise bad_request(
                f"{where}.function.name must be a name of its own: tools[{first}] has "
                f"{function['name']!r:.100} already",
                f"{where}.function.name",
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise bad_request(
                f"{where}.function.parameters must be a JSON schema, found {parameters!r:.100}",
                f"{where}.function.parameters",
            )
        tools.append(dict(tool))
    return tools


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message whose content is text."""
    role = given.get("role")
    if role not in ROLES:
        raise bad_request(
            f"{where}.role must be one of {', '.join(ROLES)}, found {role!r:.100}", f"{where}.role"
        )
    message = {key: value for key, value in given.items() if value is not None}
    message["role"] = {"developer": "system", "function": "tool"}.get(role, role)
    message["content"], thinking = _content(given.get("content"), f"{where}.content")
    if role != "assistant" and given.get("content") is None:
        raise bad_request(f"{where}.content is missing", f"{where}.content")
    for key in REASONING_NAMES:
        if not isinstance(given.get(key), str | None):
            raise bad_request(f"{where}.{key} must be a text, found {given[key]!r:.100}", f"{where}.{key}")
    if thinking and not any(given.get(key) for key in REASONING_NAMES):
        message["reasoning"] = thinking
    return message


def _content(content: Any, where: str) -> tuple[str, str]:
    """Return the text of a content, and the thinking in its parts."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of parts, found {content!r:.100}", where)
    texts: list[str] = []
    thoughts: list[str] = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (*_TEXT_PARTS, *_THINKING_PARTS):
            raise bad_request(
                f"{place}: this model takes parts of type 'text' only, found {kind!r:.100}", place
            )
        said = next((part[key] for key in ("text", "refusal", "thinking") if key in part), None)
        if not isinstance(said, str):
            raise bad_request(f"{place}.text must be a text", f"{place}.text")
        (texts if kind in _TEXT_PARTS else thoughts).append(said)
    return "\n".join(texts), "\n".join(thoughts)
