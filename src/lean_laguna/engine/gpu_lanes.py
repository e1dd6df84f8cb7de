"""Requests on the device: which share a launch, their block of state, and what is under way.

A lane is a set of requests whose rows fit one launch. The programs have one set of buffers; where there are
more lanes than one, each lane's state waits beside them and is copied in for its launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lean_laguna.engine.gpu_layout import chances_made, lay_out, write_filters
from lean_laguna.engine.gpu_programs import StepPrograms
from lean_laguna.engine.gpu_state import ENDED, MAX_ROWS, STARTED, TURN, VERIFIED, Block, pinned_copy
from lean_laguna.engine.sequence import SequenceState

Mark = float | torch.cuda.Event
"""A moment in the device's work; on a CPU a clock reading."""


def mark(device: torch.device) -> Mark:
    """Note where the device's work stands now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Mark, second: Mark) -> float:
    """Return the time from one mark to a later one that has been reached."""
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float)
        assert isinstance(second, float)
        return second - first
    return float(first.elapsed_time(second)) / 1e3


class LastSaid(NamedTuple):
    """What a step left.

    Attributes:
        fields: ``Block.arrays``.
        unsent_before: Drafts of each request ever laid out and not sent, before the step.
        unsent: And after it.
    """

    fields: dict[str, NDArray[Any]]
    unsent_before: list[int]
    unsent: list[int]

    @property
    def num_unsent(self) -> list[int]:
        """How many the step itself laid out of each and did not send."""
        return [now - num for now, num in zip(self.unsent, self.unsent_before, strict=True)]


@dataclass
class Launched:
    """A step of one lane under way: what it will have said, and when.

    Attributes:
        lane: The lane.
        turn: Number of the step, as the programs count.
        said: The lane's block as the step left it on the host; to be read once ``end`` is reached.
        end: When the device is through with it.
        logits: Host copy of the verified rows' logits, where somebody watches them.
        num_made_tokens: Longest draft that was made for it, where it is scheduled; else None.
        cols: Columns of its products.
        num_asked: Longest draft that was asked for.
        before: What the step before said, once this one is read.
    """

    lane: Lane
    turn: int
    said: Block
    end: Mark
    logits: Tensor | None = None
    num_made_tokens: int | None = None
    cols: int = 0
    num_asked: int = 0
    before: LastSaid | None = None

    @property
    def verify_s(self) -> float:
        """Seconds that verification took, by the device's clock."""
        stamps = self.said.arrays["stamps"]
        return 1e-9 * int(stamps[VERIFIED] - stamps[STARTED])

    @property
    def drafted_s(self) -> float:
        """Seconds that the drafts verified took, in the step before or when they were laid out."""
        if self.before is not None:
            stamps = self.before.fields["stamps"]
            return 1e-9 * int(stamps[ENDED] - stamps[VERIFIED])
        return seconds_between(*self.lane.first_drafts) if self.lane.first_drafts is not None else 0.0


class Spoke(NamedTuple):
    """One request's part in a step.

    Attributes:
        launched: The step.
        entry: Of the request.
        sequence: The request's.
        counts: Drafts verified, and accepted.
    """

    launched: Launched
    entry: int
    sequence: SequenceState
    counts: tuple[int, int]

    def chances(self) -> tuple[float, ...] | None:
        """Return the chance of each of its drafts, cut ones included, to be accepted if those before it are.

        None where its drafts were made when it was laid out.
        """
        before = self.launched.before
        if before is None:
            return None
        return chances_made(before.fields, before.num_unsent)[self.entry]


@dataclass(frozen=True)
class Plan:
    """What a lane's launches run as long as its requests and what they want stay.

    Attributes:
        program: One of ``gpu_programs.STEPS``.
        cols: Token columns.
        filtered: Some of the requests filter their tokens.
        num_asked: Longest draft wanted.
    """

    program: str
    cols: int
    filtered: bool
    num_asked: int


class Staging:
    """A block on the host that the device copies from by itself; owned by ``Lanes``."""

    def __init__(self, device: torch.device):
        """Set one aside for a device."""
        self._is_gpu = device.type == "cuda"
        self._block = Block.allocate("cpu", pinned=self._is_gpu)
        self._end: torch.cuda.Event | None = None

    def clear(self) -> Block:
        """Return it all zeros, once nothing of what it held is still to be copied."""
        if self._end is not None:
            self._end.synchronize()
        self._block.words.zero_()
        return self._block

    def leave(self) -> None:
        """Note that the host asks for no more copies."""
        if self._is_gpu:
            self._end = self._end or torch.cuda.Event()
            self._end.record()


