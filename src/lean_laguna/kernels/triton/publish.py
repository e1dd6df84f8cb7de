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


@triton.jit
def _publish_kernel(
    words_ptr,
    said_ptr,
    turn_ptr,
    NUM_WORDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAMPED: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL, False)
    turn = tl.load(turn_ptr)
    i = tl.arange(0, BLOCK)
    to = said_ptr + turn % NUM_BLOCKS * NUM_WORDS
    # The number, and on a GPU the end, are the copy's alone.
    mine = (i < NUM_WORDS) & ((i < (STAMPED // 2 if CLOCK else STAMPED * 3 // 4)) | (i >= STAMPED))
    tl.store(to + i, tl.load(words_ptr + i, mask=mine), mask=mine)
    stamps = to.to(tl.pointer_type(tl.int64))
    if CLOCK:
        tl.store(stamps + 2, tl.extra.cuda.globaltimer())
    tl.store(stamps + 3, turn.to(tl.int64) + 1)
    tl.store(turn_ptr, turn + 1)


def publish(words: Tensor, said: Tensor, turn: Tensor, launch: Launch) -> None:
    """Copy a block of state to the host's memory.

    Args:
        words: [N] int32, N even; the first ``NUM_STAMP_WORDS`` are stamps.
        said: [n, N] int32, written: row ``turn`` % n. On a GPU in pinned memory of the host.
        turn: [1] int32 steps before this one; one more afterwards, which is the step's number.
        launch: What the launches of a step share.
    """
    num_blocks, num_words = said.shape
    _publish_kernel[(1,)](
        words,
        said,
        turn,
        NUM_WORDS=num_words,
        NUM_BLOCKS=num_blocks,
        BLOCK=power_of_two(num_words),
        STAMPED=NUM_STAMP_WORDS,
        CLOCK=words.is_cuda,
        PDL=launch.pdl,
        **launch.options(8),
    )
