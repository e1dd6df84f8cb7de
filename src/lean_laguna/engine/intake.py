"""From what a caller asks to a request the engine can run: every check that needs no tensor, done at once."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Container, Sequence

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.errors import ConfigError, RequestError
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.output import Completion
from lean_laguna.engine.prefix_cache import prefix_keys
from lean_laguna.engine.sequence import RequestState, SequenceState
from lean_laguna.models.tokenizer import IncrementalDetokenizer, Tokenizer
from lean_laguna.spec.constraint import Constraint
from lean_laguna.spec.grammar import GrammarCompiler
from lean_laguna.spec.noise import derive_seed
from lean_laguna.spec.request import SamplingRequest, bad_word_sequences
from lean_laguna.spec.thinking import ThinkingBudget, ThinkTags


def context_limit(config: EngineConfig, checkpoint_limit: int) -> int:
    """Return the longest prompt plus output, in tokens.

    Args:
        config: May ask for less than the checkpoint's limit.
        checkpoint_limit: The checkpoint's ``max_position_embeddings``.

    Raises:
        ConfigError: It asks for more.
    """
    if config.max_model_len is not None and config.max_model_len > checkpoint_limit:
        raise ConfigError(
            f"max_model_len must be at most the checkpoint's max_position_embeddings, {checkpoint_limit}, "
            f"found {config.max_model_len}"
        )
    return config.max_model_len or checkpoint_limit


class Intake:
    """Checks requests and makes their state; owned by the engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        max_draft_tokens: int | None,
        *,
        seed: int | None,
        prefix_chunk_size: int | None,
    ):
        """Fix the limits.

        Args:
            tokenizer: The target's tokenizer.
            vocab_size: Of the target.
            max_model_len: Longest prompt plus output.
            max_draft_tokens: The drafter's limit; None without a drafter.
            seed: Seeds requests that bring none; None draws one.
            prefix_chunk_size: Chunk size of the prefix cache; None where it is off.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_draft_tokens = max_draft_tokens
        self._prefix_chunk_size = prefix_chunk_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size)
        self._seeds = random.Random(seed)
        self._ids = itertools.count()

    def make(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        request_id: str | None,
        num_speculative_tokens: int | None,
        taken: Container[str],
    ) -> RequestState:
        """Check a request and make its state; arguments as for ``LLMEngine.add_request``.

        Raises:
            RequestError: It can never be served.
            MissingDependencyError: It asks for structured output, which needs a package.
        """
        tokens = tuple(prompt_token_ids)
        self._check_prompt(tokens)
        self._check_stops(params.stop_token_ids)
        self._check_draft_length(num_speculative_tokens)
        max_tokens = self._max_tokens(len(tokens), params)
        if request_id is None:
            request_id = next(name for i in self._ids if (name := f"request-{i}") not in taken)
        elif request_id in taken:
            raise RequestError(
                f"request id '{request_id}' belongs to a request that is running", param="request_id"
            )
        request = RequestState(request_id, prompt, tokens, params, num_speculative_tokens)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        bad_words = bad_word_sequences(params.bad_words, self._tokenizer.encode)
        keys = prefix_keys(tokens, self._prefix_chunk_size) if self._prefix_chunk_size else ()
        for index in range(params.n):
            sampling = SamplingRequest(
                params,
                tokens,
                seed=derive_seed(seed, index),
                vocab_size=self._vocab_size,
                eos_token_ids=self._tokenizer.eos_token_ids,
                bad_word_ids=bad_words,
                constraints=self._constraints(params, tokens),
            )
            detokenizer = IncrementalDetokenizer(self._tokenizer, params.skip_special_tokens)
            completion = Completion(params, max_tokens, self._tokenizer.eos_token_ids, detokenizer)
            request.sequences.append(
                SequenceState(
                    request,
                    index,
                    sampling,
                    completion,
                    # The last token is never computed: nothing follows it.
                    max_positions=len(tokens) + max_tokens - 1,
                    prefix_keys=keys,
                    has_drafter=self._max_draft_tokens is not None,
                )
            )
        return request

    @functools.cached_property
    def _think_tags(self) -> ThinkTags | None:
        return ThinkTags.of(self._tokenizer)

    def _constraints(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> list[Constraint]:
        """Make one completion's grammar and thinking budget, in the order in which they apply."""
        constraints: list[Constraint] = []
        if params.structured_outputs is not None:
            constraints.append(
                self._grammars.constraint(
                    params.structured_outputs, prompt_token_ids, self._think_tags, params.allowed_token_ids
                )
            )
        if params.thinking_token_budget is not None and self._think_tags is not None:
            constraints.append(
                ThinkingBudget(params.thinking_token_budget, self._think_tags, prompt_token_ids)
            )
        return constraints

    def _check_prompt(self, tokens: tuple[int, ...]) -> None:
        if not tokens:
            raise RequestError("the prompt is empty; it must hold at least one token", param="prompt")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"prompt token id {wrong} is not in the vocabulary (0 to {self._vocab_size - 1})",
                param="prompt",
            )

    def _check_stops(self, token_ids: Sequence[int]) -> None:
        wrong = next((token for token in token_ids if token >= self._vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"stop_token_ids: {wrong} is not in the vocabulary (0 to {self._vocab_size - 1})",
                param="stop_token_ids",
            )

    def _check_draft_length(self, num_speculative_tokens: int | None) -> None:
        if num_speculative_tokens is None:
            return
        if type(num_speculative_tokens) is not int or num_speculative_tokens < 0:
            raise RequestError(
                f"num_speculative_tokens must be a whole number from 0, found {num_speculative_tokens!r}",
                param="num_speculative_tokens",
            )
        if num_speculative_tokens == 0:
            return
        limit = self._max_draft_tokens
        if limit is None:
            raise RequestError(
                f"num_speculative_tokens is {num_speculative_tokens}, but no drafter is loaded; only 0 works",
                param="num_speculative_tokens",
            )
        if num_speculative_tokens > limit:
            raise RequestError(
                f"num_speculative_tokens must be 0 to {limit} for this drafter, "
                f"found {num_speculative_tokens}",
                param="num_speculative_tokens",
            )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the output limit, having made sure that prompt and output fit the context."""
        limit = self._max_model_len
        asked = 1 if params.max_tokens is None else params.max_tokens
        if num_prompt_tokens + asked > limit:
            raise RequestError(
                f"the context limit is {limit} tokens, but the request needs {num_prompt_tokens + asked}: "
                f"{num_prompt_tokens} in the prompt and {asked} for the output",
                param="prompt" if num_prompt_tokens >= limit else "max_tokens",
                code="context_length_exceeded",
            )
        return limit - num_prompt_tokens if params.max_tokens is None else params.max_tokens
