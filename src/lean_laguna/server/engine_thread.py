"""The thread that owns the engine: loads it, steps it, and talks to the event loop through queues.

Nothing else touches the engine. Between two steps it carries out what was asked meanwhile, so a request that
nobody reads any more is dropped before the next step, whether it was decoding or still in its prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from lean_laguna.core.errors import RequestError
from lean_laguna.engine.llm import LLM
from lean_laguna.engine.output import CompletionDelta
from lean_laguna.server.errors import ApiError
from lean_laguna.server.isolation import step_one_by_one
from lean_laguna.server.metrics import Metrics
from lean_laguna.server.stream import Stream

T = TypeVar("T")
Phase = Literal["loading", "ready", "failed", "stopped"]
log = logging.getLogger("lean_laguna.server")


class EngineThread:
    """Runs one ``LLM``; made on the event loop, and asked from there only.

    Attributes:
        phase: ``ready`` from the moment requests can be served.
        error: Why loading failed.
        num_live_seqs: Completions submitted and not yet ended.
        is_paused: No steps are taken; requests wait.
    """

    def __init__(self, load: Callable[[], LLM], metrics: Metrics, on_settled: Callable[[], None]):
        """Start loading.

        Args:
            load: Makes the engine; called on the thread.
            metrics: Told of every token.
            on_settled: Called on the event loop when loading has ended, well or not.
        """
        self.phase: Phase = "loading"
        self.error: BaseException | None = None
        self.num_live_seqs = 0
        self.is_paused = False
        self._load, self._metrics, self._on_settled = load, metrics, on_settled
        self._llm: LLM | None = None
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The engine and its checkpoint; read-only facts may be read from any thread.

        Raises:
            ApiError: 503, it is not loaded.
        """
        if self._llm is None or self.phase != "ready":
            reason = {"failed": "the model could not be loaded", "stopped": "the server is stopping"}
            raise ApiError(503, reason.get(self.phase, "the model is loading"), code=self.phase)
        return self._llm

    # --- event loop

    async def submit(self, stream: Stream) -> None:
        """Queue a request and return when the engine has taken it.

        Raises:
            RequestError: It can never be served; then none of its prompts is.
            ApiError: 503, there is no engine to serve it.
        """
        _ = self.llm
        self.num_live_seqs += stream.num_seqs
        self._commands.put(lambda: self._add(stream))
        await stream.accepted()

    def abort(self, stream: Stream) -> None:
        """Drop a request before the next step; nothing happens where it has ended."""
        self._commands.put(lambda: self._abort(stream))

    async def call(self, function: Callable[[LLM], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its result.

        It is given the engine that serves when its turn comes.
        """
        _ = self.llm
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            assert self._llm is not None
            try:
                result = function(self._llm)
            except BaseException as error:
                self._soon(_set_exception, future, error)
            else:
                self._soon(_set_result, future, result)

        self._commands.put(command)
        return await future

    def set_paused(self, is_paused: bool) -> None:
        """Stop taking steps, or go on."""
        self.is_paused = is_paused
        self._commands.put(lambda: None)

    def replace(self, llm: LLM) -> None:
        """Serve with another engine; for a command, on the engine's thread, while no request runs."""
        assert not self._streams
        assert self._llm is not None
        llm.engine.count_on(self._llm.engine)
        self._llm = llm

    def give_up(self, error: Exception) -> None:
        """Serve nothing from here on: there is no engine any more. For a command, on the engine's thread."""
        self.error, self.phase = error, "failed"

    def fail_all(self, reason: str) -> None:
        """Fail every request that runs or waits; for a command, on the engine's thread."""
        self._fail_all(ApiError(503, reason, code="aborted"))

    def stop(self, reason: str) -> None:
        """Fail whatever still runs and end the thread."""

        def command() -> None:
            self._is_stopping = True
            self._fail_all(ApiError(503, reason, code="stopped"))

        self._commands.put(command)

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; false where it goes on, which only loading or a long step can do."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- engine thread

    def _run(self) -> None:
        try:
            self._llm = self._load()
        except BaseException as error:
            self.error, self.phase = error, "failed"
            self._soon(self._on_settled)
            return
        self.phase = "ready"
        self._soon(self._on_settled)
        while not self._is_stopping:
            try:
                self._take_commands()
                if self._streams and not self.is_paused and not self._is_stopping:
                    self._step(self._llm)
            except Exception as error:  # the thread must outlive any fault, or every request would hang
                log.exception("the engine's thread failed")
                self._fail_all(error)
        self.phase = "stopped"
        self._fail_all(ApiError(503, "the server is stopping", code="stopped"))

    def _take_commands(self) -> None:
        """Carry out what was asked; wait for something where there is nothing to compute."""
        has_work = bool(self._streams) and not self.is_paused
        try:
            while True:
                self._commands.get(block=not has_work)()
                has_work = True
        except queue.Empty:
            pass

    def _step(self, llm: LLM) -> None:
        try:
            deltas = llm.engine.step()
        except Exception as error:
            log.exception("a step failed; running its sequences one by one to find out which")
            deltas = self._recover(llm, error)
        changed: dict[Stream, None] = {}
        for delta in deltas:
            if delta.request_id in self._streams:
                self._deliver(delta, changed)
        if changed:
            self._soon(_wake, list(changed))

    def _deliver(self, delta: CompletionDelta, changed: dict[Stream, None]) -> None:
        stream, index = self._streams[delta.request_id]
        if delta.finish_reason == "error":
            stream.put(index, dataclasses.replace(delta, finish_reason=None, stop_reason=None))
            self._fail(stream, RequestError(str(delta.stop_reason), param="structured_outputs"))
            return
        changed[stream] = None
        stream.put(index, delta)
        self._metrics.token(stream.states[index], delta)
        stream.num_ended += delta.finish_reason is not None
        if delta.is_request_finished:
            del self._streams[delta.request_id]
            stream.outputs[index] = output = stream.states[index].snapshot()
            self._metrics.finished(output, stream.states[index].params)
            if len(stream.outputs) == len(stream.prompts):
                stream.finish()
                self._soon(self._end, stream)

    def _recover(self, llm: LLM, error: Exception) -> list[CompletionDelta]:
        """Step each sequence alone; the requests for which that fails too are failed, and only they."""
        deltas, failed = step_one_by_one(llm.engine)
        finished = {delta.request_id for delta in deltas if delta.is_request_finished}
        for request_id in self._streams.keys() - finished:
            if not llm.engine.is_unfinished(request_id):  # the engine let go of it when the step failed
                failed.setdefault(request_id, error)
        if not deltas and not failed:  # it fails together and not alone: nothing to hold responsible
            self._fail_all(error)
        for request_id, cause in failed.items():
            if request_id in self._streams:
                log.error("request %s failed", request_id, exc_info=cause)
                self._fail(self._streams[request_id][0], cause)
        return deltas

    def _add(self, stream: Stream) -> None:
        """Give the engine all prompts of a request, or none."""
        llm = self._llm
        assert llm is not None
        try:
            if self._is_stopping:
                raise ApiError(503, "the server is stopping", code="stopped")
            if stream.is_aborted:
                raise ApiError(499, "the client is gone", code="client_gone")
            for prompt in stream.prompts:
                state = llm.engine.add_request(
                    prompt.token_ids,
                    prompt.params,
                    prompt=prompt.text,
                    num_speculative_tokens=prompt.num_speculative_tokens,
                )
                stream.states.append(state)
        except Exception as error:
            for state in stream.states:
                llm.engine.abort(state.request_id)
            stream.finish()
            self._soon(self._end, stream)
            self._soon(stream.settle, error)
            return
        self._streams.update({s.request_id: (stream, i) for i, s in enumerate(stream.states)})
        self._soon(stream.settle, None)

    def _abort(self, stream: Stream) -> None:
        if self._drop(stream):
            self._metrics.aborted(stream.num_seqs - stream.num_ended)
            stream.finish()
            self._soon(self._end, stream)

    def _fail(self, stream: Stream, error: BaseException) -> None:
        self._drop(stream)
        self._metrics.failed(stream.num_seqs - stream.num_ended)
        stream.fail(error)
        self._soon(self._end, stream)
        self._soon(stream.settle, error)

    def _fail_all(self, error: BaseException) -> None:
        for stream in dict.fromkeys(stream for stream, _ in self._streams.values()):
            self._fail(stream, error)

    def _drop(self, stream: Stream) -> bool:
        """Take what is left of a request from the engine; false where it had ended."""
        assert self._llm is not None
        # By the stream, too: an engine that took another's place gives its ids anew.
        live = [s for s in stream.states if self._streams.get(s.request_id, (None,))[0] is stream]
        for state in live:
            self._llm.engine.abort(state.request_id)
            self._metrics.forget(state)
            del self._streams[state.request_id]
        return bool(live)

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the event loop; where that is closed, nobody waits."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            log.debug("the event loop is closed")

    def _end(self, stream: Stream) -> None:
        self.num_live_seqs -= stream.num_seqs
        stream.wake()


def _wake(streams: list[Stream]) -> None:
    for stream in streams:
        stream.wake()


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
