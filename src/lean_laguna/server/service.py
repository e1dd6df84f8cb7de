"""What the endpoints share: the engine, the texts around it, and the steps of every request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from lean_laguna.core.errors import nearest
from lean_laguna.engine.llm import LLM
from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.bodies import IGNORED_HEADER, decode_object, parse, read_body, with_query
from lean_laguna.server.engine_thread import EngineThread
from lean_laguna.server.errors import ApiError, bad_request, context_length_error
from lean_laguna.server.gate import Gate
from lean_laguna.server.metrics import Metrics
from lean_laguna.server.sending import until_gone
from lean_laguna.server.settings import ServerConfig
from lean_laguna.server.stream import Prompt, Stream

T = TypeVar("T", bound=msgspec.Struct)
_LONG_TEXT = 20_000
"""Characters from which on a text is encoded on a thread: until it is done the event loop serves others."""


class Service:
    """One served model; lives on the event loop.

    Attributes:
        config: As given.
        engine: The thread that runs the model.
        metrics: Counters and histograms.
        created: When it started, seconds since 1970.
        is_stopping: New requests are refused.
        gate: Where new requests wait while the server is being changed.
        updating: Held by the one update of weights that is under way.
        weights_version: Name of the weights served; counts from 1 where nobody names them.
    """

    def __init__(self, config: ServerConfig, engine: EngineThread, metrics: Metrics):
        self.config, self.engine, self.metrics = config, engine, metrics
        self.created = int(time.time())
        self.is_stopping = False
        self.gate, self.updating = Gate(), asyncio.Lock()
        self._num_held = 0  # completions at the gate
        self.weights_version = "1"
        self._num_updates = 1
        self._defaults: dict[str, Any] | None = None

    @property
    def llm(self) -> LLM:
        """The engine and its checkpoint.

        Raises:
            ApiError: 503, it is not ready.
        """
        if self.is_stopping:
            raise ApiError(503, "the server is stopping", code="stopped")
        return self.engine.llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm.tokenizer

    @property
    def model_name(self) -> str:
        """The name that responses carry."""
        return self.config.served_model_names[0]

    @property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template."""
        return self.llm.chat_template

    def defaults(self) -> Mapping[str, Any]:
        """Return sampling values for requests that are silent: the server's, else the checkpoint's."""
        if self._defaults is None:
            recommended = self.llm.generation_config.sampling_defaults()
            self._defaults = {**recommended, **self.config.override_generation_config}
        return self._defaults

    def weights_changed(self, version: str | None) -> None:
        """Take note of new weights."""
        self._num_updates += 1
        self.weights_version = version or str(self._num_updates)
        self._defaults = None

    async def body(self, request: Request, schema: type[T]) -> tuple[T, dict[str, str]]:
        """Read and check a request's body and model name.

        Returns:
            The body, and headers for the response.

        Raises:
            ApiError: It is wrong, too long, or for another model.
        """
        raw = await read_body(request, self.config.max_request_bytes) or b"{}"
        fields, ignored = parse(with_query(decode_object(raw), request, schema), schema, self.config)
        self.check_model(getattr(fields, "model", None))
        return fields, {IGNORED_HEADER: ",".join(ignored)} if ignored else {}

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name.

        Raises:
            ApiError: 404.
        """
        names = self.config.served_model_names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"The model `{name:.200}` does not exist{nearest(name[:200], names)}",
                param="model",
                code="model_not_found",
            )

    async def encode_prompt(
        self,
        text: str,
        asked: int | None,
        what: str,
        *,
        add_special_tokens: bool = False,
        truncate: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt; one that cannot fit is refused before it costs anything.

        Args:
            text: The prompt.
            asked: The request's own limit of the output.
            what: The field that holds the prompt.
            add_special_tokens: Also apply the tokenizer's own template.
            truncate: See :meth:`truncated`.

        Raises:
            ApiError: 400, it does not fit the context, whatever its tokens are.
        """
        if truncate is not None:
            ids = await self.encode(text, add_special_tokens=add_special_tokens)
            return self.truncated(ids, truncate, asked)
        limit, fewest = self.llm.engine.max_model_len, self.tokenizer.fewest_tokens(text)
        if fewest >= limit:
            raise context_length_error(limit, fewest, max(asked or 1, 1), what, or_more=True)
        return await self.encode(text, add_special_tokens=add_special_tokens)

    def truncated(self, ids: tuple[int, ...], keep: int | None, asked: int | None) -> tuple[int, ...]:
        """Return the end of a prompt, as vLLM's ``truncate_prompt_tokens`` asks for it.

        Args:
            ids: The prompt.
            keep: At most so many tokens; -1 for what the context has room for; None for all.
            asked: The request's own limit of the output, which has its room too.

        Raises:
            ApiError: 400, ``keep`` is no such number.
        """
        if keep is None:
            return ids
        limit = self.llm.engine.max_model_len
        if keep != -1 and not 1 <= keep <= limit:
            raise bad_request(
                f"truncate_prompt_tokens must be in 1 .. {limit} (the context), or -1 for all that fits; "
                f"found {keep}",
                "truncate_prompt_tokens",
            )
        return ids[-(max(1, limit - max(asked or 1, 1)) if keep == -1 else keep) :]

    async def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text, and let others have their turn."""
        tokenizer = self.tokenizer
        if len(text) < _LONG_TEXT:
            await asyncio.sleep(0)  # one of many prompts, perhaps
            return tuple(tokenizer.encode(text, add_special_tokens))
        return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens))

    def max_tokens(self, asked: int | None, num_prompt_tokens: int, what: str) -> int:
        """Return the output limit of a request; without one, the checkpoint's or what the context leaves.

        Args:
            asked: The request's own limit.
            num_prompt_tokens: Tokens of its prompt.
            what: The field that holds the prompt.

        Raises:
            ApiError: 400, prompt and output do not fit the context; both numbers are named.
        """
        limit = self.llm.engine.max_model_len
        if asked is not None and asked < 0:
            raise bad_request(f"max_tokens must be at least 1, found {asked}", "max_tokens")
        needed = 1 if asked is None else asked
        if num_prompt_tokens + needed > limit:
            raise context_length_error(limit, num_prompt_tokens, needed, what)
        if asked is not None:
            return asked
        left = limit - num_prompt_tokens
        return min(left, self.defaults().get("max_tokens") or left)

    @property
    def max_live_seqs(self) -> int:
        """Completions that may run or wait."""
        return self.llm.config.max_num_seqs + self.config.max_queued_seqs

    def check_count(self, num_seqs: int) -> None:
        """Refuse a request for more completions than could ever run or wait.

        Raises:
            ApiError: 400.
        """
        if num_seqs > self.max_live_seqs:
            raise bad_request(
                f"the request asks for {num_seqs} completions (prompts times n); this server takes "
                f"{self.max_live_seqs} at once",
                "n",
            )

    async def submit(
        self, request: Request, prompts: Sequence[Prompt], names: Mapping[str, str] | None = None
    ) -> Stream:
        """Hand a request to the engine, once the gate is open.

        Args:
            request: Tells when the client leaves.
            prompts: What is asked.
            names: Our names of fields to the client's, for errors.

        Raises:
            ApiError: 429, too many wait; 400, it alone is more than may wait; 503, the server stops.
            RequestError: It can never be served.
            ClientGoneError: The client left while the gate was closed.
        """
        stream = Stream(list(prompts), names)
        self.check_count(stream.num_seqs)
        # Those at the gate count too: it lets all of them in at once.
        num_live, limit = self.engine.num_live_seqs + self._num_held, self.max_live_seqs
        if num_live + stream.num_seqs > limit:
            raise ApiError(
                429,
                f"{num_live} completions run or wait, and at most {limit} may; try again",
                code="queue_full",
            )
        self._num_held += stream.num_seqs
        try:
            while not self.gate.is_open:  # it may be held again before this task's turn comes
                await until_gone(request, self.gate.opened(), lambda: None)
            _ = self.llm  # the server may have been told to stop meanwhile
        finally:
            self._num_held -= stream.num_seqs
        try:
            await self.engine.submit(stream)
        except asyncio.CancelledError:
            stream.is_aborted = True
            self.engine.abort(stream)
            raise
        return stream