@dataclass(frozen=True)
class Room:
    """Where one lane's block and tables lie, on either side.

    Attributes:
        words: The block, while the buffers hold another's.
        tables: Per KV group of the cache, [R, max_blocks] int32; a row an entry.
        staging: What the lane is laid out in.
        pages: ``tables`` on the host; an entry that was written stays as it is as long as the lane.
    """

    words: Tensor
    tables: list[Tensor]
    staging: Staging
    pages: list[Tensor]

    @classmethod
    def allocate(cls, programs: StepPrograms) -> Room:
        """Return room for one lane of these programs."""
        words, tables, is_gpu = programs.state.words, programs.tables, programs.device.type == "cuda"
        pages = [torch.zeros(table.shape, dtype=table.dtype, pin_memory=is_gpu) for table in tables]
        staging = Staging(programs.device)
        return cls(torch.zeros_like(words), [torch.zeros_like(table) for table in tables], staging, pages)


@dataclass(eq=False)
class Lane:
    """Requests that share launches.

    Attributes:
        sequences: In the order of the device's entries; ended ones keep theirs.
        num_drafts: Drafts wanted of each, as the device knows them.
        wanted: Drafts wanted of each from here on.
        plan: What its next launch runs, while nothing changes.
        room: Its block and tables.
        is_loaded: The buffers hold this lane's block and tables.
        has_new_pages: The buffers' tables are behind.
        emitted: Tokens that each has said since it was laid out; likewise accepted and drafted.
        live: Entries that the device has not ended, as far as the host has read.
        covered: By entry, positions whose pages the device has.
        cut: Drafts of each that were made and not worth verifying.
        unsent: Drafts of each that were laid out, and not made or cut.
        last: What the last step read said.
        first_drafts: Start and end of the drafts made when it was laid out.
        num_made_tokens: Longest of the drafts to be verified next, where they are scheduled; else None.
        num_asked: Longest of the drafts to be verified next, as asked for: a request's end may cut it.
        num_under_way: Steps launched and not read.
        row_start: First row of each in the oldest step not read.
        num_uploaded: By entry and table, how many block-table entries the device has.
    """

    sequences: list[SequenceState]
    num_drafts: list[int]
    wanted: list[int]
    room: Room
    is_loaded: bool = False
    has_new_pages: bool = True
    emitted: list[int] = field(default_factory=lambda: [0] * MAX_ROWS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_ROWS)
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_ROWS)
    live: list[int] = field(default_factory=list)
    covered: list[int] = field(default_factory=lambda: [0] * MAX_ROWS)
    plan: Plan | None = None
    cut: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    last: LastSaid | None = None
    first_drafts: tuple[Mark, Mark] | None = None
    num_made_tokens: int | None = None
    num_asked: int = 0
    num_under_way: int = 0
    row_start: list[int] = field(default_factory=list)
    num_uploaded: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live = list(range(len(self.sequences)))
        self.cut = self.unsent = [0] * len(self.sequences)


