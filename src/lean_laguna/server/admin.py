"""Endpoints that change the server: pause, resume, new weights. Served only where asked for at start.

New weights take the place of the old ones in one go, between two steps and with no request under way: a
reply is never half of one model and half of another. On a CPU they are loaded beside the old ones, which go
on serving where that fails. A GPU seldom has room for both: there the new files' headers are looked at
first, then the old weights leave, and are loaded again where the new ones cannot be.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lean_laguna.core import heap
from lean_laguna.core.config import EngineConfig
from lean_laguna.engine.llm import LLM
from lean_laguna.engine.loading import check_checkpoints, give_back_memory, load_engine
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.chat_template import ChatTemplate, check_role_tokens
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.engine_thread import EngineThread
from lean_laguna.server.errors import bad_request
from lean_laguna.server.schemas import PauseRequest, UpdateWeightsRequest
from lean_laguna.server.sending import JSON
from lean_laguna.server.service import Service

log = logging.getLogger("lean_laguna.server")
_LOOK_AGAIN_S = 0.02
_PAUSE, _UPDATE = "pause", "update"  # who holds the gate


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """``POST /reset_prefix_cache``: forget the keys and values of past prompts."""
    await service.engine.call(lambda llm: llm.engine.reset_prefix_cache())
    return JSON({"status": "ok"})


async def pause(service: Service, request: Request) -> Response:
    """``POST /pause``: stop computing; requests are kept, aborted, or waited for, as ``mode`` says.

    A ``/resume`` that comes while it waits ends the waiting, and nothing is paused.
    """
    body, _ = await service.body(request, PauseRequest)
    if body.mode == "wait":
        service.gate.hold(_PAUSE)
        try:
            await _drain(service, lambda: service.gate.is_held_by(_PAUSE))
        except BaseException:
            service.gate.let_go(_PAUSE)
            raise
        if not service.gate.is_held_by(_PAUSE):
            return await is_paused(service, request)
    service.engine.set_paused(True)
    if body.mode == "abort":
        await service.engine.call(lambda llm: service.engine.fail_all("the server was paused"))
    return await is_paused(service, request)


async def resume(service: Service, request: Request) -> Response:
    """``POST /resume``: go on computing."""
    service.engine.set_paused(False)
    service.gate.let_go(_PAUSE)
    return await is_paused(service, request)


async def is_paused(service: Service, request: Request) -> Response:
    """``GET /is_paused``."""
    return JSON({"is_paused": service.engine.is_paused})


async def update_weights(service: Service, request: Request) -> Response:
    """``POST /update_weights``: serve another checkpoint of the target, the drafter, or both.

    Updates take place one after another, in the order in which they were asked for: a call that comes while
    one is under way waits for its turn. New requests wait meanwhile, and are answered with the new weights.
    """
    body, _ = await service.body(request, UpdateWeightsRequest)
    if body.checkpoint is None and body.drafter is None:
        raise bad_request("give a 'checkpoint', a 'drafter', or both", "checkpoint")
    # A wrong one should not cost the requests that run.
    llm = service.llm
    await asyncio.to_thread(_check, _renamed(llm.config, body), llm)
    async with service.updating:
        service.gate.hold(_UPDATE)
        try:
            if body.mode == "abort":
                await service.engine.call(
                    lambda llm: service.engine.fail_all("the weights are being replaced")
                )
            await _drain(service)
            await service.engine.call(lambda llm: _exchange(service.engine, llm, body))
            service.weights_changed(body.version)
            service.metrics.loaded(service.llm)
            answer: dict[str, Any] = {"status": "ok", "weights_version": service.weights_version}
            await service.engine.call(lambda llm: heap.settle())
        finally:
            service.gate.let_go(_UPDATE)
    return JSON(answer)


async def _drain(service: Service, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Wait until no request runs, or until that is not wanted any more; new ones must be held back.

    Raises:
        ApiError: 400, a pause keeps requests.
    """
    while service.engine.num_live_seqs and is_wanted():
        if service.engine.is_paused:
            raise bad_request("requests are kept by the pause; resume first, or say mode abort", "mode")
        await asyncio.sleep(_LOOK_AGAIN_S)


def _exchange(thread: EngineThread, llm: LLM, body: UpdateWeightsRequest) -> None:
    """Have a thread serve with an engine of the same settings over other checkpoints; for its own command.

    Raises:
        CheckpointError: One cannot be loaded; the old ones serve on.
        ApiError: 400, there is no drafter to replace, or no checkpoint was loaded; likewise.
    """
    config = _renamed(llm.config, body)
    if not _leaves_first(llm):
        thread.replace(_loaded(config, llm))
        return
    _check(config, llm)
    failure: Exception | None = None
    try:
        _make_room(llm)
        thread.replace(_loaded(config, llm))
    except Exception as error:
        failure = error
    if failure is None:
        return
    _forget_frames(failure)
    log.error("%s cannot be loaded (%s); loading %s again", config.model, failure, llm.config.model)
    heap.settle()
    give_back_memory()
    try:
        thread.replace(_loaded(llm.config, llm))
    except Exception as error:
        thread.give_up(error)
        raise
    raise failure


def _leaves_first(llm: LLM) -> bool:
    """Say whether an engine has to go before another one has room."""
    return llm.engine.device.type != "cpu"


def _make_room(llm: LLM) -> None:
    log.warning("the old weights leave %s for the new ones", llm.engine.device)
    llm.engine.release()
    heap.settle()
    give_back_memory()


def _forget_frames(error: BaseException) -> None:
    """Let go of the frames of an error, and of those that led to it: they hold what was loaded so far."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _renamed(config: EngineConfig, body: UpdateWeightsRequest) -> EngineConfig:
    """Return a configuration with the checkpoints that were asked for."""
    if config.load_format == "dummy":
        raise bad_request("the server runs random weights (--load-format dummy); no checkpoint replaces them")
    if body.checkpoint is not None:
        config = dataclasses.replace(config, model=body.checkpoint)
    if body.drafter is not None:
        if config.speculative is None:
            raise bad_request("the server was started without a drafter", "drafter")
        speculative = dataclasses.replace(config.speculative, model=body.drafter)
        config = dataclasses.replace(config, speculative=speculative)
    return config


def _loaded(config: EngineConfig, before: LLM) -> LLM:
    """Return an engine that can take another's place."""
    engine, folder = load_engine(config)
    _check_tokens(engine.tokenizer, before)
    updated = LLM.from_engine(engine, folder)
    _ = updated.chat_template  # one that does not compile is known now, not at the first request
    log.warning("now serving %s", folder)
    return updated


def _check(config: EngineConfig, before: LLM) -> None:
    """Refuse what cannot take the place of an engine, as far as that is known without reading a weight."""
    check_checkpoints(config)
    folder = resolve_model(config.model)
    tokenizer = Tokenizer.from_dir(folder)
    _check_tokens(tokenizer, before)
    check_role_tokens(ChatTemplate.from_dir(folder), tokenizer, str(folder))


def _check_tokens(tokenizer: Tokenizer, before: LLM) -> None:
    """Refuse a checkpoint whose tokens are others."""
    if difference := tokenizer.difference_from(before.tokenizer):
        raise bad_request(
            f"the checkpoint's tokens are not those of the model served ({difference}); prompts of requests "
            "that wait, and tokens that clients hold, would mean something else: start a server for it",
            "checkpoint",
        )
