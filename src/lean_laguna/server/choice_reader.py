"""Reads one completion as a chat reply, piece by piece."""

from __future__ import annotations

from typing import Any

from lean_laguna.server.chat_job import ChatJob
from lean_laguna.server.reply_events import ContentDelta, Event, ReasoningDelta
from lean_laguna.server.schemas import ChatRequest
from lean_laguna.server.service import Service
from lean_laguna.server.stream import Delta


class ChoiceReader:
    """Reads one completion: its events, its finish reason, its thinking's tokens.

    Attributes:
        num_tokens: Tokens so far.
        num_reasoning_tokens: Of those, tokens of thinking.
    """

    def __init__(self, service: Service, job: ChatJob, body: ChatRequest):
        self._parser = job.parser(service.config)
        self._counter = job.counter(service.tokenizer)
        self._keeps_first_call_only = body.parallel_tool_calls is False
        self._hides_reasoning = body.include_reasoning is False
        self.num_tokens = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thinking so far."""
        return self._counter.num_tokens

    def read(self, delta: Delta) -> tuple[list[Event], str | None]:
        """Take what is new; return its events and, at the end, the finish reason for the client."""
        self._counter.push(delta.token_ids)
        self.num_tokens = delta.num_tokens
        if self._parser is None:
            return ([ContentDelta(delta.text)] if delta.text else []), delta.finish_reason
        events = self._parser.push(delta.text)
        reason: Any = delta.finish_reason
        if reason is not None:
            events += self._parser.finish(reason)
            reason = self._parser.finish_reason(reason)
        return [event for event in events if self._is_shown(event)], reason

    def _is_shown(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return not self._hides_reasoning
        return isinstance(event, ContentDelta) or not (self._keeps_first_call_only and event.index > 0)
