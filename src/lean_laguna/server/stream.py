"""What one HTTP request reads: the engine's output, put in by the engine's thread, taken by the event loop.

A reader that falls behind finds everything since its last look merged into one piece per completion, so a
slow one holds no more than its own output, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from lean_laguna.core.types import Logprob, RequestOutput, SamplingParams
from lean_laguna.engine.output import CompletionDelta, TokenLogprobs
from lean_laguna.engine.sequence import RequestState
from lean_laguna.server.errors import renamed

__all__ = ["Delta", "Logprob", "Prompt", "Stream", "TokenLogprobs"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        token_ids: At least one token.
        params: How to sample.
        text: The prompt's text, where it was given as text.
        num_speculative_tokens: Draft tokens per step, 0 for none; None leaves it to the engine.
    """

    token_ids: tuple[int, ...]
    params: SamplingParams
    text: str | None = None
    num_speculative_tokens: int | None = None


@dataclass
class Delta:
    """What is new of one completion since the last look.

    Attributes:
        choice: Number of the completion over all prompts: prompt times ``n`` plus completion.
        num_tokens: Tokens of the completion so far, those of this delta included.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    is_draft_token: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, new: CompletionDelta) -> None:
        """Take in a further piece."""
        self.text += new.text
        self.token_ids += new.token_ids
        self.is_draft_token += new.is_draft_token
        if new.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *new.logprobs]
        if new.finish_reason is not None:
            self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason


class Stream:
    """The output of one HTTP request; made on the event loop, filled on the engine's thread.

    Attributes:
        prompts: What was asked.
        states: Per prompt, the engine's request, once accepted.
        outputs: Per prompt, the whole output, once finished.
        names: Our names of fields to the client's, for errors.
        num_ended: Completions that have come to an end of their own; counted on the engine's thread.
    """

    def __init__(self, prompts: list[Prompt], names: Mapping[str, str] | None = None):
        self.prompts, self.names = prompts, names or {}
        self.states: list[RequestState] = []
        self.outputs: dict[int, RequestOutput] = {}
        self.num_seqs = sum(prompt.params.n for prompt in prompts)
        self.num_ended = 0
        self.is_aborted = False
        self._loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._pending: dict[int, Delta] = {}
        self._num_tokens: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._is_done = False

    # --- event loop

    async def accepted(self) -> None:
        """Wait until the engine has taken the request.

        Raises:
            RequestError: It cannot be served.
        """
        await self._accepted

    async def next(self) -> list[Delta]:
        """Return what is new, at least one delta; an empty list when all completions have ended.

        Raises:
            BaseException: What made the request fail.
        """
        while True:
            with self._lock:
                taken, self._pending = self._pending, {}
            if taken:
                return list(taken.values())
            if self._failure is not None:
                raise renamed(self._failure, self.names)
            if self._is_done:
                return []
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """Let the reader look again."""
        self._news.set()

    def settle(self, error: BaseException | None) -> None:
        """Say whether the engine took the request."""
        if self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(renamed(error, self.names))

    # --- engine thread

    def put(self, prompt: int, new: CompletionDelta) -> None:
        """Add a piece of one completion of one prompt."""
        choice = sum(p.params.n for p in self.prompts[:prompt]) + new.index
        with self._lock:
            delta = self._pending.get(choice)
            if delta is None:
                delta = self._pending[choice] = Delta(choice)
            delta.add(new)
            delta.num_tokens = self._num_tokens[choice] = self._num_tokens.get(choice, 0) + len(new.token_ids)

    def finish(self) -> None:
        """Say that nothing will be added."""
        self._is_done = True

    def fail(self, error: BaseException) -> None:
        """Say that nothing will be added, and why."""
        self._failure = error
        self._is_done = True
