"""A chat request made ready for the engine; shared by the three chat endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.core.types import SamplingParams
from lean_laguna.models.chat_template import THINK_END, THINK_START, starts_in_thinking
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.bodies import convert
from lean_laguna.server.conversation import Conversation, check_template_kwargs, read_messages, read_tools
from lean_laguna.server.errors import bad_request, called, field_in
from lean_laguna.server.output_format import output_names, structured_outputs
from lean_laguna.server.reply_parser import ReplyParser
from lean_laguna.server.reply_reasoning import ReasoningCounter, has_line_layout
from lean_laguna.server.sampling import draft_length, sampling_params
from lean_laguna.server.schemas import ChatRequest
from lean_laguna.server.service import Service
from lean_laguna.server.settings import ServerConfig
from lean_laguna.server.stream import Prompt, Stream
from lean_laguna.server.tool_grammar import forced_calls

_MANY_MESSAGES = 200
_BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
_MARKUP = (THINK_START, THINK_END, "<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class ChatJob:
    """What a chat endpoint hands to the engine, and what it needs to read the reply.

    Attributes:
        rendered: The prompt's text.
        prompt: For the engine.
        tools: The functions that the reply may call.
        names: Our names of fields to the client's, for errors.
    """

    rendered: str
    prompt: Prompt
    tools: list[dict[str, Any]]
    names: Mapping[str, str]

    def parser(self, config: ServerConfig) -> ReplyParser | None:
        """Return the parser of one completion; None where parsing is turned off."""
        if config.reasoning_parser == "none":
            return None
        tools = [] if config.tool_call_parser == "none" else self.tools
        return ReplyParser.for_prompt(self.rendered, tools)

    def counter(self, tokenizer: Tokenizer) -> ReasoningCounter:
        """Return what counts the tokens of one completion's thinking."""
        return ReasoningCounter(tokenizer, starts_in_thinking(self.rendered))


async def submit_chat(
    service: Service, request: Request, fields: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[ChatRequest, ChatJob, Stream]:
    """Hand another API's request, put as a chat request, to the engine.

    Args:
        service: The server.
        request: The client's.
        fields: Of a chat request.
        names: Its fields' names to the client's own, for errors.
    """
    with called(names):
        chat = convert(fields, ChatRequest)
        job = await prepare_chat(service, chat)
    own = {ours: field_in(names, chats) for ours, chats in job.names.items()}
    return chat, job, await service.submit(request, [job.prompt], {**names, **own})


async def prepare_chat(service: Service, body: ChatRequest) -> ChatJob:
    """Check a chat request, render its prompt and work out its parameters.

    Raises:
        ApiError: 400, naming the field.
        RequestError: The same.
    """
    rendered, tools = await rendered_chat(service, body)
    with called(_names(body)):
        ids = await service.encode_prompt(
            rendered,
            _asked(body),
            "messages",
            add_special_tokens=bool(body.add_special_tokens),
            truncate=body.truncate_prompt_tokens,
        )
        params = _params(service, body, len(ids), required_output(service, body, rendered, tools))
    is_forced = body.tool_choice not in (None, "auto", "none")
    names = {"structured_outputs": "tools"} if is_forced else output_names(body)
    prompt = Prompt(ids, params, rendered, draft_length(body.speculative))
    return ChatJob(rendered, prompt, tools, names)


def _names(body: ChatRequest) -> dict[str, str]:
    """Return what errors must call the sampling fields that a chat request spells differently."""
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    for name in _BUDGETS:
        if getattr(body, name) is not None:
            names["thinking_token_budget"] = name
            break
    return names


async def rendered_chat(service: Service, body: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    """Return what :func:`render_chat` does; a long conversation is rendered beside the event loop.

    Raises:
        ApiError: 400, naming the field.
        RequestError: The template refuses the conversation.
    """
    if len(body.messages) < _MANY_MESSAGES:
        return render_chat(service, body)
    return await asyncio.to_thread(render_chat, service, body)


def render_chat(service: Service, body: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    """Return the prompt of a chat request, and the tools on offer.

    Raises:
        ApiError: 400, naming the field.
        RequestError: The template refuses the conversation.
    """
    tools = offered_tools(body)
    conversation = Conversation(read_messages(body.messages), tools, template_kwargs(service, body))
    opens_turn = body.add_generation_prompt is not False
    return conversation.render(service.chat_template, add_generation_prompt=opens_turn), tools


def offered_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that the model gets to see.

    Raises:
        ApiError: 400, ``tool_choice`` does not go with them.
    """
    tools, choice = read_tools(body.tools), body.tool_choice
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return []
    if not tools:
        raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
    return tools


def required_output(
    service: Service, body: ChatRequest, rendered: str, tools: list[dict[str, Any]]
) -> StructuredOutputs | None:
    """Return what the reply must be: its declared format, or calls where ``tool_choice`` asks for one.

    Raises:
        ApiError: 400, it asks for both.
        RequestError: It names a function that is not on offer.
    """
    declared = structured_outputs(body)
    if body.tool_choice in (None, "auto", "none"):
        return declared
    if declared is not None:
        raise bad_request("tool_choice asks for a call, so the reply can have no other format", "tool_choice")
    return forced_calls(
        tools,
        body.tool_choice,
        service.tokenizer,
        line_layout=has_line_layout(rendered),
        parallel=body.parallel_tool_calls is not False,
    )


def template_kwargs(service: Service, body: ChatRequest) -> dict[str, Any]:
    """Return the template's switches: the request's, else what its effort says, else the server's."""
    kwargs: dict[str, Any] = dict(service.config.default_chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs["enable_thinking"] = body.reasoning_effort != "none"
        kwargs["reasoning_effort"] = body.reasoning_effort
    given: Mapping[str, Any] = body.chat_template_kwargs or {}
    check_template_kwargs(given)
    return {**kwargs, **given}


def thinking_budget(body: ChatRequest) -> int | None:
    """Return the thinking budget under any of its names; None where there is none.

    Raises:
        ApiError: 400, two names say different things.
    """
    found = {name: value for name in _BUDGETS if (value := getattr(body, name)) is not None}
    if len(set(found.values())) > 1:
        raise bad_request(f"{' and '.join(found)} say different budgets", next(iter(found)))
    return next(iter(found.values()), None)


def _asked(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _params(
    service: Service, body: ChatRequest, num_prompt_tokens: int, output: StructuredOutputs | None
) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    fixed: dict[str, Any] = {
        "max_tokens": service.max_tokens(_asked(body), num_prompt_tokens, "messages"),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "structured_outputs": output,
        "thinking_token_budget": thinking_budget(body),
    }
    if any(service.tokenizer.token_to_id(tag) in service.tokenizer.special_token_ids for tag in _MARKUP):
        fixed["skip_special_tokens"] = False  # the parser needs to see its tags
    return sampling_params(body, service.defaults(), **fixed)
