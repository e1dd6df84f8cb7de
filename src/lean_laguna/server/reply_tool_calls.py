"""Tool calls in the ``poolside_v1`` syntax, read off the text as it comes.

    <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>

with any whitespace between the parts, as both generations of templates write it. Rules, the same however the
text is cut:

- A value ends at a closing tag that another key or the call's end follows; any other closing tag is part of
  the value, so that files about this syntax can be edited. Strings keep every character.
- A value whose opening tag is missing starts after its key. Of a repeated key the first value counts.
- What follows ``<tool_call>`` and is no call is text. A call that is cut off never ends.
- Whitespace around calls belongs to no answer; other text stays.

Source: vLLM ``tool_parsers/poolside_v1_tool_parser.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from lean_laguna.server.argument_types import STRING_ONLY, ToolSchemas, typed_value
from lean_laguna.server.reply_events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from lean_laguna.server.reply_reasoning import held_back

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
KEY_START, KEY_END = "<arg_key>", "</arg_key>"
VALUE_START, VALUE_END = "<arg_value>", "</arg_value>"
LONGEST_NAME = 256
_KEY_TAGS = (KEY_END, VALUE_START, CALL_END)
_KEY_TAG = re.compile("|".join(_KEY_TAGS))
_CLOSING_TAG = re.compile(f"{VALUE_END}|{CALL_END}")


class ToolCallParser:
    """Turns the text of an answer into pieces of content and tool calls.

    What has been looked at leaves the buffer at once: a part that never ends costs no more per character.

    Attributes:
        num_started: Calls begun.
        num_ended: Calls completed.
    """

    def __init__(self, tools: ToolSchemas, new_call_id: Callable[[], str]):
        """Start a reply.

        Args:
            tools: What types the arguments; a call of another name is reported all the same.
            new_call_id: Makes the id of a call.
        """
        self.num_started = 0
        self.num_ended = 0
        self._tools = tools
        self._new_call_id = new_call_id
        self._state: Callable[[list[Event]], bool] = self._read_text
        self._buffer = ""
        self._blank: list[str] = []  # whitespace not yet known to belong to the answer
        self._is_blank = True  # nothing but whitespace since the start or the last call
        self._gap: list[str] = []  # whitespace before what comes next in a call
        self._name = ""
        self._key: list[str] = []  # what has come of one that has not ended
        self._closing = ""  # the tag that may have ended a value
        self._keys: set[str] = set()
        self._types: frozenset[str] = STRING_ONLY
        self._collected: list[str] | None = None  # of a value that is read once it is whole
        self._is_repeated = False

    def push(self, text: str) -> list[Event]:
        """Take text and return what became certain; every complete part of it is worked through."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._state(events):
            pass
        return events

    def finish(self, is_cut: bool) -> list[Event]:
        """Take the end of the text.

        Args:
            is_cut: Whether something other than the model ended it.

        Returns:
            What was held back. A call still open stays so, but for one that closed without closing its last
            value.
        """
        events: list[Event] = []
        if self._state == self._read_closing and not is_cut and self._closing == CALL_END:
            self._end_value(events)
            self._end_call(events)
        elif self._state == self._read_head:
            self._say(CALL_START + self._take_gap() + self._buffer, events)
        elif self._state == self._read_text:
            self._say(self._buffer, events)
            if self._blank and not self.num_started:
                events.append(ContentDelta("".join(self._blank)))
        self._buffer, self._blank = "", []
        return events

    def _skip_blank(self) -> None:
        """Set whitespace at the buffer's start aside."""
        body = self._buffer.lstrip()
        self._gap.append(self._buffer[: len(self._buffer) - len(body)])
        self._buffer = body

    def _take_gap(self) -> str:
        gap, self._gap = "".join(self._gap), []
        return gap

    def _say(self, text: str, events: list[Event]) -> None:
        """Report content, holding whitespace back until something follows it."""
        if self._is_blank and not text.strip():
            self._blank += [text] if text else []
        elif text:
            events.append(ContentDelta("".join(self._blank) + text))
            self._blank, self._is_blank = [], False

    def _read_text(self, events: list[Event]) -> bool:
        text, tag, rest = self._buffer.partition(CALL_START)
        if tag:
            self._say(text, events)
            self._buffer, self._state = rest, self._read_head
            return True
        held = held_back(text, (CALL_START,))
        self._say(text[: len(text) - held], events)
        self._buffer = text[len(text) - held :]
        return False

    def _read_head(self, events: list[Event]) -> bool:
        """Read the name, up to the tag after it."""
        self._skip_blank()
        head = self._buffer
        raw_name = head.partition("<")[0]
        name, rest = raw_name.rstrip(), head[len(raw_name) :]
        tag = next((tag for tag in (KEY_START, CALL_END) if rest.startswith(tag)), None)
        may_come = any(tag.startswith(rest) for tag in (KEY_START, CALL_END))
        is_name = len(raw_name) <= LONGEST_NAME and "\n" not in name and not name.startswith("{")
        if is_name and tag is None and may_come:
            return False
        gap = self._take_gap()
        if not is_name or tag is None or (not name and tag == KEY_START):
            self._say(CALL_START, events)  # no call: text like any other
            self._buffer, self._state = gap + head, self._read_text
            return True
        self._blank, self._is_blank = [], True
        self._buffer = rest[len(tag) :]
        if not name:  # an empty pair of tags says nothing
            self._state = self._read_text
            return True
        self._name, self._keys = name, set()
        events.append(ToolCallStart(self.num_started, self._new_call_id(), name))
        self.num_started += 1
        self._follow(tag, events)
        return True

    def _read_key(self, events: list[Event]) -> bool:
        """Read a key, up to the tag after it."""
        found = _KEY_TAG.search(self._buffer)
        if found is None:
            held = held_back(self._buffer, _KEY_TAGS)
            self._key.append(self._buffer[: len(self._buffer) - held])
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        self._key.append(self._buffer[: found.start()])
        self._buffer = self._buffer[found.end() :]
        if found[0] == CALL_END:  # an argument is missing: leave the call open
            self._key, self._state = [], self._read_text
        elif found[0] == KEY_END:
            self._state = self._read_opening
        else:
            self._begin_value(events)
        return True

    def _read_opening(self, events: list[Event]) -> bool:
        """Read the tag that opens a value, if it is there."""
        self._buffer = self._buffer.lstrip()
        if len(self._buffer) < len(VALUE_START) and VALUE_START.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(VALUE_START)
        self._begin_value(events)
        return True

    def _begin_value(self, events: list[Event]) -> None:
        key, self._key, self._state = "".join(self._key).strip(), [], self._read_value
        self._is_repeated = key in self._keys
        self._types = self._tools.types(self._name, key)
        self._collected = [] if self._is_repeated or self._types != STRING_ONLY else None
        if not self._is_repeated:
            opening = ", " if self._keys else "{"
            quote = '"' if self._collected is None else ""
            self._keys.add(key)
            self._write(f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}", events)

    def _read_value(self, events: list[Event]) -> bool:
        """Read some of a value, up to a tag that closes it."""
        closing = _CLOSING_TAG.search(self._buffer)
        if closing is None:
            held = held_back(self._buffer, (VALUE_END, CALL_END))
            self._take_value(self._buffer[: len(self._buffer) - held], events)
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        self._take_value(self._buffer[: closing.start()], events)
        self._closing, self._buffer = closing[0], self._buffer[closing.end() :]
        self._state = self._read_closing
        return True

    def _read_closing(self, events: list[Event]) -> bool:
        """Read what follows a tag that may close a value, and tells whether it does."""
        self._skip_blank()
        if self._closing == VALUE_END:
            for tag in (KEY_START, CALL_END):
                if self._buffer.startswith(tag):
                    self._gap = []
                    self._end_value(events)
                    self._buffer = self._buffer[len(tag) :]
                    self._follow(tag, events)
                    return True
                if tag.startswith(self._buffer):
                    return False
        elif not self._buffer:
            return False  # at the very end of the reply it closes call and value
        self._take_value(self._closing + self._take_gap(), events)
        self._state = self._read_value
        return True

    def _take_value(self, text: str, events: list[Event]) -> None:
        if self._collected is not None:
            self._collected.append(text)
        elif text:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1], events)

    def _end_value(self, events: list[Event]) -> None:
        if self._collected is None:
            self._write('"', events)
        elif not self._is_repeated:
            value = typed_value("".join(self._collected), self._types)
            self._write(json.dumps(value, ensure_ascii=False), events)

    def _follow(self, tag: str, events: list[Event]) -> None:
        """Go on after a complete name or value."""
        if tag == KEY_START:
            self._state = self._read_key
        else:
            self._end_call(events)

    def _end_call(self, events: list[Event]) -> None:
        self._write("}" if self._keys else "{}", events)
        events.append(ToolCallEnd(self.num_started - 1))
        self.num_ended += 1
        self._state = self._read_text

    def _write(self, json_delta: str, events: list[Event]) -> None:
        events.append(ToolCallArguments(self.num_started - 1, json_delta))
