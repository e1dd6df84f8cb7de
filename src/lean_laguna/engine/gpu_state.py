"""What host and device say to each other about a step's rows: one small block of memory on either side.

A step reads and changes the device's block; the host writes one whole to lay requests out. At its end a step
leaves a copy of the block in the host's memory by itself. So nothing is sent field by field, and requests
that wait keep their block.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows, and requests, that a block has room for.
from lean_laguna.core.engine_sizes import MAX_ROWS as MAX_ROWS

MAX_STOPS = 8
"""Stop tokens of a request that the device looks for; the host finds any."""
RING = 64
"""Tokens kept of each request; a step brings at most 16."""

NUM_STAMPS = 4
STARTED, VERIFIED, ENDED, TURN = range(NUM_STAMPS)
"""Nanoseconds at which a step started, had verified and ended; and which step it was, counted from 1."""

# Name, 32-bit words, and how they are read. 64-bit ones first: they must lie on 8 bytes. Stamps before all;
# last the ring, of which the host gets what there are requests for.
_FIELDS: tuple[tuple[str, int, str], ...] = (
    ("stamps", 2 * NUM_STAMPS, "int64"),
    ("row_seeds", 2 * MAX_ROWS, "int64"),
    ("seeds", 2 * MAX_ROWS, "int64"),
    ("row_temperatures", MAX_ROWS, "float32"),
    ("temperatures", MAX_ROWS, "float32"),
    ("input_ids", MAX_ROWS, "int32"),
    ("sampled", MAX_ROWS, "int32"),
    ("positions", MAX_ROWS, "int32"),
    ("row_request", MAX_ROWS, "int32"),
    ("row_start", MAX_ROWS, "int32"),
    ("row_count", MAX_ROWS, "int32"),
    ("num_rows", 4, "int32"),
    ("num_requests", 4, "int32"),
    ("remaining", MAX_ROWS, "int32"),
    ("num_drafts", MAX_ROWS, "int32"),
    ("emitted", MAX_ROWS, "int32"),
    ("accepted", MAX_ROWS, "int32"),
    ("drafted", MAX_ROWS, "int32"),
    ("cut", MAX_ROWS, "int32"),
    ("skipped", MAX_ROWS, "int32"),
    ("chances", MAX_ROWS, "float32"),
    ("top_k", MAX_ROWS, "int32"),
    ("top_p", MAX_ROWS, "float32"),
    ("log_min_p", MAX_ROWS, "float32"),
    ("stop_ids", MAX_ROWS * MAX_STOPS, "int32"),
    ("ring", MAX_ROWS * RING, "int32"),
)
_SHAPES = {"stop_ids": (MAX_ROWS, MAX_STOPS), "ring": (MAX_ROWS, RING)}
NUM_WORDS = sum(words for _, words, _ in _FIELDS)


@dataclass(frozen=True)
class Block:
    """A block of state, on a host or a device.

    Attributes:
        words: [NUM_WORDS] int32.
        fields: Views of it by name; most are [MAX_ROWS], ``stop_ids`` [MAX_ROWS, MAX_STOPS], ``ring``
            [MAX_ROWS, RING], ``num_rows`` and ``num_requests`` count in their first entry.
    """

    words: Tensor
    fields: dict[str, Tensor]

    @classmethod
    def allocate(cls, device: torch.device | str, *, pinned: bool = False) -> Block:
        """Return a block of zeros.

        Args:
            device: Where it lies.
            pinned: On the host, in memory that the device copies from and to on its own.
        """
        return cls.over(torch.zeros(NUM_WORDS, dtype=torch.int32, device=device, pin_memory=pinned))

    @classmethod
    def over(cls, words: Tensor) -> Block:
        """Return a block that lies in ``words``."""
        fields, at = {}, 0
        for name, size, dtype in _FIELDS:
            part = words[at : at + size].view(getattr(torch, dtype))
            fields[name] = part.view(_SHAPES[name]) if name in _SHAPES else part
            at += size
        return cls(words, fields)

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The fields of a host block as arrays that share its memory."""
        return {name: part.numpy() for name, part in self.fields.items()}


class Said:
    """What steps leave on the host, one block each, in turn; owned by the programs.

    Attributes:
        words: [n, NUM_WORDS] int32 in the host's memory, written by the device.
        turn: [1] int32 on the device: steps so far.
    """

    def __init__(self, device: torch.device, num_blocks: int):
        """Start with step 1.

        Args:
            device: That runs the steps.
            num_blocks: Left before the first is written over; more than are ever under way or looked back at.
        """
        is_gpu = device.type == "cuda"
        self.words = torch.zeros(num_blocks, NUM_WORDS, dtype=torch.int32, pin_memory=is_gpu)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        if is_gpu:
            # Steps that nobody waits for may still write here; the allocator of pinned memory cannot know.
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False
        self._blocks = [Block.over(words) for words in self.words]
        self._num_launched = 0

    def restart(self) -> None:
        """Count from 1 again, whatever was launched; nothing is under way."""
        self._num_launched = 0
        self.turn.zero_()

    def next(self) -> tuple[int, Block]:
        """Return the number of the step launched now, and the block that it will leave."""
        block = self._blocks[self._num_launched % len(self._blocks)]
        self._num_launched += 1
        return self._num_launched, block


def pinned_copy(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return values in host memory from which a copy to ``device`` needs no wait."""
    host = torch.from_numpy(values)
    return host.pin_memory() if device.type == "cuda" else host
