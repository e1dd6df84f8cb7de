"""Compile every kernel that a set of launches needs, side by side, before the first of them runs.

And find out whether Triton compiles for a card at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

MAX_THREADS = 16


def compile_ahead(runs: Sequence[Callable[[], object]]) -> None:
    """Compile what the runs would launch, launching nothing; what fails to compile will say so when launched.

    Args:
        runs: Each launches Triton kernels and nothing that reads their results.
    """
    launch = JITFunction.run

    def dry(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = dry
    try:
        with (
            ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for run in runs:
                run()
    finally:
        JITFunction.run = launch


@triton.jit
def _smallest_kernel(x_ptr):
    tl.store(x_ptr, 0)


def why_not_built(device: torch.device) -> str | None:
    """Say why Triton builds nothing for a GPU, None where it does: it knows no card newer than itself."""
    try:
        with torch.cuda.device(device):
            _smallest_kernel.warmup(torch.int32, grid=(1,))
    except Exception as error:  # its compilers raise whatever they like
        name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        lines = str(error).splitlines()
        told = next((line for word in ("fatal", "error") for line in lines if word in line), repr(error))
        return f"Triton {triton.__version__} builds nothing for {name} ({told.strip()}); a newer one may"
    return None
