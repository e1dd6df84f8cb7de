"""``LLM``: prompts in, completions out, in the shape vLLM's users know; runs in the caller's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lean_laguna.core.config import EngineConfig, SpeculativeConfig
from lean_laguna.core.errors import RequestError, reject_unknown
from lean_laguna.core.types import RequestOutput, SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.engine.loading import load_engine
from lean_laguna.engine.sequence import RequestState
from lean_laguna.engine.statistics import EngineStats
from lean_laguna.models.chat_template import ChatTemplate, check_role_tokens
from lean_laguna.models.generation_config import GenerationConfig
from lean_laguna.models.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
OnProgress = Callable[[int, int, int], None]
"""Called after each step with the finished requests, all requests, and the tokens generated so far."""


class LLM:
    """A target, maybe a drafter, and the engine that runs them; not for use from several threads at once.

    Attributes:
        engine: The engine underneath, for callers that add and abort requests themselves.
        folder: The target's checkpoint folder.
        generation_config: What the checkpoint recommends; random weights recommend nothing.
    """

    def __init__(
        self,
        model: str = "nano",
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        **options: Any,
    ):
        """Load the checkpoints and set the KV cache aside.

        Args:
            model: Checkpoint folder, catalog name, or id of a downloaded repository.
            speculative_config: The drafter, such as ``{"model": "nano-dflash"}``.
            **options: The fields of ``EngineConfig``: device, dtype, max_model_len, max_num_seqs ...

        Raises:
            ConfigError: An unknown option, or a value out of range.
            CheckpointError: A checkpoint is missing, damaged, or the two do not belong together.
        """
        names = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "speculative"}
        reject_unknown(options, (*names, "speculative_config"), "LLM")
        config = EngineConfig(model=model, speculative=SpeculativeConfig.parse(speculative_config), **options)
        self.engine, self.folder = load_engine(config)
        self._chat_template: ChatTemplate | None = None
        self.generation_config = (
            GenerationConfig() if config.load_format == "dummy" else GenerationConfig.from_dir(self.folder)
        )

    @classmethod
    def from_engine(cls, engine: LLMEngine, folder: Path | None = None) -> LLM:
        """Wrap an engine that was built by hand; without a folder there is no chat template."""
        llm = cls.__new__(cls)
        llm.engine = engine
        llm.folder = folder or Path()
        llm._chat_template = None
        is_checkpoint = folder is not None and engine.config.load_format != "dummy"
        llm.generation_config = GenerationConfig.from_dir(llm.folder) if is_checkpoint else GenerationConfig()
        return llm

    @property
    def config(self) -> EngineConfig:
        """The configuration as given."""
        return self.engine.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template.

        Raises:
            CheckpointError: There is none, or its end of a turn is no token.
        """
        if self._chat_template is None:
            template = ChatTemplate.from_dir(self.folder)
            check_role_tokens(template, self.tokenizer, str(self.folder))
            self._chat_template = template
        return self._chat_template

    def default_sampling_params(self) -> SamplingParams:
        """Return what the checkpoint's ``generation_config.json`` recommends."""
        return SamplingParams(**{"max_tokens": None, **self.generation_config.sampling_defaults()})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_speculative_tokens: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and return one output each, in the order given.

        Args:
            prompts: Texts, token id lists, or mappings with ``prompt_token_ids`` or ``prompt``; one or many.
            sampling_params: One for all or one each; None takes the checkpoint's recommendation.
            num_speculative_tokens: Draft tokens per step for these requests, 0 for none; None leaves it to
                the engine.
            on_progress: Called after each step with counts: finished requests, requests, generated tokens.

        Raises:
            RequestError: A prompt cannot be served; nothing has been generated then.
        """
        states = self._submit(_as_list(prompts), sampling_params, num_speculative_tokens)
        try:
            while any(not state.is_finished for state in states):
                self.engine.step()
                if on_progress is not None:
                    num_tokens = sum(len(s.completion.token_ids) for state in states for s in state.sequences)
                    on_progress(sum(state.is_finished for state in states), len(states), num_tokens)
        finally:
            self._abort(states)
        return [state.snapshot() for state in states]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt and yield the whole output so far after each step that added to it.

        The request starts with the first ``next``; closing the iterator aborts it. Arguments as for
        :meth:`generate`.

        Raises:
            RequestError: The prompt cannot be served.
        """
        (state,) = self._submit([prompt], sampling_params, num_speculative_tokens)
        try:
            num_seen = 0
            while True:
                num_tokens = sum(len(s.completion.token_ids) for s in state.sequences)
                if num_tokens > num_seen or state.is_finished:
                    num_seen = num_tokens
                    output = state.snapshot()
                    yield output
                    if output.finished:
                        return
                else:
                    self.engine.step()
        finally:
            self._abort([state])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        num_speculative_tokens: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[RequestOutput]:
        """Render one conversation or several with the checkpoint's template and complete them.

        Args:
            messages: One list of messages, or a list of such lists.
            sampling_params: As for :meth:`generate`.
            tools: Functions the model may call, in OpenAI's shape.
            add_generation_prompt: End the prompt where the assistant's turn starts.
            chat_template_kwargs: Further arguments of the template, such as ``enable_thinking``.
            num_speculative_tokens: As for :meth:`generate`.
            on_progress: As for :meth:`generate`.

        Raises:
            RequestError: The template refuses the messages, or a prompt cannot be served.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(
                f"messages must be a list of objects with a 'role', found {messages!r:.200}", param="messages"
            )
        conversations: Sequence[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        prompts = [
            self.chat_template.render(
                conversation, tools, add_generation_prompt, **(chat_template_kwargs or {})
            )
            for conversation in conversations
        ]
        return self.generate(
            prompts, sampling_params, num_speculative_tokens=num_speculative_tokens, on_progress=on_progress
        )

    def stats(self) -> EngineStats:
        """Return counts since the engine was made."""
        return self.engine.stats()

    def _submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        num_speculative_tokens: int | None,
    ) -> list[RequestState]:
        """Add all requests or none."""
        read = [self._read(prompt) for prompt in prompts]
        if sampling_params is None:
            params = [self._recommended_params(len(token_ids)) for _, token_ids in read]
        elif isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(read)
        else:
            params = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
        for one in params:
            if not isinstance(one, SamplingParams):
                raise RequestError(
                    f"sampling_params must be SamplingParams, found {one!r:.200}", param="sampling_params"
                )
        if len(params) != len(read):
            raise RequestError(
                f"{len(params)} sampling parameters for {len(read)} prompts; give one, or one each",
                param="sampling_params",
            )
        states: list[RequestState] = []
        try:
            for (text, token_ids), one in zip(read, params, strict=True):
                states.append(
                    self.engine.add_request(
                        token_ids, one, prompt=text, num_speculative_tokens=num_speculative_tokens
                    )
                )
        except BaseException:
            self._abort(states)
            raise
        return states

    def _abort(self, states: Sequence[RequestState]) -> None:
        for state in states:
            self.engine.abort(state.request_id)

    def _recommended_params(self, num_prompt_tokens: int) -> SamplingParams:
        """Return the checkpoint's parameters; its output limit gives way where the context is shorter."""
        params = self.default_sampling_params()
        if (
            params.max_tokens is not None
            and num_prompt_tokens + params.max_tokens > self.engine.max_model_len
        ):
            return dataclasses.replace(params, max_tokens=None)
        return params

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return a prompt's text, where it has one, and its tokens."""
        text: str | None = None
        given: Any = prompt
        if isinstance(prompt, Mapping):
            reject_unknown(prompt, ("prompt", "prompt_token_ids"), "prompt")
            text = prompt.get("prompt")
            given = prompt.get("prompt_token_ids", text)
        if isinstance(given, str):
            return given, self.tokenizer.encode(given)
        if isinstance(given, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in given):
            return text, list(given)
        raise RequestError(
            "a prompt must be a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids', "
            f"found {prompt!r:.200}",
            param="prompt",
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; a text, a mapping or a list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be a prompt or a list of them, found {prompts!r:.200}", param="prompt"
        )
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed
