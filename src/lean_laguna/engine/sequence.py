"""A request and the sequences that answer it, one per completion: tokens, blocks and progress."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lean_laguna.core.types import CompletionOutput, RequestOutput, RequestTimes, SamplingParams
from lean_laguna.engine.block_table import BlockTable
from lean_laguna.engine.output import Completion, TokenLogprobs
from lean_laguna.spec.request import SamplingRequest
from lean_laguna.spec.statistics import SpeculationCounter


class RequestState:
    """What was asked, and the sequences that answer it.

    Attributes:
        request_id: Unique among unfinished requests.
        prompt: The prompt's text, where it was given as text.
        prompt_token_ids: At least one token.
        params: As asked.
        num_speculative_tokens: Draft tokens per step for this request; None leaves it to the engine.
        sequences: One per completion.
        prompt_logprobs: Grows while the prompt is computed; None where not asked for.
        arrival_s: Clock reading at submission; so are the other two, None until reached.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        num_speculative_tokens: int | None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.num_speculative_tokens = num_speculative_tokens
        self.sequences: list[SequenceState] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.arrival_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def is_finished(self) -> bool:
        """True once every completion has a finish reason."""
        return all(sequence.completion.finish_reason is not None for sequence in self.sequences)

    def mark_token(self, now_s: float) -> None:
        """Record that a token came out."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    def snapshot(self) -> RequestOutput:
        """Return everything said so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(sequence.snapshot() for sequence in self.sequences),
            finished=self.is_finished,
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            times=RequestTimes(self.arrival_s, self.first_token_s, self.last_token_s),
        )


class SequenceState:
    """One completion being generated.

    Invariant while decoding: the KV of all tokens but the last is written (``num_computed`` positions); the
    last committed token is the anchor of the next step. Owned by the engine.

    Attributes:
        request: The request it answers.
        index: Which of the request's completions.
        sampling: What the sampler needs to know.
        completion: What it has said.
        max_positions: Positions whose KV it may ever write.
        prefix_keys: Keys of the prompt's whole chunks; empty where the prefix cache is off.
        num_computed: Positions whose KV is written.
        num_cached_tokens: Of those, positions taken from the prefix cache.
        tables: Per KV group, once admitted; empty before and after.
        quotas: Per KV group, the blocks set aside.
        follows_engine: Whether the engine chooses its draft length, not the request.
        wants_drafts: Whether there is a drafter and the request did not turn it off.
        speculation: Counts of drafts and acceptance, where it wants drafts.
    """

    def __init__(
        self,
        request: RequestState,
        index: int,
        sampling: SamplingRequest,
        completion: Completion,
        *,
        max_positions: int,
        prefix_keys: Sequence[bytes] = (),
        has_drafter: bool = False,
    ):
        self.request = request
        self.index = index
        self.sampling = sampling
        self.completion = completion
        self.max_positions = max_positions
        self.prefix_keys = tuple(prefix_keys)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.tables: tuple[BlockTable, ...] = ()
        self.quotas: tuple[int, ...] = ()
        self.follows_engine = request.num_speculative_tokens is None
        self.wants_drafts = has_drafter and request.num_speculative_tokens != 0
        self.speculation = SpeculationCounter(keeps_steps=True) if self.wants_drafts else None

    def snapshot(self) -> CompletionOutput:
        """Return everything said so far."""
        counts = self.speculation.stats() if self.speculation is not None else None
        return self.completion.snapshot(self.index, self.sampling.seed, counts)

    @property
    def is_admitted(self) -> bool:
        """True while it holds blocks."""
        return bool(self.tables)

    @property
    def is_prefilling(self) -> bool:
        """True while prompt tokens are left to compute."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """True where every prompt row must be computed, so that nothing can come from the prefix cache."""
        return self.index == 0 and self.request.prompt_logprobs is not None
