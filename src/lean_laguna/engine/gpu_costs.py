"""What a step of so many rows takes on this card: measured at start, and kept in line with steps since."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lean_laguna.core.engine_sizes import WIDE
from lean_laguna.engine.gpu_lanes import mark, seconds_between
from lean_laguna.engine.gpu_programs import StepPrograms
from lean_laguna.engine.gpu_state import Block
from lean_laguna.spec.draft_schedule import StepCosts

_REPEATS = 3
_TIMED = "verify", "propose"
_MOST_TIMED = 8  # numbers of rows of one width; the costs of those between lie between
_WINDOW = 15  # steps of so many rows whose median says how much longer they take than at start
_HOST_BUFFERS = 8  # more than prices can be sent within the steps under way
_REFRESH_EVERY = 256  # steps: they may take longer than before at the same worth of time
_LEAST_CHANGE = 0.02  # of prices, below which the device keeps the old ones

Table = Sequence[Sequence[float]]
"""[W][most_rows + 1] seconds by rows, for each width of products."""


class RowCosts:
    """Seconds of a step by its rows.

    Attributes:
        table: [W, most_rows + 1] as measured at start, for each width of products.
    """

    def __init__(self, widths: Sequence[int], verify_s: Table | None = None):
        """Start from a table; without one all steps count the same.

        Args:
            widths: Columns of products that steps have, ascending.
            verify_s: As measured, by these.
        """
        self.table = np.ones((len(widths), widths[-1] + 1)) if verify_s is None else np.array(verify_s)
        self._widths, self._is_known = tuple(widths), verify_s is not None
        self._ascending = np.maximum.accumulate(self.table, axis=1)
        self._longer: dict[int, dict[int, deque[float]]] = {}  # by width and rows

    def observe(self, num_rows: int, verify_s: float, *, cols: int) -> None:
        """Take the time of one step."""
        if self._is_known and num_rows:
            width = self._widths.index(max(cols, self._widths[0]))
            late = self._longer.setdefault(width, {}).setdefault(num_rows, deque(maxlen=_WINDOW))
            late.append(verify_s - self.table[width, num_rows])

    def prices(self, tokens_per_s: float) -> NDArray[np.float32]:
        """Return the tokens that a step's time is worth, [W, most_rows + 1]."""
        seconds = self._ascending.copy()
        for width, found in self._longer.items():
            # Between row counts seen it is between theirs: context, and how many experts are drawn.
            # One row draws as many at any text.
            medians = {1: 0.0} | {rows: sorted(late)[len(late) // 2] for rows, late in found.items()}
            known = sorted(medians)
            late_s = np.interp(np.arange(seconds.shape[1]), known, [medians[rows] for rows in known])
            seconds[width] = np.maximum.accumulate(self.table[width] + late_s)
        return (seconds * tokens_per_s).astype(np.float32)


class Prices:
    """The prices that the device has; sent again when they have changed."""

    def __init__(self, programs: StepPrograms, costs: RowCosts):
        self._programs, self.costs = programs, costs
        self._wanted = np.zeros(1 + costs.table.size, dtype=np.float32)
        self._is_set = False  # the programs have what is wanted; else zeros
        self._wanted_for: StepCosts | None = None
        self._num_asked = self._num_sent = 0
        is_gpu = programs.device.type == "cuda"
        # Several, in turn: a copy may still wait for the steps launched before it.
        self._hosts = [torch.zeros(len(self._wanted), pin_memory=is_gpu) for _ in range(_HOST_BUFFERS)]
        self._kept = torch.zeros_like(programs.bounds)

    def set(self, costs: StepCosts | None) -> None:
        """Have drafts made and cut by what time is worth, or, given None, all made and kept."""
        self._num_asked += 1
        if costs is None:
            if self._is_set:
                self._programs.bounds.zero_()
                self._is_set = False
            return
        if costs is not self._wanted_for or not self._num_asked % _REFRESH_EVERY:
            self._wanted_for = costs
            prices = self.costs.prices(costs.tokens_per_s).ravel()
            wanted = np.concatenate([np.array([costs.least], dtype=np.float32), prices])
            known, change = self._wanted, np.abs(wanted - self._wanted)
            if change[0] > _LEAST_CHANGE * known[0] or change.max() > _LEAST_CHANGE * known.max():
                self._wanted, self._is_set = wanted, False
                host = self._hosts[self._num_sent % _HOST_BUFFERS]
                host.copy_(torch.from_numpy(wanted))
                self._kept.copy_(host, non_blocking=True)
                self._num_sent += 1
        if not self._is_set:
            self._programs.bounds.copy_(self._kept)
            self._is_set = True


def measure_rows(programs: StepPrograms) -> tuple[Table, Table]:
    """Time verifying, and drafting, by rows: of random tokens, so that many experts are drawn.

    Returns:
        Seconds of steps without drafting, and of drafting for the next.
    """
    draw = random.Random(0)
    found = tuple([_measured(programs, name, cols, draw) for cols in programs.widths] for name in _TIMED)
    programs.state.words.zero_()
    return found[0], found[1]


def _measured(programs: StepPrograms, name: str, cols: int, draw: random.Random) -> list[float]:
    """Return the seconds of a program by rows, 0 to the most that any launch takes."""
    every = max(1, cols // _MOST_TIMED)
    timed, medians = range(every, cols + 1, every), []
    for num_rows in (0, *timed):
        times = []
        for _ in range(_REPEATS):
            programs.state.words.copy_(_rows(num_rows, draw, programs.target.embed.shape[0]).words)
            start = mark(programs.device)
            programs.run(name, cols)
            end = mark(programs.device)
            if programs.device.type == "cuda":
                torch.cuda.synchronize(programs.device)
            times.append(seconds_between(start, end))
        medians.append(sorted(times)[_REPEATS // 2])
    # The first launches compile and capture; more rows never count as cheaper: a draft costs what it costs.
    seconds = np.interp(np.arange(programs.most_rows + 1), timed, np.maximum.accumulate(medians[1:]))
    return [0.0, *seconds[1:].tolist()]


def _rows(num_rows: int, draw: random.Random, vocab_size: int) -> Block:
    """Return a block of requests with so many rows of random tokens in all, on no pages of their own."""
    block = Block.allocate("cpu")
    fields = block.arrays
    fields["input_ids"][:num_rows] = [draw.randrange(vocab_size) for _ in range(num_rows)]
    starts = range(0, num_rows, WIDE)
    for entry, start in enumerate(starts):
        rows = slice(start, min(start + WIDE, num_rows))
        count = rows.stop - start
        fields["positions"][rows], fields["row_request"][rows] = np.arange(count), entry
        fields["row_start"][entry], fields["row_count"][entry] = start, count
        fields["remaining"][entry] = WIDE + 1
    fields["num_rows"][0], fields["num_requests"][0] = num_rows, len(starts)
    fields["stop_ids"][:] = -1
    return block
