"""One place through which every CUDA C++ kernel is launched: tests put an emulator here."""

from __future__ import annotations

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import Argument, launch
from lean_laguna.kernels.triton.launch import Launch


def launch_kernel(
    source: Source,
    grid: int,
    threads: int,
    shared_bytes: int,
    arguments: tuple[Argument, ...],
    settings: Launch,
) -> None:
    """Launch a kernel; see ``driver.launch``."""
    launch(source, grid, threads, shared_bytes, arguments, early=settings.pdl)
