"""Sizes that the engines and their kernels are built for, in one place: plans count with them too."""

from __future__ import annotations

CPU_CHUNK_SIZE, GPU_CHUNK_SIZE = 256, 8192
"""Prompt rows per step at most, of one request alone, unless told otherwise."""
PREFILL_BLOCK = 2048
"""Rows of a prompt that the GPU's library multiplies at once, from absolute multiples of so many on: how many
of these a step takes changes no bits, and where each ends a prefix can be cached."""
GPU_STEPS_AHEAD = 2
"""Steps that the engine for GPUs launches before it has read what an earlier one said."""
MAX_ROWS = 64
"""Rows of a decode step on a GPU that its state has room for; how many one launch takes, its kernels say."""
LONE, NARROW, WIDE = 1, 8, 16
"""Columns that the products of any step are made for: one row, up to 8, and up to 16, which no request passes
by itself. A row's bits are the same in all."""
WIDTHS = (NARROW, WIDE, 32, MAX_ROWS)
"""Columns of products, where the kernels have so many."""
SPLIT_KEYS, NEAR_SPLITS, FAR_SPLIT_CHUNKS = 64, 128, 8
"""Keys of one of the first so many parts of a row's attention; later parts have several times as many."""
MAX_ORDERED_KEYS, ORDERED_SLACK = 65536, 256
"""Keys that a prompt's attention lays in order before it starts, and rows beyond them for whole blocks."""


def rows_of_launch(num_rows: int, most_rows: int = MAX_ROWS) -> int:
    """Return the rows that launches are made for.

    Args:
        num_rows: Of all requests that there can be at once, with their drafts.
        most_rows: That the kernels take.
    """
    return next((cols for cols in WIDTHS if WIDE <= cols < most_rows and cols >= num_rows), most_rows)


def gpu_chunks(asked: int | None) -> tuple[int, int, int]:
    """Return the rows of a block of prompt, and the most of a step: of a request alone, and beside others.

    Args:
        asked: ``prefill_chunk_size``, which holds in both cases; None for the engine's own choice: long steps
            while nobody waits for their end.
    """
    if asked is None:
        return PREFILL_BLOCK, GPU_CHUNK_SIZE, PREFILL_BLOCK
    return PREFILL_BLOCK if asked % PREFILL_BLOCK == 0 else asked, asked, asked
