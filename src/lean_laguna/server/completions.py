"""``POST /v1/completions``: texts or token ids in, text out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lean_laguna.core.errors import RequestError
from lean_laguna.server import logprobs as shapes
from lean_laguna.server.errors import bad_request
from lean_laguna.server.output_format import output_names, structured_outputs
from lean_laguna.server.sampling import draft_length, sampling_params
from lean_laguna.server.schemas import CompletionRequest
from lean_laguna.server.sending import DONE, JSON, EventStream, data, until_gone
from lean_laguna.server.service import Service
from lean_laguna.server.stream import Delta, Prompt, Stream
from lean_laguna.server.token_texts import TokenTexts
from lean_laguna.server.usage import speculation_metrics, usage


async def completions(service: Service, request: Request) -> Response:
    """Serve one request."""
    body, headers = await service.body(request, CompletionRequest)
    job = await _prepare(service, body)
    stream = await service.submit(request, job.prompts, output_names(body))
    reply = _Reply(service, job, stream)

    def leave() -> None:
        service.engine.abort(stream)

    if body.stream:
        return EventStream(reply.events(), leave, headers=headers)
    return JSON(await until_gone(request, reply.whole(), leave), headers=headers)


@dataclass(frozen=True)
class _Job:
    """A checked request.

    Attributes:
        body: As it came.
        prompts: For the engine.
        hides_output: ``max_tokens`` is 0: the one token computed is not part of the answer.
    """

    body: CompletionRequest
    prompts: list[Prompt]
    hides_output: bool


async def _prepare(service: Service, body: CompletionRequest) -> _Job:
    hides_output = body.max_tokens == 0 and bool(body.echo)
    texts = _prompts(body.prompt)
    service.check_count(len(texts))
    prompts = []
    for text in texts:
        asked = (
            16 if body.max_tokens is None else max(1, body.max_tokens) if hides_output else body.max_tokens
        )
        ids = await _encode(service, body, text, asked)
        limit = service.max_tokens(asked, len(ids), "prompt")
        fixed: dict[str, Any] = {"max_tokens": limit, "logprobs": body.logprobs}
        fixed["structured_outputs"] = structured_outputs(body)
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            fixed["prompt_logprobs"] = body.logprobs
        params = sampling_params(body, service.defaults(), **fixed)
        shown = text if isinstance(text, str) and body.truncate_prompt_tokens is None else None
        prompts.append(Prompt(ids, params, shown, draft_length(body.speculative)))
    return _Job(body, prompts, hides_output)


def _prompts(given: Any) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or token ids."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise bad_request(
            "prompt must be a text, a list of token ids, or a non-empty list of either", "prompt"
        )
    if all(type(item) is int for item in given):
        return [given]
    for item in given:
        is_ids = isinstance(item, list) and all(type(token) is int for token in item)
        if not isinstance(item, str) and not is_ids:
            raise bad_request(
                f"prompt must be a text, a list of token ids, or a list of either, found {item!r:.100} in it",
                "prompt",
            )
    return list(given)


async def _encode(
    service: Service, body: CompletionRequest, prompt: str | list[int], asked: int
) -> tuple[int, ...]:
    truncate = body.truncate_prompt_tokens
    if isinstance(prompt, str):
        adds = body.add_special_tokens is not False
        ids = await service.encode_prompt(prompt, asked, "prompt", add_special_tokens=adds, truncate=truncate)
    else:
        ids = service.truncated(tuple(prompt), truncate, asked)
    if not ids:
        raise RequestError("the prompt is empty; it must hold at least one token", param="prompt")
    return ids


class _Reply:
    """Puts the engine's output into the endpoint's shape, whole or piece by piece."""

    def __init__(self, service: Service, job: _Job, stream: Stream):
        self.service, self.job, self.stream = service, job, stream
        self.body = job.body
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.logprobs: dict[int, shapes.LegacyLogprobs] = {}
        self.num_tokens = [0] * stream.num_seqs
        skips = stream.prompts[0].params.skip_special_tokens
        self.texts = [TokenTexts(service.tokenizer, skips) for _ in range(stream.num_seqs)]

    async def whole(self) -> dict[str, Any]:
        """Return the response body."""
        merged: dict[int, dict[str, Any]] = {}
        while deltas := await self.stream.next():
            for delta in deltas:
                piece = self._choice(delta)
                if delta.choice in merged:
                    _merge(merged[delta.choice], piece)
                else:
                    merged[delta.choice] = piece
        body = self._frame([merged[i] for i in sorted(merged)])
        body["usage"] = self._usage()
        if metrics := self._metrics():
            body["metrics"] = metrics
        return body

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        options = self.body.stream_options
        wants_usage = bool(options and options.include_usage)
        is_continuous = bool(options and options.continuous_usage_stats)
        while deltas := await self.stream.next():
            for delta in deltas:
                choice = self._choice(delta)
                if not (choice["text"] or delta.finish_reason or self._is_wanted() or is_continuous):
                    continue
                chunk = self._frame([choice])
                if is_continuous:
                    chunk["usage"] = self._usage()
                elif wants_usage:
                    chunk["usage"] = None
                yield data(chunk)
        if wants_usage:
            chunk = self._frame([])
            chunk["usage"] = self._usage()
            if metrics := self._metrics():
                chunk["metrics"] = metrics
            yield data(chunk)
        yield DONE

    def _is_wanted(self) -> bool:
        """Return whether tokens without text are still news."""
        return self.body.logprobs is not None or bool(
            self.body.return_token_ids or self.body.return_draft_flags
        )

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """Return a choice that holds what is new of one completion."""
        prompt_index = delta.choice // self.stream.prompts[0].params.n
        prompt, state = self.stream.prompts[prompt_index], self.stream.states[prompt_index]
        is_first = self.num_tokens[delta.choice] == 0
        self.num_tokens[delta.choice] = delta.num_tokens
        token_ids, text = ([], "") if self.job.hides_output else (delta.token_ids, delta.text)
        choice: dict[str, Any] = {
            "index": delta.choice,
            "text": self._prompt_text(prompt) + text if is_first and self.body.echo else text,
            "logprobs": None,
            "finish_reason": "length"
            if self.job.hides_output and delta.finish_reason
            else delta.finish_reason,
            "stop_reason": None if self.job.hides_output else delta.stop_reason,
        }
        if self.body.logprobs is not None:
            candidates = [] if self.job.hides_output else delta.logprobs or []
            choice["logprobs"] = self._legacy(delta.choice, prompt, is_first, token_ids, candidates)
        if is_first and self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shapes.prompt_logprobs(state.prompt_logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        if self.body.return_draft_flags:
            choice["is_draft_token"] = delta.is_draft_token[: len(token_ids)]
            choice["token_texts"] = self.texts[delta.choice].of(delta)[: len(token_ids)]
        return choice

    def _legacy(
        self, index: int, prompt: Prompt, is_first: bool, token_ids: Sequence[int], candidates: Sequence[Any]
    ) -> dict[str, Any]:
        assert self.body.logprobs is not None
        if is_first:
            self.logprobs[index] = shapes.LegacyLogprobs(
                self.service.tokenizer, self.body.logprobs, bool(self.body.return_tokens_as_token_ids)
            )
            if self.body.echo:
                state = self.stream.states[index // prompt.params.n]
                self.logprobs[index].add(prompt.token_ids, state.prompt_logprobs or [])
        collected = self.logprobs[index]
        collected.add(token_ids, candidates)
        return collected.take()

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self.service.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        stream = self.stream
        num_prompt = sum(len(prompt.token_ids) for prompt in stream.prompts)
        num_cached = sum(state.sequences[0].num_cached_tokens for state in stream.states)
        return usage(num_prompt, 0 if self.job.hides_output else sum(self.num_tokens), num_cached, None)

    def _metrics(self) -> dict[str, Any] | None:
        if self.job.hides_output:
            return None
        outputs = [self.stream.outputs[i] for i in sorted(self.stream.outputs)]
        return speculation_metrics(outputs, self.service.config.spec_decode_metrics)


def _merge(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a later piece of the same completion."""
    choice["text"] += piece["text"]
    choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
    for name in ("token_ids", "is_draft_token", "token_texts"):
        if piece.get(name):
            choice[name] += piece[name]
    if piece["logprobs"] is not None:
        for key, values in piece["logprobs"].items():
            choice["logprobs"][key] += values
