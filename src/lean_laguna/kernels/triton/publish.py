"""The last kernel of a step: what it said goes to the host's memory.

A copy by the device's copy engine between two steps took 8 to 11 us on an H200; this one writes over the bus
itself, a block in turn, and starts while the kernel before it ends.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import Launch, power_of_two
from lean_laguna.kernels.triton.primitives import wait_for_inputs

NUM_STAMP_WORDS = 8
"""Words of the stamps, which come first: step started, verified, ended, and its number; 64 bits each."""

MOST_AT_ONCE = 2048
"""Words that the program copies at once."""


@triton.jit
def _publish_kernel(
    words_ptr,
    said_ptr,
    turn_ptr,
    num_entries_ptr,
    NUM_WORDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAMPED: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRY: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL, False)
    turn = tl.load(turn_ptr)
    num_words = NUM_WORDS
    if ENTRY > 0:
        num_words -= (ENTRIES - tl.load(num_entries_ptr)) * ENTRY
    to = said_ptr + turn % NUM_BLOCKS * NUM_WORDS
    for start in tl.range(0, num_words, BLOCK, num_stages=1):
        i = start + tl.arange(0, BLOCK)
        # The number, and on a GPU the end, are the copy's alone.
        mine = (i < num_words) & ((i < (STAMPED // 2 if CLOCK else STAMPED * 3 // 4)) | (i >= STAMPED))
        tl.store(to + i, tl.load(words_ptr + i, mask=mine), mask=mine)
    stamps = to.to(tl.pointer_type(tl.int64))
    if CLOCK:
        tl.store(stamps + 2, tl.extra.cuda.globaltimer())
    tl.store(stamps + 3, turn.to(tl.int64) + 1)
    tl.store(turn_ptr, turn + 1)


def publish(
    words: Tensor,
    said: Tensor,
    turn: Tensor,
    launch: Launch,
    *,
    entries: Tensor | None = None,
    num_entries: Tensor | None = None,
) -> None:
    """Copy a block of state to the host's memory.

    Args:
        words: [N] int32, N even; the first ``NUM_STAMP_WORDS`` are stamps.
        said: [n, N] int32, written: row ``turn`` % n. On a GPU in pinned memory of the host.
        turn: [1] int32 steps before this one; one more afterwards, which is the step's number.
        launch: What the launches of a step share.
        entries: [R, n] int32 that ends the block; with ``num_entries``.
        num_entries: [1] int32: only so many of these are copied; None: all.
    """
    num_blocks, num_words = said.shape
    _publish_kernel[(1,)](
        words,
        said,
        turn,
        turn if num_entries is None else num_entries,
        NUM_WORDS=num_words,
        NUM_BLOCKS=num_blocks,
        BLOCK=min(MOST_AT_ONCE, power_of_two(num_words)),
        STAMPED=NUM_STAMP_WORDS,
        ENTRIES=0 if entries is None else entries.shape[0],
        ENTRY=0 if entries is None else entries.shape[1],
        CLOCK=words.is_cuda,
        PDL=launch.pdl,
        **launch.options(8),
    )
