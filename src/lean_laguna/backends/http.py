"""Any server that speaks OpenAI's completions API as a backend: ours, vLLM, SGLang, llama.cpp, a hosted one.

Tokens are counted by the server's ``usage``, never by chunks: with speculation a chunk is several tokens.
What a server cannot do is found out by asking it, kept by name in ``limits``, and left empty in the results.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lean_laguna.backends.base import GenerationResult, Progress, PromptInput, per_prompt_params
from lean_laguna.backends.http_connection import HttpConnection
from lean_laguna.backends.http_reply import CompletionReader
from lean_laguna.backends.http_wire import body_of, counts_between
from lean_laguna.core.errors import BackendError, ConfigError, RequestError, nearest
from lean_laguna.core.types import SamplingParams

OnText = Callable[[Mapping[str, Any]], None]
# Fields beyond OpenAI's that make the numbers exact; a server that refuses one is asked without it.
EXTRAS: dict[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
_NEW_LIMIT_NAME = "max_completion_tokens"  # what chat endpoints of newer models insist on
_CHAT_ONLY = (
    "it has no /v1/completions: each prompt was sent as a chat message, so it was answered, not continued"
)
_NO_IDS = "it does not report token ids: outputs are compared as text, and no margin is known where they part"
_NO_USAGE = "it does not report usage while it streams: first and last token are taken from chunks with text"
_NO_COUNTS = "it reports no speculation counters (vLLM's spec_decode_*): its acceptance is not known"
_NO_LOGPROBS = "it gives no log-probabilities: where outputs part, no margin is known"
_CACHED = "its prefix cache served repeated prompts: times to the first token are shorter than a new prompt's"
_NO_SEED = "it does not repeat itself under a seed: sampled outputs differ from run to run"


class HttpBackend:
    """Asks a server for completions, streaming each one.

    Attributes:
        base_url: Up to and without ``/v1``.
        model: The name asked for.
        limits: What this server cannot do, in words.
    """

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str | None = None):
        """Connect, choose the model, and find out what the server reports.

        Args:
            base_url: With or without ``/v1``.
            model: A name that the server serves; None takes the one it names first.
            api_key: Sent as ``Authorization: Bearer``.

        Raises:
            ConfigError: The address is no URL, the key is refused, or the model is not served.
            BackendError: The server cannot be reached, or does not answer as such a server would.
        """
        self._connection = HttpConnection(base_url, api_key)
        self.base_url = self._connection.base_url
        self.limits: list[str] = []
        self._speculative: bool | dict[str, int] | None = None
        self._extras = dict(EXTRAS)
        self._has_running_usage = False
        self._is_chat = self._is_copy = False
        self._limit_name = "max_tokens"
        try:
            self._card = self._connection.run(self._choose_model(model))
            self.model = str(self._card["id"])
            self._probe()
        except BaseException:
            self.close()
            raise

    def with_speculation(self, speculative: bool | int) -> HttpBackend:
        """Return a backend on the same server that asks for a draft length with each request.

        Args:
            speculative: False for none, a number of draft tokens, or True for what the server does unasked.

        Raises:
            ConfigError: The server has no such switch, which is tried out.
        """
        other = copy.copy(self)
        other.limits, other._is_copy = list(self.limits), True
        if isinstance(speculative, bool):
            other._speculative = None if speculative else False
        else:
            other._speculative = {"num_speculative_tokens": speculative}
        if other._speculative is not None:
            other._check_switch()
        return other

    def with_draft_length(self, num_speculative_tokens: int) -> HttpBackend:
        """Return a backend on the same server that asks for a fixed draft length.

        Raises:
            ConfigError: The server has no such switch, or its drafter cannot draft so far.
        """
        if 0 < self.max_draft_tokens < num_speculative_tokens:
            raise ConfigError(
                f"a draft length of {num_speculative_tokens} is beyond the drafter at {self.base_url}, which "
                f"drafts at most {self.max_draft_tokens} tokens a step"
            )
        return self.with_speculation(num_speculative_tokens)

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft, read off the server's counters; 0 where it has none."""
        counts = self._connection.run(self._connection.counts(self.model))
        return 0 if counts is None else len(counts.num_accepted_tokens_per_pos)

    def generate(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[GenerationResult]:
        """Complete every prompt, as ``Backend.generate`` says; all requests are in flight together.

        The server's own numbers of a request's speculation are used where it sends them. Else its counters
        are read before and after, which is right for one prompt at a time on a server that nobody else uses.

        Raises:
            RequestError: The server refuses a request.
            BackendError: It cannot be reached, fails, or breaks a stream off.
        """
        each = per_prompt_params(params, len(prompts))
        if any(one.n != 1 for one in each):
            raise RequestError("n must be 1 here: one completion per prompt is compared", param="n")
        return self._connection.run(self._generate(prompts, each, on_progress))

    def stream(
        self,
        prompt: PromptInput | Sequence[Mapping[str, str]],
        params: SamplingParams,
        on_event: OnText,
        *,
        is_chat: bool = False,
    ) -> GenerationResult:
        """Complete one prompt and hand on each choice of the stream as it comes.

        Args:
            prompt: A text, token ids, or the messages of a chat.
            params: How to sample.
            on_event: Called with each choice, as the server wrote it.
            is_chat: Use the chat endpoint; ``prompt`` is messages.

        Raises:
            RequestError: The server refuses the request.
            BackendError: It cannot be reached, fails, or breaks the stream off.
        """
        return self._connection.run(self._complete(prompt, params, on_event, is_chat=is_chat))

    def check_seed(self) -> None:
        """Find out whether a seed makes the server repeat itself, and note it in ``limits`` if not."""
        params = SamplingParams(temperature=1.5, seed=7, max_tokens=12)
        first, second = (self.generate(["x = "], params)[0] for _ in range(2))
        self._note((first.token_ids, first.text) != (second.token_ids, second.text), _NO_SEED)

    def info(self) -> dict[str, Any]:
        """Return what a result file must say; see ``Backend.info``.

        Device, number format and checkpoint hashes are the server's secret, and absent.
        """
        facts: dict[str, Any] = {
            "engine": str(self._card.get("owned_by") or "unknown"),
            "base_url": self.base_url,
            "model": {"name": self.model},
            "limits": list(self.limits),
        }
        if version := self._connection.run(self._connection.version()):
            facts["engine_version"] = version
        if self._card.get("max_model_len"):
            facts["max_model_len"] = self._card["max_model_len"]
        if isinstance(self._speculative, dict):
            facts["num_speculative_tokens"] = self._speculative["num_speculative_tokens"]
        return facts

    def close(self) -> None:
        """Close the connections."""
        if not self._is_copy:
            self._connection.close()

    # --- finding out

    async def _choose_model(self, name: str | None) -> dict[str, Any]:
        answer = await self._connection.get_json("/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        names = [card["id"] for card in cards or () if isinstance(card, dict) and "id" in card]
        if not names and name is not None:
            return {"id": name}  # some load what a request names, and list what they know of
        if not names:
            raise BackendError(
                f"{self.base_url}: /v1/models names no model; give one with --model, if this is an "
                "OpenAI-style server"
            )
        if name is None:
            name = names[0]
        if name not in names:
            raise ConfigError(f"{self.base_url} does not serve the model '{name}'{nearest(name, names)}")
        return dict(cards[names.index(name)]) if cards else {}

    def _probe(self) -> None:
        """Ask for some tokens with everything on, and leave out what the server refuses.

        Some, since a busy server may send two in one piece, and usage in the last says nothing of others.
        """
        running, final = EXTRAS["stream_options"], {"include_usage": True}
        ids = {name: True for name in EXTRAS if name != "stream_options"}
        ways = itertools.product((running, final), (ids, {}), (1, None))
        refusal: RequestError | None = None
        for options, reported, logprobs in ways:
            self._extras = {"stream_options": options, **reported}
            params = SamplingParams(temperature=0, max_tokens=16, logprobs=logprobs)
            try:
                result = self._ask_either("x", params)
                break
            except RequestError as error:
                refusal = refusal or error
        else:
            assert refusal is not None
            raise refusal
        self._note(not result.token_ids, _NO_IDS)
        self._note(result.logprobs is None, _NO_LOGPROBS)
        self._note(not self._has_running_usage, _NO_USAGE)
        counts = self._connection.run(self._connection.counts(self.model))
        self._note(result.speculation is None and counts is None, _NO_COUNTS)

    def _ask_either(self, prompt: str, params: SamplingParams) -> GenerationResult:
        """Complete a prompt; where there is no such endpoint, turn to the chat endpoint for good."""
        try:
            return self._connection.run(self._complete(prompt, params))
        except BackendError as error:
            if error.status not in (404, 405) or self._is_chat:
                raise
        self._is_chat = True
        self._note(True, _CHAT_ONLY)
        return self._connection.run(self._complete(prompt, params))

    def _note(self, is_so: bool, limit: str) -> None:
        if is_so and limit not in self.limits:
            self.limits.append(limit)

    def _check_switch(self) -> None:
        """Draft with what was asked for and see whether the counters obey."""
        asked = self._speculative
        most = asked["num_speculative_tokens"] if isinstance(asked, dict) else 0
        wanted = f"a draft length of {most}" if most else "no drafting"
        why = f"{self.base_url}: this server cannot be asked for {wanted} per request"
        hint = "start a second one and name it with --base-url-b"
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        try:
            result = self.generate(["def add(a, b):\n    return"], params)[0]
        except RequestError as error:
            raise ConfigError(f"{why} ({error}); {hint}") from None
        stats = result.speculation
        if stats is None:
            if most or _NO_COUNTS in self.limits:
                raise ConfigError(f"{why}: it reports no drafting, so it may have no drafter; {hint}")
        elif stats.num_draft_tokens > most * max(stats.num_drafts, 1) or (most and not stats.num_drafts):
            raise ConfigError(
                f"{why}: it drafted {stats.num_draft_tokens} tokens in {stats.num_drafts} steps; {hint}"
            )

    # --- asking

    async def _generate(
        self, prompts: Sequence[PromptInput], params: Sequence[SamplingParams], on_progress: Progress | None
    ) -> list[GenerationResult]:
        before = await self._connection.counts(self.model) if len(prompts) == 1 else None
        num_done = 0

        async def one(prompt: PromptInput, chosen: SamplingParams) -> GenerationResult:
            nonlocal num_done
            result = await self._complete(prompt, chosen)
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, len(prompts))
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(p, c)) for p, c in zip(prompts, params, strict=True)]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
        self._note(any(result.num_cached_tokens for result in results), _CACHED)
        if before is not None and results[0].speculation is None:
            after = await self._connection.counts(self.model)
            grown = None if after is None else counts_between(before, after)
            if grown is not None and (grown.num_drafts or self._speculative is not False):
                results[0] = dataclasses.replace(results[0], speculation=grown)
        return results

    async def _complete(
        self, prompt: Any, params: SamplingParams, on_event: OnText | None = None, *, is_chat: bool = False
    ) -> GenerationResult:
        try:
            return await self._ask(prompt, params, on_event, is_chat=is_chat)
        except RequestError as error:
            if self._limit_name == _NEW_LIMIT_NAME or _NEW_LIMIT_NAME not in str(error):
                raise
        self._limit_name = _NEW_LIMIT_NAME
        return await self._ask(prompt, params, on_event, is_chat=is_chat)

    async def _ask(
        self, prompt: Any, params: SamplingParams, on_event: OnText | None, *, is_chat: bool
    ) -> GenerationResult:
        body = {"model": self.model, "stream": True, **body_of(prompt, params), **self._extras}
        if self._is_chat and not is_chat:
            if not isinstance(prompt, str):
                raise RequestError(f"{self.base_url} has a chat endpoint only, which takes no token ids")
            is_chat, body["prompt"] = True, [{"role": "user", "content": prompt}]
        if is_chat:
            body["messages"] = body.pop("prompt")
            if "max_tokens" in body:
                body[self._limit_name] = body.pop("max_tokens")
            if params.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": params.logprobs}
        if self._speculative is not None:
            body["speculative"] = self._speculative
        if on_event is not None and not is_chat and self._card.get("owned_by") == "lean-laguna":
            body["return_draft_flags"] = True
        reader = CompletionReader(params)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        async for event in self._connection.events(path, body):
            choice = reader.take(event)
            if choice is not None and on_event is not None:
                on_event(choice)
        self._has_running_usage = reader.has_running_usage
        return reader.result(self.base_url)
