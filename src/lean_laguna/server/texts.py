"""Tokens to text and back, the model's card, and how the server is: everything that generates nothing."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lean_laguna.server.conversation import Conversation, check_template_kwargs, read_messages, read_tools
from lean_laguna.server.errors import ApiError, bad_request
from lean_laguna.server.metrics import CONTENT_TYPE
from lean_laguna.server.schemas import DetokenizeRequest, TokenizeRequest
from lean_laguna.server.sending import JSON
from lean_laguna.server.service import Service


async def models(service: Service, request: Request) -> Response:
    """``GET /v1/models``: every name the model is served under."""
    limit = service.llm.engine.max_model_len
    cards = [
        {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "lean-laguna",
            "root": str(service.llm.config.model),
            "parent": None,
            "max_model_len": limit,
        }
        for name in service.config.served_model_names
    ]
    name = request.path_params.get("name")
    if name is None:
        return JSON({"object": "list", "data": cards})
    service.check_model(name)
    return JSON(next(card for card in cards if card["id"] == name))


async def health(service: Service, request: Request) -> Response:
    """``GET /health``: 200 once requests can be served, 503 before and while stopping."""
    phase = "stopping" if service.is_stopping else service.engine.phase
    if phase == "ready":
        return JSON({"status": "ok"})
    raise ApiError(503, f"not ready: {phase}", code=phase)


async def version(service: Service, request: Request) -> Response:
    """``GET /version``."""
    return JSON(
        {
            "version": importlib.metadata.version("lean-laguna"),
            "engine": "lean-laguna",
            "weights_version": service.weights_version,
        }
    )


async def metrics(service: Service, request: Request) -> Response:
    """``GET /metrics``: Prometheus' text format, under vLLM's names."""
    stats, longest = None, 0
    if service.engine.phase == "ready":
        proposer = service.engine.llm.engine.proposer
        longest = proposer.max_draft_tokens if proposer is not None else 0
        stats = await service.engine.call(lambda llm: llm.stats())
    return Response(service.metrics.render(stats, longest), media_type=CONTENT_TYPE)


async def tokenize(service: Service, request: Request) -> Response:
    """``POST /tokenize``: the tokens that a prompt or a conversation would become."""
    body, headers = await service.body(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either 'prompt' or 'messages'", "prompt")
    if body.messages is not None:
        check_template_kwargs(body.chat_template_kwargs or {})
        kwargs = {**service.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
        conversation = Conversation(read_messages(body.messages), read_tools(body.tools), kwargs)
        text = conversation.render(
            service.chat_template, add_generation_prompt=body.add_generation_prompt is not False
        )
        ids = await service.encode(text, add_special_tokens=bool(body.add_special_tokens))
    else:
        assert body.prompt is not None
        ids = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    limit = service.llm.engine.max_model_len
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": list(ids)}
    names = [service.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    answer["token_strs"] = names
    return JSON(answer, headers=headers)


async def detokenize(service: Service, request: Request) -> Response:
    """``POST /detokenize``: the text of tokens, special ones included."""
    body, headers = await service.body(request, DetokenizeRequest)
    size = service.tokenizer.vocab_size
    for token in body.tokens:
        if token >= size:
            raise bad_request(f"token id {token} is not in the vocabulary (0 to {size - 1})", "tokens")
    text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JSON({"prompt": text}, headers=headers)


async def tokenizer_info(service: Service, request: Request) -> Response:
    """``GET /tokenizer_info``: what a client that tokenizes by itself must know."""
    tokenizer = service.tokenizer
    eos = [tokenizer.id_to_token(i) for i in tokenizer.eos_token_ids]
    bos = service.chat_template.special_tokens.get("bos_token")
    return JSON(
        {
            "tokenizer_class": "lean-laguna",
            "vocab_size": tokenizer.vocab_size,
            "max_model_len": service.llm.engine.max_model_len,
            "model_max_length": service.llm.engine.max_model_len,
            "bos_token": bos,
            "eos_token": eos[0] if eos else None,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "add_bos_token": False,
            "chat_template": service.chat_template.source,
        }
    )


async def ping(service: Service, request: Request) -> Response:
    """``GET /ping``: the process answers."""
    return PlainTextResponse("pong")
