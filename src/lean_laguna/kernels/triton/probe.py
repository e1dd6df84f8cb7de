"""How fast memory can be read at all: the floor that a step's bytes are held against."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEPS = 2048, 16


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK * STEPS + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(STEPS):
        total += tl.load(x_ptr + at + i * BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_all(words: Tensor, sums: Tensor) -> int:
    """Launch a kernel that reads a tensor and keeps next to nothing.

    Args:
        words: [n] int32; whole pieces of ``BLOCK * STEPS`` are read.
        sums: [n // (BLOCK * STEPS)] int32 at least, written.

    Returns:
        Bytes read.
    """
    programs: int = words.numel() // (BLOCK * STEPS)
    _read_kernel[(programs,)](words, sums, BLOCK=BLOCK, STEPS=STEPS, num_warps=4)
    return programs * BLOCK * STEPS * 4
