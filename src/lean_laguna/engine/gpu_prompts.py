"""Prompts on the device: chunks of one sequence at a time, and the head for the rows that need it.

Chunks start at absolute boundaries and see no neighbour, so what they leave in the cache does not depend on
neighbours, on how many are computed at once, or on what a cached prefix spared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lean_laguna.core.engine_sizes import MAX_ORDERED_KEYS, WIDE
from lean_laguna.engine.block_pool import NULL_BLOCK
from lean_laguna.engine.gpu_graphs import Program
from lean_laguna.engine.gpu_lanes import Lanes, mark
from lean_laguna.engine.gpu_layout import has_filters
from lean_laguna.engine.gpu_programs import StepPrograms
from lean_laguna.engine.gpu_state import pinned_copy
from lean_laguna.engine.scheduler import SchedulerLimits
from lean_laguna.engine.sequence import SequenceState
from lean_laguna.kernels.triton.context import append_chunk_context, context_width, fold_tap
from lean_laguna.kernels.triton.prefill import LIBRARY_FROM, AttendBlock, PrefillStep
from lean_laguna.kernels.triton.prefill_scratch import MIN_ROWS, PrefillScratch, block_rows, shape_rows

Span = tuple[int, float]
"""First positions of chunks, from and up to."""


class Prompts(Protocol):
    """Computes chunks; keys, values and the drafter's context are written in stream order.

    Attributes:
        takes_many: One call may compute several chunks.
    """

    takes_many: bool

    def dry_runs(self) -> Sequence[Callable[[], object]]:
        """Return what launches every kernel of prompts, for these to be compiled ahead."""
        ...

    def capture(self) -> None:
        """Capture what can be, once all is compiled."""
        ...

    def note_pages(self, sequence: SequenceState, *, is_first: bool) -> None:
        """Take the pages of a chunk, ready as for its rows; ``is_first`` of those of the next ``compute``."""
        ...

    def compute(
        self, sequence: SequenceState, first: int, token_ids: Sequence[int], *, wants_all: bool
    ) -> Tensor:
        """Run chunks whose pages were noted.

        Returns:
            [1, D] after the final norm, of the last row, or [S, D] of all; valid until the next call.
        """
        ...


class RowPrompts:
    """Prompts through the decode kernels, 16 rows at a time: slow, and the same bits however they are cut."""

    takes_many = False

    def __init__(self, programs: StepPrograms, lanes: Lanes):
        self._programs, self._lanes = programs, lanes

    def dry_runs(self) -> Sequence[Callable[[], object]]:
        """Nothing: where it is used, nothing is compiled."""
        return ()

    def capture(self) -> None:
        """Nothing likewise."""

    def note_pages(self, sequence: SequenceState, *, is_first: bool) -> None:
        """Nothing: they are the sequence's when its rows are computed."""

    def compute(
        self, sequence: SequenceState, first: int, token_ids: Sequence[int], *, wants_all: bool
    ) -> Tensor:
        """Run a chunk; see ``Prompts.compute``."""
        hidden = []
        for start in range(0, len(token_ids), WIDE):
            tokens = token_ids[start : start + WIDE]
            self._lanes.put_rows(sequence, first + start, len(tokens), tokens)
            self._programs.run("fill", self._programs.columns(len(tokens)))
            if wants_all or start + WIDE >= len(token_ids):
                hidden.append(self._programs.scratch.normed[: len(tokens)].clone())
        return torch.cat(hidden) if wants_all else hidden[0][-1:]


