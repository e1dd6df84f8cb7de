"""Engines, kernels and plans count with the same sizes."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core import engine_sizes
from lean_laguna.engine import gpu_state
from lean_laguna.engine.gpu_engine import GpuEngine
from lean_laguna.kernels.triton import attention, launch


def test_engines_and_kernels_take_their_sizes_from_here() -> None:
    assert GpuEngine._STEPS_AHEAD == engine_sizes.GPU_STEPS_AHEAD
    assert gpu_state.MAX_ROWS == launch.MAX_ROWS == engine_sizes.MAX_ROWS
    assert launch.Launch().cols == launch.WIDE == engine_sizes.WIDE
    assert (attention.CHUNK, attention.FAR_CHUNKS) == (
        engine_sizes.SPLIT_KEYS,
        engine_sizes.FAR_SPLIT_CHUNKS,
    )


def test_the_sizes_fit_together() -> None:
    assert engine_sizes.GPU_CHUNK_SIZE % engine_sizes.PREFILL_BLOCK == 0
    assert engine_sizes.MAX_ORDERED_KEYS % engine_sizes.PREFILL_BLOCK == 0


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [(None, (2048, 8192, 2048)), (8192, (2048, 8192, 8192)), (512, (512, 512, 512)), (3000, (3000,) * 3)],
)
def test_chunks_are_whole_blocks_where_they_can_be(asked: int | None, sizes: tuple[int, int, int]) -> None:
    assert engine_sizes.gpu_chunks(asked) == sizes


@pytest.mark.parametrize(
    ("num_rows", "most", "rows"),
    [(1, 64, 16), (16, 64, 16), (17, 64, 32), (33, 64, 64), (900, 64, 64), (900, 16, 16), (20, 32, 32)],
)
def test_launches_are_no_wider_than_requests_can_fill(num_rows: int, most: int, rows: int) -> None:
    assert engine_sizes.rows_of_launch(num_rows, most) == rows