class Lanes:
    """Moves lanes' state between host, buffers and where they wait; owned by the engine."""

    def __init__(self, programs: StepPrograms, group_ids: Sequence[int]):
        """Start with nothing loaded.

        Args:
            programs: Whose buffers they are.
            group_ids: Which group of the cache each of a sequence's tables belongs to.
        """
        self.programs, self._group_ids = programs, tuple(group_ids)
        self.device = programs.device
        self._loaded: Lane | None = None
        self._spare: list[Room] = []
        self._rows = Staging(self.device)
        self._blocks: list[Block] = []
        self._ends: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None  # of the lanes' launches; asking takes a while

    def make(self, sequences: Sequence[SequenceState], num_drafts: Sequence[int], mask_token: int) -> Lane:
        """Lay requests out anew: anchors, and mask tokens where drafts are to come."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        room = self._spare.pop() if self._spare else Room.allocate(self.programs)
        lane = Lane(list(sequences), list(num_drafts), list(num_drafts), room)
        host = room.staging.clear()
        lay_out(host.arrays, sequences, num_drafts, mask_token)
        lane.row_start = host.arrays["row_start"].tolist()
        room.words.copy_(host.words, non_blocking=True)
        for entry in range(len(sequences)):
            self.upload_pages(lane, entry)
        return lane

    def drop(self, lane: Lane) -> None:
        """Let go of a lane; of what it has under way nobody reads what it says."""
        if self._loaded is lane:
            self._loaded = None
        lane.is_loaded = False
        lane.room.staging.leave()
        self._spare.append(lane.room)

    def upload_pages(self, lane: Lane, entry: int) -> None:
        """Send the block-table entries that the device does not have yet."""
        for i, (group, table) in enumerate(zip(self._group_ids, lane.sequences[entry].tables, strict=True)):
            known = lane.num_uploaded.get((entry, i), 0)
            entries = table.as_tuple()
            if len(entries) > known:
                pages = lane.room.pages[group][entry]
                pages.numpy()[known : len(entries)] = entries[known:]
                to = lane.room.tables[group][entry, known : len(entries)]
                to.copy_(pages[known : len(entries)], non_blocking=True)
                lane.num_uploaded[entry, i] = len(entries)
                lane.has_new_pages = True

    def load(self, lane: Lane) -> None:
        """Put a lane's block and tables into the buffers; whoever was there waits beside them."""
        programs = self.programs
        if not lane.is_loaded:
            self.unload()
            programs.state.words.copy_(lane.room.words)
            self._loaded, lane.is_loaded, lane.has_new_pages = lane, True, True
        if lane.has_new_pages:
            num = len(lane.sequences)
            for group in self._group_ids:
                programs.tables[group][:num].copy_(lane.room.tables[group][:num])
            lane.has_new_pages = False

    def unload(self) -> None:
        """Save the block in the buffers, so that they can be used for something else."""
        if self._loaded is not None:
            self._loaded.room.words.copy_(self.programs.state.words)
            self._loaded.is_loaded = False
            self._loaded = None

    def put_rows(
        self, sequence: SequenceState | None, first: int, num_rows: int, token_ids: Sequence[int] = ()
    ) -> None:
        """Put rows of one sequence into the buffers, for a program that decides nothing.

        Args:
            sequence: Whose rows; None where neither pages nor sampling matter.
            first: Position of the first row.
            num_rows: At most ``WIDE``.
            token_ids: The rows' tokens, where the program reads them; then the sequence's tables go along.
        """
        self.unload()
        host = self._rows.clear()
        fields = host.arrays
        fields["input_ids"][: len(token_ids)] = token_ids
        fields["positions"][:num_rows] = np.arange(first, first + num_rows)
        fields["row_count"][0] = fields["num_rows"][0] = num_rows
        fields["num_requests"][0] = 1
        if sequence is not None:
            fields["row_seeds"].view(np.uint64)[:num_rows] = sequence.sampling.seed
            fields["row_temperatures"][:num_rows] = sequence.request.params.temperature
            write_filters(fields, 0, sequence.request.params)
        self.programs.state.words.copy_(host.words, non_blocking=True)
        self._rows.leave()
        if token_ids and sequence is not None:
            for group, table in zip(self._group_ids, sequence.tables, strict=True):
                entries = pinned_copy(np.array(table.as_tuple(), dtype=np.int32), self.device)
                self.programs.tables[group][0, : len(entries)].copy_(entries, non_blocking=True)

    def set_num_drafts(self, lane: Lane, num_drafts: Sequence[int]) -> None:
        """Change how many drafts the loaded lane's requests want, from its next layout of rows on."""
        wanted = np.zeros(MAX_ROWS, dtype=np.int32)
        wanted[: len(num_drafts)] = num_drafts
        self.programs.state.fields["num_drafts"].copy_(pinned_copy(wanted, self.device), non_blocking=True)
        lane.num_drafts = list(num_drafts)

    def read_later(self) -> Block:
        """Start a copy of the buffers' block to the host; it is there once the device has come so far."""
        is_gpu = self.device.type == "cuda"
        block = self._blocks.pop() if self._blocks else Block.allocate("cpu", pinned=is_gpu)
        block.words.copy_(self.programs.state.words, non_blocking=is_gpu)
        return block

    def read_logits_later(self, cols: int) -> Tensor:
        """Start a copy of the logits [cols, V] float32 of the rows last verified to the host."""
        logits = self.programs.verified_logits[:cols]
        host = torch.empty(logits.shape, pin_memory=self.device.type == "cuda")
        return host.copy_(logits, non_blocking=True)

    def give_back(self, block: Block) -> None:
        """Hand back a host block that ``read_later`` gave and that has been read."""
        self._blocks.append(block)

    def note_end(self) -> Mark:
        """Mark where the device's work stands, for ``wait_for`` alone: it tells no time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = self._ends.pop() if self._ends else torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait_for(self, launched: Launched) -> None:
        """Wait until a step is through and what it said is on the host; once."""
        if not isinstance(launched.end, float):
            launched.end.synchronize()
            self._ends.append(launched.end)
        found = int(launched.said.arrays["stamps"][TURN])
        if found != launched.turn:
            raise RuntimeError(f"step {launched.turn} left the block of step {found}")

    def wait(self, until: Mark) -> None:
        """Wait until the device has come to a mark."""
        if not isinstance(until, float):
            until.synchronize()
