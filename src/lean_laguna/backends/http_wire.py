"""What goes over the wire to an OpenAI-style server and comes back: bodies, events, counters, errors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from lean_laguna.backends.base import PromptInput
from lean_laguna.core.errors import BackendError, ConfigError, LeanLagunaError, RequestError
from lean_laguna.core.types import SamplingParams, SpeculationStats

# OpenAI's own fields, which every server knows; the others are sent only where they ask for something.
_ALWAYS = ("temperature", "max_tokens")
_COUNTER = re.compile(
    r"^(?:\w+:)?spec_decode_num_(?P<what>\w+?)(?:_total)?(?:\{(?P<labels>.*)\})? (?P<value>\S+)"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_DONE = "[DONE]"


def normal_url(base_url: str) -> str:
    """Return a server's address without a trailing ``/v1``.

    Raises:
        ConfigError: It is no HTTP address.
    """
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(f"not an address: {base_url!r} ({error})") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"not an address: {base_url!r}; write it as http://127.0.0.1:8000")
    return re.sub(r"(/v1)?/*$", "", base_url)


def body_of(prompt: PromptInput, params: SamplingParams) -> dict[str, Any]:
    """Return the part of a completions request that asks for text: what differs from the defaults."""
    body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    default = SamplingParams()
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name not in _ALWAYS and value == getattr(default, field.name):
            continue
        if field.name == "logit_bias":
            value = {str(token): bias for token, bias in value.items()}
        elif field.name == "structured_outputs":
            value = {k: v for k, v in dataclasses.asdict(value).items() if v not in (None, False)}
        elif isinstance(value, tuple):
            value = list(value)
        if value is not None:
            body[field.name] = value
    return body


async def events_of(response: httpx.Response, where: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of server-sent events up to ``[DONE]``, or to the end after a finish reason.

    Raises:
        BackendError: The stream breaks off, holds something else, or carries an error.
    """
    num_events, has_finished = 0, False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        text = line[5:].strip()
        if text == _DONE:
            return
        try:
            event = msgspec.json.decode(text)
        except (msgspec.MsgspecError, ValueError):
            raise BackendError(f"{where}: a broken event in the stream: {text!r:.80}") from None
        if not isinstance(event, dict):
            raise BackendError(f"{where}: a broken event in the stream: {text!r:.80}")
        if event.get("error"):
            raise BackendError(f"{where}: the server gave up in the stream: {_message(event['error'])}")
        num_events += 1
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            has_finished |= bool(choices[0].get("finish_reason"))
        yield event
    if has_finished:  # some servers say no more than that
        return
    raise BackendError(f"{where}: the stream broke off after {num_events} events, before its [DONE]")


def said_by_server(where: str, response: httpx.Response) -> LeanLagunaError:
    """Return the error for a response that is not 200, with what the server says about it."""
    try:
        told = response.json()
    except ValueError:
        told = response.text
    message = _message(told.get("error", told) if isinstance(told, dict) else told)
    status = response.status_code
    if status in (401, 403):
        return ConfigError(
            f"{where} refuses the API key ({status}: {message}); "
            "give one with --api-key or in LEAN_LAGUNA_API_KEY"
        )
    if status in (400, 413, 422):
        code = (
            told["error"].get("code")
            if isinstance(told, dict) and isinstance(told.get("error"), dict)
            else None
        )
        return RequestError(f"{where} refuses the request ({status}): {message}", code=code)
    return BackendError(f"{response.request.url} answered {status}: {message}", status=status)


def error_message(where: str, error: httpx.HTTPError, num_events: int = 0) -> str:
    """Return what a failed connection means, in words."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"cannot reach {where}: {error or 'no answer'}; is the server running?"
    if isinstance(error, httpx.TimeoutException):
        return f"{where}: no answer within the time limit ({type(error).__name__})"
    after = f" after {num_events} events" if num_events else ""
    return f"{where}: the connection broke{after}: {error or type(error).__name__}"


def speculation_counts(text: str, model: str) -> SpeculationStats | None:
    """Return the speculation counters in Prometheus' text, under vLLM's names with any prefix.

    Args:
        text: What ``/metrics`` says.
        model: Series that carry another model's name are left out.

    Returns:
        Sums over engines; None where there are none.
    """
    sums: dict[str, float] = {}
    per_pos: dict[int, float] = {}
    for line in text.splitlines():
        found = _COUNTER.match(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found["labels"] or ""))
        if labels.get("model_name", model) != model:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if found["what"] == "accepted_tokens_per_pos":
            place = int(labels.get("position", 0))
            per_pos[place] = per_pos.get(place, 0.0) + value
        else:
            sums[found["what"]] = sums.get(found["what"], 0.0) + value
    if "drafts" not in sums:
        return None
    positions = tuple(int(per_pos.get(i, 0)) for i in range(max(per_pos, default=-1) + 1))
    return SpeculationStats(
        int(sums["drafts"]),
        int(sums.get("draft_tokens", 0)),
        int(sums.get("accepted_tokens", 0)),
        positions,
        num_cut_draft_tokens=int(sums.get("cut_draft_tokens", 0)),
    )


def counts_between(before: SpeculationStats, after: SpeculationStats) -> SpeculationStats:
    """Return what counters grew by; a position that was not there before counts from 0."""
    earlier = before.num_accepted_tokens_per_pos
    per_pos = tuple(
        count - (earlier[i] if i < len(earlier) else 0)
        for i, count in enumerate(after.num_accepted_tokens_per_pos)
    )
    return SpeculationStats(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        per_pos,
        num_cut_draft_tokens=after.num_cut_draft_tokens - before.num_cut_draft_tokens,
    )


def _message(told: Any) -> str:
    if isinstance(told, dict):
        told = told.get("message") or told.get("detail") or json.dumps(told)
    return " ".join(str(told).split())[:500] or "no reason given"
