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


def launch_together(
    source: Source, grid: int, threads: int, shared_bytes: int, arguments: tuple[Argument, ...]
) -> None:
    """Launch a kernel whose blocks wait for each other: all of them run at once."""
    launch(source, grid, threads, shared_bytes, arguments, together=True)
