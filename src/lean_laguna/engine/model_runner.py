"""The step's tensors: packs rows, runs target and drafter over the paged cache. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lean_laguna.engine.sequence import SequenceState
from lean_laguna.models.forward_batch import ForwardBatch, SequenceSpan
from lean_laguna.models.kv_cache import KVCache, KVGroup
from lean_laguna.spec.dspark_proposer import DSparkProposer
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.proposer import DraftRequest, Proposer

MAX_BACKLOG_ROWS = 16
"""Context rows that may wait while nothing is drafted: two tiles, so that catching up stays cheap."""


class TargetOutput(Protocol):
    """What a forward pass of the target returns."""

    @property
    def hidden_states(self) -> Tensor:
        """[T, D] after the final norm."""
        ...

    @property
    def aux_hidden_states(self) -> Tensor | None:
        """[T, m, D] raw residuals after the tapped layers; None without taps."""
        ...


class Target(Protocol):
    """What the engine asks of the model served; ``models.laguna.LagunaForCausalLM`` is one."""

    @property
    def config(self) -> Any:
        """Has ``vocab_size`` and ``max_position_embeddings``."""
        ...

    def parameters(self) -> Iterator[Tensor]:
        """Yield its weights; the first one's device and dtype are those of the KV cache."""
        ...

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Return its KV groups; they come first in the cache."""
        ...

    def __call__(
        self, batch: ForwardBatch, kv_cache: KVCache, *, tap_layer_ids: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Compute packed rows, writing their keys and values into the cache."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, D] into logits [R, V] float32."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence to compute.

    Attributes:
        sequence: The sequence; its tables cover the positions.
        first_position: Absolute position of the first token.
        token_ids: The tokens.
    """

    sequence: SequenceState
    first_position: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Rows that the target computed.

    Attributes:
        runs: What was asked for.
        batch: The rows.
        hidden_states: [T, D] after the final norm.
        aux_hidden_states: [T, m, D] for the drafter's context; None where there is no drafter.
    """

    runs: Sequence[Run]
    batch: ForwardBatch
    hidden_states: Tensor
    aux_hidden_states: Tensor | None


class ModelRunner:
    """Runs the target and, where there is one, the drafter; owned by the engine, which holds no tensors.

    Attributes:
        kv_cache: Keys and values of all groups, the target's first.
        device: Where rows are computed.
        num_cut_draft_tokens: Of the last proposal, drafts made and not to be sent to verification.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        kv_cache: KVCache,
        group_ids: Sequence[int],
        device: torch.device,
        noise: NoiseCache,
    ):
        """Put the parts together.

        Args:
            target: The model served.
            proposer: The drafter, or None.
            kv_cache: Storage for the groups of both.
            group_ids: Which group of the cache each of a sequence's tables belongs to.
            device: Where rows are computed.
            noise: Shared by drafting and sampling.
        """
        self.target = target
        self.proposer = proposer
        self.kv_cache = kv_cache
        self.device = device
        self._group_ids = tuple(group_ids)
        self._no_tables: list[tuple[int, ...]] = [()] * len(kv_cache.groups)
        self._tap_layer_ids = tuple(proposer.target_layer_ids) if proposer is not None else ()
        self._noise = noise
        self.num_cut_draft_tokens = 0
        self._backlog: list[tuple[Run, Tensor]] = []

    def compute(self, runs: Sequence[Run], *, wants_context: bool) -> ComputedRows:
        """Run the target over packed rows; keys and values are written.

        Args:
            runs: The rows.
            wants_context: Whether the drafter will be given their context.
        """
        batch = self._batch(runs)
        taps = self._tap_layer_ids if wants_context else ()
        output = self.target(batch, self.kv_cache, tap_layer_ids=taps)
        return ComputedRows(runs, batch, output.hidden_states, output.aux_hidden_states)

    def logits(self, hidden: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Return logits [R, V] float32 of all rows, or of some."""
        return self.target.compute_logits(hidden if rows is None else hidden[list(rows)])

    def append_context(
        self, computed: ComputedRows, num_rows: Sequence[int] | None = None, *, may_wait: bool = False
    ) -> None:
        """Give the drafter the context of computed rows.

        Args:
            computed: The rows.
            num_rows: Per run, how many of its first rows stand; None for all.
            may_wait: Nothing is drafted now, so rows may pile up first: one costs as much as a tile of them.
        """
        aux = computed.aux_hidden_states
        if aux is None:
            return
        for i, (run, span) in enumerate(zip(computed.runs, computed.batch.spans, strict=True)):
            count = span.num_rows if num_rows is None else num_rows[i]
            if count:
                standing = Run(run.sequence, run.first_position, run.token_ids[:count])
                self._backlog.append((standing, aux[span.start : span.start + count]))
        if not may_wait or sum(len(run.token_ids) for run, _ in self._backlog) >= MAX_BACKLOG_ROWS:
            self._append_backlog()

    def _append_backlog(self) -> None:
        # A sequence that has ended in the meantime holds no pages to write to.
        waiting = [(run, aux) for run, aux in self._backlog if run.sequence.is_admitted]
        self._backlog = []
        if waiting and self.proposer is not None:
            rows = [aux for _, aux in waiting]
            batch = self._batch([run for run, _ in waiting])
            aux = rows[0] if len(rows) == 1 else torch.cat(rows)
            self.proposer.append_context(aux, batch, self.kv_cache)

    def propose(self, sequences: Sequence[SequenceState], num_draft_tokens: Sequence[int]) -> list[list[int]]:
        """Draft for each sequence, at most as many tokens as asked."""
        drafts: list[list[int]] = [[] for _ in sequences]
        self.num_cut_draft_tokens = 0
        wanted = [i for i, n in enumerate(num_draft_tokens) if n]
        if self.proposer is None or not wanted:
            return drafts
        if self._backlog:
            self._append_backlog()
        requests = [
            DraftRequest(sequences[i].sampling, num_draft_tokens[i], self._tables(sequences[i]))
            for i in wanted
        ]
        for i, found in zip(wanted, self.proposer.propose(requests, self.kv_cache, self._noise), strict=True):
            drafts[i] = found[: num_draft_tokens[i]]
        if isinstance(self.proposer, DSparkProposer) and self.proposer.schedule is not None:
            for i, cut in zip(wanted, self.proposer.schedule.cut, strict=True):
                counts = sequences[i].speculation
                if counts is not None:
                    counts.record_cut(len(cut))
                self.num_cut_draft_tokens += len(cut)
        return drafts

    def _batch(self, runs: Sequence[Run]) -> ForwardBatch:
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        for run in runs:
            num_rows, first = len(run.token_ids), run.first_position
            spans.append(SequenceSpan(len(ids), num_rows, first, self._tables(run.sequence)))
            ids += run.token_ids
            positions += range(first, first + num_rows)
        packed = torch.tensor((ids, positions), dtype=torch.int64, device=self.device)
        return ForwardBatch(packed[0], packed[1], tuple(spans), self.kv_cache.kv_block_size)

    def _tables(self, sequence: SequenceState) -> tuple[tuple[int, ...], ...]:
        tables = self._no_tables.copy()
        for group, table in zip(self._group_ids, sequence.tables, strict=True):
            tables[group] = table.as_tuple()
        return tuple(tables)
