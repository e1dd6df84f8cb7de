"""Conversations from JSONL files in the shapes of common data sets: UltraChat, Magpie or ShareGPT, plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import parse_json

_ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "model": "assistant",
}  # fmt: skip
SHAPES = (
    "{'messages': [{'role', 'content'}]} (UltraChat), {'conversations': [{'from', 'value'}]} (ShareGPT, "
    "Magpie), or {'prompt': text} with 'response' or without"
)


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Attributes:
        id: Unique in its file.
        messages: Each with ``role`` (system, user, assistant) and ``content``.
    """

    id: str
    messages: tuple[dict[str, str], ...]

    def question(self) -> tuple[dict[str, str], ...]:
        """Return the messages up to the first user's, which is asked anew.

        Raises:
            DataError: No user speaks.
        """
        for i, message in enumerate(self.messages):
            if message["role"] == "user":
                return self.messages[: i + 1]
        raise DataError(f"conversation '{self.id}': no message of the user")


def read_conversations(path: Path) -> list[Conversation]:
    """Read a JSONL file.

    Raises:
        DataError: No such file; a line that is not JSON or of no known shape; an empty or repeated text; the
            message names file and line.
    """
    try:
        # Not splitlines: a text may hold the other line ends of Unicode as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}': cannot be read: {getattr(error, 'strerror', None) or error}") from None
    given_by_line: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"'{path}', line {number}"
        try:
            given = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise DataError(f"{where}: must be an object, found {type(given).__name__}")
        given_by_line[number] = given
    if not given_by_line:
        raise DataError(f"'{path}' holds no conversation; a line is {SHAPES}")
    return _named(given_by_line, path)


def _named(given_by_line: Mapping[int, Mapping[str, Any]], path: Path) -> list[Conversation]:
    """Return the conversations of a file; those without an id are named by their line."""
    own = {number: _own_name(given) for number, given in given_by_line.items()}
    stated = {name for name in own.values() if name is not None}
    taken: set[str] = set()
    found = []
    for number, given in given_by_line.items():
        where = f"'{path}', line {number}"
        # Another line may have this one's number for its id.
        name = own[number] or (str(number) if str(number) not in stated else f"line {number}")
        if name in taken:
            raise DataError(f"{where}: id '{name}' was used before")
        taken.add(name)
        found.append(Conversation(name, tuple(_messages(given, where))))
    return found


def _own_name(given: Mapping[str, Any]) -> str | None:
    """Return the id that a line states, which may be 0; None where it has none."""
    stated = (given.get(key) for key in ("id", "prompt_id", "uuid"))
    return next((str(name) for name in stated if name not in (None, "")), None)


def _messages(given: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    if isinstance(given.get("messages"), list):
        turns = [(_text(turn, "role", where), _text(turn, "content", where)) for turn in given["messages"]]
    elif isinstance(given.get("conversations"), list):
        turns = [(_text(turn, "from", where), _text(turn, "value", where)) for turn in given["conversations"]]
    elif texts := [text for key in ("prompt", "instruction") if isinstance(text := given.get(key), str)]:
        turns = [("user", next(filter(None, texts), ""))]
        if "response" in given:
            turns.append(("assistant", _text(given, "response", where)))
    else:
        raise DataError(f"{where}: of no known shape, its keys are {sorted(given)}; a line is {SHAPES}")
    if not turns:
        raise DataError(f"{where}: nobody speaks; a line is {SHAPES}")
    messages = []
    for role, text in turns:
        if role not in _ROLES:
            raise DataError(f"{where}: role '{role}' is not one of {', '.join(sorted(_ROLES))}")
        if not text.strip():
            raise DataError(f"{where}: the {_ROLES[role]}'s text is empty")
        messages.append({"role": _ROLES[role], "content": text})
    return messages


def _text(turn: Any, key: str, where: str) -> str:
    if not isinstance(turn, Mapping) or not isinstance(turn.get(key), str):
        raise DataError(f"{where}: each turn needs the text '{key}'")
    return str(turn[key])
