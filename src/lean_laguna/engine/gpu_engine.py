"""The engine on the Triton kernels: the same requests and scheduler, with decoding that stays on the device.

Steps are launched ahead: the device drafts, verifies, accepts and lays out its next rows by itself, and the
host reads what a step said while later ones run. What a step says after a request's end is dropped. Whenever
the set of requests or of launches changes, the host waits for what is under way and lays them out anew.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from lean_laguna.core.engine_sizes import GPU_STEPS_AHEAD, NARROW, WIDE, gpu_chunks
from lean_laguna.engine.draft_lengths import SpareTime
from lean_laguna.engine.gpu_cache import PagedPools
from lean_laguna.engine.gpu_costs import Prices, RowCosts, measure_rows
from lean_laguna.engine.gpu_host_steps import HostSteps, needs_host
from lean_laguna.engine.gpu_lanes import Lane, Lanes, LastSaid, Launched, Plan, Spoke, mark
from lean_laguna.engine.gpu_layout import has_filters, split_rows, tokens_said
from lean_laguna.engine.gpu_programs import StepPrograms
from lean_laguna.engine.gpu_prompts import ChunkPrompts, Head, Prompts, RowPrompts
from lean_laguna.engine.gpu_state import MAX_ROWS
from lean_laguna.engine.gpu_weights import drop_stack, why_not_cuda
from lean_laguna.engine.kv_budget import KVBudget, kv_cache_for
from lean_laguna.engine.llm_engine import LLMEngine, candidates_of
from lean_laguna.engine.logprobs import prompt_logprobs
from lean_laguna.engine.output import CompletionDelta
from lean_laguna.engine.scheduler import PrefillChunk, SchedulerLimits
from lean_laguna.engine.sequence import SequenceState
from lean_laguna.models.kv_cache import KVGroup
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.spec.draft_shape import StepShape
from lean_laguna.spec.proposer import DFlashProposer

LogitsWatcher = Callable[[SequenceState, Tensor], None]

_PAGES_FOR = 256  # positions that the device is told of at once: telling it takes as long as a small step


@dataclass(frozen=True)
class _Round:
    """One step of every lane that had something to say, under way."""

    launched: list[Launched]
    is_alone: bool


class GpuEngine(LLMEngine):
    """An ``LLMEngine`` whose steps run ahead on the device; ``gpu_weights.why_not`` says for which models."""

    _STEPS_AHEAD = GPU_STEPS_AHEAD
    _LEARNING_S = 5e-5
    _TRIAL_STEPS = 1
    _HEAVY = ("_programs", "_lanes", "_head", "_host_steps", "_prompts", "_prices", "_running", "_rounds")

    def _chunk_sizes(self) -> tuple[int, int, int]:
        return gpu_chunks(self.config.prefill_chunk_size)

    def _set_up(self, groups: Sequence[KVGroup], used: Sequence[int], limits: SchedulerLimits) -> KVBudget:
        target, proposer = self.target, self.proposer
        assert isinstance(target, LagunaForCausalLM), "why_not() comes first"
        assert proposer is None or isinstance(proposer, DFlashProposer), "why_not() comes first"
        weight = next(target.parameters())
        is_gpu = weight.device.type == "cuda"
        if is_gpu:
            drop_stack(weight.device)
        pools, budget = kv_cache_for(
            groups, self.config, limits, self.max_model_len, weight.dtype, weight.device, PagedPools
        )
        thresholds = None if self._synthetic is None else self._synthetic.thresholds(MAX_ROWS)
        drafter = proposer.drafter if proposer is not None else None
        self._limits = limits
        self._programs = StepPrograms(
            target,
            drafter,
            pools,
            self.max_model_len,
            thresholds,
            use_cuda=self._uses_cuda(weight),
            # Under way, read last, and one to spare; of as many lanes as there can be.
            num_blocks_said=(self._STEPS_AHEAD + 2) * limits.max_num_seqs,
            max_requests=limits.max_num_seqs,
            max_rows=limits.max_num_seqs * (1 + limits.max_draft_tokens),
        )
        self._lanes = Lanes(self._programs, used)
        self._head = Head(self._programs, self._lanes)
        self._host_steps = HostSteps(self._programs, self._lanes, self._noise)
        self._prompts: Prompts = (
            ChunkPrompts(self._programs, used, limits, self.max_model_len)
            if is_gpu
            else RowPrompts(self._programs, self._lanes)
        )
        self._running: list[Lane] = []
        self._rounds: deque[_Round] = deque()
        self._spare_time = SpareTime(self._LEARNING_S)
        self._held: tuple[Sequence[SequenceState], list[int]] | None = None
        self._on_device: WeakSet[SequenceState] = WeakSet()
        self._told: set[str] = set()
        self._watcher: LogitsWatcher | None = None
        self._programs.warm_up(self._prompts.dry_runs())
        self._prompts.capture()
        self._schedule = self.controller.schedule if self.controller is not None else None
        if self._schedule is not None:
            self._schedule.row_tiles = self._programs.widths
            self._schedule.stops_early = True
        is_measured = is_gpu and self.controller is not None and not self.controller.is_fixed
        measured = measure_rows(self._programs) if is_measured else None
        widths = self._programs.widths
        self._prices = Prices(self._programs, RowCosts(widths, measured[0] if measured else None))
        if self.controller is not None:
            self.controller.shape = StepShape(self._programs.most_rows, widths, measured)
        return budget

    def _uses_cuda(self, weight: Tensor) -> bool:
        """Whether CUDA C++ kernels take what fits them; says where they would be expected and do not."""
        kernels = self.config.kernels
        if kernels == "triton" or weight.device.type != "cuda":
            return False
        # Without the copy engine their other way of loading takes over, which is not proven on such cards.
        if kernels == "auto" and torch.cuda.get_device_capability(weight.device) < (9, 0):
            return False
        reason = why_not_cuda(weight)
        if reason is None and self.config.kv_cache_dtype != "auto":
            reason = "they read no FP8 cache"
        if reason is not None:
            print(f"lean-laguna: Triton kernels alone, without the CUDA C++ ones: {reason}", file=sys.stderr)
        return reason is None

    @property
    def kernels(self) -> str:
        """What computes its steps, in words."""
        return "CUDA C++ and Triton" if self._programs.uses_cuda else "Triton"

    @property
    def programs(self) -> StepPrograms:
        """What it launches."""
        return self._programs

    def watch_logits(self, watcher: LogitsWatcher) -> None:
        """Call ``watcher`` with every run of tokens: the sequence, and the logits they were chosen from.

        Args:
            watcher: Takes a sequence and [n, V] float32 on the host, before the n tokens are committed. To be
                set before the first step.
        """
        self._watcher = watcher
        self._programs.keep_logits()

    # --- prompts

    def _prefill(self, chunks: Sequence[PrefillChunk], deltas: list[CompletionDelta]) -> None:
        """Compute prompt chunks, those of one sequence at once; an end of a prompt yields its first token."""
        start_s = time.perf_counter()
        for sequence, group in itertools.groupby(chunks, lambda chunk: chunk.sequence):
            own = list(group)
            for run in [own] if self._prompts.takes_many else [[chunk] for chunk in own]:
                self._prefill_run(sequence, run, deltas)
        self._counters.num_steps += 1
        self._counters.prefill_s += time.perf_counter() - start_s

    def _prefill_run(
        self, sequence: SequenceState, run: Sequence[PrefillChunk], deltas: list[CompletionDelta]
    ) -> None:
        """Compute chunks of one sequence, one after another, in one go."""
        start, end = run[0].start, run[-1].end
        for chunk in run:
            self.scheduler.prepare(sequence, chunk.end - chunk.start)
            self._prompts.note_pages(sequence, is_first=chunk is run[0])
            if chunk is not run[-1]:
                # What it leaves is kept, or let go, before the next takes pages.
                self.scheduler.chunk_done(chunk)
        tokens, wants_all = sequence.request.prompt_token_ids[start:end], sequence.needs_prompt_logits
        try:
            hidden = self._prompts.compute(sequence, start, tokens, wants_all=wants_all)
        except BaseException:
            self.reset_prefix_cache()
            self.abort(sequence.request.request_id)
            raise
        if wants_all:
            hidden = hidden.clone()
            self._add_prompt_rows(sequence, start, hidden)
        self.scheduler.chunk_done(run[-1])
        if run[-1].is_last:
            token, logits = self._head.sample(hidden[-1:], sequence, end - 1)
            sampled = self._host_steps.first_token(sequence, token, logits)
            found = candidates_of(sequence, sampled, 0, 1)
            if self._watcher is not None:
                self._watcher(sequence, logits.cpu())
            self._emit(sequence, sampled.token_ids[0], 0, deltas, found)

    def _add_prompt_rows(self, sequence: SequenceState, start: int, hidden: Tensor) -> None:
        request = sequence.request
        assert request.prompt_logprobs is not None
        assert request.params.prompt_logprobs is not None
        request.prompt_logprobs += prompt_logprobs(
            hidden,
            request.prompt_token_ids[start + 1 : start + len(hidden) + 1],
            request.params.prompt_logprobs,
            self._head.logits,
            self.tokenizer,
        )

    # --- decoding

    def _decode(
        self, sequences: Sequence[SequenceState], deltas: list[CompletionDelta], *, is_alone: bool
    ) -> None:
        """Read one step of what runs on the device, and take one step of what the host decides."""
        start_s = time.perf_counter()
        on_host = [sequence for sequence in sequences if self._stays_on_host(sequence)]
        on_device = [sequence for sequence in sequences if sequence not in on_host]
        if on_device or self._rounds:
            self._run_ahead(on_device, deltas, is_alone=is_alone and not on_host)
        on_host = [sequence for sequence in on_host if sequence.is_admitted]
        if on_host:
            self._step_on_host(on_host, deltas, is_alone=is_alone and not on_device)
        self._counters.num_steps += 1
        self._counters.decode_s += time.perf_counter() - start_s

    def _stays_on_host(self, sequence: SequenceState) -> bool:
        if sequence in self._on_device:
            return False
        reasons = needs_host(sequence)
        if not reasons:
            if not sequence.sampling.constraints:  # which may wake up; all else stays as it is
                self._on_device.add(sequence)
            return False
        told = ", ".join(reasons)
        if told not in self._told:
            self._told.add(told)
            print(f"lean-laguna: {told}: chosen on the host, step by step, which is slower", file=sys.stderr)
        return True

    def _run_ahead(
        self, sequences: Sequence[SequenceState], deltas: list[CompletionDelta], *, is_alone: bool
    ) -> None:
        lengths = self._draft_lengths.choose(sequences)
        if (sequences, lengths) != self._held:
            wanted = dict(zip(sequences, lengths, strict=True))
            if self._can_go_on(wanted):
                for lane in self._running:
                    lane.wanted = [wanted.get(sequence, 0) for sequence in lane.sequences]
            else:
                self._drain(deltas)
                left = [sequence for sequence in sequences if sequence.is_admitted]
                self._lay_out(left, [wanted[sequence] for sequence in left])
            self._held = sequences, lengths
        self._set_prices()
        while len(self._rounds) < self._STEPS_AHEAD and self._launch_round(is_alone):
            pass
        if self._rounds:
            self._read_round(deltas)

    def _set_prices(self) -> None:
        """Have the drafts that are made from here on cut as the step last chosen for says."""
        if self._schedule is not None:
            self._prices.set(self._schedule.costs)

    def _can_go_on(self, lengths: dict[SequenceState, int]) -> bool:
        """Say whether the lanes hold just these sequences, and launches are as few and narrow as can be."""
        live = [lane.sequences[i] for lane in self._running for i in lane.live]
        if len(live) != len(lengths) or any(sequence not in lengths for sequence in live):
            return False
        rows = [sum(1 + lengths[lane.sequences[i]] for i in lane.live) for lane in self._running]
        fewest = len(self._split([lengths[sequence] for sequence in live]))
        if max(rows, default=0) > self._programs.most_rows or sum(n > 0 for n in rows) > fewest:
            return False
        return all(
            self._columns(lane, num) <= max(WIDE, self._programs.columns(num))
            for lane, num in zip(self._running, rows, strict=True)
        )

    def _split(self, lengths: Sequence[int]) -> list[range]:
        """Cut requests with so many drafts each into launches, in order."""
        return split_rows(lengths, self._programs.most_rows)

    def _columns(self, lane: Lane, num_rows: int) -> int:
        """Return the columns of a lane's launch: a wide lane's take its ended requests' entries, too."""
        entries = len(lane.sequences)
        return self._programs.columns(max(num_rows, entries if entries > WIDE else 0))

    def _drain(self, deltas: list[CompletionDelta]) -> None:
        """Read everything under way and let the lanes go."""
        while self._rounds:
            self._read_round(deltas)
        self.forget_ahead()

    def forget_ahead(self) -> None:
        """Let the lanes go, and what they have not said: it is computed again, to the same bits."""
        self._rounds.clear()
        for lane in self._running:
            self._lanes.drop(lane)
        self._running, self._held = [], None

    def _lay_out(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> None:
        """Share sequences out among launches, and draft for them."""
        drafter = self._programs.drafter
        self._spare_time.restart()
        self._prices.set(None)  # the host knows where rows stand that it laid out
        for cut in self._split(lengths):
            own = [sequences[i] for i in cut]
            covered = [self._prepare(sequence) for sequence in own]
            num_drafts = [lengths[i] for i in cut]
            lane = self._lanes.make(own, num_drafts, drafter.mask_token if drafter is not None else 0)
            lane.covered, lane.num_asked = covered, max(num_drafts)
            self._running.append(lane)
            if any(num_drafts):
                self._lanes.load(lane)
            start = mark(self._programs.device)
            if any(num_drafts):
                cols = self._programs.columns(len(own) + sum(num_drafts))
                self._programs.run("propose", cols, filtered=has_filters(own))
            lane.first_drafts = start, mark(self._programs.device)

    def _prepare(self, sequence: SequenceState) -> int:
        """Make the tables cover what launched steps and many more may write; returns up to which position."""
        left = sequence.max_positions - sequence.num_computed
        wanted, size = max(_PAGES_FOR, self._limits.decode_span), self._limits.kv_block_size
        span = min(self._limits.rows_per_step(wanted), left)
        self.scheduler.prepare(sequence, span)
        return -(-(sequence.num_computed + span) // size) * size

    def _launch_round(self, is_alone: bool) -> bool:
        """Launch a step of each lane that can still have something to say; False where none can."""
        launched = [
            self._launch(lane)
            for lane in self._running
            if any(lane.sequences[i].completion.num_remaining > lane.num_under_way for i in lane.live)
        ]
        if launched:
            self._rounds.append(_Round(launched, is_alone))
        return bool(launched)

    def _launch(self, lane: Lane) -> Launched:
        programs, lanes = self._programs, self._lanes
        for i in lane.live:
            sequence = lane.sequences[i]
            most = min(sequence.num_computed + self._limits.decode_span, sequence.max_positions)
            if most > lane.covered[i]:
                lane.covered[i] = self._prepare(sequence)
                lanes.upload_pages(lane, i)
        lanes.load(lane)
        plan = lane.plan
        if lane.wanted != lane.num_drafts:
            plan = self._plan(lane, lane.num_drafts)
            lanes.set_num_drafts(lane, lane.wanted)
            lane.plan = None
        elif plan is None:
            plan = lane.plan = self._plan(lane, lane.wanted)
        assert plan is not None
        turn, said = programs.run_step(plan.program, plan.cols, filtered=plan.filtered)
        logits = lanes.read_logits_later(plan.cols) if self._watcher is not None else None
        made = lane.num_made_tokens
        lane.num_made_tokens = self._draft_lengths.num_made_tokens if plan.num_asked else None
        asked, lane.num_asked = lane.num_asked, plan.num_asked
        lane.num_under_way += 1
        return Launched(lane, turn, said, lanes.note_end(), logits, made, plan.cols, asked)

    def _plan(self, lane: Lane, before: Sequence[int]) -> Plan:
        """Return what a launch of a lane runs whose rows were laid out for ``before`` drafts each."""
        live, wanted = lane.live, lane.wanted
        most = max((wanted[i] for i in live), default=0)
        cols = self._columns(lane, max(sum(1 + drafts[i] for i in live) for drafts in (before, wanted)))
        has_context = any(lane.sequences[i].wants_drafts for i in live)
        program = "step" if most else "verify" if has_context else "decode"
        return Plan(program, cols, has_filters(lane.sequences), most)

    def _read_round(self, deltas: list[CompletionDelta]) -> None:
        """Wait for the oldest step under way and commit what it said."""
        a_round = self._rounds.popleft()
        spoke: list[Spoke] = []
        waited_s = 0.0
        for launched in a_round.launched:
            start_s = time.perf_counter()
            self._lanes.wait_for(launched)
            waited_s += time.perf_counter() - start_s
            spoke += self._commit(launched, deltas)
        if spoke and a_round.is_alone:
            sequences, counts = [one.sequence for one in spoke], [one.counts for one in spoke]
            if self._draft_lengths.hears(sequences, counts, is_idle=self._spare_time.is_enough(waited_s)):
                start_s = time.perf_counter()
                self._learn(a_round, spoke)
                self._spare_time.learned(time.perf_counter() - start_s)

    def _learn(self, a_round: _Round, spoke: Sequence[Spoke]) -> None:
        """Tell who chooses draft lengths of a round that only decoded."""
        made, is_usual = a_round.launched[0].num_made_tokens, True
        draft_s = verify_s = 0.0
        for launched in a_round.launched:
            drafted = [one.counts[0] for one in spoke if one.launched is launched]
            num_rows, lane_s = sum(1 + num for num in drafted), launched.verify_s
            self._prices.costs.observe(num_rows, lane_s, cols=launched.cols)
            # Not so where a request's end cut the drafts, or where the step before or after is a wider one.
            is_whole = launched.num_made_tokens is not None or max(drafted, default=0) == launched.num_asked
            is_widened = launched.cols > max(NARROW, self._programs.columns(num_rows))
            is_usual = is_usual and is_whole and not is_widened
            draft_s += launched.drafted_s
            verify_s += lane_s
        counts = [one.counts for one in spoke]
        if self._schedule is not None:
            self._schedule.note([num for num, _ in counts], [one.chances() for one in spoke])
        self._draft_lengths.observe(
            [one.sequence for one in spoke],
            counts,
            draft_s=draft_s,
            verify_s=verify_s,
            num_made_tokens=made,
            is_usual=is_usual,
            are_earlier=True,
            is_heard=True,
        )

    def _commit(self, launched: Launched, deltas: list[CompletionDelta]) -> list[Spoke]:
        """Commit what one lane's step said."""
        lane, fields = launched.lane, launched.said.arrays
        lane.num_under_way -= 1
        spoke = []
        launched.before, lane.last = lane.last, self._note_cuts(lane, fields)
        for i, sequence in enumerate(lane.sequences):
            tokens = tokens_said(fields, i, lane.emitted[i])
            drafted = int(fields["drafted"][i]) - lane.drafted[i]
            accepted = int(fields["accepted"][i]) - lane.accepted[i]
            lane.emitted[i] += len(tokens)
            lane.drafted[i] += drafted
            lane.accepted[i] += accepted
            if not fields["remaining"][i] and i in lane.live:
                lane.live.remove(i)
                lane.plan = self._held = None
            row, lane.row_start[i] = lane.row_start[i], int(fields["row_start"][i])
            if not tokens or not sequence.is_admitted:
                continue  # it has ended, here or on the device
            if self._watcher is not None and launched.logits is not None:
                self._watcher(sequence, launched.logits[row : row + len(tokens)])
            spoke.append(Spoke(launched, i, sequence, (drafted, accepted)))
            self._record(sequence, drafted, accepted)
            sequence.num_computed += len(tokens)
            self._emit(sequence, tokens, accepted, deltas, None)
        return spoke

    def _note_cuts(self, lane: Lane, fields: dict[str, Any]) -> LastSaid:
        """Count the drafts that a step made and did not send."""
        if self._schedule is None:
            return LastSaid(fields, [], [])
        num, unsent = len(lane.sequences), lane.unsent
        cut = fields["cut"][:num].tolist()
        lane.unsent = (fields["cut"][:num] + fields["skipped"][:num]).tolist()
        if cut != lane.cut:
            for sequence, before, now in zip(lane.sequences, lane.cut, cut, strict=True):
                self._record_cut(sequence, now - before)
            lane.cut = cut
        return LastSaid(fields, unsent, lane.unsent)

    def _record_cut(self, sequence: SequenceState, num: int) -> None:
        if sequence.speculation is not None:
            sequence.speculation.record_cut(num)
            self._counters.speculation.record_cut(num)

    def _record(self, sequence: SequenceState, drafted: int, accepted: int) -> None:
        if sequence.speculation is not None:
            sequence.speculation.record(drafted, accepted)
            self._counters.speculation.record(drafted, accepted)

    def _step_on_host(
        self, sequences: Sequence[SequenceState], deltas: list[CompletionDelta], *, is_alone: bool
    ) -> None:
        """Draft, verify and accept for sequences whose tokens the host chooses."""
        start_s, draft_s = time.perf_counter(), 0.0
        lengths = self._draft_lengths.choose(sequences)
        self._set_prices()
        counts: list[tuple[int, int]] = []
        for cut in self._split(lengths):
            own, num_drafts = [sequences[i] for i in cut], [lengths[i] for i in cut]
            for sequence in own:
                self._prepare(sequence)
            verified = self._host_steps.verify(own, num_drafts)
            draft_s += verified.draft_s
            for i, sequence in enumerate(own):
                draft = verified.drafts[i]
                verdict = self._accept(sequence, draft, verified.sampled.token_ids[i])
                counts.append((len(draft), verdict.num_accepted_tokens))
                self._record(sequence, *counts[-1])
                self._record_cut(sequence, verified.num_cut[i])
                sequence.num_computed += len(verdict.token_ids)
                if self._watcher is not None:
                    self._watcher(sequence, verified.logits_of(i)[: len(verdict.token_ids)])
                found = candidates_of(sequence, verified.sampled, i, len(verdict.token_ids))
                self._emit(sequence, verdict.token_ids, verdict.num_accepted_tokens, deltas, found)
        if is_alone:
            verify_s = time.perf_counter() - start_s - draft_s
            self._draft_lengths.observe(sequences, counts, draft_s=draft_s, verify_s=verify_s)
