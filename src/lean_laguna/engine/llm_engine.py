"""The engine: requests in, tokens out, one step at a time; deterministic, and driven by the caller's thread.

A step computes at most one budget of prompt chunks, and one round for every decoding sequence: draft, verify
all drafts in one pass of the target, accept what equals the target's own tokens, commit. What a sequence
emits depends on its request alone, not on drafts, neighbours, chunks or cached prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from lean_laguna.core.config import DraftLength, EngineConfig
from lean_laguna.core.engine_sizes import CPU_CHUNK_SIZE
from lean_laguna.core.types import Logprob, SamplingParams
from lean_laguna.engine.draft_lengths import DraftLengths, controller_for
from lean_laguna.engine.foreseen import with_foreseen
from lean_laguna.engine.intake import Intake, context_limit
from lean_laguna.engine.kv_budget import KVBudget, kv_cache_for, stored_groups
from lean_laguna.engine.logprobs import prompt_logprobs, with_text
from lean_laguna.engine.model_runner import ComputedRows, ModelRunner, Run, Target
from lean_laguna.engine.output import CompletionDelta
from lean_laguna.engine.scheduler import PrefillChunk, Scheduler, SchedulerLimits
from lean_laguna.engine.sequence import RequestState, SequenceState
from lean_laguna.engine.statistics import EngineCounters, EngineStats
from lean_laguna.models.kv_cache import KVCache, KVGroup
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.acceptance import Acceptance, accept
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.proposer import Proposer
from lean_laguna.spec.sampling import RowBlock, SampledRows, sample_rows
from lean_laguna.spec.synthetic import SyntheticAcceptance


class LLMEngine:
    """Owns scheduler, KV cache and requests; not for use from several threads at once.

    Attributes:
        config: As given.
        tokenizer: The target's.
        target: The model served.
        proposer: The drafter, or None.
        max_model_len: Longest prompt plus output, tokens.
        scheduler: Queue, block pools, prefix cache.
        controller: Chooses the draft length; None without a drafter.
        kv_bytes: Bytes set aside for keys and values.
    """

    _STEPS_AHEAD = 0
    _LEARNING_S = 6e-4
    """What learning draft lengths from a step takes, with nothing of it in the CPU's caches."""
    _HEAVY: tuple[str, ...] = ("_runner",)
    """What holds memory of the device, beside the models."""
    _TRIAL_STEPS = 2
    """Of a draft length: a first one that finds nothing in the CPU's caches took a third longer (nano)."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        proposer: Proposer | None = None,
        config: EngineConfig | None = None,
        *,
        num_speculative_tokens: DraftLength | None = None,
    ):
        """Set the KV cache aside and start empty.

        Args:
            target: The model served, its weights where they shall be used.
            tokenizer: The target's tokenizer.
            proposer: The drafter, or None.
            config: Limits and sizes; its checkpoint names, device and dtype were used to make the parts.
            num_speculative_tokens: Draft tokens per step or "auto"; None reads the configuration.

        Raises:
            ConfigError: A limit is beyond the checkpoint's, or the KV cache does not fit.
        """
        self.config = config = config or EngineConfig()
        self.tokenizer, self.target, self.proposer = tokenizer, target, proposer
        self.max_model_len = context_limit(config, target.config.max_position_embeddings)
        chunk_size, *prefill_rows = self._chunk_sizes()
        limits = SchedulerLimits(
            config.max_num_seqs,
            chunk_size,
            config.kv_block_size,
            proposer.max_draft_tokens if proposer is not None else 0,
            self._STEPS_AHEAD,
            *prefill_rows,
        )
        self.controller = controller_for(
            proposer, num_speculative_tokens, config, trial_steps=self._TRIAL_STEPS
        )
        if self.controller is not None:
            self.controller.learning_s = self._LEARNING_S
        self._draft_lengths = DraftLengths(self.controller)
        vocab_size = target.config.vocab_size
        self._noise = NoiseCache(vocab_size)
        self._synthetic = _synthetic(proposer, config)
        groups = (
            *stored_groups(target.kv_groups(), config.kv_cache_dtype),
            *(proposer.kv_groups() if proposer is not None else ()),
        )
        used = [i for i, group in enumerate(groups) if group.num_layers]
        budget = self._set_up(groups, used, limits)
        self.kv_bytes = budget.total_bytes
        self.scheduler = Scheduler(
            limits,
            [groups[i] for i in used],
            [budget.num_blocks[i] for i in used],
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._intake = Intake(
            tokenizer,
            vocab_size,
            self.max_model_len,
            limits.max_draft_tokens if proposer is not None else None,
            seed=config.seed,
            prefix_chunk_size=limits.prefill_chunk_size if config.enable_prefix_caching else None,
        )
        self._requests: dict[str, RequestState] = {}
        self._counters = EngineCounters()
        self._deltas: list[CompletionDelta] = []

    def _chunk_sizes(self) -> tuple[int, int, int]:
        """Return where chunks of prompts end, and the most rows of a step, alone and beside decoding."""
        size = self.config.prefill_chunk_size or CPU_CHUNK_SIZE
        return size, size, size

    def _set_up(self, groups: Sequence[KVGroup], used: Sequence[int], limits: SchedulerLimits) -> KVBudget:
        """Set the KV cache aside and put the runner together; ``used`` are the groups that have layers."""
        weight = next(self.target.parameters())
        kv_cache, budget = kv_cache_for(
            groups, self.config, limits, self.max_model_len, weight.dtype, weight.device, KVCache
        )
        self._runner = ModelRunner(self.target, self.proposer, kv_cache, used, weight.device, self._noise)
        return budget

    @property
    def kernels(self) -> str:
        """What computes its steps, in words."""
        return "plain PyTorch"

    @property
    def has_unfinished(self) -> bool:
        """True while a request is waiting or running."""
        return bool(self._requests)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        num_speculative_tokens: int | None = None,
    ) -> RequestState:
        """Queue a request.

        Args:
            prompt_token_ids: At least one token.
            params: How to sample.
            prompt: The prompt's text, handed through to the output.
            request_id: Unique among unfinished requests; None makes one.
            num_speculative_tokens: Draft tokens per step for this request, 0 for none; None leaves it to the
                engine.

        Returns:
            The request's state, which grows with each step; ``snapshot()`` reads it.

        Raises:
            RequestError: It can never be served: too long, a token outside the vocabulary, a taken id ...
        """
        request = self._intake.make(
            prompt_token_ids,
            params or SamplingParams(),
            prompt,
            request_id,
            num_speculative_tokens,
            taken=self._requests,
        )
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        self._counters.num_requests += 1
        return request

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; what was said stays readable.

        Returns:
            False where no unfinished request has this id.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.completion.finish_reason is None:
                sequence.completion.abort()
                self.scheduler.remove(sequence)
        self._counters.num_finished_requests += 1
        return True

    def is_unfinished(self, request_id: str) -> bool:
        """True while a request waits or runs."""
        return request_id in self._requests

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.target.parameters()).device

    def release(self) -> None:
        """Let go of weights, keys and values, so that another engine has room; no request may be unfinished.

        It computes nothing from here on, and still says what it was.
        """
        assert not self._requests
        for module in (self.target, getattr(self.proposer, "drafter", None)):
            if isinstance(module, torch.nn.Module):
                module.to("meta")
                vars(module).pop("packed_weights", None)
        for name in self._HEAVY:
            delattr(self, name)

    def forget_ahead(self) -> None:
        """Go on from what was committed: drop what was computed beyond it. Nothing where steps end whole."""

    def take_committed(self) -> list[CompletionDelta]:
        """Return what a step that failed had committed, which else comes with the next one."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @torch.inference_mode()  # a fifth faster than no_grad on a small model
    def step(self) -> list[CompletionDelta]:
        """Compute one step and return what it added, completion by completion; empty if there is no work."""
        plan = self.scheduler.schedule()
        deltas = self._deltas  # what a step that failed had committed comes with the next one
        if plan.prefill:
            self._prefill(plan.prefill, deltas)
        if plan.decode:
            self._decode(plan.decode, deltas, is_alone=not plan.prefill)
        assert plan.prefill or plan.decode or not self._requests, "requests wait and nothing runs"
        self._deltas = []
        return deltas

    def stats(self) -> EngineStats:
        """Return counts since the engine was made, and what is in use now."""
        return self._counters.snapshot(self.scheduler, self._draft_lengths.explain())

    def count_on(self, other: LLMEngine) -> None:
        """Begin with the counts of an engine that this one takes the place of; before the first request."""
        self._counters = other._counters
        mine, others = self.scheduler, other.scheduler
        mine.num_prompt_tokens, mine.num_cached_tokens = others.num_prompt_tokens, others.num_cached_tokens

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts."""
        if self.scheduler.prefix_cache is not None:
            self.scheduler.prefix_cache.clear()

    def _prefill(self, chunks: Sequence[PrefillChunk], deltas: list[CompletionDelta]) -> None:
        """Compute prompt chunks; those that end a prompt yield its first output token."""
        start_s = time.perf_counter()
        runs = []
        for chunk in chunks:
            self.scheduler.prepare(chunk.sequence, chunk.end - chunk.start)
            tokens = chunk.sequence.request.prompt_token_ids[chunk.start : chunk.end]
            runs.append(Run(chunk.sequence, chunk.start, tokens))
        computed = self._runner.compute(runs, wants_context=True)
        self._runner.append_context(computed)
        last_rows, starting = [], []
        for chunk, span in zip(chunks, computed.batch.spans, strict=True):
            if chunk.sequence.needs_prompt_logits:
                self._add_prompt_logprobs(chunk, computed, span.start)
            self.scheduler.chunk_done(chunk)
            if chunk.is_last:
                last_rows.append(span.start + span.num_rows - 1)
                starting.append(chunk.sequence)
        if starting:
            logits = self._runner.logits(computed.hidden_states, last_rows)
            sampled = sample_rows(logits, [RowBlock(s.sampling) for s in starting], self._noise)
            for i, sequence in enumerate(starting):
                self._emit(sequence, sampled.token_ids[i], 0, deltas, candidates_of(sequence, sampled, i, 1))
        self._counters.num_steps += 1
        self._counters.prefill_s += time.perf_counter() - start_s

    def _add_prompt_logprobs(self, chunk: PrefillChunk, computed: ComputedRows, first_row: int) -> None:
        request = chunk.sequence.request
        assert request.prompt_logprobs is not None
        assert request.params.prompt_logprobs is not None
        hidden = computed.hidden_states[first_row : first_row + chunk.end - chunk.start]
        request.prompt_logprobs += prompt_logprobs(
            hidden,
            request.prompt_token_ids[chunk.start + 1 : chunk.end + 1],
            request.params.prompt_logprobs,
            self._runner.logits,
            self.tokenizer,
        )

    def _decode(
        self, sequences: Sequence[SequenceState], deltas: list[CompletionDelta], *, is_alone: bool
    ) -> None:
        """Run one round for every sequence: draft, verify, accept, commit."""
        start_s = time.perf_counter()
        lengths = self._draft_lengths.choose(sequences)
        drafts = with_foreseen(self._runner.propose(sequences, lengths), sequences, self.scheduler.limits)
        self._counters.speculation.record_cut(self._runner.num_cut_draft_tokens)
        drafted_s = time.perf_counter()
        runs = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            self.scheduler.prepare(sequence, 1 + len(draft))
            anchor = sequence.completion.token_ids[-1]
            runs.append(Run(sequence, sequence.num_computed, [anchor, *draft]))
        computed = self._runner.compute(runs, wants_context=any(s.wants_drafts for s in sequences))
        logits = self._runner.logits(computed.hidden_states)
        blocks = [RowBlock(s.sampling, draft) for s, draft in zip(sequences, drafts, strict=True)]
        sampled = sample_rows(logits, blocks, self._noise)
        accepted, num_standing = [], []
        for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            verdict = self._accept(sequence, draft, sampled.token_ids[i])
            accepted.append((len(draft), verdict.num_accepted_tokens))
            if sequence.speculation is not None:
                sequence.speculation.record(*accepted[-1])
                self._counters.speculation.record(*accepted[-1])
            sequence.num_computed += len(verdict.token_ids)
            tokens, num_accepted = verdict.token_ids, verdict.num_accepted_tokens
            found = candidates_of(sequence, sampled, i, len(tokens))
            self._emit(sequence, tokens, num_accepted, deltas, found)
            goes_on = sequence.is_admitted and sequence.wants_drafts
            num_standing.append(len(verdict.token_ids) if goes_on else 0)
        verified_s = time.perf_counter()
        if any(num_standing):
            self._runner.append_context(computed, num_standing, may_wait=not any(drafts))
        end_s = time.perf_counter()
        self._counters.num_steps += 1
        self._counters.decode_s += end_s - start_s
        if is_alone:
            self._draft_lengths.observe(
                sequences,
                accepted,
                draft_s=(drafted_s - start_s) + (end_s - verified_s),
                verify_s=verified_s - drafted_s,
                num_made_tokens=self._draft_lengths.num_made_tokens,
            )

    def _accept(
        self, sequence: SequenceState, draft: Sequence[int], sampled_token_ids: Sequence[int]
    ) -> Acceptance:
        """Judge one verified block whose anchor stands at ``sequence.num_computed``."""
        if self._synthetic is None:
            return accept(draft, sampled_token_ids)
        return self._synthetic.accept(draft, sampled_token_ids, sequence.sampling.seed, sequence.num_computed)

    def _emit(
        self,
        sequence: SequenceState,
        token_ids: list[int],
        num_accepted: int,
        deltas: list[CompletionDelta],
        candidates: Sequence[Mapping[int, Logprob]] | None,
    ) -> None:
        """Commit a run of tokens to a sequence, and let go of it if one of them ends it."""
        completion, request = sequence.completion, sequence.request
        logprobs = None
        if candidates is not None:
            logprobs = [with_text(row, self.tokenizer) for row in candidates]
        num_kept = completion.append(token_ids, num_accepted, logprobs)
        sequence.sampling.commit(token_ids[:num_kept])
        if completion.finish_reason == "stop" and sequence.sampling.failure is not None:
            completion.fail(sequence.sampling.failure)
        request.mark_token(time.perf_counter())
        self._counters.num_generated_tokens += num_kept
        is_request_finished = False
        if completion.finish_reason is not None:
            self.scheduler.remove(sequence)
            is_request_finished = request.is_finished
            if is_request_finished:
                del self._requests[request.request_id]
                self._counters.num_finished_requests += 1
        deltas.append(completion.delta(request.request_id, sequence.index, is_request_finished))


def candidates_of(
    sequence: SequenceState, sampled: SampledRows, block: int, num_tokens: int
) -> list[dict[int, Logprob]] | None:
    """Return the log-probabilities of a block's tokens where the request asked for them."""
    wanted = sequence.request.params.logprobs
    return None if wanted is None else sampled.logprobs(block, num_tokens, wanted)


def _synthetic(proposer: Proposer | None, config: EngineConfig) -> SyntheticAcceptance | None:
    """Return the rates that drafts stand at; None where the target decides."""
    if proposer is None or config.speculative is None:
        return None
    rates = config.speculative.synthetic_rates(proposer.max_draft_tokens)
    return None if rates is None else SyntheticAcceptance(rates)
