"""Sizes that the engines and their kernels are built for, in one place: plans count with them too."""

from __future__ import annotations

CPU_CHUNK_SIZE, GPU_CHUNK_SIZE = 256, 2048
"""Prompt rows per step, unless told otherwise."""
GPU_STEPS_AHEAD = 2
"""Steps that the engine for GPUs launches before it has read what an earlier one said."""
MAX_ROWS = 16
"""Rows of a decode step on a GPU."""
SPLIT_KEYS, NEAR_SPLITS, FAR_SPLIT_CHUNKS = 64, 128, 8
"""Keys of one of the first so many parts of a row's attention; later parts have several times as many."""
MAX_ORDERED_KEYS, ORDERED_SLACK = 65536, 256
"""Keys that a prompt's attention lays in order before it starts, and rows beyond them for whole blocks."""
