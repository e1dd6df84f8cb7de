"""What request bodies hold. Types are checked here, ranges by ``SamplingParams``, unknown keys by ``bodies``.

Source: field names of OpenAI's API and of vLLM 0.30's OpenAI-compatible server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PromptField = Annotated[
    Any,
    Meta(
        description="A text, a list of token ids, or a list of either.",
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                _TOKEN_IDS,
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": _TOKEN_IDS},
            ]
        },
    ),
]
ObjectField = Annotated[dict[str, Any], Meta(extra_json_schema={"type": "object"})]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Speculative(Struct, kw_only=True, forbid_unknown_fields=True):
    """Speculation of one request."""

    num_speculative_tokens: Annotated[int, Meta(ge=0)]


class SamplingFields(Struct, kw_only=True):
    """Sampling options that every generating endpoint takes, by their name in ``SamplingParams``."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """What every OpenAI endpoint that generates takes beside its prompt."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: bool | Speculative | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ObjectField | None = None
    structured_outputs: ObjectField | None = None
    guided_json: Annotated[Any, Meta(description="A JSON schema; as structured_outputs.json.")] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/completions``."""

    prompt: PromptField
    echo: bool | None = None
    return_draft_flags: bool | None = None
    logprobs: int | None = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ObjectField]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ObjectField] | None = None
    tool_choice: Literal["none", "auto", "required"] | ObjectField | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: ObjectField | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tokenize``: a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ObjectField] | None = None
    tools: list[ObjectField] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: ObjectField | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None


class TokenSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params`` of a generate request."""

    max_tokens: int | None = None
    logprobs: int | None = None
    structured_outputs: ObjectField | None = None
    # Sent by verifiers with a turn that continues another: where reports of chosen experts would begin.
    routed_experts_prompt_start: int | None = None


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /inference/v1/generate``: tokens in, tokens out."""

    token_ids: list[Annotated[int, Meta(ge=0)]]
    sampling_params: TokenSampling
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: bool | Speculative | None = None
    request_id: str | None = None


class MessagesFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/messages/count_tokens``, and what ``/v1/messages`` shares with it."""

    messages: list[ObjectField]
    model: str | None = None
    system: str | list[ObjectField] | None = None
    tools: list[ObjectField] | None = None
    tool_choice: ObjectField | None = None
    thinking: ObjectField | None = None
    output_config: ObjectField | None = None
    chat_template_kwargs: ObjectField | None = None


class MessagesRequest(MessagesFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/messages``, as Anthropic's clients send it."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    speculative: bool | Speculative | None = None


class ResponsesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/responses``."""

    input: str | list[ObjectField]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[ObjectField] | None = None
    tool_choice: Literal["none", "auto", "required"] | ObjectField | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ObjectField | None = None
    text: ObjectField | None = None
    metadata: ObjectField | None = None
    chat_template_kwargs: ObjectField | None = None
    speculative: bool | Speculative | None = None


class PauseRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /pause``."""

    mode: Literal["keep", "abort", "wait"] = "keep"


class UpdateWeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /update_weights``."""

    checkpoint: str | None = None
    drafter: str | None = None
    mode: Literal["abort", "wait"] = "wait"
    version: str | None = None