class ChunkPrompts:
    """Prompts through the kernels for chunks, on the tensor cores."""

    takes_many = True

    def __init__(
        self, programs: StepPrograms, group_ids: Sequence[int], limits: SchedulerLimits, max_model_len: int
    ):
        """Set buffers aside for as many tokens as a step may take of one prompt."""
        self._programs, self._group_ids, self._block = programs, tuple(group_ids), limits.prefill_chunk_size
        rows = most_rows(limits.budget(is_beside=False), self._block, max_model_len)
        drafter, width, self._sums = programs.drafter, 0, torch.empty(0)
        if drafter is not None:
            width = context_width(drafter)
            self._sums = torch.zeros(rows, programs.target.norm.shape[0], device=programs.device)
        scratch = PrefillScratch.allocate(programs.target, rows, block=self._block, context_width=width)
        self._step = PrefillStep(
            programs.target,
            programs.caches,
            scratch,
            tap_layers=programs.tap_layers,
            tapped=None if drafter is None else self._fold,
            attend_block=self._own_attention(),
        )
        self._graphs: dict[tuple[int, Span], Program] = {}
        self._tables = [torch.zeros_like(table[0]) for table in programs.tables]
        self._host_tables = [np.zeros(len(table), dtype=np.int32) for table in self._tables]
        self._table_of = {id(table): own for table, own in zip(programs.tables, self._tables, strict=True)}

    def _own_attention(self) -> AttendBlock | None:
        """Return what attends whole blocks in CUDA C++, where it fits every layer."""
        if not self._programs.uses_cuda:
            return None
        from lean_laguna.kernels.cuda.prompt_attention import attend_block, fits_prompts, has_warpgroups

        shapes = [layer.attention.shape for layer in self._programs.target.layers]
        fits = all(fits_prompts(shape, self._block) for shape in shapes)
        return attend_block if fits and has_warpgroups(self._programs.device) else None

    def dry_runs(self) -> Sequence[Callable[[], object]]:
        """See ``Prompts.dry_runs``: the shapes that differ, and positions with keys before the chunk."""
        most, block = self._step.scratch.rows, self._block
        last = self._tables[0].shape[0] * self._programs.pools.kv_block_size
        runs = [(first, rows) for rows, _, first in self._shapes()]
        runs += [(0, num) for num in dict.fromkeys((-(-most // 2), most)) if num > block]
        runs += [(first, block) for first in (LIBRARY_FROM, MAX_ORDERED_KEYS) if first + block <= last]
        return [partial(self._launch, first, num) for first, num in runs]

    def _shapes(self) -> list[tuple[int, Span, int]]:
        """Return launches that repeat: rows of a chunk, where from and up to, and a position.

        Of chunks of one block, and where nothing follows positions of the longest too.
        """
        rows = dict.fromkeys(block_rows(num, self._block) for num in range(1, self._block + 1, MIN_ROWS))
        if self._step.attend_block is not None:
            rows[self._step.scratch.rows] = None
        return [(num, span[:2], span[2]) for num in rows for span in self._step.spans(num)]

    def capture(self) -> None:
        """Capture launches that repeat."""
        if not self._programs.uses_cuda:  # for want of a compiler, as is known by now
            self._step.attend_block = None
        if self._programs.graph_pool is None:
            return
        self._step.scratch.note(0, 0)
        for rows, span, first in self._shapes():
            program = Program(partial(self._launch, first, rows), self._programs.graph_pool)
            self._graphs[rows, span] = program
            for _ in range(2):
                program()

    def note_pages(self, sequence: SequenceState, *, is_first: bool) -> None:
        """Take the pages of a chunk; see ``Prompts.note_pages``.

        A table's entries that a later chunk has let go stay: its windowed layers may write over their pages,
        for all that this chunk does in a layer comes first.
        """
        for group, table in zip(self._group_ids, sequence.tables, strict=True):
            entries, host = np.array(table.as_tuple(), dtype=np.int32), self._host_tables[group]
            if is_first:
                host[:] = 0
            np.copyto(host[: len(entries)], entries, where=entries != NULL_BLOCK)

    def compute(
        self, sequence: SequenceState, first: int, token_ids: Sequence[int], *, wants_all: bool
    ) -> Tensor:
        """Run chunks; see ``Prompts.compute``."""
        programs, step = self._programs, self._step
        for group in self._group_ids:
            entries = pinned_copy(self._host_tables[group], programs.device)
            self._tables[group].copy_(entries, non_blocking=True)
        ids = pinned_copy(np.array(token_ids, dtype=np.int32), programs.device)
        step.scratch.input_ids[: len(ids)].copy_(ids, non_blocking=True)
        step.scratch.note(first, len(ids))
        self._find(first, len(ids))()
        return step.found(len(ids), all_rows=wants_all)

    def _find(self, first: int, num_tokens: int) -> Callable[[], object]:
        """Return what launches a chunk: a graph, where one was captured."""
        rows = shape_rows(num_tokens, self._block)
        for (num, (start, end)), program in self._graphs.items():
            if num == rows and start <= first <= end:
                return program
        return partial(self._launch, first, num_tokens)

    def _launch(self, first: int, num_tokens: int) -> None:
        tables = tuple(self._table_of[id(table)] for table in self._programs.caches.tables)
        self._sums[:num_tokens].zero_()
        self._step.launch(self._step.scratch.input_ids, first, num_tokens, tables)
        self._append_context(num_tokens)

    def _fold(self, index: int, hidden: Tensor, num_tokens: Tensor, room: tuple[Tensor, Tensor]) -> None:
        assert self._programs.drafter is not None
        fold_tap(self._programs.drafter, index, hidden, self._sums[: len(hidden)], num_tokens, room)

    def _append_context(self, num_tokens: int) -> None:
        """Write the drafter's context of the chunks just run, one by one: they may share pages."""
        programs, step = self._programs, self._step
        if programs.drafter is None:
            return
        for block in step.scratch.blocks(num_tokens):
            buffers = step.context_buffers(block.rows, context_width(programs.drafter))
            append_chunk_context(
                programs.drafter,
                programs.pools.group(programs.draft_group),
                self._sums[block.own],
                self._tables[programs.draft_group],
                block.first,
                block.length,
                buffers,
            )


def most_rows(budget: int, block: int, max_model_len: int) -> int:
    """Return the most tokens of one prompt in a step, whole blocks."""
    return min(budget, -(-max_model_len // block) * block)


class Head:
    """The head alone, for rows of a prompt: the same kernel, and so the same bits, as in a decode step."""

    def __init__(self, programs: StepPrograms, lanes: Lanes):
        self._programs, self._lanes = programs, lanes

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V] float32 on the device, of rows [R, D] after the final norm."""
        found = []
        for rows in hidden.split(WIDE):
            found.append(self._run(None, 0, rows).clone())
        return torch.cat(found)

    def sample(self, hidden: Tensor, sequence: SequenceState, position: int) -> tuple[int, Tensor]:
        """Return the token after one row, and the row's logits [1, V], on the device until the next call.

        Args:
            hidden: [1, D] after the final norm.
            sequence: Whose row it is.
            position: Of the row.
        """
        logits = self._run(sequence, position, hidden)
        block = self._lanes.read_later()
        self._lanes.wait(mark(self._programs.device))
        token = int(block.arrays["sampled"][0])
        self._lanes.give_back(block)
        return token, logits

    def _run(self, sequence: SequenceState | None, position: int, hidden: Tensor) -> Tensor:
        programs, cols = self._programs, self._programs.columns(len(hidden))
        self._lanes.put_rows(sequence, position, len(hidden))
        programs.scratch.normed[: len(hidden)].copy_(hidden)
        filtered = sequence is not None and has_filters([sequence])
        programs.run("choose", cols, filtered=filtered)
        return programs.logits_of(cols)[: len(hidden)]
